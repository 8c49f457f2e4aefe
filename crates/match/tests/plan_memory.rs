//! What a plan holds is slot pairs, whatever the number of pieces and runs that they stand for. A test binary of its own: it
//! counts every allocation of the process.

use std::alloc::System;

use kvferry_layout::{CellOrder, Cut, Dtype, ModelFacts, PageTable, Pooling, Slot, Storage, TableOptions, build};
use kvferry_match::{BlockMap, assign};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const TOKENS: u32 = 131_072;
const LLAMA_70B: &str = include_str!("../../../examples/models/llama-3.1-70b.json");
const GLM_5_2: &str = include_str!("../../../examples/models/glm-5.2.json");

fn tables(config: &str, cut: &str, block_tokens: u32, pooling: Pooling, cells: CellOrder) -> Vec<PageTable> {
    let facts = ModelFacts::from_config(config).expect("a known model");
    let cut: Cut = cut.parse().expect("a cut");
    let storage = Storage { pooling, cells, ..Storage::default() };
    let options = TableOptions { storage, ..TableOptions::new(block_tokens, Dtype::Fp8E4m3, TOKENS) };
    (0..cut.rank_count()).map(|rank| build(&facts, &cut, rank, &options).expect("the cut fits")).collect()
}

/// One test, as tests of one process would count each other's allocations.
#[test]
#[cfg_attr(miri, ignore = "a million runs")]
fn memory_is_that_of_the_blocks_and_pieces() {
    let block_major =
        |config, cut, block_tokens| tables(config, cut, block_tokens, Pooling::BlockMajor, CellOrder::Hnd);
    let token_major = |config, cut, block_tokens, pooling| tables(config, cut, block_tokens, pooling, CellOrder::Nhd);
    let check = |sources: &[PageTable], destinations: &[PageTable], run_bytes: u64, pieces_max: usize| {
        let assignments = assign((0..).zip(sources), (0..).zip(destinations)).expect("one model");
        let destination = assignments.len() - 1;
        let source = assignments[destination].sources().next().expect("someone sends");
        let template = assignments[destination].template(source).expect("sizes fit");
        let pieces: usize = template.sections().iter().map(|section| section.pieces.len()).sum();
        assert!(pieces <= pieces_max, "{pieces} pieces");
        let shortest =
            template.sections().iter().flat_map(|section| section.pieces.iter()).map(|piece| piece.run_bytes);
        assert_eq!(shortest.min(), Some(run_bytes));

        let blocks = |table: &PageTable| TOKENS.div_ceil(table.groups[0].kind.tokens());
        let map = |count: u32| [BlockMap::dense(0, (0..count).map(Slot))];
        let (ours, theirs) = (blocks(&sources[source as usize]), blocks(&destinations[destination]));
        let (source, destination) = (map(ours), map(theirs));
        let region = Region::new(ALLOCATOR);
        let plan = template.bind(&source, &destination, 0..TOKENS.into()).expect("all blocks are there");
        let change = region.change();
        let held = change.bytes_allocated - change.bytes_deallocated;
        // 8 bytes a pair, a bit a slot, and some for each list of pairs.
        let (blocks, pairings) = ((ours + theirs) as usize, template.sections().len());
        assert!(held <= 16 * blocks + 32 * pairings + 4096, "{held} bytes for {blocks} blocks, {pairings} sections");
        assert!(plan.runs() >= plan.pieces());
        (plan.pieces(), plan.runs())
    };
    // Whole rows, and one head of eight token by token: 128 bytes each, 21 million of them.
    check(&block_major(GLM_5_2, "pp4", 64), &block_major(GLM_5_2, "tp8", 64), 7 * 64 * 132, 2);
    let (_, runs) = check(
        &token_major(LLAMA_70B, "tp1", 16, Pooling::BlockMajor),
        &token_major(LLAMA_70B, "tp8", 16, Pooling::BlockMajor),
        128,
        1,
    );
    assert_eq!(runs, u64::from(TOKENS) * 80 * 2);
    // A pool for each layer and role; tokens as blocks, on one side and on both.
    let split = |cut, block_tokens| token_major(LLAMA_70B, cut, block_tokens, Pooling::LayerSplit);
    check(&split("tp1", 16), &split("tp8", 16), 128, 160);
    check(&split("tp1", 1), &split("tp8", 1), 128, 160);
    check(&split("tp1", 1), &split("tp8", 64), 128, 160 * 64);
    check(&block_major(GLM_5_2, "tp1", 1), &block_major(GLM_5_2, "pp4", 64), 4, 3 * 64);
    check(&block_major(GLM_5_2, "pp2", 48), &block_major(GLM_5_2, "tp2", 32), 64, 3 * 4);
    check(&block_major(GLM_5_2, "pp2cp4", 64), &block_major(GLM_5_2, "tp2", 32), 128, 3 * 2);
}
