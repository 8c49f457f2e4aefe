//! What makes no sense is refused before anything is moved: exit code 2, and one line that names it.

use std::fs;
use std::time::Duration;

use kvferry_examples::models;

use crate::run::run;

/// Too many pieces, which the engine would refuse once all pools were filled and all ranks had met.
const BAD_BLOCKS: &str = "--block-tokens-from 8191 --block-tokens-to 8192";

#[test]
fn what_makes_no_sense() {
    let known = format!("known are {}, or give the path of a config.json", models::names().join(", "));
    let cut = "is not of the form pp4, tp8, pp4dp2cp2tp2, pp40+38tp2 or pp0..40,76..78+40..76";
    let bad_blocks =
        "between sender rank 0 and receiver rank 0: blocks of 8191 and 8192 tokens overlap in 16382 ways; for 63 \
        arrays that is more than 262144 pieces"
            .to_owned();
    for (program, line, expected) in [
        ("loopback", "--model glm-9", format!("--model: unknown model \"glm-9\": {known}")),
        ("loopback", "--model /dev/zero", "--model: cannot read /dev/zero: not a regular file".into()),
        ("loopback", "--from pp4xx", format!("invalid value 'pp4xx' for '--from <CUT>': cut \"pp4xx\" {cut}")),
        ("loopback", "--to 8", format!("invalid value '8' for '--to <CUT>': cut \"8\" {cut}")),
        ("loopback", "--to pp0", "invalid value 'pp0' for '--to <CUT>': a cut into 0 parts, or a stage of 0 layers".into()),
        ("loopback", "--from pp40+37", "sender rank 0 of pp40+37: pp stages cover 77 of 78 layers".into()),
        ("loopback", "--to pp79", "receiver rank 0 of pp79: 79 pp stages for 78 layers".into()),
        ("loopback", BAD_BLOCKS, bad_blocks.clone()),
        ("receiver", &format!("{BAD_BLOCKS} --rank 0 --meet 127.0.0.1:1"), bad_blocks.clone()),
        ("sender", &format!("{BAD_BLOCKS} --rank 0 --meet 127.0.0.1:1"), bad_blocks),
        ("loopback", "--to tp2000", "--from and --to are 2002 ranks together, at most 1024 can meet".into()),
        ("loopback", "--tokens 0", "invalid value '0' for '--tokens <COUNT>': 0 is not in 1..=4294967296".into()),
        (
            "loopback",
            "--block-tokens-from 0",
            "invalid value '0' for '--block-tokens-from <COUNT>': 0 is not in 1..=1048576".into(),
        ),
        (
            "loopback",
            "--tokens 4294967296 --block-tokens-to 1",
            "4294967296 tokens in blocks of 1 need more slots than a pool can have".into(),
        ),
        (
            "sender",
            "--from pp2 --to tp2 --rank 2 --meet 127.0.0.1:1",
            "sender rank 2 of pp2: rank 2 is not one of the 2 of pp2".into(),
        ),
        (
            "receiver",
            "--rank 0 --meet host:port",
            "invalid value 'host:port' for '--meet <HOST:PORT|DIR>': \"host:port\" is neither HOST:PORT nor a directory".into(),
        ),
        (
            "receiver",
            "--rank 0 --meet 127.0.0.1:0",
            "invalid value '127.0.0.1:0' for '--meet <HOST:PORT|DIR>': port 0 of \"127.0.0.1:0\" is any free one, and nobody \
             else is told which: give the same port to all ranks".into(),
        ),
        ("replay", "--trace /dev/zero", "--trace: cannot read /dev/zero: not a regular file".into()),
        ("replay", "--speed 0", "invalid value '0' for '--speed <TIMES|max>': neither max nor a number in 0.001..=1000000".into()),
        ("replay", "--scale 3", "--scale 3 does not divide the 512 tokens of a block of the trace".into()),
        (
            "replay",
            "--block-tokens-to 3",
            "--block-tokens-to 3 does not divide the 8 tokens that a block of the trace has here".into(),
        ),
        ("replay", "--to dp2tp2", "--to dp2tp2 has 2 data-parallel parts: leave one, each serves requests of its own".into()),
        ("replay", "--to tp63", "--from and --to are 65 ranks together, at most 32 are engines of one process".into()),
        (
            "replay",
            "--model gpt-oss-120b",
            "--model gpt-oss-120b has windows or recurrent state, of which no prefix can be used again".into(),
        ),
        ("receiver", "--rank 0", "the following required arguments were not provided: --meet <HOST:PORT|DIR>".into()),
    ] {
        let ended = run(program, line);
        assert_eq!(ended.failure(2), expected);
        assert_eq!(ended.stdout, "");
        assert!(ended.elapsed < Duration::from_secs(10), "{ended:?}");
    }
}

/// Two sources of GLM's indexer mask that disagree.
#[test]
fn masks_that_disagree() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    let config = r#"{ "model_type": "glm_moe_dsa", "num_hidden_layers": 4, "num_nextn_predict_layers": 0, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 2, "index_skip_topk_offset": 0,
        "indexer_types": ["full", "full", "full", "full"] }"#;
    fs::write(&path, config).unwrap();
    let ended = run("loopback", &format!("--model {}", path.display()));
    let line = ended.failure(2);
    assert!(line.starts_with(&format!("--model: model {}: ", path.display())) && line.contains("layer"), "{line}");
}

#[test]
fn more_than_the_machine_has() {
    let ended = run("loopback", "--tokens 4294967296 --json");
    let line = ended.failure(1);
    assert!(line.starts_with("the pools take ") && line.ends_with(" MiB available"), "{line}");
    assert_eq!(ended.stdout, format!("{{\"error\":\"{line}\",\"outcome\":\"failed\"}}\n"));
}

#[test]
fn help_and_version_are_no_failures() {
    for program in ["sender", "receiver", "loopback", "replay"] {
        let help = run(program, "--help");
        assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""));
        assert!(help.stdout.contains("Example: --from pp4"), "{}", help.stdout);
        let version = run(program, "--version");
        assert_eq!((version.code, version.stderr.as_str()), (Some(0), ""));
    }
}
