//! One block of 4 KiB and the message that it has come, there and back.

use std::time::{Duration, Instant};

use kvferry_wire::{EndpointId, Region, RemoteRegion, SlotPair, TransferId};

use crate::ask::Error;
use crate::end::{self, End};

const SIZE: u64 = 4096;

fn send(end: &End, endpoint: EndpointId, local: &Region, remote: RemoteRegion) -> Result<(), Error> {
    let part = end::blocks(local, remote, SIZE, vec![SlotPair { local: 0, remote: 1 }]);
    end.worker.put_then_send(endpoint, TransferId(0), vec![part], 1, Vec::new())?;
    Ok(())
}

pub(crate) fn pong(
    end: &End,
    endpoint: EndpointId,
    local: &Region,
    remote: RemoteRegion,
    count: usize,
) -> Result<(), Error> {
    for _ in 0..count {
        end.frame()?;
        send(end, endpoint, local, remote)?;
    }
    Ok(())
}

/// Half of each round trip, sorted. A tenth is run before and left out.
pub(crate) fn ping(
    end: &End,
    endpoint: EndpointId,
    local: &Region,
    remote: RemoteRegion,
    count: usize,
) -> Result<Vec<Duration>, Error> {
    let mut halves = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        send(end, endpoint, local, remote)?;
        end.frame()?;
        halves.push(start.elapsed() / 2);
    }
    let mut halves = halves.split_off(count / 10);
    halves.sort();
    Ok(halves)
}
