//! The points of a request at which the other side is killed or stopped. Before all of them is the connecting, in
//! `connecting.rs`.

use std::time::{Duration, Instant};

use kvferry::{Receive, Send};

use crate::rank::{CANARY, Rank, SLOT_BYTES, SLOTS};

/// More than a request takes.
const LONG: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// Connected, nothing is posted.
    Idle,
    /// One side has posted the request, the one that goes on.
    Posted,
    FirstByte,
    Middle,
    /// All is written, and not yet said to be.
    LastByte,
    /// It has ended well.
    Done,
    Quiet,
}

pub(crate) const POINTS: [Point; 7] =
    [Point::Idle, Point::Posted, Point::FirstByte, Point::Middle, Point::LastByte, Point::Done, Point::Quiet];

impl Point {
    /// Whether the request has ended well before anything happens.
    pub(crate) fn is_after(self) -> bool {
        matches!(self, Self::Done | Self::Quiet)
    }

    /// Whether both sides post the request.
    pub(crate) fn is_in_the_middle(self) -> bool {
        !matches!(self, Self::Idle | Self::Posted)
    }

    /// Looks on until a receive of all slots, which hold canaries, has come so far, or has ended.
    pub(crate) fn await_receive(self, destination: &Rank, receive: &Receive) {
        let is_written = |slot: &u32| {
            let mut byte = [0];
            destination.region.read((u64::from(*slot) + 1) * SLOT_BYTES - 1, &mut byte).unwrap();
            byte != [CANARY]
        };
        let changed = || (0..SLOTS).filter(is_written).count() as u64;
        self.watch(u64::from(SLOTS), changed, || receive.poll().is_some());
        if self == Self::Quiet {
            let _quiet = receive.wait_quiet(LONG).unwrap();
        }
    }

    /// As [`Point::await_receive`], of a send of all slots.
    pub(crate) fn await_send(self, send: &Send) {
        self.watch(u64::from(SLOTS) * SLOT_BYTES, || send.moved_bytes(), || send.poll().is_some());
        if self == Self::Quiet {
            let _quiet = send.wait_quiet(LONG).unwrap();
        }
    }

    fn watch(self, all: u64, moved: impl Fn() -> u64, ended: impl Fn() -> bool) {
        let enough = match self {
            Self::Idle | Self::Posted => return,
            Self::FirstByte => 1,
            Self::Middle => all / 2,
            Self::LastByte => all,
            Self::Done | Self::Quiet => u64::MAX,
        };
        let until = Instant::now() + LONG;
        while !ended() && moved() < enough {
            assert!(Instant::now() < until, "{self:?} is not reached");
        }
    }
}
