//! Vectors small enough to check by hand, each with its origin.

use std::path::Path;

use kvferry_layout::{
    Dtype, GroupKind, Layer, LayerGroup, MemoryKind, Ordinals, PageTable, Plane, Pool, PoolId, Role, Row, Slot,
};
use kvferry_match::{BlockMap, Chunk, assign};
use serde::Deserialize;
use serde::de::DeserializeOwned;

#[derive(Deserialize)]
struct Golden<Case> {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct CopyCase {
    name: String,
    sources: Vec<Table>,
    destinations: Vec<Table>,
    copies: Vec<Copies>,
}

/// A table of one group.
#[derive(Deserialize)]
struct Table {
    kind: GroupKind,
    slot_bytes: Vec<u64>,
    rows: Vec<TableRow>,
}

#[derive(Deserialize)]
struct TableRow {
    layer: u32,
    role: Role,
    pool: u16,
    offset: u64,
    bytes: u64,
    /// Offset, cell bytes, unit stride, token stride, first unit, unit after the last, units of the model.
    planes: Vec<(u64, u64, u64, u64, u32, u32, u32)>,
}

/// What goes from one rank to another in a pair of slots.
#[derive(Deserialize)]
struct Copies {
    from: u32,
    to: u32,
    pieces: usize,
    /// Source pool and offset, destination pool and offset, bytes.
    runs: Vec<(u16, u64, u16, u64, u64)>,
}

#[derive(Deserialize)]
struct BlockMapCase {
    name: String,
    block_tokens: [u32; 2],
    source: Blocks,
    destination: Blocks,
    /// Of the group on both sides.
    #[serde(default)]
    window_tokens: Option<u32>,
    /// Step and first ordinal of the blocks that the source rank and the destination rank hold.
    #[serde(default)]
    ordinals: Option<[(u32, u32); 2]>,
    common_tokens: [u64; 2],
    /// First token, the token after the last, tokens of the request; the common tokens if there is none.
    #[serde(default)]
    chunk: Option<(u64, u64, u64)>,
    pairs: Vec<(u32, u32)>,
}

#[derive(Deserialize)]
struct Blocks {
    first: u64,
    slots: Vec<u32>,
}

impl Table {
    fn build(self) -> PageTable {
        let (kind, tokens) = (self.kind, self.kind.tokens());
        let pool = |slot_bytes| Pool {
            memory: MemoryKind::Host,
            base: 0,
            slot_count: 100,
            slot_stride: slot_bytes,
            slot_bytes,
        };
        let row = |TableRow { layer, role, pool, offset, bytes, planes }| Row {
            layer: Layer(layer),
            role,
            dtype: Dtype::U8,
            pool: PoolId(pool),
            offset,
            bytes,
            planes: planes
                .into_iter()
                .map(|(offset, cell_bytes, unit_stride, token_stride, start, end, units_total)| Plane {
                    offset,
                    cell_bytes,
                    unit_stride,
                    token_stride,
                    units: start..end,
                    units_total,
                    tokens,
                })
                .collect(),
        };
        let table = PageTable {
            hidden_layers: 4,
            dp_rank: 0,
            pools: self.slot_bytes.into_iter().map(pool).collect(),
            groups: vec![LayerGroup { kind, rows: self.rows.into_iter().map(row).collect() }],
        };
        table.check().expect("a golden table is sound");
        table
    }
}

fn read<Case: DeserializeOwned>(file: &str) -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    let text = std::fs::read_to_string(path).expect("the file is there");
    serde_json::from_str::<Golden<Case>>(&text).expect("the file has this form").cases
}

fn check_copies(file: &str) {
    for CopyCase { name, sources, destinations, copies } in read(file) {
        let sources: Vec<PageTable> = sources.into_iter().map(Table::build).collect();
        let destinations: Vec<PageTable> = destinations.into_iter().map(Table::build).collect();
        let map = [BlockMap::dense(0, [Slot(0)])];
        let assignments = assign((0..).zip(&sources), (0..).zip(&destinations)).expect("the instances match");
        for Copies { from, to, pieces, mut runs } in copies {
            let assignment = &assignments[to as usize];
            assert_eq!(assignment.sources().any(|rank| rank == from), !runs.is_empty(), "{name}: {from} to {to}");
            let Ok(template) = assignment.template(from) else { continue };
            assert_eq!(template.sections().iter().map(|section| section.pieces.len()).sum::<usize>(), pieces, "{name}");
            let plan = template.bind(&map, &map, 0..1).expect("block 0 is there");
            let mut found = Vec::new();
            plan.for_each_run(|run| {
                let (source, destination) = (run.source_pool.0, run.destination_pool.0);
                found.push((source, run.source_offset, destination, run.destination_offset, run.bytes));
            });
            found.sort_unstable();
            runs.sort_unstable();
            assert_eq!(found, runs, "{name}: {from} to {to}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn heads() {
    check_copies("heads.json");
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn masked_indexer() {
    check_copies("masked_indexer.json");
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn conv_sections() {
    check_copies("conv_sections.json");
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn block_maps() {
    for case in read("block_maps.json") {
        let BlockMapCase { name, block_tokens, window_tokens, ordinals, common_tokens, mut pairs, .. } = case;
        let ordinals = ordinals.unwrap_or([(1, 0); 2]).map(|(step, first)| Ordinals { step, first });
        let table = |tokens_per_block: u32, ordinals| {
            let plane = (0, 1, 0, 1, 0, 1, 1);
            let bytes = u64::from(tokens_per_block);
            let (role, planes) = (Role::Latent, vec![plane]);
            let row = TableRow { layer: 0, role, pool: 0, offset: 0, bytes, planes };
            let kind = GroupKind::Paged { tokens_per_block, window_tokens, ordinals };
            Table { kind, slot_bytes: vec![bytes], rows: vec![row] }.build()
        };
        // All ranks of the source hold the blocks between them; rank 0 is the one looked at.
        let [step, first] = [ordinals[0].step, ordinals[0].first];
        let hands = (0..step).map(|hand| Ordinals { step, first: (first + hand) % step });
        let sources: Vec<PageTable> = hands.map(|hand| table(block_tokens[0], hand)).collect();
        let destination_table = table(block_tokens[1], ordinals[1]);
        let map = |blocks: Blocks| [BlockMap::dense(blocks.first, blocks.slots.into_iter().map(Slot))];
        let (source, destination) = (map(case.source), map(case.destination));
        let assignments = assign((0..).zip(&sources), [(0, &destination_table)]).expect("the instances match");
        let template = assignments[0].template(0).expect("rank 0 sends");
        let tokens = template.common_tokens(&source, &destination);
        assert_eq!([tokens.start, tokens.end], common_tokens, "{name}");
        let chunk = case.chunk.map(|(start, end, request_tokens)| Chunk::new(start..end, request_tokens));
        let chunk = chunk.unwrap_or(Chunk::from(tokens));
        let plan = template.bind(&source, &destination, chunk).unwrap_or_else(|error| panic!("{name}: {error}"));
        let slots = plan.sections().flat_map(|(_, pairs)| pairs).map(|pair| (pair.source.0, pair.destination.0));
        let mut found: Vec<(u32, u32)> = slots.collect();
        found.sort_unstable();
        pairs.sort_unstable();
        assert_eq!(found, pairs, "{name}");
    }
}
