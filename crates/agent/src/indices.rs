//! Which entries of a list are meant.

/// Entries of a [`List`](crate::List), in the integers that the caller has them in. The same entry may be named again.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Indices<'a> {
    /// All of them, in order.
    All,
    /// These.
    I32(&'a [i32]),
    /// These.
    U32(&'a [u32]),
    /// These.
    I64(&'a [i64]),
    /// These.
    U64(&'a [u64]),
}

impl Indices<'_> {
    /// As indices. One that does not fit becomes one that no list has, so that it is refused by its place.
    pub(crate) fn of(self, entries: usize) -> Vec<usize> {
        let none = usize::MAX;
        match self {
            Self::All => (0..entries).collect(),
            Self::I32(indices) => indices.iter().map(|index| usize::try_from(*index).unwrap_or(none)).collect(),
            Self::U32(indices) => indices.iter().map(|index| usize::try_from(*index).unwrap_or(none)).collect(),
            Self::I64(indices) => indices.iter().map(|index| usize::try_from(*index).unwrap_or(none)).collect(),
            Self::U64(indices) => indices.iter().map(|index| usize::try_from(*index).unwrap_or(none)).collect(),
        }
    }
}
