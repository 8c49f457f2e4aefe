//! Nothing is touched that a transfer does not name, or that is not there.

use kvferry_wire::{CommandError, Context, PutError, RegionCard, Route, TransferError, TransferId};

use super::end::{Way, bytes, pair, side_by_side};
use super::puts::{STRIDED_BYTES, strided};

pub(crate) fn nothing_is_posted_of_a_transfer_that_leaves_a_region(way: &Way) {
    let [a, b] = pair(way);
    let source = a.context.allocate(STRIDED_BYTES.0).unwrap();
    source.write(0, &[7; 1000]).unwrap();
    let target = b.context.allocate(STRIDED_BYTES.1).unwrap();
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    let good = strided(&source, remote);
    let mut outside = good.clone();
    outside.pairs[4].remote = 7;
    match a.worker.put(a.to_peer, TransferId(1), vec![good.clone(), outside]) {
        Err(TransferError::OutsideRemote { part: 1, pair: 4, slot: 7, region_bytes: 7710 }) => {}
        result => panic!("{result:?}"),
    }
    let mut outside = good.clone();
    outside.pairs[2].local = 7;
    match a.worker.put(a.to_peer, TransferId(1), vec![outside]) {
        Err(TransferError::OutsideLocal { part: 0, pair: 2, slot: 7, .. }) => {}
        result => panic!("{result:?}"),
    }
    let second = a.worker.connect(b.worker.address(), b.worker.epoch()).unwrap();
    let other = a.worker.put(second, TransferId(1), vec![good.clone()]);
    assert!(matches!(other, Err(TransferError::OtherEndpoint { part: 0 })));
    let strange = Context::open(&way.options).unwrap().allocate(STRIDED_BYTES.0).unwrap();
    let other = a.worker.put(a.to_peer, TransferId(1), vec![good.clone(), strided(&strange, remote)]);
    assert!(matches!(other, Err(TransferError::OtherContext { part: 1 })));
    a.worker.put(a.to_peer, TransferId(2), Vec::new()).unwrap();
    assert_eq!(a.done().0, TransferId(2), "the empty transfer is the only one that ends");
    assert!(bytes(&target).iter().all(|byte| *byte == 0));
}

pub(crate) fn a_claimed_region_that_cannot_be_is_refused(way: &Way) {
    let [a, b] = pair(way);
    let region = b.context.allocate(4096).unwrap();
    let card = region.card();
    for (base, bytes) in [(card.base, 0), (u64::MAX, 2), (2, u64::MAX)] {
        let mut claim: RegionCard = card.clone();
        (claim.base, claim.bytes) = (base, bytes);
        assert!(matches!(a.worker.import(a.to_peer, &claim), Err(CommandError::Range { .. })), "{base} {bytes}");
    }
}

pub(crate) fn a_region_that_was_given_up_is_refused_by_name_or_left_to_the_transport(way: &Way) {
    let [a, b] = pair(way);
    let (from, to) = (a.context.allocate(4096).unwrap(), b.context.allocate(4096).unwrap());
    let card = to.card();
    let remote = a.worker.import(a.to_peer, &card).unwrap();
    drop(to);
    let mapped = way.options.transports.as_deref().is_none_or(|list| list.contains("posix") || list.contains("self"));
    if !mapped && way.options.route != Some(Route::Staged) {
        return; // a plain put over a socket is in nobody's sight: documented, and seen with processes
    }
    a.put(1, side_by_side((&from, 0), (remote, 0), 1024, 4));
    let expected = PutError::Withdrawn { base: card.base, bytes: card.bytes };
    assert_eq!(a.done().1, Err(expected), "{way:?}");
    assert!(!expected.may_still_arrive());
}
