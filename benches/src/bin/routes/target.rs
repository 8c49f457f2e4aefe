//! The process that is written to: owns two pools, and does what it is asked.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};

use kvferry_wire::{EndpointId, Region, RemoteRegion, SlotPair};

use crate::Arguments;
use crate::ask::{Answer, Ask, Blocks, Error, Opened, Pool};
use crate::end::End;
use crate::memory::{Memory, register_again};
use crate::{end, latency, order, pattern};

/// A worker for one list of transports.
struct Open {
    end: End,
    allocated: Region,
    callers: Region,
    back: Option<(EndpointId, RemoteRegion)>,
}

pub(crate) fn serve(arguments: &Arguments) -> Result<(), Error> {
    let mut ends: BTreeMap<Option<String>, Open> = BTreeMap::new();
    let callers = Memory::new(arguments.pool)?;
    let mut allocated: Option<Region> = None;
    // Worked out in the first round, which does not count.
    let mut pulled: Option<(Blocks, Vec<SlotPair>)> = None;
    for line in std::io::stdin().lock().lines() {
        let any = ends.values().next();
        let region = |pool| match pool {
            Pool::Allocated => any.map(|open: &Open| &open.allocated).ok_or("nothing is open"),
            Pool::Callers => any.map(|open| &open.callers).ok_or("nothing is open"),
        };
        let answer = match serde_json::from_str(&line?)? {
            Ask::Open { transports } => {
                let end = End::open(arguments, transports.as_deref(), (None, 1))?;
                let region = match &allocated {
                    Some(region) => register_again(&end.context, region)?,
                    None => allocated.insert(end.context.allocate(arguments.pool)?).clone(),
                };
                let open = Open { callers: callers.register(&end.context)?, allocated: region, end, back: None };
                let opened = Opened {
                    address: open.end.worker.address().to_owned(),
                    epoch: open.end.worker.epoch(),
                    allocated: open.allocated.card(),
                    callers: open.callers.card(),
                };
                ends.insert(transports, open);
                Answer::Opened(Box::new(opened))
            }
            Ask::Connect { transports, address, epoch, card } => {
                let open = ends.get_mut(&transports).ok_or("not open")?;
                let endpoint = open.end.worker.connect(&address, epoch)?;
                open.back = Some((endpoint, open.end.worker.import(endpoint, &card)?));
                Answer::Done
            }
            Ask::Scrub { pool, bytes } => {
                pattern::scrub(region(pool)?, bytes)?;
                Answer::Done
            }
            Ask::Check { pool, blocks, tag } => Answer::Checked { right: pattern::check(region(pool)?, &blocks, tag)? },
            Ask::Cpu => Answer::Cpu { seconds: cpu_seconds() },
            Ask::Pong { transports, count } => {
                let open = ends.get(&transports).ok_or("not open")?;
                let (endpoint, remote) = open.back.ok_or("not connected")?;
                println!("{}", serde_json::to_string(&Answer::Done)?);
                latency::pong(&open.end, endpoint, &open.allocated, remote, count)?;
                Answer::Done
            }
            Ask::Pull { transports, blocks, from } => {
                let open = ends.get(&transports).ok_or("not open")?;
                let (endpoint, remote) = open.back.ok_or("not connected")?;
                if pulled.as_ref().is_none_or(|(known, _)| *known != blocks) {
                    pulled = Some((blocks, order::pairs(&blocks)));
                }
                let pairs = pulled.iter().flat_map(|(_, pairs)| &pairs[from..]);
                let pairs = pairs.map(|pair| SlotPair { local: pair.remote, remote: pair.local }).collect();
                open.end.get(endpoint, end::blocks(&open.allocated, remote, blocks.size, pairs))?;
                Answer::Done
            }
            Ask::Where { pool } => {
                let process = std::process::id().cast_signed();
                let address = if pool == Pool::Callers { callers.base() } else { region(pool)?.base() };
                Answer::Where { process, address }
            }
        };
        println!("{}", serde_json::to_string(&answer)?);
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// CPU seconds of this process so far, all threads.
pub(crate) fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
