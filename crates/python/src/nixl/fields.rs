//! Which of NIXL's exceptions an error is.

use kvferry_agent::wire::{ListError, OpenError, PutError};
use kvferry_agent::{ExchangeError, Failure, MakeError, MemoryError, PostError, ReleaseError, RemoteError, StartError};

use crate::failure::{Describe, Described};

const BACKEND: &str = "kvferry.nixl._errors.nixlBackendError";
const INVALID: &str = "kvferry.nixl._errors.nixlInvalidParamError";
const NOT_FOUND: &str = "kvferry.nixl._errors.nixlNotFoundError";
const DISCONNECTED: &str = "kvferry.nixl._errors.nixlRemoteDisconnectError";
const NOT_ALLOWED: &str = "kvferry.nixl._errors.nixlNotAllowedError";
const ACTIVE: &str = "kvferry.nixl._errors.nixlRepostActiveError";
const UNSUPPORTED: &str = "kvferry.nixl._errors.nixlNotSupportedError";
const MISMATCH: &str = "kvferry.nixl._errors.nixlMismatchError";
const CANCELLED: &str = "kvferry.nixl._errors.nixlCancelledError";

impl crate::failure::Failure {
    /// What an agent that has not got the device, say, cannot do.
    pub(crate) fn unsupported(message: &str) -> Self {
        Self::new(UNSUPPORTED, "Unsupported", message)
    }

    /// What no agent takes.
    pub(crate) fn invalid(kind: &str, message: &str) -> Self {
        Self::new(INVALID, kind, message)
    }

    pub(crate) fn not_found(message: &str) -> Self {
        Self::new(NOT_FOUND, "Unknown", message)
    }
}

impl Describe for StartError {
    fn describe(&self) -> Described {
        match self {
            Self::Open(error @ OpenError::Forked) => error.describe(),
            Self::Name { .. } => Described::of(INVALID, self),
            _ => Described::of(BACKEND, self),
        }
    }
}

impl Describe for MemoryError {
    fn describe(&self) -> Described {
        let class = match self {
            Self::Unknown { .. } => NOT_FOUND,
            Self::Busy { .. } => ACTIVE,
            Self::OtherContext { .. } => INVALID,
            _ => BACKEND,
        };
        Described::of(class, self)
    }
}

impl Describe for RemoteError {
    fn describe(&self) -> Described {
        Described::of(of_remote(self), self)
    }
}

fn of_remote(error: &RemoteError) -> &'static str {
    match error {
        RemoteError::Metadata(_) => MISMATCH,
        RemoteError::Unknown { .. } | RemoteError::NoAddress { .. } => NOT_FOUND,
        RemoteError::Disconnected { .. } | RemoteError::Silent { .. } => DISCONNECTED,
        RemoteError::NotificationTooLong { .. } => INVALID,
        _ => BACKEND,
    }
}

impl Describe for MakeError {
    fn describe(&self) -> Described {
        let class = match self {
            Self::Local { .. } | Self::Remote { .. } | Self::Deregistered => NOT_FOUND,
            Self::Peer(error) => of_remote(error),
            Self::Stale { .. } => DISCONNECTED,
            Self::Pair(ListError::Local { .. } | ListError::Remote { .. }) => NOT_FOUND,
            _ => INVALID,
        };
        Described::of(class, self)
    }
}

impl Describe for PostError {
    fn describe(&self) -> Described {
        let class = match self {
            Self::Active => ACTIVE,
            Self::Deregistered => NOT_FOUND,
            Self::Stale { .. } => DISCONNECTED,
            Self::NotificationTooLong { .. } => INVALID,
            _ => BACKEND,
        };
        Described::of(class, self)
    }
}

impl Describe for Failure {
    fn describe(&self) -> Described {
        let class = match self {
            Self::Cancelled => CANCELLED,
            Self::Busy { .. } => NOT_ALLOWED,
            Self::Disconnected { .. } | Self::Silent { .. } => DISCONNECTED,
            Self::Refused { .. } | Self::Wire(PutError::Withdrawn { .. } | PutError::Refused { .. }) => NOT_FOUND,
            _ => BACKEND,
        };
        Described::of(class, self)
    }
}

impl Describe for ReleaseError {
    fn describe(&self) -> Described {
        Described::of(ACTIVE, self)
    }
}

impl Describe for ExchangeError {
    fn describe(&self) -> Described {
        let class = match self {
            Self::Remote(error) => of_remote(error),
            Self::Other { .. } => NOT_FOUND,
            Self::Protocol => MISMATCH,
            _ => DISCONNECTED,
        };
        Described::of(class, self)
    }
}
