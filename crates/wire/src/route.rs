//! Which way the bytes of a transfer take, and why. A pure function of what is known of the two ends.

use std::fmt;

use serde::{Deserialize, Serialize};
use ucx_sys::Version;

/// A way to move the bytes of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Route {
    /// This side copies straight into the peer's memory, or out of it, which it maps. One copy, no message, no part for the peer to play.
    /// The memory stays valid here if the peer dies; a process that is stopped in the middle goes on writing when it is
    /// continued, whatever the peer has decided since.
    Direct,
    /// This side gathers into the peer's inbox, which it maps; the peer scatters and acknowledges. The peer's own memory is
    /// written by the peer alone.
    Landing,
    /// As `Landing` over a network: gathered into local memory, put into the inbox in large chunks.
    Staged,
    /// One UCX put a run, or one get.
    Runs,
}

/// Why a transfer took its route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RouteReason {
    /// The options say so.
    Forced,
    /// Nothing is to be moved.
    Empty,
    /// All of the target is mapped here: one copy is the least there is.
    TargetMapped,
    /// Only the peer's inbox is mapped, and UCX would pay for each run.
    ShortRunsOnOneHost,
    /// Runs so long that UCX's one copy beats two of ours.
    LongRunsOnOneHost,
    /// Over a network each put has a fixed cost, and these runs are short.
    ShortRunsOverNetwork,
    /// Over a network, runs so long that gathering gains nothing.
    LongRunsOverNetwork,
    /// So little that its puts cost less than the round trips of an inbox.
    FewRuns,
    /// The peer has no inbox.
    NoInbox,
    /// Between GPUs of one host: the peer's own memory is written by the peer alone.
    GpusOfOneHost,
    /// Two processes on one GPU take turns on it, for milliseconds each: what needs only one of them is best.
    SameGpu,
    /// The peer's GPU memory, or its slab, is not mapped here: it is on another host or offers none.
    GpuNotMapped,
    /// The driver refuses to map the peer's GPU memory: no access between the two GPUs, as a rule.
    GpuRefused,
    /// This side has no GPU.
    NoGpu,
    /// The bytes are pulled from memory that is not mapped here: the kernel reads each run.
    Pulled,
    /// The peer has been told that nothing takes another way.
    Promised,
    /// This UCX may emulate puts, and one that dies amid emulated puts takes its target with it.
    PutsEmulated,
    /// The peer's host memory is not mapped here, for this side's GPU to write.
    HostNotMapped,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Landing => "landing",
            Self::Staged => "staged",
            Self::Runs => "runs",
        })
    }
}

impl fmt::Display for RouteReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forced => "the options ask for it",
            Self::Empty => "there is nothing to move",
            Self::TargetMapped => "the target is mapped here",
            Self::ShortRunsOnOneHost => "short runs, the peer's inbox is mapped here",
            Self::LongRunsOnOneHost => "long runs, one copy by UCX",
            Self::ShortRunsOverNetwork => "short runs over a network",
            Self::LongRunsOverNetwork => "long runs over a network",
            Self::FewRuns => "few runs",
            Self::NoInbox => "the peer has no inbox",
            Self::GpusOfOneHost => "GPUs of one host",
            Self::SameGpu => "the same GPU",
            Self::GpuNotMapped => "the peer's GPU memory is not mapped here",
            Self::GpuRefused => "the driver refuses to map the peer's GPU memory",
            Self::NoGpu => "this side has no GPU",
            Self::Pulled => "a pull of memory that is not mapped here",
            Self::Promised => "the peer has been told that nothing takes another way",
            Self::PutsEmulated => "this UCX may emulate puts",
            Self::HostNotMapped => "the peer's host memory is not mapped here",
        })
    }
}

/// What the choice depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) forced: Option<Route>,
    /// The bytes come from the peer.
    pub(crate) pulled: bool,
    pub(crate) bytes: u64,
    pub(crate) runs: u64,
    /// The inbox or nothing.
    pub(crate) inbox_only: bool,
    /// Every target region is mapped here.
    pub(crate) target_mapped: bool,
    /// The peer has an inbox and can answer.
    pub(crate) inbox: bool,
    /// The inbox is mapped here.
    pub(crate) inbox_mapped: bool,
    /// UCX moves the bytes of a put on one host by a system call (cma) rather than through a socket.
    pub(crate) kernel_copies: bool,
    /// UCX may make messages of puts, each acknowledged by the target.
    pub(crate) puts_emulated: bool,
}

/// The first release that makes no messages of puts where the transport has none of its own (protocols of the second kind are
/// the default). Before it the target of such a put acknowledges it, and aborts if its initiator is dead by then
/// (`ucp_request_try_send`; on 1.13.1 in 11 of 12 kills over tcp).
pub(crate) const PUTS_NOT_EMULATED: Version = Version::new(1, 16, 0);

/// The first release whose puts take cma with peer error handling on (measured: 1.13 has a tcp lane only, 1.22 both).
pub(crate) const CMA_WITH_ERROR_HANDLING: Version = Version::new(1, 16, 0);

/// Mean bytes of a run from which one kernel copy (cma, a run at a time) beats two copies of ours on two cores.
const LONG_ON_ONE_HOST: u64 = 256 << 10;

/// Mean bytes of a run from which a put a run over tcp is as fast as gathering.
const LONG_OVER_NETWORK: u64 = 256 << 10;

/// Puts that cost less than describing a transfer, being granted a chunk and being acknowledged.
const FEW_RUNS: u64 = 16;

/// Chooses, or says which forced route cannot be taken.
pub(crate) fn choose(facts: &Facts) -> Result<(Route, RouteReason), Route> {
    if facts.runs == 0 {
        return Ok((Route::Runs, RouteReason::Empty));
    }
    if let Some(route) = facts.forced {
        let possible = match route {
            Route::Direct | Route::Runs if facts.inbox_only => false,
            Route::Direct => facts.target_mapped,
            Route::Landing => facts.inbox_mapped && !facts.pulled,
            Route::Staged => facts.inbox && !facts.pulled,
            Route::Runs => true,
        };
        return if possible { Ok((route, RouteReason::Forced)) } else { Err(route) };
    }
    if facts.inbox_only {
        return match (facts.inbox, facts.inbox_mapped) {
            (true, true) => Ok((Route::Landing, RouteReason::Promised)),
            (true, false) => Ok((Route::Staged, RouteReason::Promised)),
            (false, _) => Err(Route::Staged),
        };
    }
    let run_bytes = facts.bytes / facts.runs;
    Ok(if facts.target_mapped {
        (Route::Direct, RouteReason::TargetMapped)
    } else if facts.pulled {
        // Everywhere else the peer answers each read, and may abort if this side is dead by then (UCX 1.22 has, in `stubs.c`).
        if !facts.kernel_copies {
            return Err(Route::Runs);
        }
        (Route::Runs, RouteReason::Pulled)
    } else if !facts.inbox {
        (Route::Runs, RouteReason::NoInbox)
    } else if facts.puts_emulated {
        (if facts.inbox_mapped { Route::Landing } else { Route::Staged }, RouteReason::PutsEmulated)
    } else if facts.runs < FEW_RUNS && run_bytes < LONG_OVER_NETWORK {
        (Route::Runs, RouteReason::FewRuns)
    } else if facts.inbox_mapped {
        if facts.kernel_copies && run_bytes >= LONG_ON_ONE_HOST {
            (Route::Runs, RouteReason::LongRunsOnOneHost)
        } else {
            (Route::Landing, RouteReason::ShortRunsOnOneHost)
        }
    } else if run_bytes >= LONG_OVER_NETWORK {
        (Route::Runs, RouteReason::LongRunsOverNetwork)
    } else {
        (Route::Staged, RouteReason::ShortRunsOverNetwork)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REMOTE: Facts = Facts {
        forced: None,
        pulled: false,
        inbox_only: false,
        bytes: 1 << 30,
        runs: 1 << 20,
        target_mapped: false,
        inbox: true,
        inbox_mapped: false,
        kernel_copies: false,
        puts_emulated: false,
    };

    #[test]
    fn the_best_route_that_can_be_taken_is_taken() {
        use {Route::*, RouteReason::*};
        let local = Facts { inbox_mapped: true, kernel_copies: true, ..REMOTE };
        for (facts, expected) in [
            (REMOTE, (Staged, ShortRunsOverNetwork)),
            (Facts { runs: 1 << 10, ..REMOTE }, (Runs, LongRunsOverNetwork)),
            (Facts { runs: 1, bytes: 4096, ..REMOTE }, (Runs, FewRuns)),
            (Facts { inbox: false, ..REMOTE }, (Runs, NoInbox)),
            (Facts { target_mapped: true, ..local }, (Direct, TargetMapped)),
            (local, (Landing, ShortRunsOnOneHost)),
            (Facts { runs: 1 << 10, ..local }, (Runs, LongRunsOnOneHost)),
            (Facts { runs: 1 << 10, kernel_copies: false, ..local }, (Landing, ShortRunsOnOneHost)),
            (Facts { runs: 0, bytes: 0, ..local }, (Runs, Empty)),
            (Facts { puts_emulated: true, runs: 1, ..REMOTE }, (Staged, PutsEmulated)),
            (Facts { puts_emulated: true, runs: 1, ..local }, (Landing, PutsEmulated)),
            (Facts { pulled: true, target_mapped: true, ..local }, (Direct, TargetMapped)),
            (Facts { pulled: true, ..local }, (Runs, Pulled)),
            (Facts { pulled: true, forced: Some(Runs), ..REMOTE }, (Runs, Forced)),
        ] {
            assert_eq!(choose(&facts), Ok(expected), "{facts:?}");
        }
    }

    #[test]
    fn what_the_peer_has_been_told_is_kept() {
        let promised = Facts { inbox_only: true, runs: 1, bytes: 1 << 20, ..REMOTE };
        let near = Facts { target_mapped: true, inbox_mapped: true, kernel_copies: true, ..promised };
        assert_eq!(choose(&promised), Ok((Route::Staged, RouteReason::Promised)));
        assert_eq!(choose(&near), Ok((Route::Landing, RouteReason::Promised)));
        assert_eq!(choose(&Facts { inbox: false, inbox_mapped: false, ..near }), Err(Route::Staged));
        for route in [Route::Direct, Route::Runs] {
            assert_eq!(choose(&Facts { forced: Some(route), ..near }), Err(route));
        }
    }

    #[test]
    fn a_forced_route_is_taken_or_refused_and_never_replaced() {
        let forced = |route, facts| choose(&Facts { forced: Some(route), ..facts });
        assert_eq!(forced(Route::Direct, REMOTE), Err(Route::Direct));
        assert_eq!(forced(Route::Landing, REMOTE), Err(Route::Landing));
        assert_eq!(forced(Route::Staged, Facts { inbox: false, ..REMOTE }), Err(Route::Staged));
        assert_eq!(forced(Route::Staged, Facts { pulled: true, ..REMOTE }), Err(Route::Staged));
        assert_eq!(choose(&Facts { pulled: true, ..REMOTE }), Err(Route::Runs));
        assert_eq!(
            forced(Route::Runs, Facts { target_mapped: true, ..REMOTE }),
            Ok((Route::Runs, RouteReason::Forced))
        );
    }
}
