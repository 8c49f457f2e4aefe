//! Whether the driver offers handles of GPU memory that other hosts can import, and how far it goes.

use crate::framework::Framework;

/// Says it, and that the driver keeps its word.
#[test]
#[ignore = "needs CUDA"]
fn fabric_handles_are_what_the_driver_says() {
    kvferry_wire::cuda_devices().unwrap();
    let (supported, steps) = Framework::on(0).fabric(0);
    let told: Vec<String> = steps.iter().map(|(step, code)| format!("{step} {code}")).collect();
    println!("\nfabric: supported {supported}; {}", told.join(", "));
    assert_eq!(steps[0], ("attribute", 0));
    if supported == 0 {
        assert!(steps.iter().any(|(_, code)| *code != 0), "it goes without being offered: {steps:?}");
    }
}
