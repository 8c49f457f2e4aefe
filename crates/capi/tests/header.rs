//! `include/kvferry.h` is what the source says. `KVFERRY_WRITE_HEADER=1 cargo test -p kvferry-capi` writes it.

use std::path::Path;

use cbindgen::{Builder, Config};

#[test]
fn the_header_is_that_of_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml can be read");
    let bindings = Builder::new().with_crate(root).with_config(config).generate().expect("the source can be parsed");
    let mut made = Vec::new();
    bindings.write(&mut made);
    // Of use to Rust's readers only: C's have the contract in front of everything.
    let safety = "///\n/// # Safety\n///\n/// The contract of the crate.\n";
    let made = String::from_utf8(made).expect("text").replace(safety, "");
    let path = root.join("include/kvferry.h");
    if std::env::var_os("KVFERRY_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).expect("the header can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == made, "include/kvferry.h is not that of the source: KVFERRY_WRITE_HEADER=1 writes it");
}
