//! Runs around the powers of two that 32 bits end at.

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_wire::{Context, Region};

use crate::suite::end::{Way, pair, side_by_side};

/// Memory of which only the pages that are written exist.
struct Sparse {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length, which nobody dereferences here.
unsafe impl Send for Sparse {}
// SAFETY: as above.
unsafe impl Sync for Sparse {}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `sparse` and is undone only here.
        unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) }.unwrap();
    }
}

fn sparse(context: &Context, bytes: u64) -> Region {
    use rustix::mm::{MapFlags, ProtFlags};
    let (length, access) = (bytes as usize, ProtFlags::READ | ProtFlags::WRITE);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping replaces nothing.
    let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, access, flags) }.unwrap();
    let base = NonNull::new(base.cast()).unwrap();
    let owner = Arc::new(Sparse { base, bytes: length });
    // SAFETY: the mapping lives as long as its owner, and nobody has a reference into it.
    unsafe { context.register(base, bytes, owner) }.unwrap()
}

#[test]
#[ignore = "moves 24 runs of 2 to 4 GiB, and takes 4 GiB of memory: run it in release mode"]
fn runs_around_two_and_four_gib_arrive_whole() {
    const GIB: u64 = 1 << 30;
    let ways = Way::all(None, true).into_iter().chain(Way::all(Some("tcp"), false));
    for way in ways.filter(|way| way.options.route.is_some()) {
        let [a, b] = pair(&way.roomy());
        for bytes in [2 * GIB - 4096, 2 * GIB + 4096, 4 * GIB - 4096, 4 * GIB + 4096] {
            let (from, to) = (sparse(&a.context, bytes), b.context.allocate(bytes).unwrap());
            let marks = [0, GIB - 1, 2 * GIB - 4097, 2 * GIB - 1, 2 * GIB, 3 * GIB, 4 * GIB - 1, 4 * GIB, bytes - 1];
            for mark in marks.into_iter().filter(|mark| *mark < bytes) {
                from.write(mark, &[mark as u8 | 1]).unwrap();
            }
            let remote = a.worker.import(a.to_peer, &to.card()).unwrap();
            a.put(0, side_by_side((&from, 0), (remote, 0), bytes, 1));
            assert_eq!(a.done().1.unwrap().bytes, bytes);
            let (mut expected, mut found) = (vec![0; 64 << 20], vec![0; 64 << 20]);
            for start in (0..bytes).step_by(64 << 20) {
                let count = (bytes - start).min(64 << 20) as usize;
                from.read(start, &mut expected[..count]).unwrap();
                to.read(start, &mut found[..count]).unwrap();
                assert!(found[..count] == expected[..count], "{way:?} {bytes} B at {start}");
            }
        }
    }
}
