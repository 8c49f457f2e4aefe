//! Real models and cuts: how small their templates are, and who sends how much.

use kvferry_layout::{Cut, Dtype, ModelFacts, PageTable, PoolId, Slot, TableOptions, build};
use kvferry_match::{Assignment, BlockMap, Dim, Matrix, Piece, Template, assign};

const GLM_5_2: &str = r#"{
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3
}"#;

const LLAMA_8B: &str = r#"{
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "head_dim": 128
}"#;

fn instance(config: &str, cut: &str, tokens_per_block: u32, mtp: bool) -> Vec<PageTable> {
    let facts = ModelFacts::from_config(config).expect("a known model");
    let cut: Cut = cut.parse().expect("a cut");
    let options = TableOptions { mtp, ..TableOptions::new(tokens_per_block, Dtype::Fp8E4m3, 4096) };
    (0..cut.rank_count()).map(|rank| build(&facts, &cut, rank, &options).expect("the cut fits")).collect()
}

fn assignments(sources: &[PageTable], destinations: &[PageTable]) -> Vec<Assignment> {
    assign((0..).zip(sources), (0..).zip(destinations)).expect("one model")
}

fn templates(assignments: &[Assignment]) -> impl Iterator<Item = (u32, Template)> {
    assignments
        .iter()
        .flat_map(|assignment| assignment.sources().map(|rank| (rank, assignment.template(rank).expect("sizes fit"))))
}

fn piece_counts(template: &Template) -> Vec<usize> {
    template.sections().iter().map(|section| section.pieces.len()).collect()
}

#[test]
fn same_cut_is_one_piece_a_slot() {
    for (config, cut, pools) in
        [(GLM_5_2, "pp4", 2), (GLM_5_2, "tp2", 2), (LLAMA_8B, "tp8", 1), (LLAMA_8B, "pp2tp4", 1)]
    {
        let tables = instance(config, cut, 64, true);
        for (rank, assignment) in (0..).zip(assignments(&tables, &tables)) {
            for source in assignment.sources() {
                let template = assignment.template(source).expect("sizes fit");
                assert_eq!(template.sections().len(), pools);
                assert!(piece_counts(&template).iter().all(|count| *count == 1), "{cut}: {source} to {rank}");
                assert!(template.sections().iter().all(|section| section.runs_per_pair == 1));
            }
        }
    }
}

#[test]
fn pipeline_stages_are_runs_of_layers() {
    let sizes: Vec<u32> = if cfg!(miri) { vec![2, 3] } else { (1..=26).collect() };
    for from in &sizes {
        for to in &sizes {
            let sources = instance(GLM_5_2, &format!("pp{from}"), 64, true);
            let destinations = instance(GLM_5_2, &format!("pp{to}"), 64, true);
            let assignments = assignments(&sources, &destinations);
            for (table, assignment) in destinations.iter().zip(&assignments) {
                let rows: u64 = assignment.sources().map(|rank| assignment.rows(rank)).sum();
                assert_eq!(rows, table.rows().count() as u64);
            }
            for (_, template) in templates(&assignments) {
                // Latents are one piece. So are indexer rows, of those stages that have some.
                assert!(matches!(piece_counts(&template).as_slice(), [1] | [1, 1]), "pp{from} to pp{to}");
            }
        }
    }
}

#[test]
fn glm_5_2_pp4_to_tp8() {
    let sources = instance(GLM_5_2, "pp4", 64, false);
    let assignments = assignments(&sources, &instance(GLM_5_2, "tp8", 64, false));
    assert_eq!(templates(&assignments).count(), 32);
    for (_, template) in templates(&assignments) {
        assert_eq!(piece_counts(&template), [1, 1]);
    }
    // 20 layers, of which 0, 1, 2, 6, 10, 14 and 18 own an indexer.
    let first = assignments[0].template(0).expect("sizes fit");
    let bytes: Vec<u64> = first.sections().iter().map(|section| section.bytes_per_pair).collect();
    assert_eq!(bytes, [20 * 64 * 576, 7 * 64 * 132]);
    assert_eq!(assignments[0].rows(0), 27);
    // All eight destinations get the same.
    let digests = |rank| assignments.iter().map(move |to| to.template(rank).expect("sizes fit").digest());
    assert!(digests(1).all(|digest| digest == digests(1).next().expect("eight")));
    assert_ne!(digests(0).next(), digests(1).next());
    // But each is an assignment of its own.
    assert_ne!(assignments[0].digest(), assignments[1].digest());
}

#[test]
fn digests_of_plans_say_what_the_receiver_knows() {
    let tables = instance(GLM_5_2, "pp1", 64, false);
    let template = assignments(&tables, &tables)[0].template(0).expect("sizes fit");
    let digest = |source: [u32; 2], destination: [u32; 2], tokens| {
        let maps = [source, destination].map(|slots| [BlockMap::dense(0, slots.map(Slot))]);
        template.bind(&maps[0], &maps[1], tokens).expect("two blocks").digest()
    };
    let of = digest([0, 1], [2, 3], 0..128);
    assert_eq!(digest([5, 4], [2, 3], 0..128), of);
    assert_ne!(digest([0, 1], [3, 2], 0..128), of);
    assert_ne!(digest([0, 1], [2, 3], 0..127), of);
}

#[test]
fn heads_are_strided_over_layers() {
    let one_piece = |from: &str, to: &str, from_tokens: u32, to_tokens: u32| {
        let sources = instance(LLAMA_8B, from, from_tokens, false);
        let assignments = assignments(&sources, &instance(LLAMA_8B, to, to_tokens, false));
        let (_, template) = templates(&assignments).last().expect("someone sends");
        let section = template.sections().last().expect("something is sent");
        assert_eq!((section.source_pool, section.destination_pool), (PoolId(0), PoolId(0)));
        assert_eq!(section.pieces.len(), 1);
        section.pieces[0]
    };
    let dim = |count, source_stride, destination_stride| Dim { count, source_stride, destination_stride };
    let head = 64 * 128;
    // The last two of a source rank's four heads, keys and values of 32 layers alike.
    let narrower = one_piece("tp2", "tp4", 64, 64);
    let expected = Piece {
        source_offset: 2 * head,
        destination_offset: 0,
        run_bytes: 2 * head,
        dims: [dim(64, 4 * head, 2 * head), Dim::UNUSED],
    };
    assert_eq!(narrower, expected);
    let wider = one_piece("tp4", "tp2", 64, 64);
    let expected = Piece {
        source_offset: 0,
        destination_offset: 2 * head,
        dims: [dim(64, 2 * head, 4 * head), Dim::UNUSED],
        ..expected
    };
    assert_eq!(wider, expected);
    // Eight heads, one on each pair of ranks.
    assert_eq!(one_piece("tp1", "tp16", 64, 64).run_bytes, head);
    // Half a block: heads are no longer side by side.
    let halves = one_piece("tp2", "tp4", 32, 64);
    let expected = Piece {
        source_offset: head,
        destination_offset: head / 2,
        run_bytes: head / 2,
        dims: [dim(64, 2 * head, 2 * head), dim(2, head / 2, head)],
    };
    assert_eq!(halves, expected);
}

#[test]
fn block_sizes_meet_in_phases() {
    let counts = |from_tokens, to_tokens| {
        let sources = instance(GLM_5_2, "pp2", from_tokens, false);
        let assignments = assignments(&sources, &instance(GLM_5_2, "tp2", to_tokens, false));
        let (_, template) = templates(&assignments).next().expect("someone sends");
        piece_counts(&template)
    };
    // A latent piece and, as keys and scales are apart in a row, two indexer pieces for each phase.
    assert_eq!(counts(32, 64), [1, 2].repeat(2));
    assert_eq!(counts(64, 16), [1, 2].repeat(4));
    assert_eq!(counts(48, 32), [1, 2].repeat(4));
    assert_eq!(counts(1, 64), [1, 2].repeat(64));
}

#[test]
fn a_matrix_says_who_sends_what_to_whom() {
    let sources = instance(GLM_5_2, "pp2", 64, false);
    let assignments = assignments(&sources, &instance(GLM_5_2, "pp3", 64, false));
    let matrix = Matrix::new(&assignments, 64..100).expect("sizes fit");
    assert_eq!(
        matrix.to_string(),
        "\
ranks   layers  rows  pieces  runs  bytes
0 -> 0  0..26   34    2       2     1026048
0 -> 1  26..39  17    2       2     513024
1 -> 1  39..52  16    2       2     504576
1 -> 2  52..78  32    2       2     1009152
all                   8       8     3052800
"
    );
    let (sent, received) = (matrix.sent(), matrix.received());
    assert_eq!((sent[&0].bytes, received[&1].bytes), (1_026_048 + 513_024, 513_024 + 504_576));
    let picture = matrix.to_svg();
    let says = |text: &str| assert!(picture.contains(text), "{text}: {picture}");
    says("2 source ranks to 3 destination ranks");
    says("tokens 64..100 of a request of 100");
    says("0 to 1: 513024 bytes, 2 pieces, 2 runs, 17 rows of layers 26..39");
    says("501 KiB");
    assert_eq!(picture.matches("<title>").count(), 4);
    assert_eq!(picture, Matrix::new(&assignments, 64..100).expect("sizes fit").to_svg());
}

#[test]
fn explains_itself() {
    let sources = instance(GLM_5_2, "pp26", 64, true);
    let assignment = &assignments(&sources, &instance(GLM_5_2, "pp39", 64, true))[38];
    assert_eq!(
        assignment.explain(),
        "\
ranks     role         plane  units  layers  bytes a slot
25 -> 38  latent       0      0..1   76..79  110592
25 -> 38  indexer key  0      0..1   78      8192
25 -> 38  indexer key  1      0..1   78      256
"
    );
    let template = assignment.template(25).expect("rank 25 sends");
    let map = [BlockMap::dense(0, [Slot(1), Slot(0)])];
    assert_eq!(
        template.bind(&map, &map, 0..100).expect("two blocks").explain(),
        "\
groups  pools   tokens       slot pairs  pieces  runs  bytes
0 -> 0  0 -> 0  0..64 of 64  2           2       2     221184
0 -> 0  1 -> 1  0..64 of 64  2           2       2     16896
"
    );
}
