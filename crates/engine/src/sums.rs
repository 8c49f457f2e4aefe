//! The thread that makes checksums and compares them, of an engine that was asked for that. It takes long, and keeps nobody
//! waiting but the requests behind it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use crossbeam::channel::Receiver;
use kvferry_match::{Plan, Template};

use crate::core::{LinkId, Peer, PutId, ToVerify};
use crate::message::{About, PartCheck, RequestKey};
use crate::shared::Shared;
use crate::verify;

/// Something to go over.
#[derive(Debug)]
pub(crate) enum Check {
    /// What is about to leave.
    Sum { put: PutId, plan: Plan },
    /// What has arrived.
    Verify { epoch: u64, key: RequestKey, check: Box<ToVerify> },
}

/// The body of the thread: until the control thread has ended. What is left when everything has is not gone over, but the state
/// machine hears that a write which was to leave does not.
pub(crate) fn run(shared: &Shared, checks: &Receiver<Check>) {
    let mut layered = Layered::new();
    for check in checks {
        let mut state = shared.lock();
        let published = state.published.clone();
        match check {
            Check::Sum { put, plan } if state.stopped => {
                let actions = state.core.summed(Instant::now(), put, plan, 0);
                shared.act(state, actions);
            }
            Check::Verify { .. } if state.stopped => {}
            Check::Sum { put, plan } => {
                drop(state);
                let sum = published.and_then(|own| verify::of_source(&plan, &own.regions, &own.table));
                let mut state = shared.lock();
                // No memory that was published can be out of reach; if it is, the other side will not agree.
                let actions = state.core.summed(Instant::now(), put, plan, sum.unwrap_or_default());
                shared.act(state, actions);
            }
            Check::Verify { epoch, key, check } => {
                let matched = state.core.matched(epoch);
                drop(state);
                let templates = matched.and_then(|matched| templates(&mut layered, epoch, &matched, &check.checks));
                let same = published.zip(templates).is_some_and(|(own, templates)| {
                    verify::holds_at_destination(&check, &templates, &own.regions, &own.table)
                });
                let about = About { key, serial: check.serial };
                let mut state = shared.lock();
                let actions = state.core.verified(Instant::now(), epoch, about, same);
                shared.act(state, actions);
            }
        }
    }
}

/// Templates of some layers, by the link, the life of the peer and the layers.
type Layered = BTreeMap<(LinkId, u64, u32, u32), Template>;

/// Kept, at most. Beyond, all of them are given up, to be made again when they come again.
const LAYERED_MAX: usize = 1024;

/// The templates of the parts that a peer has sent. `None` if one cannot be.
fn templates(
    layered: &mut Layered,
    epoch: u64,
    (link, peer): &(LinkId, Peer),
    checks: &[PartCheck],
) -> Option<Vec<Template>> {
    let mut of_layers = |layers: &Range<u32>| {
        let place = (*link, epoch, layers.start, layers.end);
        if let Some(known) = layered.get(&place) {
            return Some(known.clone());
        }
        let (assignment, source_rank) = peer.assignment.as_ref()?;
        let template = assignment.template_of_layers(*source_rank, layers.clone()).ok()?;
        if layered.len() >= LAYERED_MAX {
            layered.clear();
        }
        layered.insert(place, template.clone());
        Some(template)
    };
    checks
        .iter()
        .map(|check| check.layers.as_ref().map_or_else(|| Some(peer.template.clone()), &mut of_layers))
        .collect()
}
