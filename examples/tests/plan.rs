//! `plan`: what it says of instances that match, and of such that do not.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test they help")]

use clap::Parser;
use kvferry_examples::options::PlanOptions;
use kvferry_examples::{models, plan};

fn run(args: &[&str]) -> Result<(), String> {
    let args = std::iter::once("plan").chain(args.iter().copied()).map(Into::into);
    plan::main(args).map_err(|failure| format!("{} {}", failure.exit_code(), failure.line()))
}

#[test]
fn every_model_is_planned() {
    for name in models::names() {
        for cuts in [["--from=pp2", "--to=tp2"], ["--from=tp2", "--to=pp2cp2"], ["--from=cp2tp2", "--to=pp2tp4"]] {
            let model = format!("--model={name}");
            let options = ["plan", &model, cuts[0], cuts[1], "--block-tokens-from=256", "--block-tokens-to=128"];
            let options = PlanOptions::try_parse_from(options).unwrap();
            let assignments = plan::assignments(&options).unwrap_or_else(|error| panic!("{name} {cuts:?}: {error:?}"));
            assert!(assignments.iter().all(|assignment| assignment.sources().count() > 0), "{name} {cuts:?}");
        }
    }
}

#[test]
fn a_picture_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.svg");
    let svg = format!("--svg={}", path.display());
    assert_eq!(run(&["--from=pp4", "--to=tp8", "--roles", &svg]), Ok(()));
    let picture = std::fs::read_to_string(&path).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("4 source ranks to 8 destination ranks"), "{picture}");
    let nowhere = format!("--svg={}", folder.path().join("none").join("out.svg").display());
    assert!(run(&[&nowhere]).unwrap_err().starts_with("1 --svg "));
}

#[test]
fn what_does_not_fit_is_said() {
    let check = |args: &[&str], expected: &str| {
        let error = run(args).unwrap_err();
        assert!(error.starts_with("2 ") && error.contains(expected), "{error}");
    };
    check(&["--from=pp100"], "rank 0 of --from pp100");
    check(&["--part-from=1"], "--part-from 1: pp4 has 1 data-parallel parts");
    check(&["--from=pp2dp2", "--part-from=2"], "--part-from 2: pp2dp2 has 2 data-parallel parts");
    check(
        &["--block-tokens-from=1048576", "--block-tokens-to=1048575"],
        "blocks of 1048576 and 1048575 tokens overlap in",
    );
    assert_eq!(run(&["--from=pp2dp2", "--part-from=1", "--to=dp2tp2", "--part-to=1"]), Ok(()));
}
