//! The same tests without a GPU: over a driver whose GPU memory is the host's.

use std::process::Command;

/// What the tests cover of the host's side is covered: routes, credits, descriptions, exports, ends. Not what GPUs make of it.
#[test]
fn what_arrives_is_right_over_a_driver_that_is_none() {
    let directory = tempfile::tempdir().unwrap();
    kvferry_fake_cuda::install(directory.path()).unwrap();
    let tests = [
        "lists::land",
        "lists::are_copied",
        "lists::are_pulled",
        "lists::are_staged",
        "right::landing_in_a_slab",
        "right::two_sources",
        "right::between",
        "right::from_",
        "one_sided::",
    ];
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--test-threads", "2"])
        .args(tests)
        .env("LD_LIBRARY_PATH", directory.path())
        .status()
        .unwrap();
    assert!(status.success());
}
