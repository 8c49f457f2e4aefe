//! Ranks of equal layout. What is found out about one of them holds for all, so that work and memory grow with layouts.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};

use kvferry_layout::PageTable;

/// The ranks of an instance whose slots are the same, byte for byte.
#[derive(Debug)]
pub(crate) struct Class<'a> {
    /// The table of the first of them.
    pub(crate) table: &'a PageTable,
    /// In the order given; at least one.
    pub(crate) ranks: Vec<u32>,
}

/// A table without what each rank has for itself: where its pools are, how many slots they have and how far apart.
struct Shape<'a>(&'a PageTable);

impl Shape<'_> {
    fn slot_bytes(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.pools.iter().map(|pool| pool.slot_bytes)
    }
}

impl PartialEq for Shape<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.0.hidden_layers == other.0.hidden_layers
            && self.0.groups == other.0.groups
            && self.slot_bytes().eq(other.slot_bytes())
    }
}

impl Eq for Shape<'_> {}

impl Hash for Shape<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hidden_layers.hash(state);
        self.0.groups.hash(state);
        self.slot_bytes().for_each(|bytes| bytes.hash(state));
    }
}

/// The classes of some ranks in the order of their first ranks, and the class of each rank in the order given.
pub(crate) fn classes<'a>(ranks: &[(u32, &'a PageTable)]) -> (Vec<Class<'a>>, Vec<usize>) {
    let mut classes: Vec<Class<'a>> = Vec::new();
    let mut known = HashMap::new();
    let class_of = ranks.iter().map(|&(rank, table)| {
        let class = *known.entry(Shape(table)).or_insert_with(|| {
            classes.push(Class { table, ranks: Vec::new() });
            classes.len() - 1
        });
        classes[class].ranks.push(rank);
        class
    });
    let class_of = class_of.collect();
    (classes, class_of)
}
