//! Links: how two instances are connected, and how a rank leaves.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel;
use kvferry_wire::TransferId;

use super::{Engine, Link};
use crate::core::{LinkId, other};
use crate::error::{ConnectError, PeerName, PostError};
use crate::instance::InstanceCard;
use crate::peer::WirePeer;
use crate::shared::LinkCards;
use crate::survey::{Survey, survey};

impl Engine {
    /// Connects two instances, of one of which this engine is a rank. Every rank of both makes this call with the same cards. Of
    /// an instance with attention data parallelism they are the cards of one part, whose ranks hold the same requests between
    /// them; other parts have links of their own.
    ///
    /// Matches the tables, proves that every byte this rank is concerned with has one source,
    /// and exchanges greetings, with the digest of what was matched, with each peer. Waits for those up to the engine's
    /// patience: the calls of all ranks must overlap. A source then writes a few bytes to each of its destinations, to
    /// memory that is set aside for that, and returns when they have arrived.
    ///
    /// A rank that restarts makes this call with its new card and those that the others have; the others do nothing: they
    /// hear of its next life from itself, and the link goes on. So does a link whose connections have failed for another
    /// reason, once they can be made again.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] names the peer; nothing is left behind. Calls that all overlap can still fail for half a second after
    /// earlier ones were given up, while those connections go down: call again.
    pub fn connect(&self, sources: &InstanceCard, destinations: &InstanceCard) -> Result<Link, ConnectError> {
        let shared = &self.shared;
        let cards = LinkCards { sources: sources.cards().to_vec(), destinations: destinations.cards().to_vec() };
        let epoch = shared.epoch;
        let Survey { side, peers } = survey(&cards.sources, &cards.destinations, epoch, self.ucx_version())?;
        {
            let state = shared.lock();
            if state.stopped {
                return Err(ConnectError::Stopped);
            }
            if state.published.is_none() {
                return Err(ConnectError::Unpublished);
            }
            if let Some(peer) = peers.keys().find_map(|epoch| state.core.known(*epoch)) {
                return Err(ConnectError::Already { peer });
            }
        }
        // Not under the lock, which the progress thread needs before it can answer.
        let mut opened = BTreeMap::new();
        for (epoch, (card, peer)) in peers {
            let name = PeerName { side: other(side), rank: peer.rank };
            match WirePeer::connect(shared.workers(), side, Arc::new(card)) {
                Ok(wire) => drop(opened.insert(epoch, (wire, peer))),
                Err(source) => {
                    self.close(opened.into_values().map(|(wire, _)| wire));
                    return Err(ConnectError::Endpoint { peer: name, source });
                }
            }
        }
        let (answer, connected) = channel::bounded(1);
        let mut state = shared.lock();
        if let Some(peer) = opened.keys().find_map(|epoch| state.core.known(*epoch)) {
            drop(state);
            self.close(opened.into_values().map(|(wire, _)| wire));
            return Err(ConnectError::Already { peer });
        }
        let link = LinkId(state.next_link);
        state.next_link += 1;
        state.connecting.insert(link, answer);
        state.links.insert(link, cards);
        let mut members = BTreeMap::new();
        for (epoch, (wire, peer)) in opened {
            state.connected(shared.workers(), epoch, wire);
            members.insert(epoch, peer);
        }
        let actions = state.core.connect(Instant::now(), link, side, shared.options.rank, members);
        shared.act(state, actions);
        // The control thread answers at the deadline at the latest, and when it ends, however it does.
        connected.recv().unwrap_or(Err(ConnectError::Stopped))?;
        if let Err(error) = self.test_routes(link) {
            let mut state = shared.lock();
            let actions = state.core.disconnect(Instant::now(), link).unwrap_or_default();
            state.links.remove(&link);
            shared.act(state, actions);
            return Err(error);
        }
        Ok(Link { engine: epoch, id: link })
    }

    /// Writes a few bytes to each destination of a link, by the way that the options force if they do: the first request
    /// finds connections that have carried bytes.
    fn test_routes(&self, link: LinkId) -> Result<(), ConnectError> {
        let (shared, deadline) = (&self.shared, Instant::now() + self.shared.options.patience);
        let mut asked = Vec::new();
        let mut state = shared.lock();
        for (epoch, name) in state.core.members(link) {
            let Some(peer) = state.peers.get(&epoch) else { continue };
            let (Some(part), endpoint) = (peer.probe(&shared.probe), peer.endpoint) else { continue };
            let worker = shared.workers().get(peer.worker);
            // Writes of requests are numbered from 0 on.
            let transfer = TransferId(u64::MAX - epoch % (1 << 62));
            let (answer, done) = channel::bounded(1);
            state.probes.insert(transfer, answer);
            worker.put(endpoint, transfer, vec![part]).map_err(|source| {
                state.probes.remove(&transfer);
                ConnectError::Unwritable { peer: name, source }
            })?;
            asked.push((name, transfer, done));
        }
        drop(state);
        shared.workers().carry_out();
        for (peer, transfer, done) in asked {
            match done.recv_deadline(deadline) {
                Ok(Ok(stats)) => tracing::debug!(%peer, route = %stats.route, elapsed = ?stats.elapsed, "bytes arrive"),
                Ok(Err(source)) => return Err(ConnectError::SelfTest { peer, source }),
                Err(_) => {
                    shared.lock().probes.remove(&transfer);
                    shared.workers().cancel(transfer);
                    return Err(ConnectError::NoAnswer { peer, waited: shared.options.patience });
                }
            }
        }
        Ok(())
    }

    fn close(&self, peers: impl Iterator<Item = WirePeer>) {
        for peer in peers {
            let _ = self.shared.workers().get(peer.worker).close(peer.endpoint); // stopped: closed with everything else
        }
        self.shared.workers().carry_out();
    }

    /// Forgets a link and tells its peers, to whom this rank is lost then.
    ///
    /// # Errors
    ///
    /// [`PostError::UnderWay`] while a request of the link has not ended, or is a send whose slots are not quiet;
    /// [`PostError::NoLink`].
    pub fn disconnect(&self, link: Link) -> Result<(), PostError> {
        let link = self.id_of(link)?;
        let mut state = self.shared.lock();
        if let Some(key) = state.core.under_way(link) {
            return Err(PostError::UnderWay(key));
        }
        let actions = state.core.disconnect(Instant::now(), link).ok_or(PostError::NoLink)?;
        state.links.remove(&link);
        self.shared.act(state, actions);
        Ok(())
    }
}
