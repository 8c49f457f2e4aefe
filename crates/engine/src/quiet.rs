//! The proof that memory can be used again.

use kvferry_match::Side;
use thiserror::Error;

use crate::message::RequestKey;

/// The slots of a request are the caller's own again: nothing on this rank or any other reads or writes them for the
/// request, now or later. There is no other way to know: a request that has ended badly may leave writes behind that are on
/// their way, or that a frozen peer makes when it goes on.
///
/// Only the handle of the request makes one, once: [`Transfer::poll_quiet`](crate::Transfer::poll_quiet),
/// [`wait_quiet`](crate::Transfer::wait_quiet) or [`until_quiet`](crate::Transfer::until_quiet).
///
/// ```
/// fn use_again(quiet: kvferry::Quiet) -> kvferry::RequestKey {
///     quiet.key()
/// }
/// ```
///
/// ```compile_fail
/// let quiet = kvferry::Quiet { key: kvferry::RequestKey { request: 1, attempt: 0 }, side: kvferry_match::Side::Source };
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "it says that the slots of the request can be used again"]
pub struct Quiet {
    key: RequestKey,
    side: Side,
}

impl Quiet {
    pub(crate) fn new(key: RequestKey, side: Side) -> Self {
        Self { key, side }
    }

    /// The request and attempt whose slots are quiet.
    #[must_use]
    pub fn key(&self) -> RequestKey {
        self.key
    }

    /// Which side of the request this rank was.
    #[must_use]
    pub fn side(&self) -> Side {
        self.side
    }
}

/// There is no proof that the slots can be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NotQuiet {
    /// Somebody may touch them still. Wait on; `Engine::quarantine` says who.
    #[error("the slots are not quiet yet")]
    Waiting,
    /// The proof was given before.
    #[error("the slots were given back before")]
    Given,
    /// The engine has stopped, and nobody is left who would hear of it. The memory is safe once the peers are gone.
    #[error("the engine has stopped before the slots were quiet")]
    Never,
}
