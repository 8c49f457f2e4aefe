//! Pairs of slots, as they are given, in the form that the kernel reads.

use std::sync::Arc;

use zerocopy::IntoBytes;

use crate::cuda::description::slot;
use crate::cuda::expand::{Mode, Pair};
use crate::pieces::SlotPair;

/// The pairs of a set.
pub(crate) trait Pairs {
    fn count(&self) -> usize;

    /// Writes them all. `place` has so many.
    fn write(&self, place: &mut [u8], mode: Mode);
}

impl Pairs for Arc<[SlotPair]> {
    fn count(&self) -> usize {
        self.len()
    }

    fn write(&self, place: &mut [u8], mode: Mode) {
        // They are laid out as the kernel's, unless they are turned.
        const _: () = assert!(size_of::<SlotPair>() == size_of::<Pair>());
        if mode == Mode::Pull {
            for (place, pair) in place.chunks_exact_mut(size_of::<Pair>()).zip(self.iter()) {
                place.copy_from_slice(mode.pair(pair).as_bytes());
            }
        } else {
            place.copy_from_slice(self.as_bytes());
        }
    }
}

/// Slots that a peer has sent: those of its own side are left out.
impl Pairs for &[[u8; 4]] {
    fn count(&self) -> usize {
        self.len()
    }

    fn write(&self, place: &mut [u8], _mode: Mode) {
        for (place, bytes) in place.chunks_exact_mut(size_of::<Pair>()).zip(self.iter()) {
            place.copy_from_slice(Pair { from: 0, to: slot(bytes) }.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_read_the_way_it_was_given_or_turned() {
        let pairs: Arc<[SlotPair]> = Arc::new([SlotPair { local: 1, remote: 2 }, SlotPair { local: 3, remote: 4 }]);
        let written = |pairs: &dyn Fn(&mut [u8])| {
            let mut place = [0; 16];
            pairs(&mut place);
            place.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect::<Vec<_>>()
        };
        assert_eq!(written(&|place| pairs.write(place, Mode::Direct)), [1, 2, 3, 4]);
        assert_eq!(written(&|place| pairs.write(place, Mode::Gather)), [1, 2, 3, 4]);
        assert_eq!(written(&|place| pairs.write(place, Mode::Pull)), [2, 1, 4, 3]);
        let sent: &[[u8; 4]] = &[[7, 0, 0, 0], [0, 1, 0, 0]];
        assert_eq!(written(&|place| sent.write(place, Mode::Scatter)), [0, 7, 0, 256]);
    }
}
