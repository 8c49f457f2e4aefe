//! The ways that blocks can go, and what they need to be open.

use std::collections::BTreeMap;

use kvferry_wire::{EndpointId, Region, RemoteRegion, Route};

use crate::Arguments;
use crate::ask::{Answer, Ask, Error, Opened, Pool, Target};
use crate::end::End;
use crate::memory::{Memory, register_again};

/// One way from the source's pool to a pool of the target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) transports: Option<&'static str>,
    pub(crate) pool: Pool,
    pub(crate) by: By,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// A plain copy inside of the source process: what there is to reach.
    Copy,
    /// `process_vm_writev`, 1024 pieces a call.
    Writev,
    /// The direct route with two threads that copy.
    TwoThreads,
    /// The source pushes the first half by the direct route, while the target pulls the second.
    Both,
    /// The target pulls everything by the direct route.
    Pulled,
    /// This library; `None` is its own choice.
    Route(Option<Route>),
}

const fn way(name: &'static str, transports: Option<&'static str>, pool: Pool, by: By) -> Way {
    Way { name, transports, pool, by }
}

const TCP: Option<&str> = Some("tcp");

pub(crate) const WAYS: [Way; 14] = [
    way("memcpy", None, Pool::Allocated, By::Copy),
    way("auto", None, Pool::Allocated, By::Route(None)),
    way("direct", None, Pool::Allocated, By::Route(Some(Route::Direct))),
    way("direct:2", None, Pool::Allocated, By::TwoThreads),
    way("pulled", None, Pool::Allocated, By::Pulled),
    way("both", None, Pool::Allocated, By::Both),
    way("runs", None, Pool::Allocated, By::Route(Some(Route::Runs))),
    way("own:auto", None, Pool::Callers, By::Route(None)),
    way("own:landing", None, Pool::Callers, By::Route(Some(Route::Landing))),
    way("own:runs", None, Pool::Callers, By::Route(Some(Route::Runs))),
    way("own:writev", None, Pool::Callers, By::Writev),
    way("tcp:auto", TCP, Pool::Allocated, By::Route(None)),
    way("tcp:staged", TCP, Pool::Allocated, By::Route(Some(Route::Staged))),
    way("tcp:runs", TCP, Pool::Allocated, By::Route(Some(Route::Runs))),
];

/// How long a new connection is left alone: it maps the pools of the target meanwhile.
const SETTLED: std::time::Duration = std::time::Duration::from_secs(1);

/// One worker of the source, with the target's pools.
pub(crate) struct Line {
    pub(crate) end: End,
    pub(crate) endpoint: EndpointId,
    pub(crate) local: Region,
    pub(crate) allocated: RemoteRegion,
    pub(crate) callers: RemoteRegion,
}

/// Everything of the source.
pub(crate) struct Source {
    pub(crate) target: Target,
    pub(crate) pool: Region,
    pub(crate) copy: std::sync::Arc<Memory>,
    lines: BTreeMap<(Option<&'static str>, String), Line>,
    opened: BTreeMap<Option<&'static str>, Box<Opened>>,
}

impl By {
    /// What a user gets who asks for nothing.
    pub(crate) const AUTO: Self = Self::Route(None);

    /// The route that the options ask for, and the threads that copy.
    pub(crate) fn options(self) -> (Option<Route>, usize) {
        match self {
            Self::Copy | Self::Writev | Self::Both | Self::Pulled => (None, 1),
            Self::TwoThreads => (Some(Route::Direct), 2),
            Self::Route(route) => (route, 1),
        }
    }
}

impl Source {
    pub(crate) fn open(arguments: &Arguments) -> Result<Self, Error> {
        let mut passed = vec!["--pool".to_owned(), arguments.pool.to_string()];
        passed.extend(arguments.chunk.iter().flat_map(|chunk| ["--chunk".to_owned(), chunk.to_string()]));
        let target = Target::start(&passed)?;
        let pool = End::open(arguments, None, By::AUTO.options())?.context.allocate(arguments.pool)?;
        let copy = Memory::new(arguments.pool)?;
        Ok(Self { target, pool, copy, lines: BTreeMap::new(), opened: BTreeMap::new() })
    }

    /// The line for a list of transports and a route, opened at its first use.
    pub(crate) fn line(
        &mut self,
        arguments: &Arguments,
        transports: Option<&'static str>,
        by: By,
    ) -> Result<&Line, Error> {
        let key = (transports, format!("{:?} {}", by.options(), matches!(by, By::Both | By::Pulled)));
        if !self.lines.contains_key(&key) {
            let line = self.open_line(arguments, transports, by)?;
            self.lines.insert(key.clone(), line);
            std::thread::sleep(SETTLED); // what it does beside its start is not measured
        }
        self.lines.get(&key).ok_or("a line that was just opened".into())
    }

    fn open_line(&mut self, arguments: &Arguments, transports: Option<&'static str>, by: By) -> Result<Line, Error> {
        let owned = transports.map(str::to_owned);
        if !self.opened.contains_key(&transports) {
            let Answer::Opened(opened) = self.target.ask(&Ask::Open { transports: owned })? else {
                return Err("the target did not open".into());
            };
            self.opened.insert(transports, opened);
        }
        let Opened { address, epoch, allocated, callers } = &*self.opened[&transports];
        let end = End::open(arguments, transports, by.options())?;
        let local = register_again(&end.context, &self.pool)?;
        let endpoint = end.worker.connect(address, *epoch)?;
        let (allocated, callers) = (end.worker.import(endpoint, allocated)?, end.worker.import(endpoint, callers)?);
        if matches!(by, By::Both | By::Pulled) {
            // The pool itself, which the target can map, and not the second registration of it.
            let (address, epoch) = (end.worker.address().to_owned(), end.worker.epoch());
            let transports = transports.map(str::to_owned);
            self.target.ask(&Ask::Connect { transports, address, epoch, card: self.pool.card() })?;
        }
        Ok(Line { end, endpoint, local, allocated, callers })
    }
}
