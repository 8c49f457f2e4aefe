//! Any text gives facts that build a table, or an error.
#![no_main]

use kvferry_layout::{Dtype, ModelFacts, TableOptions, build};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(facts) = ModelFacts::from_config(text) {
        let options = TableOptions { mtp: true, ..TableOptions::new(128, Dtype::Fp8E4m3, 4) };
        let cut = "pp2tp3".parse().expect("a cut");
        if let Ok(table) = build(&facts, &cut, 4, &options) {
            assert_eq!(table.check(), Ok(()));
        }
    }
});
