//! Vectors small enough to check by hand, each with its origin.

use std::path::Path;

use kvferry_layout::{
    Dtype, GroupKind, Layer, LayerGroup, MemoryKind, PageTable, Plane, Pool, PoolId, Role, Row, Slot,
};
use kvferry_match::{BlockMap, assign};
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
    common_tokens: [u64; 2],
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
            slot_count: 64,
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
        let BlockMapCase { name, block_tokens, source, destination, common_tokens, mut pairs } = case;
        let [source_table, destination_table] = block_tokens.map(|tokens| {
            let plane = (0, 1, 0, 1, 0, 1, 1);
            let row = TableRow {
                layer: 0,
                role: Role::Latent,
                pool: 0,
                offset: 0,
                bytes: tokens.into(),
                planes: vec![plane],
            };
            let kind = GroupKind::paged(tokens);
            Table { kind, slot_bytes: vec![tokens.into()], rows: vec![row] }.build()
        });
        let map = |blocks: Blocks| [BlockMap::dense(blocks.first, blocks.slots.into_iter().map(Slot))];
        let (source, destination) = (map(source), map(destination));
        let assignments = assign([(0, &source_table)], [(0, &destination_table)]).expect("the instances match");
        let template = assignments[0].template(0).expect("rank 0 sends");
        let tokens = template.common_tokens(&source, &destination);
        assert_eq!([tokens.start, tokens.end], common_tokens, "{name}");
        let plan = template.bind(&source, &destination, tokens).expect("all blocks of the common tokens are there");
        let slots = plan.sections().flat_map(|(_, pairs)| pairs).map(|pair| (pair.source.0, pair.destination.0));
        let mut found: Vec<(u32, u32)> = slots.collect();
        found.sort_unstable();
        pairs.sort_unstable();
        assert_eq!(found, pairs, "{name}");
    }
}
