//! Which other rank an error is only the consequence of, so that whoever hears of several can tell which came first.

use kvferry::{ConnectError, PeerName, RequestError, TransferError};
use kvferry_match::Side as PeerSide;
use kvferry_wire::PutError;

use crate::meet::{MeetError, Member, Refusal, Side};

/// The first rank that was lost, gave up, or kept silent.
pub fn of_transfer(error: &RequestError) -> Option<Member> {
    let blamed = |error: &TransferError| match error {
        // Nothing that the peer did.
        TransferError::Put {
            source: PutError::Cancelled | PutError::RouteUnavailable { .. } | PutError::NoMemory,
            ..
        } => None,
        TransferError::Lost { peer, .. }
        | TransferError::Stalled { peer, .. }
        | TransferError::Refused { peer, .. }
        | TransferError::Put { peer, .. } => Some(member(*peer)),
        _ => None,
    };
    error.errors.iter().find_map(|part| blamed(&part.error))
}

/// The rank that was lost or kept silent.
pub fn of_connect(error: &ConnectError) -> Option<Member> {
    match error {
        ConnectError::NoAnswer { peer, .. } | ConnectError::Lost { peer, .. } => Some(member(*peer)),
        _ => None,
    }
}

/// The rank that did not come.
pub fn of_meeting(error: &MeetError) -> Option<Member> {
    match error {
        MeetError::Refused(Refusal::Missing { member, .. }) => Some(*member),
        _ => None,
    }
}

fn member(peer: PeerName) -> Member {
    let side = match peer.side {
        PeerSide::Source => Side::Sender,
        PeerSide::Destination => Side::Receiver,
    };
    Member { side, rank: peer.rank }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvferry::{PartError, Phase, RequestKey};
    use kvferry_wire::{Route, Status};

    use super::*;

    #[test]
    fn consequences_name_their_cause() {
        let peer = PeerName { side: PeerSide::Source, rank: 3 };
        let sender = Some(Member { side: Side::Sender, rank: 3 });
        let waited = Duration::from_secs(1);
        let of_error = |error| {
            let key = RequestKey { request: 1, attempt: 0 };
            let errors = vec![PartError { epoch: 7, phase: Phase::Moving, error }];
            of_transfer(&RequestError { key, errors })
        };
        assert_eq!(of_error(TransferError::Stalled { peer, waited, moved: 0, expected: 1 }), sender);
        let put = |source| TransferError::Put { peer, moved: 0, expected: 1, source };
        assert_eq!(of_error(put(PutError::Endpoint { source: Status::ERR_CONNECTION_RESET, settled: false })), sender);
        assert_eq!(of_error(put(PutError::RouteUnavailable { route: Route::Direct })), None);
        assert_eq!(of_error(TransferError::PlansDiffer { peer, reported: 0, expected: 1 }), None);
        assert_eq!(of_connect(&ConnectError::NoAnswer { peer, waited }), sender);
        assert_eq!(of_connect(&ConnectError::PlansDiffer { peer }), None);
        let missing = Refusal::Missing { member: Member::HOST, limit_s: 1.0 };
        assert_eq!(of_meeting(&missing.into()), Some(Member::HOST));
        assert_eq!(of_meeting(&Refusal::Twice { member: Member::HOST }.into()), None);
    }
}
