//! Tables, block maps and chunks that a peer made up: matched, or refused; bound, or refused; and then nothing is named
//! outside of the pools.
#![no_main]

use kvferry_layout::{PageTable, Slot};
use kvferry_match::{BlockMap, Chunk, Templates, assign};
use libfuzzer_sys::fuzz_target;

/// Takes so many bytes from the front, or what there is.
fn take<'a>(data: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = data.split_at(count.min(data.len()));
    *data = rest;
    taken
}

fn number(data: &mut &[u8], bytes: usize) -> u64 {
    take(data, bytes).iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Mostly small numbers, now and then any.
fn any(data: &mut &[u8]) -> u64 {
    let bytes = if number(data, 1) < 250 { 1 } else { 8 };
    number(data, bytes)
}

fn table(data: &mut &[u8]) -> Option<PageTable> {
    let bytes = number(data, 2) as usize;
    PageTable::from_bytes(take(data, bytes)).ok()
}

fn maps(data: &mut &[u8], groups: usize) -> Vec<BlockMap> {
    let map = |_| {
        let (first, count) = (any(data), number(data, 1) % 16);
        let slot = |_| Some(Slot(any(data) as u32)).filter(|slot| slot.0 % 8 != 7);
        BlockMap::new(first, (0..count).map(slot).collect())
    };
    (0..groups).map(map).collect()
}

fuzz_target!(|data: &[u8]| {
    let mut data = data;
    let (Some(source), Some(destination)) = (table(&mut data), table(&mut data)) else { return };
    // Of one table there is always a template.
    for (source, destination) in [(&source, &destination), (&source, &source), (&destination, &destination)] {
        let Ok(assignments) = assign([(0, source)], [(0, destination)]) else { continue };
        let Ok(template) = Templates::default().template(&assignments[0], 0) else { continue };
        let (ours, theirs) = (maps(&mut data, source.groups.len()), maps(&mut data, destination.groups.len()));
        let (start, count, more) = (any(&mut data), any(&mut data), any(&mut data));
        let end = start.saturating_add(count);
        let Ok(plan) = template.bind(&ours, &theirs, Chunk::new(start..end, end.saturating_add(more))) else {
            continue;
        };
        if plan.runs() > 1 << 20 {
            continue;
        }
        plan.for_each_run(|run| {
            let pool = &destination.pools[usize::from(run.destination_pool.0)];
            assert!(run.destination_offset + run.bytes <= pool.extent_bytes().unwrap());
            let pool = &source.pools[usize::from(run.source_pool.0)];
            assert!(run.source_offset + run.bytes <= pool.extent_bytes().unwrap());
        });
    }
});
