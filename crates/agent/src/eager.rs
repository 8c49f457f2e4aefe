//! Small writes, whose bytes travel in a message: one way through UCX where a put, its flush and a notification are three.
//!
//! The peer's agent writes them to its memory, if all of it is registered there, hears the notification, and answers.

use kvferry_wire::{EndpointId, FRAME_PAYLOAD_BYTES_MAX, MemoryKind, Part, Region, RegionId};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use crate::message::{Message, Refused};
use crate::notification::Notification;
use crate::shared::Shared;

/// Most bytes of such a write: more are copied once less by a put.
const BYTES_MAX: u64 = 16 << 10;

/// Most runs of one.
const RUNS_MAX: usize = 64;

/// Answers that one message takes along.
pub(crate) const DONE_MAX: usize = 256;

/// More than a description of the most runs and answers takes.
const DESCRIPTION_BYTES_MAX: usize = 16 << 10;

/// Length of the description in front of the bytes.
type Length = u32;

/// What stands in front of the bytes, which are those of the runs in order, and then the notification.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Described {
    serial: u64,
    runs: Vec<Target>,
    notified: bool,
    /// Writes of the receiver that are there: answers that were put off.
    done: Vec<u64>,
}

/// A run of bytes at an offset of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Target {
    region: RegionId,
    offset: u64,
    bytes: u32,
}

/// The message of a write of `parts`, if it is small and between host memories that are not mapped: into those a copy is less.
///
/// `done` are answers that go along, taken if it is.
pub(crate) fn message(
    serial: u64,
    parts: &[Part],
    bytes: u64,
    notification: Option<&[u8]>,
    done: impl FnOnce() -> Vec<u64>,
) -> Option<Vec<u8>> {
    let host = |part: &Part| {
        part.local.kind() == MemoryKind::Host && part.remote.kind() == MemoryKind::Host && !part.remote.is_mapped()
    };
    if bytes > BYTES_MAX || parts.is_empty() || !parts.iter().all(host) {
        return None;
    }
    let told = notification.map_or(0, <[u8]>::len);
    let (mut runs, mut data) = (Vec::new(), Vec::new());
    for part in parts {
        let fits = each_run(part, |from, to, run_bytes| {
            let start = data.len();
            data.resize(start + usize::try_from(run_bytes).ok()?, 0);
            runs.push(Target { region: part.remote.id(), offset: to, bytes: u32::try_from(run_bytes).ok()? });
            // Out of its region a run cannot be; if it were, the wire would say so.
            part.local.read(from, &mut data[start..]).ok()?;
            (runs.len() <= RUNS_MAX).then_some(())
        });
        fits?;
    }
    if data.len() + told > FRAME_PAYLOAD_BYTES_MAX - DESCRIPTION_BYTES_MAX {
        return None;
    }
    let described = Described { serial, runs, notified: notification.is_some(), done: done() };
    let described = postcard::to_allocvec(&described).expect("a plain structure has an encoding");
    let mut message = Vec::with_capacity(size_of::<Length>() + described.len() + data.len() + told);
    message.extend_from_slice(&Length::try_from(described.len()).ok()?.to_le_bytes());
    message.extend_from_slice(&described);
    message.extend_from_slice(&data);
    message.extend_from_slice(notification.unwrap_or_default());
    Some(message)
}

/// Calls `run` with the local and the remote offset and the length of each run of a part, until it returns `None`.
fn each_run(part: &Part, mut run: impl FnMut(u64, u64, u64) -> Option<()>) -> Option<()> {
    for pair in part.pairs.iter() {
        let slots = (u64::from(pair.local), u64::from(pair.remote));
        let from = part.local_base + slots.0 * part.local_slot_stride;
        let to = part.remote_base + slots.1 * part.remote_slot_stride;
        for piece in part.pieces.iter() {
            let [outer, inner] = piece.dims;
            for (i, j) in (0..outer.count).flat_map(|i| (0..inner.count).map(move |j| (i, j))) {
                let from = from + piece.local_offset + i * outer.local_stride + j * inner.local_stride;
                let to = to + piece.remote_offset + i * outer.remote_stride + j * inner.remote_stride;
                run(from, to, piece.run_bytes)?;
            }
        }
    }
    Some(())
}

/// The description and what follows it, if the message is one.
fn parse(payload: &[u8]) -> Option<(Described, &[u8])> {
    let (length, rest) = payload.split_first_chunk::<{ size_of::<Length>() }>()?;
    let (described, data) = rest.split_at_checked(Length::from_le_bytes(*length) as usize)?;
    Some((postcard::from_bytes(described).ok()?, data))
}

impl Shared {
    /// A peer writes something small.
    pub(crate) fn written(&self, epoch: u64, payload: &[u8]) {
        let Some((described, data)) = parse(payload) else {
            return tracing::warn!(epoch, bytes = payload.len(), "a small write cannot be read");
        };
        described.done.iter().for_each(|serial| self.done(epoch, *serial));
        let state = self.state.lock();
        let Some(peer) = state.peers.get(&epoch) else {
            return tracing::warn!(epoch, "a small write of an agent that has not greeted is dropped");
        };
        let from = peer.name.clone();
        // All of it is looked at before any of it is written.
        let mut writes: Vec<(Region, u64, &[u8])> = Vec::with_capacity(described.runs.len());
        let (mut rest, mut wrong) = (data, None);
        for Target { region, offset, bytes } in &described.runs {
            let found = state.regions.get(region);
            let inside =
                |region: &&Region| offset.checked_add(u64::from(*bytes)).is_some_and(|end| end <= region.bytes());
            match (found, rest.split_at_checked(*bytes as usize)) {
                (None, _) => wrong = wrong.or(Some(Refused::NoRegion)),
                (Some(region), Some((run, behind))) if inside(&region) => {
                    rest = behind;
                    writes.push((region.clone(), *offset, run));
                }
                _ => wrong = wrong.or(Some(Refused::Bad)),
            }
        }
        let endpoint = peer.endpoint();
        drop(state);
        if wrong.is_none() {
            let done = writes.iter().try_for_each(|(region, offset, run)| region.write(*offset, run));
            wrong = done.err().map(|_| Refused::Bad);
        }
        if wrong.is_none() && described.notified {
            self.notifications.add(Notification { from: from.to_string(), message: rest.to_vec() });
        }
        let serial = described.serial;
        match (wrong, endpoint) {
            (None, Some(endpoint)) if self.is_looked_at() => self.put_off.lock().push((endpoint, serial)),
            (None, Some(endpoint)) => self.say(endpoint, &Message::Done { serial }),
            (Some(why), Some(endpoint)) => self.say(endpoint, &Message::Failed { serial, why, settled: true }),
            (why, None) => drop(self.chores.send(crate::control::Chore::Answer { epoch, serial, why, settled: true })),
        }
    }
}

/// Answers that a caller, who looks again and again, sends with what it says next, or at its next look.
#[derive(Debug, Default)]
pub(crate) struct PutOff {
    all: Mutex<Vec<(EndpointId, u64)>>,
}

impl PutOff {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<(EndpointId, u64)>> {
        self.all.lock()
    }

    /// Those for one peer, as many as go along with a message.
    pub(crate) fn take(&self, to: EndpointId) -> Vec<u64> {
        let mut left = DONE_MAX;
        let fits = |(endpoint, _): &mut (EndpointId, u64)| {
            let fits = *endpoint == to && left > 0;
            left -= usize::from(fits);
            fits
        };
        self.all.lock().extract_if(.., fits).map(|(_, serial)| serial).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_none_or_a_write_and_never_a_panic(bytes: Vec<u8>) {
            let _ = parse(&bytes);
        }
    }
}
