//! The worker's side of its inbox: hears sources, answers them through endpoints of its own, scatters what came.
//!
//! Answers do not take the caller's endpoints: those come and go as the caller likes, and there need not be one.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use ucx_sys::Status;

use crate::address::{InboxCard, WorkerCard};
use crate::context::Context;
use crate::cuda::incoming::Incoming;
use crate::endpoints::Endpoints;
use crate::error::RegionError;
use crate::frames::outgoing::{Outgoing, Sender};
use crate::inbox::message::{Body, Message, Refusal};
use crate::inbox::target::{Inbox, Peer, Reply};
use crate::permits::{Permit, Permits};
use crate::process::Process;
use crate::raw::RawEndpoint;

pub(crate) struct Service {
    context: Context,
    /// `None` if the options leave no room for one: then peers have nothing to describe transfers for.
    inbox: Option<Inbox>,
    /// The same in GPU memory.
    slab: Option<Inbox>,
    permits: Arc<Permits>,
    /// What the GPU scatters with, if there is one.
    gpu: Option<Rc<Incoming>>,
    answers: BTreeMap<Peer, Answer>,
    /// Processes of this host whose connections have failed here, and which may not know yet: see [`forget`](Self::forget).
    doubtful: BTreeMap<Peer, Process>,
    replies: Vec<Reply>,
    endpoints: Rc<Endpoints>,
}

/// What a source is answered through.
struct Answer {
    endpoint: RawEndpoint,
    outgoing: Outgoing,
    /// The source's process, if it is on this host.
    process: Option<Process>,
}

impl Service {
    pub(crate) fn new(
        context: &Context,
        endpoints: &Rc<Endpoints>,
        gpu: Option<&Rc<Incoming>>,
        permits: Arc<Permits>,
    ) -> Result<Self, RegionError> {
        let inbox = Inbox::new(context)?;
        let slab = gpu.map(|_| Inbox::on_gpu(context)).transpose()?.flatten();
        Ok(Self {
            context: context.clone(),
            inbox,
            slab,
            permits,
            gpu: gpu.cloned(),
            answers: BTreeMap::new(),
            doubtful: BTreeMap::new(),
            replies: Vec::new(),
            endpoints: endpoints.clone(),
        })
    }

    pub(crate) fn inbox_card(&self) -> Option<InboxCard> {
        self.inbox.as_ref().map(Inbox::card)
    }

    pub(crate) fn slab_card(&self) -> Option<InboxCard> {
        self.slab.as_ref().map(Inbox::card)
    }

    fn inboxes(&mut self) -> impl Iterator<Item = &mut Inbox> {
        [&mut self.inbox, &mut self.slab].into_iter().filter_map(Option::as_mut)
    }

    /// Whether the GPU is scattering something.
    pub(crate) fn is_scattering(&self) -> bool {
        [&self.inbox, &self.slab].into_iter().flatten().any(Inbox::is_scattering)
    }

    /// A source says something. Returns the endpoint that answered it, if it has said goodbye.
    pub(crate) fn hear(&mut self, peer: Peer, body: Body) -> Option<RawEndpoint> {
        if self.inbox.is_none() && self.slab.is_none() {
            return None;
        }
        match body {
            Body::Describe { stream, permit, .. } | Body::DescribeDevice { stream, permit, .. }
                if !self.permits.allow(peer.epoch, permit) =>
            {
                // Of what was let in a moment ago there may be the beginning of a description.
                self.inboxes().filter(|inbox| inbox.has(peer, stream)).for_each(|inbox| {
                    inbox.drop_stream(peer, stream);
                });
                self.replies.push((peer, Body::Refused { stream, refusal: Refusal::Revoked }));
            }
            Body::Hello { address } => {
                // A source that cannot be answered gets nothing: it finds out by its own deadline.
                let Ok(card) = WorkerCard::parse(&address, self.context.ucx_version()) else { return None };
                // Both or neither: they take in and forget the same connections.
                let mut new = false;
                for inbox in self.inboxes() {
                    new |= inbox.welcome(peer);
                }
                if new {
                    match self.endpoints.connect(&card.ucx_address) {
                        Ok(endpoint) => {
                            let share = card.inbox.and_then(|inbox| inbox.region.share);
                            let process = share.and_then(|share| share.owner());
                            let near = process.is_some();
                            let outgoing = Outgoing::new(self.context.options().ring_bytes_for(near));
                            self.answers.insert(peer, Answer { endpoint, outgoing, process });
                        }
                        Err(_) => self.forget(peer),
                    }
                }
            }
            Body::Describe { stream, permit, total_bytes, bytes } => {
                let inbox = self.inbox.as_mut()?;
                self.replies.extend(inbox.describe(&self.context, peer, stream, total_bytes, &bytes));
                inbox.belongs(peer, stream, permit);
            }
            Body::DescribeDevice { stream, permit, slab, total_bytes, bytes } => {
                let inbox = if slab { &mut self.slab } else { &mut self.inbox };
                let reply = match (inbox, &self.gpu) {
                    (Some(inbox), Some(gpu)) => {
                        inbox.describe_device(&self.context, gpu, peer, stream, total_bytes, &bytes.0)
                    }
                    // The peer has a GPU, and this side none.
                    (Some(inbox), None) if !slab => {
                        inbox.describe_units(&self.context, peer, stream, total_bytes, &bytes.0)
                    }
                    _ => Some((peer, Body::Refused { stream, refusal: Refusal::Gpu })),
                };
                self.replies.extend(reply);
                self.inboxes().for_each(|inbox| inbox.belongs(peer, stream, permit));
            }
            // The one that does not know the stream takes no notice.
            Body::Chunk { stream, index, chunk } => {
                self.inboxes().for_each(|inbox| inbox.filled(peer, stream, index, chunk, None));
            }
            Body::Chunks { stream, index, chunks } => {
                let known = self.inboxes().find(|inbox| inbox.has(peer, stream));
                known.into_iter().for_each(|inbox| inbox.filled_all(peer, stream, index, chunks.clone()));
            }
            Body::Filled { stream, index, chunk, bytes } => {
                self.inbox.as_mut()?.filled(peer, stream, index, chunk, Some(&bytes));
            }
            Body::Drop { stream } => {
                let known = self.inboxes().find(|inbox| inbox.has(peer, stream));
                let reply = match known {
                    Some(inbox) => inbox.drop_stream(peer, stream),
                    None => self.inboxes().next().and_then(|inbox| inbox.drop_stream(peer, stream)),
                };
                self.replies.extend(reply);
            }
            Body::Bye => {
                self.inboxes().for_each(|inbox| inbox.farewell(peer));
                self.doubtful.remove(&peer);
                // One that has failed is forgotten when it is closed.
                let answer = self.answers.remove(&peer)?;
                self.forget(peer);
                return Some(answer.endpoint);
            }
            // What an inbox says is not said to one.
            Body::Grant { .. }
            | Body::Ahead { .. }
            | Body::Landed { .. }
            | Body::Refused { .. }
            | Body::Dropped { .. }
            | Body::Revoked { .. }
            | Body::Unanswered
            // Nor is what the worker has to do with.
            | Body::Ring { .. }
            | Body::Bell => {}
        }
        None
    }

    /// Scatters nothing more of what belongs to a permit that has been closed. When this returns, nothing of it is scattered.
    pub(crate) fn revoke(&mut self, epoch: u64, permit: Permit) {
        let replies: Vec<Reply> = self.inboxes().flat_map(|inbox| inbox.revoke(epoch, permit)).collect();
        self.replies.extend(replies);
    }

    /// Scatters a chunk, grants what is free and answers. Returns whether anything was done.
    pub(crate) fn step(&mut self, sender: &Sender<'_>) -> bool {
        let mut busy = false;
        for inbox in [&mut self.inbox, &mut self.slab].into_iter().filter_map(Option::as_mut) {
            let scattered = inbox.scatter();
            busy |= scattered.is_some();
            self.replies.extend(scattered.flatten());
            self.replies.extend(inbox.settle());
            self.replies.extend(inbox.grant());
        }
        busy |= !self.replies.is_empty();
        for (peer, body) in self.replies.drain(..) {
            if let Some(Answer { endpoint, outgoing, .. }) = self.answers.get_mut(&peer) {
                outgoing.say(endpoint, sender, peer.epoch, &Message { connection: peer.connection, body });
            }
        }
        busy
    }

    /// Passes on answers that wait for room in a ring. Returns whether any went.
    pub(crate) fn pass_waiting(&mut self, sender: &Sender<'_>) -> bool {
        let mut busy = false;
        for (peer, Answer { endpoint, outgoing, .. }) in &mut self.answers {
            busy |= outgoing.pass_waiting(endpoint, sender, peer.epoch);
        }
        busy
    }

    /// Endpoints whose peers are gone, or out of reach: to be closed, then forgotten.
    pub(crate) fn take_failed(&mut self) -> Vec<(Peer, RawEndpoint)> {
        let failed = self.take(|_, answer| answer.endpoint.failure() != Status::OK || answer.outgoing.is_broken());
        let endpoint = |(peer, Answer { endpoint, process, .. }): (Peer, Answer)| {
            self.doubtful.extend(process.map(|process| (peer, process)));
            (peer, endpoint)
        };
        failed.into_iter().map(endpoint).collect()
    }

    fn take(&mut self, which: impl Fn(&Peer, &Answer) -> bool) -> Vec<(Peer, Answer)> {
        let these = self.answers.iter().filter(|(peer, answer)| which(peer, answer));
        let these: Vec<Peer> = these.map(|(peer, _)| *peer).collect();
        these.into_iter().filter_map(|peer| self.answers.remove_entry(&peer)).collect()
    }

    /// Endpoints that answer a dead peer: to be closed, then forgotten.
    pub(crate) fn take_of(&mut self, epoch: u64) -> Vec<(Peer, RawEndpoint)> {
        let dead = self.take(|peer, _| peer.epoch == epoch);
        dead.into_iter().map(|(peer, answer)| (peer, answer.endpoint)).collect()
    }

    /// Whether anything of this peer may still be scattered.
    pub(crate) fn knows(&self, epoch: u64) -> bool {
        [&self.inbox, &self.slab].into_iter().flatten().any(|inbox| inbox.knows(epoch))
    }

    pub(crate) fn take_all(&mut self) -> Vec<(Peer, RawEndpoint)> {
        std::mem::take(&mut self.answers).into_iter().map(|(peer, answer)| (peer, answer.endpoint)).collect()
    }

    /// The endpoint that answered `peer` is closed, and what UCX wrote for the peer is over with it, as it is behind its goodbye. A
    /// process of this host
    /// copies by itself, for as long as its own end of the connection has not failed: what it may write is nobody's until it
    /// is dead.
    pub(crate) fn forget(&mut self, peer: Peer) {
        if self.is_doubtful(peer) {
            self.inboxes().for_each(|inbox| inbox.lose(peer));
        } else {
            self.doubtful.remove(&peer);
            self.inboxes().for_each(|inbox| inbox.forget(peer));
        }
    }

    /// Whether the endpoint that answered `peer` has failed, although its process, of this host, lives.
    pub(crate) fn is_doubtful(&self, peer: Peer) -> bool {
        self.doubtful.get(&peer).is_some_and(|process| !process.has_ended())
    }

    /// Takes back what was lost to processes that have died since. To be called now and then.
    pub(crate) fn recover(&mut self) {
        let dead = self.doubtful.iter().filter(|(_, process)| process.has_ended());
        for peer in dead.map(|(peer, _)| *peer).collect::<Vec<_>>() {
            self.doubtful.remove(&peer);
            self.inboxes().for_each(|inbox| inbox.recover(peer));
        }
    }
}
