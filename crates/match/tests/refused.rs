//! What cannot be matched or bound, and what the errors say of it.

use kvferry_layout::{
    Dtype, GroupId, GroupKind, GroupSpec, Layer, LayerMask, Ordinals, PageTable, PoolId, RankSpec, Role, RowSpec, Slot,
    block_major,
};
use kvferry_match::{
    Assignment, BindError, BlockMap, Chunk, LayerList, MatchError, Mismatch, Plan, Side, Template, TemplateError,
    assign, prove_whole,
};

const PAGED: GroupKind = GroupKind::paged(16);

/// Four hidden layers, of which `layers` are here, keys of two heads, and an indexer on the layers of `mask`.
fn table(layers: &[u32], mask: &[bool], (tp_rank, tp_size): (u32, u32)) -> PageTable {
    let keys = RowSpec::single(Role::Key, Dtype::F16, LayerMask::all(8), 2, 4).expect("whole bytes");
    let indexer = RowSpec::indexer(Dtype::Fp8E4m3, LayerMask::from_bools(mask.iter().copied()), 128, 128);
    let pools = vec![vec![keys], vec![indexer.expect("whole bytes")]];
    block_major(&RankSpec {
        hidden_layers: 4,
        layers: layers.iter().copied().map(Layer).collect(),
        tp_rank,
        tp_size,
        groups: vec![GroupSpec { kind: PAGED, slot_count: 10, pools }],
    })
    .expect("a sound table")
}

fn dense(layers: &[u32]) -> PageTable {
    table(layers, &[], (0, 1))
}

fn matched(sources: &[PageTable], destination: &PageTable) -> Result<Assignment, MatchError> {
    assign((0..).zip(sources), [(5, destination)]).map(|mut assignments| assignments.remove(0))
}

fn refusal(sources: &[PageTable], destination: &PageTable) -> MatchError {
    matched(sources, destination).expect_err("these do not match")
}

fn maps(slots: &[u32]) -> [BlockMap; 1] {
    [BlockMap::dense(0, slots.iter().copied().map(Slot))]
}

fn template() -> Template {
    let table = dense(&[0, 1, 2, 3]);
    matched(std::slice::from_ref(&table), &table).expect("equal tables").template(0).expect("rank 0 sends")
}

#[test]
fn layers_that_nobody_holds() {
    let error = refusal(&[dense(&[0, 1])], &dense(&[0, 1, 2, 3]));
    assert_eq!(
        error.to_string(),
        "key of layers 2..4: no source rank holds units 0..2 of plane 0 for destination rank 5"
    );
    let error = refusal(&[dense(&[1]), dense(&[3])], &dense(&[0, 1, 2, 3]));
    assert_eq!(
        error.to_string(),
        "key of layers 0, 2: no source rank holds units 0..2 of plane 0 for destination rank 5"
    );
    assert!(matches!(refusal(&[], &dense(&[0])), MatchError::Uncovered { .. }));
}

#[test]
fn units_that_nobody_holds() {
    let half = table(&[0, 1, 2, 3], &[], (0, 2));
    let error = refusal(&[half], &dense(&[1, 2]));
    assert_eq!(
        error.to_string(),
        "key of layers 1..3: no source rank holds units 1..2 of plane 0 for destination rank 5"
    );
}

#[test]
fn masks_that_differ() {
    let all = [0, 1, 2, 3];
    let (more, less) = ([true, false, true, false], [true, false, false, false]);
    let error = refusal(&[table(&all, &less, (0, 1))], &table(&all, &more, (0, 1)));
    let MatchError::MissingRole { layer, role, lacking, .. } = &error else { panic!("{error}") };
    assert_eq!((*layer, role, *lacking), (Layer(2), &Role::IndexerKey, Side::Source));
    assert_eq!(
        error.to_string(),
        "indexer key of layer 2: only the destination has it, though both hold the layer \
         (of the layers of destination rank 5 the source has TFFF, the destination TFTF)"
    );
    let error = refusal(&[table(&all, &more, (0, 1))], &table(&[2, 3], &less, (0, 1)));
    assert_eq!(
        error.to_string(),
        "indexer key of layer 2: only the source has it, though both hold the layer \
         (of the layers of destination rank 5 the source has FFTF, the destination FFFF)"
    );
    // Where they differ, the destination rank has nothing.
    let assignment = matched(&[table(&all, &more, (0, 1))], &table(&[0, 1], &less, (0, 1))).expect("masks agree there");
    assert_eq!(assignment.rows(0), 3);
}

/// Each of these is served by itself: it is together that they miss something.
#[test]
fn what_no_destination_rank_says_that_it_holds_is_missed_all_the_same() {
    let source = [dense(&[0, 1, 2, 3])];
    let whole = |destinations: &[PageTable]| {
        assert!(assign((0..).zip(&source), (0..).zip(destinations)).is_ok());
        prove_whole((0..).zip(&source), (0..).zip(destinations))
    };
    let nothing = Ok(LayerList::from_iter([]));
    let shard = |layers: &[u32], tp_rank| table(layers, &[], (tp_rank, 2));
    assert_eq!(whole(&[shard(&[0, 1, 2, 3], 0), shard(&[0, 1, 2, 3], 1)]), nothing);
    assert_eq!(whole(&[dense(&[0, 1]), shard(&[2, 3], 0), shard(&[2, 3], 1)]), nothing);
    let error = whole(&[shard(&[0, 1, 2, 3], 0), shard(&[0, 1, 2, 3], 0)]).expect_err("the second head is nobody's");
    let (layer, role) = (Layer(0), Role::Key);
    assert_eq!(error, MatchError::Unclaimed { dp_rank: 0, layer, role: role.clone(), plane: 0, units: 1..2 });
    assert!(whole(&[dense(&[0, 1]), shard(&[2, 3], 1)]).is_err());

    // Layers that nobody holds are legal, and told. A part is looked at by itself.
    assert_eq!(whole(&[dense(&[0]), dense(&[3])]), Ok(LayerList::from_iter([Layer(1), Layer(2)])));
    let of_part = |dp_rank, table| PageTable { dp_rank, ..table };
    assert_eq!(whole(&[dense(&[0, 1, 2, 3]), of_part(1, dense(&[1, 2, 3]))]), Ok(LayerList::from_iter([Layer(0)])));
    assert!(whole(&[shard(&[0, 1, 2, 3], 0), of_part(1, shard(&[0, 1, 2, 3], 1))]).is_err());

    let dealt = |first| {
        let mut table = dense(&[0, 1, 2, 3]);
        let ordinals = Ordinals { step: 2, first };
        table.groups[0].kind = GroupKind::Paged { tokens_per_block: 16, window_tokens: None, ordinals };
        table
    };
    assert_eq!(whole(&[dealt(0), dealt(1)]), nothing);
    assert_eq!(whole(&[dealt(0), dense(&[0, 1, 2, 3])]), nothing);
    let error = whole(&[dealt(0), dealt(0)]).expect_err("every other block is nobody's");
    let ordinals = Ordinals { step: 2, first: 1 };
    assert_eq!(error, MatchError::UnclaimedBlocks { dp_rank: 0, layer, role, block_tokens: 16, ordinals });
}

#[test]
fn layers_past_the_hidden_ones_may_be_one_sided() {
    let with = dense(&[0, 1, 2, 3, 4]);
    let without = dense(&[0, 1, 2, 3]);
    let assignment = matched(std::slice::from_ref(&without), &with).expect("one-sided MTP is legal");
    assert_eq!((assignment.one_sided(), assignment.rows(0)), (&[Layer(4)][..], 4));
    let assignment = matched(std::slice::from_ref(&with), &without).expect("one-sided MTP is legal");
    assert_eq!((assignment.one_sided(), assignment.rows(0)), (&[][..], 4));
    // Held by both, it is a layer like the others.
    let error = refusal(&[with], &table(&[0, 1, 2, 3, 4], &[false, false, false, false, true], (0, 1)));
    assert!(matches!(error, MatchError::MissingRole { layer: Layer(4), lacking: Side::Source, .. }), "{error}");
}

#[test]
fn rows_that_differ() {
    let check = |change: fn(&mut PageTable), expected: &str| {
        let ours = dense(&[0, 1, 2, 3]);
        let mut theirs = ours.clone();
        change(&mut theirs);
        theirs.check().expect("a sound table");
        assert_eq!(refusal(&[ours.clone(), theirs], &ours).to_string(), expected);
    };
    let differ = "key of layer 2: source rank 1 and destination rank 5 differ in";
    check(|table| table.groups[0].rows[2].dtype = Dtype::Bf16, &format!("{differ} element type: bf16 against f16"));
    check(
        |table| table.groups[0].rows[2].planes[0].cell_bytes = 7,
        &format!("{differ} bytes of a cell of plane 0: 7 against 8"),
    );
    check(
        |table| table.groups[0].rows[2].planes[0].units_total = 3,
        &format!("{differ} units of plane 0: 3 against 2"),
    );
    check(
        |table| {
            let row = &mut table.groups[0].rows[2];
            let mut second = row.planes[0].clone();
            (row.planes[0].units.end, second.units.end, second.offset) = (1, 1, 128);
            row.planes.push(second);
        },
        &format!("{differ} planes: 2 against 1"),
    );
    check(
        |table| {
            let mut row = table.groups[0].rows.remove(2);
            row.planes[0].tokens = 1;
            table.groups.push(kvferry_layout::LayerGroup { kind: GroupKind::State, rows: vec![row] });
        },
        &format!("{differ} life cycle: state against paged"),
    );
    check(|table| table.hidden_layers = 5, "source rank 1 has 5 hidden layers, destination rank 5 has 4");
}

#[test]
fn cells_and_windows_that_differ() {
    let differ = "key of layer 2: source rank 0 and destination rank 5 differ in";
    let check = |source: GroupKind, destination: GroupKind, expected: Option<&str>| {
        let [source, destination] = [source, destination].map(|kind| {
            let mut table = dense(&[2]);
            table.groups[0].kind = kind;
            table.check().expect("a sound table");
            table
        });
        let error = matched(std::slice::from_ref(&source), &destination).err().map(|error| error.to_string());
        assert_eq!(error, expected.map(|expected| format!("{differ} {expected}")));
    };
    // Sixteen cells a block either way, each of one token or of two.
    check(GroupKind::paged(32), GroupKind::paged(16), Some("tokens of a cell of plane 0: 2 against 1"));
    check(GroupKind::paged(32), GroupKind::paged(32), None);
    let window = |tokens| GroupKind::windowed(16, tokens);
    check(window(64), window(64), None);
    check(window(64), window(65), Some("window: 64 tokens kept, 65 needed"));
    check(window(64), PAGED, Some("window: 64 tokens kept, all needed"));
    // Who keeps more can give less.
    check(window(65), window(64), None);
    check(PAGED, window(64), None);
}

#[test]
fn blocks_that_nobody_holds() {
    let hand = |tokens_per_block: u32, step: u32, first: u32| {
        let mut table = dense(&[1]);
        let (row, bytes) = (&mut table.groups[0].rows[0], u64::from(tokens_per_block) * 16);
        (row.bytes, row.planes[0].tokens) = (bytes, tokens_per_block);
        row.planes[0].unit_stride = bytes / 2;
        (table.pools[0].slot_bytes, table.pools[0].slot_stride) = (bytes, bytes);
        let ordinals = Ordinals { step, first };
        table.groups[0].kind = GroupKind::Paged { tokens_per_block, window_tokens: None, ordinals };
        table.check().expect("a sound table");
        table
    };
    let sources = |deal: &[(u32, u32, u32)]| -> Vec<PageTable> {
        deal.iter().map(|(tokens, step, first)| hand(*tokens, *step, *first)).collect()
    };
    let ranks = |deal: &[(u32, u32, u32)], destination: &PageTable| -> Vec<u32> {
        matched(&sources(deal), destination).expect("all blocks are held").sources().collect()
    };
    let whole = hand(16, 1, 0);
    assert_eq!(ranks(&[(16, 3, 0), (16, 3, 1), (16, 3, 2)], &whole), [0, 1, 2]);
    assert_eq!(
        refusal(&sources(&[(16, 3, 0), (16, 3, 2)]), &whole).to_string(),
        "key of layer 1: no source rank holds block 1 of every 3, of 16 tokens each, for destination rank 5"
    );
    // Equal deals need only the rank of the same hand; so do blocks that are parts of its blocks.
    assert_eq!(ranks(&[(16, 3, 0), (16, 3, 2)], &hand(16, 3, 2)), [1]);
    assert_eq!(ranks(&[(8, 4, 0), (8, 4, 2), (8, 4, 3)], &hand(16, 2, 1)), [1, 2]);
    // Two to three: every pair of hands meets.
    assert_eq!(ranks(&[(16, 2, 0), (16, 2, 1)], &hand(16, 3, 1)), [0, 1]);
    // Who holds all blocks can serve alone, and is left to.
    assert_eq!(ranks(&[(16, 3, 0), (32, 1, 0), (16, 3, 1)], &whole), [1]);
    let error = refusal(&sources(&[(16, 2, 0), (32, 2, 1)]), &whole);
    assert_eq!(
        error.to_string(),
        "key of layer 1: source ranks 0 and 1 deal out its blocks in different ways (blocks of 16 tokens to 2 ranks, \
         blocks of 32 tokens to 2 ranks)"
    );
}

#[test]
fn state_moves_with_the_last_chunk() {
    let mut table = dense(&[0]);
    let mut state = dense(&[1]);
    state.groups[0].kind = GroupKind::State;
    state.groups[0].rows[0].pool = PoolId(1);
    table.pools.append(&mut state.pools);
    table.groups.append(&mut state.groups);
    table.check().expect("a sound table");
    let template = matched(std::slice::from_ref(&table), &table).expect("equal tables").template(0).expect("sends");
    let maps = |blocks: &[u32], state: &[u32]| [maps(blocks)[0].clone(), maps(state)[0].clone()];
    let pairs = |source: &[BlockMap], destination: &[BlockMap], chunk| -> Result<Vec<usize>, BindError> {
        Ok(template.bind(source, destination, chunk)?.sections().map(|(_, pairs)| pairs.len()).collect())
    };
    let (both, no_state) = (maps(&[0, 1, 2], &[7]), maps(&[0, 1, 2], &[]));
    assert_eq!(pairs(&no_state, &no_state, Chunk::new(0..40, 48)), Ok(vec![2, 0]));
    assert_eq!(pairs(&both, &both, Chunk::new(40..48, 48)), Ok(vec![1, 1]));
    assert_eq!(pairs(&both, &both, Chunk::from(48..48)), Ok(vec![0, 1]));
    let (side, group, ordinal) = (Side::Source, GroupId(1), 0);
    let lacking = BindError::OutOfMap { side, group, ordinal, first: 0, end: 0 };
    assert_eq!(pairs(&no_state, &both, Chunk::from(0..48)), Err(lacking));
    let past = BindError::PastEnd { end: 49, request_tokens: 48 };
    assert_eq!(pairs(&both, &both, Chunk::new(0..49, 48)), Err(past.clone()));
    assert_eq!(template.amount(Chunk::new(0..49, 48)), Err(past));
}

#[test]
fn the_first_difference_is_named() {
    let ours = dense(&[0, 1, 2, 3]);
    let mut theirs = ours.clone();
    theirs.groups[0].rows[3].planes[0].units_total = 9;
    theirs.groups[0].rows[1].dtype = Dtype::U8;
    let MatchError::Incompatible { layer, source_rank, mismatch, .. } = refusal(&[ours.clone(), theirs], &ours) else {
        panic!("not comparable");
    };
    assert_eq!((layer, source_rank), (Layer(1), 1));
    assert_eq!(mismatch, Mismatch::Dtype { source: Dtype::U8, destination: Dtype::F16 });
}

#[test]
fn templates_that_are_not_made() {
    let tables = [dense(&[0, 1]), dense(&[2, 3])];
    let assignment = matched(&tables, &tables[1]).expect("covered");
    let error = assignment.template(0).expect_err("rank 0 has none of the layers");
    assert_eq!(error, TemplateError::NotASource { source_rank: 0, destination_rank: 5 });

    let blocks = |tokens_per_block| {
        let mut table = dense(&[0]);
        let Some(plane) = table.groups[0].rows[0].planes.first_mut() else { panic!("a row has planes") };
        (plane.tokens, plane.unit_stride) = (tokens_per_block, u64::from(tokens_per_block) * 8);
        let bytes = u64::from(tokens_per_block) * 16;
        table.groups[0].rows[0].bytes = bytes;
        table.groups[0].kind = GroupKind::paged(tokens_per_block);
        (table.pools[0].slot_bytes, table.pools[0].slot_stride) = (bytes, bytes);
        table.check().expect("a sound table");
        table
    };
    let assignment = matched(&[blocks(u32::MAX)], &blocks(u32::MAX - 1)).expect("the rows match");
    let error = assignment.template(0).expect_err("8 billion phases");
    assert!(matches!(error, TemplateError::TooManyPieces { phases: 8_589_934_588, arrays: 1, .. }), "{error}");
    assignment_of_largest_blocks(&blocks(u32::MAX));
}

/// Equal blocks of any size have one phase.
fn assignment_of_largest_blocks(table: &PageTable) {
    let assignment = matched(std::slice::from_ref(table), table).expect("equal tables");
    let template = assignment.template(0).expect("one phase");
    assert_eq!(template.sections().len(), 1);
    assert_eq!(template.sections()[0].runs_per_pair, 1);
}

#[test]
fn maps_that_do_not_fit() {
    let template = template();
    let ours = maps(&[0, 1, 2]);
    let check = |source: &[BlockMap], destination: &[BlockMap], tokens, expected: BindError| {
        let mut plan = template.bind(&ours, &maps(&[3, 4, 5]), 0..48).expect("all is there");
        assert!(plan.bytes() > 0);
        let bound = template.bind_into(source, destination, tokens, &mut plan);
        assert_eq!(bound, Err(expected));
        assert_eq!((plan.bytes(), plan.runs(), plan.digest()), (0, 0, empty(&template).digest()));
    };
    let (side, group) = (Side::Source, GroupId(0));
    check(&[], &ours, 0..48, BindError::MapCount { side, groups: 1, maps: 0 });
    check(&ours, &ours, 0..49, BindError::OutOfMap { side, group, ordinal: 3, first: 0, end: 3 });
    check(&ours, &ours, 0..u64::MAX, BindError::OutOfMap { side, group, ordinal: 3, first: 0, end: 3 });
    let holed = [BlockMap::new(0, vec![Some(Slot(0)), None, Some(Slot(2))])];
    check(&holed, &ours, 0..48, BindError::Hole { side, group, ordinal: 1 });
    let past = maps(&[0, 10, 2]);
    let (pool, slot_count) = (PoolId(0), 10);
    check(&past, &ours, 0..48, BindError::SlotOutOfRange { side, group, ordinal: 1, slot: Slot(10), pool, slot_count });

    let side = Side::Destination;
    check(&ours, &[ours.clone(), ours.clone()].concat(), 0..48, BindError::MapCount { side, groups: 1, maps: 2 });
    let late = [BlockMap::dense(1, [Slot(0), Slot(1)])];
    check(&ours, &late, 0..48, BindError::OutOfMap { side, group, ordinal: 0, first: 1, end: 3 });
    check(&ours, &holed, 16..32, BindError::Hole { side, group, ordinal: 1 });
    check(
        &ours,
        &past,
        31..32,
        BindError::SlotOutOfRange { side, group, ordinal: 1, slot: Slot(10), pool, slot_count },
    );
    let twice = BindError::SlotTwice { slot: Slot(7), group, ordinal: 2, earlier_group: group, earlier_ordinal: 0 };
    check(&ours, &maps(&[7, 1, 7]), 0..48, twice.clone());
    check(&ours, &maps(&[7, 1, 7]), 0..33, twice.clone());
    assert_eq!(template.expected_bytes(&maps(&[7, 1, 7]), 0..48), Err(twice));

    // What is not needed may be wrong.
    let bytes = template.bind(&holed, &maps(&[7, 10, 7]), 32..48).expect("only block 2 is needed").bytes();
    assert_eq!(bytes, template.expected_bytes(&ours, 0..16).expect("a block"));
    // Two blocks may be read from one slot.
    assert_eq!(template.bind(&maps(&[1, 1, 1]), &ours, 0..48).expect("reading twice is harmless").bytes(), 3 * bytes);
}

#[test]
fn the_last_tokens_there_are_do_not_overflow() {
    let mut table = dense(&[0, 1]);
    table.groups[0].rows.iter_mut().for_each(|row| row.planes[0].tokens = 1);
    let ordinals = Ordinals { step: 7, first: 2 };
    table.groups[0].kind = GroupKind::Paged { tokens_per_block: 1, window_tokens: None, ordinals };
    table.check().expect("a sound table");
    let template = matched(std::slice::from_ref(&table), &table).expect("equal tables").template(0).expect("sends");
    for count in 0..200 {
        // One block in seven is here, so most of these chunks have none.
        let chunk = u64::MAX - count..u64::MAX;
        let bound = template.bind(&maps(&[]), &maps(&[]), chunk.clone()).map(|plan| plan.bytes());
        assert!(matches!(bound, Ok(0) | Err(BindError::OutOfMap { .. })), "{bound:?}");
        assert_eq!(template.expected_bytes(&maps(&[]), chunk).is_ok(), bound.is_ok());
    }
}

#[test]
fn the_smallest_pool_bounds_the_slots() {
    let mut table = table(&[0, 1], &[true, true], (0, 1));
    table.pools[1].slot_count = 4;
    let template = matched(std::slice::from_ref(&table), &table).expect("equal tables").template(0).expect("sends");
    assert!(template.bind(&maps(&[3]), &maps(&[3]), 0..16).is_ok());
    let (side, group, slot, pool) = (Side::Source, GroupId(0), Slot(4), PoolId(1));
    let error = BindError::SlotOutOfRange { side, group, ordinal: 0, slot, pool, slot_count: 4 };
    assert_eq!(template.bind(&maps(&[4]), &maps(&[3]), 0..16).map(|plan| plan.bytes()), Err(error));
}

fn empty(template: &Template) -> Plan {
    template.bind(&maps(&[]), &maps(&[]), 0..0).expect("nothing is needed")
}

#[test]
fn groups_that_share_a_pool_share_no_slot() {
    // Two groups take turns with the pages of one pool, at the same offsets.
    let mut table = dense(&[0, 1]);
    let mut second = table.groups[0].clone();
    second.rows.iter_mut().for_each(|row| row.role = Role::Value);
    table.groups.push(second);
    // A third has a pool of its own.
    let mut third = dense(&[0, 1]);
    third.groups[0].rows.iter_mut().for_each(|row| (row.role, row.pool) = (Role::Latent, PoolId(1)));
    table.pools.append(&mut third.pools);
    table.groups.append(&mut third.groups);
    table.check().expect("a sound table");

    let template = matched(std::slice::from_ref(&table), &table).expect("equal tables").template(0).expect("sends");
    let maps = |slots: [&[u32]; 3]| slots.map(|slots| maps(slots)[0].clone());
    let apart = maps([&[0, 1], &[2, 3], &[0, 1]]);
    assert!(template.bind(&apart, &apart, 0..32).is_ok());
    assert_eq!(
        template.bind(&apart, &maps([&[0, 1], &[2, 1], &[0, 1]]), 0..32).map(|plan| plan.bytes()),
        Err(BindError::SlotTwice {
            slot: Slot(1),
            group: GroupId(1),
            ordinal: 1,
            earlier_group: GroupId(0),
            earlier_ordinal: 1
        })
    );
}

#[test]
fn pools_larger_than_memory_do_not_overflow() {
    // Three pools that each end just below 2^64.
    let mut table = dense(&[0, 1, 2]);
    let bytes = table.groups[0].rows[0].bytes;
    let stride = u64::MAX / 4;
    table.pools = vec![table.pools[0].clone(); 3];
    for (row, pool) in table.groups[0].rows.iter_mut().zip(0..) {
        let tall = 16 * (stride / 32);
        (row.pool, row.offset, row.bytes) = (PoolId(pool), 0, 2 * tall);
        (row.planes[0].unit_stride, row.planes[0].token_stride, row.planes[0].cell_bytes) =
            (tall, tall / 16, tall / 16);
    }
    for pool in &mut table.pools {
        (pool.slot_count, pool.slot_stride, pool.slot_bytes) = (4, stride, stride);
    }
    table.check().expect("sound, if not real");
    assert!(bytes < stride);
    let template = matched(std::slice::from_ref(&table), &table).expect("equal tables").template(0).expect("sends");
    assert!(template.bind(&maps(&[0]), &maps(&[3]), 0..16).is_ok());
    let all = maps(&[0, 1, 2, 3]);
    assert_eq!(template.bind(&all, &all, 0..64).map(|plan| plan.bytes()), Err(BindError::TooManyBytes));
    assert_eq!(template.expected_bytes(&all, 0..64), Err(BindError::TooManyBytes));
}
