//! What the report says of a machine on which the tests run.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use kvferry_wire::{Finding, Route, report};

#[test]
fn every_route_works_from_this_process_to_itself() {
    let report = report();
    let tried: Vec<Route> = report.routes.iter().map(|(route, _)| *route).collect();
    assert_eq!(tried, [Route::Direct, Route::Landing, Route::Staged, Route::Runs]);
    for (route, result) in &report.routes {
        assert!(result.is_ok(), "{route}: {result:?}");
        assert!(!report.findings.contains(&Finding::RouteBroken(*route)));
    }
    let text = report.to_string();
    assert!(text.contains("route direct: works"), "{text}");
}

/// Names the library that the other process opens before anything else does.
const VARIABLE: &str = "KVFERRY_TEST_LIBUCP";

/// Runs in a process of its own: a process has one UCX and keeps it.
#[test]
fn a_ucx_that_was_open_before_is_named() {
    let Some(library) = std::env::var_os(VARIABLE) else {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_ucx_that_was_open_before_is_named"]);
        command.env(VARIABLE, ucx_sys::load().unwrap().path()).env("KVFERRY_UCX_DIR", "/not/this/one");
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    };
    // SAFETY: the library of UCX that the tests run with, which is made to be loaded.
    let opened = unsafe { libloading::os::unix::Library::new(library) }.unwrap();
    let _never_closed = opened.into_raw();
    let report = report();
    assert_eq!(report.ucx.as_ref().unwrap().overridden.as_deref(), Some(Path::new("/not/this/one")));
    assert!(report.findings.contains(&Finding::UcxOverridden));
    assert!(report.to_string().contains("not the one in /not/this/one"));
}
