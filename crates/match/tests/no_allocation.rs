//! Binding into a plan that has held as much allocates nothing. A test binary of its own: it counts every allocation of
//! the process.

use std::alloc::System;

use kvferry_layout::{Cut, Dtype, ModelFacts, PageTable, Slot, TableOptions, build};
use kvferry_match::{BlockMap, Plan, assign};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const CONFIG: &str = r#"{
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3
}"#;

fn tables(cut: &str, tokens_per_block: u32) -> Vec<PageTable> {
    let facts = ModelFacts::from_config(CONFIG).expect("a known model");
    let cut: Cut = cut.parse().expect("a cut");
    let options = TableOptions::new(tokens_per_block, Dtype::Fp8E4m3, 8192);
    (0..cut.rank_count()).map(|rank| build(&facts, &cut, rank, &options).expect("the cut fits")).collect()
}

/// `count` blocks in slots that are out of order.
fn map(count: u32, step: u32) -> [BlockMap; 1] {
    [BlockMap::dense(0, (0..count).map(|block| Slot(block * step % 8192)))]
}

/// One test, as tests of one process would count each other's allocations.
#[test]
fn binding_again_allocates_nothing() {
    for (source_tokens, destination_tokens) in [(64, 64), (32, 64), (48, 64)] {
        let sources = tables("pp4", source_tokens);
        let destination = &tables("tp8", destination_tokens)[0];
        let template =
            assign((0..).zip(&sources), [(0, destination)]).expect("one model")[0].template(2).expect("rank 2 sends");
        let blocks = if cfg!(miri) { 12 } else { 2048 };
        let tokens = u64::from(blocks * destination_tokens);
        let source_blocks = u32::try_from(tokens.div_ceil(source_tokens.into())).expect("few blocks");
        let (source, destination) = (map(source_blocks, 4099), map(blocks, 5003));
        let mut plan = Plan::default();
        template.bind_into(&source, &destination, 0..tokens, &mut plan).expect("all blocks are there");
        let bytes = plan.bytes();

        let region = Region::new(ALLOCATOR);
        template.bind_into(&source, &destination, 0..tokens / 2, &mut plan).expect("all blocks are there");
        template.bind_into(&source, &destination, 0..tokens, &mut plan).expect("all blocks are there");
        let stats = region.change();
        assert_eq!((stats.allocations, stats.reallocations), (0, 0));
        assert_eq!(plan.bytes(), bytes);
    }
}
