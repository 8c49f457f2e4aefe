//! What the digests change with, and what they do not.

use kvferry_layout::Digest;
use proptest::prelude::*;

use crate::tables::{full_table, leaves, tables, with_leaf};

/// Of a pool's fields only `slot_bytes` decides which bytes go where.
fn decides_the_shape(leaf: &str) -> bool {
    let of_pool = leaf.starts_with("/pools");
    leaf != "/dp_rank" && (!of_pool || leaf.ends_with("/slot_bytes"))
}

#[test]
fn each_field_changes_the_digest() {
    let table = full_table();
    let leaves = leaves(&table);
    assert!(leaves.len() >= 100, "{} leaves", leaves.len());
    for leaf in &leaves {
        let other = with_leaf(&table, leaf, 7777);
        assert_ne!(other.digest(), table.digest(), "{leaf}");
        assert_eq!(other.shape_digest() != table.shape_digest(), decides_the_shape(leaf), "{leaf}");
    }
}

#[test]
fn things_that_no_leaf_shows_change_it_too() {
    let table = full_table();
    let check = |spoil: fn(&mut kvferry_layout::PageTable)| {
        let mut other = table.clone();
        spoil(&mut other);
        assert_ne!(other.digest(), table.digest());
        assert_ne!(other.shape_digest(), table.shape_digest());
    };
    check(|table| table.groups.truncate(1));
    check(|table| table.pools.truncate(1));
    check(|table| table.groups[0].rows.swap(0, 1));
    check(|table| table.groups.swap(0, 1));
    check(|table| table.groups[0].rows[2].planes.swap(0, 1));
    check(|table| {
        let row = table.groups[0].rows.remove(2);
        table.groups[1].rows.push(row);
    });
}

#[test]
fn texts() {
    let digest = Digest(0xab);
    assert_eq!(digest.to_string(), "000000000000000000000000000000ab");
    let json = serde_json::to_string(&digest).unwrap();
    assert_eq!(json, "\"000000000000000000000000000000ab\"");
    assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), digest);
    for bad in ["\"ab\"", "\"+0000000000000000000000000000ab\"", "\"zz0000000000000000000000000000ab\"", "171"] {
        assert!(serde_json::from_str::<Digest>(bad).is_err(), "{bad}");
    }
    let bytes = postcard::to_allocvec(&digest).unwrap();
    assert_eq!(bytes.len(), 16);
    assert_eq!(postcard::from_bytes::<Digest>(&bytes).unwrap(), digest);
}

proptest! {
    #[test]
    fn digests_are_equal_iff_tables_are(a in tables(), b in tables(), leaf in any::<prop::sample::Index>(), number in 0..40u64) {
        prop_assert_eq!(a.digest() == b.digest(), a == b);
        let leaves = leaves(&a);
        let changed = with_leaf(&a, &leaves[leaf.index(leaves.len())], number);
        prop_assert_eq!(a.digest() == changed.digest(), a == changed);
        prop_assert_eq!(a.digest(), a.clone().digest());
    }
}
