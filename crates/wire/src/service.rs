//! The worker's side of its inbox: hears sources, answers them through endpoints of its own, scatters what came.
//!
//! Answers do not take the caller's endpoints: those come and go as the caller likes, and there need not be one.

use std::collections::BTreeMap;
use std::rc::Rc;

use ucx_sys::Status;

use crate::address::{InboxCard, WorkerCard};
use crate::connection::{self, Sender};
use crate::context::Context;
use crate::error::RegionError;
use crate::inbox::message::{Body, Message};
use crate::inbox::target::{Inbox, Peer, Reply};
use crate::raw::{RawEndpoint, RawWorker};

pub(crate) struct Service {
    context: Context,
    /// `None` if the options leave no room for one: then peers have nothing to describe transfers for.
    inbox: Option<Inbox>,
    answers: BTreeMap<Peer, RawEndpoint>,
    replies: Vec<Reply>,
    worker: Rc<RawWorker>, // last: the endpoints are its
}

impl Service {
    pub(crate) fn new(context: &Context, worker: &Rc<RawWorker>) -> Result<Self, RegionError> {
        let inbox = Inbox::new(context)?;
        Ok(Self {
            context: context.clone(),
            inbox,
            answers: BTreeMap::new(),
            replies: Vec::new(),
            worker: worker.clone(),
        })
    }

    pub(crate) fn inbox_card(&self) -> Option<InboxCard> {
        self.inbox.as_ref().map(Inbox::card)
    }

    /// A source says something. Returns the endpoint that answered it, if it has said goodbye: to be closed, then forgotten.
    pub(crate) fn hear(&mut self, peer: Peer, body: Body) -> Option<RawEndpoint> {
        let inbox = self.inbox.as_mut()?;
        match body {
            Body::Hello { address } => {
                // A source that cannot be answered gets nothing: it finds out by its own deadline.
                let Ok(card) = WorkerCard::parse(&address, self.context.ucx_version()) else { return None };
                if inbox.welcome(peer) {
                    match self.worker.connect(&card.ucx_address) {
                        Ok(endpoint) => drop(self.answers.insert(peer, endpoint)),
                        Err(_) => inbox.forget(peer),
                    }
                }
            }
            Body::Describe { stream, total_bytes, bytes } => {
                self.replies.extend(inbox.describe(&self.context, peer, stream, total_bytes, &bytes));
            }
            Body::Chunk { stream, index, chunk } => inbox.filled(peer, stream, index, chunk, None),
            Body::Filled { stream, index, chunk, bytes } => inbox.filled(peer, stream, index, chunk, Some(&bytes)),
            Body::Drop { stream } => self.replies.extend(inbox.drop_stream(peer, stream)),
            Body::Bye => return self.answers.remove(&peer),
            // What an inbox says is not said to one.
            Body::Grant { .. } | Body::Landed { .. } | Body::Refused { .. } | Body::Dropped { .. } => {}
        }
        None
    }

    /// Scatters a chunk, grants what is free and answers. Returns whether anything was done.
    pub(crate) fn step(&mut self, sender: &Sender<'_>) -> bool {
        let Some(inbox) = self.inbox.as_mut() else { return false };
        let scattered = inbox.scatter();
        let busy = scattered.is_some();
        self.replies.extend(scattered.flatten());
        self.replies.extend(inbox.grant());
        for (peer, body) in self.replies.drain(..) {
            if let Some(answer) = self.answers.get(&peer) {
                connection::say(answer, sender, peer.epoch, Message { connection: peer.connection, body });
            }
        }
        busy
    }

    /// Endpoints whose peers are gone: to be closed, then forgotten.
    pub(crate) fn take_failed(&mut self) -> Vec<(Peer, RawEndpoint)> {
        let failed = self.answers.iter().filter(|(_, endpoint)| endpoint.failure() != Status::OK);
        let failed: Vec<Peer> = failed.map(|(peer, _)| *peer).collect();
        failed.into_iter().filter_map(|peer| self.answers.remove_entry(&peer)).collect()
    }

    /// Endpoints that answer a dead peer: to be closed, then forgotten.
    pub(crate) fn take_of(&mut self, epoch: u64) -> Vec<(Peer, RawEndpoint)> {
        let peers: Vec<Peer> = self.answers.keys().filter(|peer| peer.epoch == epoch).copied().collect();
        peers.into_iter().filter_map(|peer| self.answers.remove_entry(&peer)).collect()
    }

    /// Whether anything of this peer may still be scattered.
    pub(crate) fn knows(&self, epoch: u64) -> bool {
        self.inbox.as_ref().is_some_and(|inbox| inbox.knows(epoch))
    }

    pub(crate) fn take_all(&mut self) -> Vec<(Peer, RawEndpoint)> {
        std::mem::take(&mut self.answers).into_iter().collect()
    }

    /// The endpoint that answered `peer` is closed, so nothing that it was granted is written any more.
    pub(crate) fn forget(&mut self, peer: Peer) {
        if let Some(inbox) = &mut self.inbox {
            inbox.forget(peer);
        }
    }
}
