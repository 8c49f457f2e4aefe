//! What the report says of a machine on which the tests run.

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
