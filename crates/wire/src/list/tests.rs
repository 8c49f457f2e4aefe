use proptest::prelude::*;

use super::*;

/// Every run that `entries` become, as (local region, remote region, from, to, bytes), cut into single bytes and sorted.
fn expanded(entries: &[Entry]) -> Vec<(u32, u32, u64, u64)> {
    let mut bytes = Vec::new();
    for ((local, remote, run_bytes), starts) in group(entries.iter().copied()) {
        let (dims, starts) = structure(starts);
        for Slots { base, stride, pairs } in slots(&starts) {
            for pair in pairs {
                let from = base.0 + u64::from(pair.local) * stride.0;
                let to = base.1 + u64::from(pair.remote) * stride.1;
                for (i, j, byte) in loops(&dims, run_bytes) {
                    let at = |start, strides: [u64; 2]| start + i * strides[0] + j * strides[1] + byte;
                    let from = at(from, [dims[0].local_stride, dims[1].local_stride]);
                    bytes.push((local, remote, from, at(to, [dims[0].remote_stride, dims[1].remote_stride])));
                }
            }
        }
    }
    bytes.sort_unstable();
    bytes
}

fn loops(dims: &[Dim; 2], run_bytes: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    let (outer, inner) = (dims[0].count, dims[1].count);
    (0..outer).flat_map(move |i| (0..inner).flat_map(move |j| (0..run_bytes).map(move |byte| (i, j, byte))))
}

fn plain(entries: &[Entry]) -> Vec<(u32, u32, u64, u64)> {
    let byte = |entry: &Entry| {
        let Entry { local, remote, bytes, from, to } = *entry;
        (0..bytes).map(move |byte| (local, remote, from + byte, to + byte))
    };
    let mut bytes: Vec<_> = entries.iter().flat_map(byte).collect();
    bytes.sort_unstable();
    bytes
}

fn entry(from: u64, to: u64, bytes: u64) -> Entry {
    Entry { local: 0, remote: 0, bytes, from, to }
}

/// The loops and the pairs that entries of one kind come to.
fn shape(entries: &[Entry]) -> ([Dim; 2], usize) {
    let mut groups = group(entries.iter().copied());
    let (_, starts) = groups.pop_first().unwrap();
    assert!(groups.is_empty());
    let (dims, starts) = structure(starts);
    (dims, starts.len())
}

#[test]
fn layers_of_slots_are_loops_in_either_order() {
    const SLOTS: [(u64, u64); 5] = [(3, 9), (11, 2), (0, 5), (7, 7), (8, 1)];
    let at = |layer: u64, (from, to): (u64, u64)| entry(from * 8000 + layer * 100, to * 9000 + layer * 120, 64);
    let slot_by_slot: Vec<Entry> = SLOTS.iter().flat_map(|slot| (0..4).map(|layer| at(layer, *slot))).collect();
    let layer_by_layer: Vec<Entry> = (0..4).flat_map(|layer| SLOTS.iter().map(move |slot| at(layer, *slot))).collect();
    let layers = Dim { count: 4, local_stride: 100, remote_stride: 120 };
    assert_eq!(shape(&slot_by_slot), ([Dim::ONE, layers], 5));
    assert_eq!(shape(&layer_by_layer), ([Dim::ONE, layers], 5));
    assert_eq!(expanded(&layer_by_layer), plain(&slot_by_slot));
}

#[test]
fn rows_of_rows_are_two_loops() {
    let entries: Vec<Entry> =
        (0..3).flat_map(|i| (0..4).map(move |j| entry(i * 1000 + j * 10, i * 2000 + j * 30, 5))).collect();
    let inner = Dim { count: 4, local_stride: 10, remote_stride: 30 };
    let outer = Dim { count: 3, local_stride: 1000, remote_stride: 2000 };
    assert_eq!(shape(&entries), ([outer, inner], 1));
}

#[test]
fn neighbours_on_both_sides_are_one_run() {
    let entries = [entry(100, 500, 8), entry(108, 508, 4), entry(112, 600, 4)];
    let groups = group(entries.into_iter());
    assert_eq!(groups.into_iter().collect::<Vec<_>>(), [((0, 0, 4), vec![(112, 600)]), ((0, 0, 12), vec![(100, 500)])]);
}

#[test]
fn divisors_are_all_of_them() {
    assert_eq!(divisors(36), [2, 3, 4, 6, 9, 12, 18]);
    assert!(divisors(7).is_empty());
    assert!(divisors(0).is_empty());
}

#[test]
fn more_slots_than_a_number_holds_are_several_pools() {
    let far = 1 << 40;
    let starts = vec![(0, 0), (1, far), (far + 3, 7), (2 * far, far + 1)];
    let mut seen: Vec<Start> = Vec::new();
    for Slots { base, stride, pairs } in slots(&starts) {
        seen.extend(
            pairs
                .iter()
                .map(|pair| (base.0 + u64::from(pair.local) * stride.0, base.1 + u64::from(pair.remote) * stride.1)),
        );
    }
    seen.sort_unstable();
    assert_eq!(seen, starts);
}

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let one = (0..2u32, 0..2u32, 0..9u64, 0..300u64, 0..300u64);
    let one = one.prop_map(|(local, remote, bytes, from, to)| Entry { local, remote, bytes, from, to });
    // Rows of slots, as frameworks have them, with something else before and behind.
    let slots = prop::collection::vec((0..9u64, 0..9u64), 1..6);
    let rows =
        (1..6u64, slots, 0..20u64, 0..20u64, any::<bool>()).prop_map(|(layers, slots, here, there, by_layer)| {
            let at = |layer: u64, (from, to): (u64, u64)| entry(from * 100 + layer * here, to * 90 + layer * there, 4);
            if by_layer {
                (0..layers).flat_map(|layer| slots.iter().map(move |slot| at(layer, *slot))).collect::<Vec<_>>()
            } else {
                slots.iter().flat_map(|slot| (0..layers).map(move |layer| at(layer, *slot))).collect()
            }
        });
    let some = prop::collection::vec(one, 0..4);
    (some.clone(), rows, some).prop_map(|(before, rows, behind)| [before, rows, behind].concat())
}

proptest! {
    #[test]
    fn parts_are_the_list(entries in entries()) {
        prop_assert_eq!(expanded(&entries), plain(&entries));
    }
}
