//! Runs of one side of a list, each looked up once in the regions of that side.

use crate::endpoint::RemoteRegion;
use crate::list::Run;
use crate::region::{MemoryKind, Region, RegionCard};

/// Runs of one side, each inside of one of its regions. Kept by a caller that pairs some of them with some of the other side's,
/// again and again: see [`List::pair`](crate::List::pair). Cheap neither to make nor to clone: share it.
#[derive(Clone, Debug)]
pub struct Side<R> {
    regions: Vec<R>,
    places: Vec<Place>,
    alike: Option<Alike>,
}

/// Runs of one length in one region, as slots of a pool.
#[derive(Clone, Debug)]
pub(crate) struct Alike {
    pub(crate) region: u32,
    pub(crate) bytes: u64,
    /// The largest power of two that meets all of them.
    pub(crate) stride: u64,
    pub(crate) slots: Vec<u32>,
}

/// A run, as an offset into the region of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) region: u32,
    pub(crate) bytes: u64,
    pub(crate) offset: u64,
}

/// Memory that runs can be in. Implemented by [`Region`], [`RegionCard`] and [`RemoteRegion`].
pub trait Extent {
    /// First address.
    fn base(&self) -> u64;
    /// Length.
    fn bytes(&self) -> u64;
    /// Where the memory is.
    fn kind(&self) -> MemoryKind;
}

impl Extent for Region {
    fn base(&self) -> u64 {
        self.base()
    }

    fn bytes(&self) -> u64 {
        self.bytes()
    }

    fn kind(&self) -> MemoryKind {
        self.kind()
    }
}

impl Extent for RemoteRegion {
    fn base(&self) -> u64 {
        self.base()
    }

    fn bytes(&self) -> u64 {
        self.bytes()
    }

    fn kind(&self) -> MemoryKind {
        self.kind()
    }
}

impl Extent for RegionCard {
    fn base(&self) -> u64 {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn kind(&self) -> MemoryKind {
        self.kind()
    }
}

impl<R: Extent> Side<R> {
    /// Looks each run up. Where regions overlap, the run is in any that contains it.
    ///
    /// # Errors
    ///
    /// The index of the first run that is in none of them.
    pub fn new(regions: Vec<R>, runs: &[Run]) -> Result<Self, usize> {
        let mut finder = Finder::new(&regions);
        let mut places = Vec::with_capacity(runs.len());
        for (index, run) in runs.iter().enumerate() {
            let (region, offset) = finder.find(*run).ok_or(index)?;
            places.push(Place { region, bytes: run.bytes, offset });
        }
        let alike = Alike::of(&places);
        Ok(Self { regions, places, alike })
    }

    /// The runs, if they are alike.
    pub(crate) fn alike(&self) -> Option<&Alike> {
        self.alike.as_ref()
    }

    /// The regions, as they were given.
    #[must_use]
    pub fn regions(&self) -> &[R] {
        &self.regions
    }

    /// Runs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is no run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Length of the run of this number.
    #[must_use]
    pub fn run_bytes(&self, index: usize) -> Option<u64> {
        self.places.get(index).map(|place| place.bytes)
    }

    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }
}

impl Alike {
    fn of(places: &[Place]) -> Option<Self> {
        let first = places.first().filter(|first| first.bytes > 0)?;
        if places.iter().any(|place| (place.region, place.bytes) != (first.region, first.bytes)) {
            return None;
        }
        let bits = places.iter().fold(0, |bits, place| bits | place.offset);
        let shift = if bits == 0 { 0 } else { bits.trailing_zeros() };
        let slots = places.iter().map(|place| u32::try_from(place.offset >> shift).ok()).collect::<Option<_>>()?;
        Some(Self { region: first.region, bytes: first.bytes, stride: 1 << shift, slots })
    }
}

/// Finds the region that a run is in.
struct Finder {
    /// Base, length, number and the largest end so far, by base.
    regions: Vec<(u64, u64, u32, u64)>,
    /// Where the last run was: most lists stay in a region for a while.
    last: usize,
}

impl Finder {
    fn new<R: Extent>(regions: &[R]) -> Self {
        let mut regions: Vec<_> =
            regions.iter().zip(0..).map(|(region, number)| (region.base(), region.bytes(), number, 0)).collect();
        regions.sort_unstable();
        let mut end = 0;
        for region in &mut regions {
            end = end.max(region.0.saturating_add(region.1));
            region.3 = end;
        }
        Self { regions, last: 0 }
    }

    /// The region's number and the run's offset in it.
    fn find(&mut self, run: Run) -> Option<(u32, u64)> {
        let inside = |(base, bytes, number, _): (u64, u64, u32, u64)| {
            let offset = run.address.checked_sub(base)?;
            (offset.checked_add(run.bytes)? <= bytes).then_some((number, offset))
        };
        if let Some(found) = self.regions.get(self.last).copied().and_then(inside) {
            return Some(found);
        }
        let behind = self.regions.partition_point(|region| region.0 <= run.address);
        for index in (0..behind).rev() {
            let region = self.regions[index];
            if let Some(found) = inside(region) {
                self.last = index;
                return Some(found);
            }
            if region.3 < run.address {
                return None; // neither this nor any before it reaches so far
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place(u64, u64);

    impl Extent for Place {
        fn base(&self) -> u64 {
            self.0
        }

        fn bytes(&self) -> u64 {
            self.1
        }

        fn kind(&self) -> MemoryKind {
            MemoryKind::Host
        }
    }

    #[test]
    fn runs_are_found_in_regions_that_overlap() {
        let mut finder = Finder::new(&[Place(1000, 100), Place(1010, 10), Place(5000, 50)]);
        let mut find = |address, bytes| finder.find(Run { address, bytes });
        assert_eq!(find(1015, 5), Some((0, 15))); // as good as the other
        assert_eq!(find(1015, 6), Some((0, 15)));
        assert_eq!(find(1099, 1), Some((0, 99)));
        assert_eq!(find(5000, 50), Some((2, 0)));
        assert_eq!(find(5050, 0), Some((2, 50)));
        let outside = [(1099, 2), (999, 1), (999, 200), (1100, 1), (5049, 2), (0, u64::MAX), (u64::MAX, u64::MAX)];
        for (address, bytes) in outside {
            assert_eq!(find(address, bytes), None, "{bytes} B at {address}");
        }
    }
}
