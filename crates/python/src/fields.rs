//! The fields of errors, a function an enum.
//!
//! What an enum of the library adds later has its name and its message until it is listed here.

use std::ops::Range;
use std::time::Duration;

use kvferry::{
    CardError, ConnectError, InstanceCardError, NotQuiet, OptionsError, PartError, PeerName, PostError, PublishError,
    PushError, RequestError, RequestKey, StartError, TransferError,
};
use kvferry_wire::{CommandError, OpenError, PutError, RegionError, Status, Version};

use crate::failure::{Describe, Described, Value};

/// Variables by their names, as a list of fields.
macro_rules! fields {
    ($($name:ident),*) => {
        vec![$((stringify!($name), Value::from($name))),*]
    };
}

mod layout;
mod matching;

impl Describe for StartError {
    fn describe(&self) -> Described {
        let described = Described::of("StartError", self);
        match self {
            Self::Open(error) => error.describe(),
            Self::Probe(source) => described.because(source.describe()),
            Self::Patience(patience) => described.with(fields!(patience)),
            Self::Resend { resend, patience } => described.with(fields!(resend, patience)),
            Self::Workers { workers } => described.with(fields!(workers)),
            _ => described,
        }
    }
}

impl Describe for OpenError {
    fn describe(&self) -> Described {
        let forked = matches!(self, Self::Forked);
        let described = Described::of(if forked { "ForkedError" } else { "StartError" }, self);
        match self {
            Self::Setting { key, value, source } => described.with(fields!(key, value, source)),
            Self::Transports { list, source } => described.with(fields!(list, source)),
            Self::Start { call, source } => described.with(fields!(call, source)),
            Self::Inbox(source) => described.because(source.describe()),
            Self::Processor { cpu } => described.with(fields!(cpu)),
            _ => described,
        }
    }
}

impl Describe for OptionsError {
    fn describe(&self) -> Described {
        let described = Described::of("OptionsError", self);
        match self {
            Self::File { path, .. } | Self::Format { path } => {
                let path = path.display().to_string();
                described.with(fields!(path))
            }
            Self::Variable { variable, value, .. } => described.with(fields!(variable, value)),
            _ => described,
        }
    }
}

impl Describe for RegionError {
    fn describe(&self) -> Described {
        let described = Described::of("RegionError", self);
        match self {
            Self::Allocation { bytes } | Self::HugePages { bytes } => described.with(fields!(bytes)),
            Self::Register { base, bytes, source } => described.with(fields!(base, bytes, source)),
            Self::NotOfDevice { base, bytes, device } => described.with(fields!(base, bytes, device)),
            Self::Outside { offset, bytes, region_bytes } => described.with(fields!(offset, bytes, region_bytes)),
            _ => described,
        }
    }
}

impl Describe for PublishError {
    fn describe(&self) -> Described {
        let described = Described::of("PublishError", self);
        match self {
            Self::Table(source) => described.because(source.describe()),
            Self::OtherContext { pool } => described.with(fields!(pool)),
            Self::Regions { pools, regions } => described.with(fields!(pools, regions)),
            Self::Memory { pool, source } => described.with(fields!(pool)).because(source.describe()),
            _ => described,
        }
    }
}

impl Describe for CardError {
    fn describe(&self) -> Described {
        let described = Described::of("CardError", self);
        match self {
            Self::NotACard { bytes } => described.with(fields!(bytes)),
            Self::Version { theirs, ours } => described.with(fields!(theirs, ours)),
            Self::Table(source) => described.because(source.describe()),
            Self::Layout(source) => described.because(source.describe()),
            Self::Regions { pools, regions } => described.with(fields!(pools, regions)),
            Self::Workers { workers } => described.with(fields!(workers)),
            _ => described,
        }
    }
}

impl Describe for InstanceCardError {
    fn describe(&self) -> Described {
        let described = Described::of("CardError", self);
        match self {
            Self::Unreadable(source) => source.describe(),
            Self::Card { place, source } => described.with(fields!(place)).because(source.describe()),
            Self::Missing { rank } | Self::Twice { rank } | Self::Unexpected { rank } => described.with(fields!(rank)),
            Self::OtherInstance { rank, theirs, others } => described.with(fields!(rank, theirs, others)),
            _ => described,
        }
    }
}

impl Describe for ConnectError {
    fn describe(&self) -> Described {
        let described = Described::of("ConnectError", self);
        match self {
            Self::Ucx { peer, theirs, ours } => described.with(fields!(peer, theirs, ours)),
            Self::Verify { peer, theirs, ours } => described.with(fields!(peer, theirs, ours)),
            Self::Match(source) => described.because(source.describe()),
            Self::Template { peer, source } => described.with(fields!(peer)).because(source.describe()),
            Self::Endpoint { peer, source } => described.with(fields!(peer)).because(source.describe()),
            Self::SelfTest { peer, source } => described.with(fields!(peer)).because(source.describe()),
            Self::Unwritable { peer, source } => described.with(fields!(peer)).because(source.describe()),
            Self::NoAnswer { peer, waited } => described.with(fields!(peer, waited)),
            Self::Lost { peer, source } => described.with(fields!(peer, source)),
            Self::PlansDiffer { peer } | Self::Already { peer } => described.with(fields!(peer)),
            _ => described,
        }
    }
}

impl Describe for PostError {
    fn describe(&self) -> Described {
        let described = Described::of("PostError", self);
        match self {
            Self::UnderWay(key) | Self::Over(key) => {
                let RequestKey { request, attempt } = *key;
                described.with(fields!(request, attempt))
            }
            Self::Lost(peer) => described.with(fields!(peer)),
            Self::TooMany { requests_max } => described.with(fields!(requests_max)),
            Self::BlockMaps { peer, source } => described.with(fields!(peer)).because(source.describe()),
            Self::TooManyBlocks { blocks, blocks_max } => described.with(fields!(blocks, blocks_max)),
            Self::Tokens { tokens } => described.with(fields!(tokens)),
            _ => described,
        }
    }
}

impl Describe for PushError {
    fn describe(&self) -> Described {
        let described = Described::of("PushError", self);
        match self {
            Self::Tokens { pushed, next, end } => described.with(fields!(pushed, next, end)),
            Self::Layers { pushed, next, own } => described.with(fields!(pushed, next, own)),
            Self::Note { bytes, bytes_max } => described.with(fields!(bytes, bytes_max)),
            Self::TooManyParts { parts_max } => described.with(fields!(parts_max)),
            _ => described,
        }
    }
}

impl Describe for RequestError {
    fn describe(&self) -> Described {
        let RequestKey { request, attempt } = self.key;
        let described = Described::of("RequestError", self).with(fields!(request, attempt));
        described.made_of(self.errors.iter().map(Describe::describe).collect())
    }
}

impl Describe for PartError {
    fn describe(&self) -> Described {
        let (epoch, phase) = (self.epoch, self.phase.to_string());
        let described = self.error.describe();
        described.and(fields!(epoch, phase))
    }
}

impl Describe for TransferError {
    fn describe(&self) -> Described {
        let described = Described::of("PartError", self);
        match self {
            Self::Lost { peer, moved, expected, source } => described.with(fields!(peer, moved, expected, source)),
            Self::Stalled { peer, waited, moved, expected } => described.with(fields!(peer, waited, moved, expected)),
            Self::Refused { peer, source } => {
                let reason = format!("{source:?}");
                described.with(fields!(peer, reason))
            }
            Self::PlansDiffer { peer, reported, expected } => described.with(fields!(peer, reported, expected)),
            Self::TokensDiffer { peer, theirs, ours } => described.with(fields!(peer, theirs, ours)),
            Self::BlockMaps { peer, source } => described.with(fields!(peer)).because(source.describe()),
            Self::Outside { peer, source } => described.with(fields!(peer)).because(source.describe()),
            Self::Put { peer, moved, expected, source } => {
                described.with(fields!(peer, moved, expected)).because(source.describe())
            }
            Self::Layers { peer, source } => described.with(fields!(peer)).because(source.describe()),
            Self::Corrupted { peer } => described.with(fields!(peer)),
            Self::NobodySends { waited } => described.with(fields!(waited)),
            _ => described,
        }
    }
}

impl Describe for PutError {
    fn describe(&self) -> Described {
        let may_still_arrive = self.may_still_arrive();
        let described = Described::of("WireError", self).with(fields!(may_still_arrive));
        match self {
            Self::Endpoint { source, .. } | Self::Put { source } | Self::Get { source } | Self::Flush { source } => {
                described.and(fields!(source))
            }
            Self::Withdrawn { base, bytes } => described.and(fields!(base, bytes)),
            Self::RouteUnavailable { route } => {
                let route = route.to_string();
                described.and(fields!(route))
            }
            _ => described,
        }
    }
}

impl Describe for kvferry_wire::TransferError {
    fn describe(&self) -> Described {
        Described::of("WireError", self)
    }
}

impl Describe for CommandError {
    fn describe(&self) -> Described {
        Described::of("WireError", self)
    }
}

impl Describe for NotQuiet {
    fn describe(&self) -> Described {
        Described::of("NotQuietError", self)
    }
}

macro_rules! counts {
    ($($integer:ty),*) => {
        $(impl From<&$integer> for Value {
            fn from(value: &$integer) -> Self {
                Self::Count((*value).into())
            }
        }
        impl From<$integer> for Value {
            fn from(value: $integer) -> Self {
                Self::Count(value.into())
            }
        })*
    };
}
counts!(u8, u16, u32, u64);

impl From<&usize> for Value {
    fn from(value: &usize) -> Self {
        Self::Count(*value as u64)
    }
}

impl From<&bool> for Value {
    fn from(value: &bool) -> Self {
        Self::Flag(*value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Flag(value)
    }
}

impl From<&Duration> for Value {
    fn from(value: &Duration) -> Self {
        Self::Seconds(value.as_secs_f64())
    }
}

impl From<&String> for Value {
    fn from(value: &String) -> Self {
        Self::Text(value.clone())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

impl From<&&'static str> for Value {
    fn from(value: &&'static str) -> Self {
        Self::Text((*value).to_owned())
    }
}

impl From<&Status> for Value {
    fn from(value: &Status) -> Self {
        Self::Text(value.to_string())
    }
}

impl From<&Version> for Value {
    fn from(value: &Version) -> Self {
        Self::Text(value.to_string())
    }
}

impl From<&PeerName> for Value {
    fn from(value: &PeerName) -> Self {
        Self::Peer((value.side.to_string(), value.rank))
    }
}

impl From<&Range<u64>> for Value {
    fn from(value: &Range<u64>) -> Self {
        Self::Range((value.start, value.end))
    }
}

impl From<&Range<u32>> for Value {
    fn from(value: &Range<u32>) -> Self {
        Self::Range((value.start.into(), value.end.into()))
    }
}

impl From<&Option<Range<u32>>> for Value {
    fn from(value: &Option<Range<u32>>) -> Self {
        value.as_ref().map_or(Self::Nothing(None), Self::from)
    }
}

impl From<&Option<u32>> for Value {
    fn from(value: &Option<u32>) -> Self {
        Self::Nothing(value.map(Into::into))
    }
}
