//! Rows whose bytes run through each other.

use kvferry_layout::{
    Counted, Dtype, GroupKind, INTERLEAVED_PLANES_MAX, Layer, LayerGroup, LayoutError, MemoryKind, PageTable, Plane,
    Pool, PoolId, Role, Row,
};
use proptest::prelude::*;

use crate::check::sound_by_scan;

/// Axes of a slot besides the bytes of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Layer,
    KeyValue,
    Unit,
    Token,
}

/// A table whose slots are an array with these axes, outermost first, and `gap` bytes behind each line of an axis.
fn table_of(axes: &[(Axis, u32)], cell_bytes: u64, gap: u64) -> PageTable {
    let mut strides = Vec::new();
    let mut stride = cell_bytes;
    for (axis, count) in axes.iter().rev() {
        strides.push((*axis, *count, stride));
        stride = stride * u64::from(*count) + gap;
    }
    let of = |wanted: Axis| {
        let found = strides.iter().find(|(axis, ..)| *axis == wanted);
        found.map_or((1, 0), |(_, count, stride)| (*count, *stride))
    };
    let (layers, layer_stride) = of(Axis::Layer);
    let (roles, role_stride) = of(Axis::KeyValue);
    let (units, unit_stride) = of(Axis::Unit);
    let (tokens, token_stride) = of(Axis::Token);
    let plane = Plane { offset: 0, cell_bytes, unit_stride, token_stride, units: 0..units, units_total: units, tokens };
    let bytes = u64::from(units - 1) * unit_stride + u64::from(tokens - 1) * token_stride + cell_bytes;
    let row = |layer: u32, role: usize| Row {
        layer: Layer(layer),
        role: [Role::Key, Role::Value][role].clone(),
        dtype: Dtype::U8,
        pool: PoolId(0),
        offset: u64::from(layer) * layer_stride + role as u64 * role_stride,
        bytes,
        planes: vec![plane.clone()],
    };
    let rows = (0..layers).flat_map(|layer| (0..roles as usize).map(move |role| (layer, role)));
    let rows = rows.map(|(layer, role)| row(layer, role)).collect();
    let pool = Pool { memory: MemoryKind::Host, base: 0, slot_count: 2, slot_stride: stride, slot_bytes: stride };
    let groups = vec![LayerGroup { kind: GroupKind::paged(tokens), rows }];
    PageTable { hidden_layers: layers, dp_rank: 0, pools: vec![pool], groups }
}

/// Keys and values of a head side by side: `[slots, tokens, heads, 2 * head_dim]`.
#[test]
fn keys_and_values_of_a_head_in_turn() {
    let table = table_of(&[(Axis::Token, 16), (Axis::Unit, 4), (Axis::KeyValue, 2)], 64, 0);
    assert_eq!(table.check(), Ok(()));
    assert_eq!(table.groups[0].rows[1].offset, 64);
    let mut spoilt = table.clone();
    spoilt.groups[0].rows[1].offset = 63;
    assert!(matches!(spoilt.check(), Err(LayoutError::RowsOverlap { .. })));
    let mut spoilt = table;
    spoilt.groups[0].rows[0].planes[0].cell_bytes = 65;
    spoilt.groups[0].rows[0].bytes += 1;
    assert!(matches!(spoilt.check(), Err(LayoutError::RowsOverlap { .. })));
}

/// vLLM's order for all layers in one slot with HND heads:
/// `(num_blocks, num_kv_heads, num_layers, 2, block_size, head_size)` (`vllm/v1/attention/backends/flash_attn.py`,
/// `get_kv_cache_stride_order`, vllm-project/vllm at commit 5704f34f361c).
#[test]
fn heads_outside_of_layers() {
    let table = table_of(&[(Axis::Unit, 4), (Axis::Layer, 94), (Axis::KeyValue, 2), (Axis::Token, 64)], 128, 0);
    assert_eq!(table.check(), Ok(()));
    let bytes = table.to_bytes();
    assert!(bytes.len() < 100, "{} B", bytes.len());
    assert_eq!(PageTable::from_bytes(&bytes).unwrap(), table);
    let mut spoilt = table;
    spoilt.groups[0].rows[180].offset -= 1;
    let error = spoilt.check().unwrap_err();
    assert_eq!(error.to_string(), "pool 0, layer 90, key: overlaps the value row of layer 89");
}

#[test]
fn comparisons_are_bounded() {
    // 1,024 rows that all run through each other: some 524,000 pairs.
    let table = table_of(&[(Axis::Unit, 2), (Axis::Layer, 512), (Axis::KeyValue, 2)], 1, 0);
    let Err(LayoutError::TooMany { what: Counted::InterleavedPlanes, found, max }) = table.check() else {
        panic!("{:?}", table.check());
    };
    assert_eq!((found, max), (INTERLEAVED_PLANES_MAX + 1, INTERLEAVED_PLANES_MAX));
    // Side by side they are no more than rows.
    assert_eq!(table_of(&[(Axis::Layer, 512), (Axis::KeyValue, 2), (Axis::Unit, 2)], 1, 0).check(), Ok(()));
}

proptest! {
    /// Whatever the order of the axes, the check sees that no cells meet, and that they do once one is moved onto another.
    #[test]
    fn every_order_of_axes_passes(
        axes in Just([Axis::Layer, Axis::KeyValue, Axis::Unit, Axis::Token]).prop_shuffle(),
        counts in [1..4u32, 1..3u32, 1..4u32, 1..4u32],
        cell_bytes in 1..4u64,
        gap in 0..3u64,
        moved in (any::<prop::sample::Index>(), 0..40u64),
    ) {
        let axes: Vec<_> = axes.into_iter().map(|axis| (axis, counts[axis as usize])).collect();
        let mut table = table_of(&axes, cell_bytes, gap);
        prop_assert!(sound_by_scan(&table));
        prop_assert_eq!(table.check(), Ok(()));

        let rows = &mut table.groups[0].rows;
        let row = moved.0.index(rows.len());
        rows[row].offset = moved.1;
        if table.check().is_ok() {
            prop_assert!(sound_by_scan(&table));
        }
    }
}
