//! Links: how two instances are connected, and how a rank leaves.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::{self, RecvTimeoutError};
use kvferry_match::Side;
use kvferry_wire::TransferId;

use super::{Engine, Link};
use crate::card::Card;
use crate::core::{LinkId, Peer, other};
use crate::error::{ConnectError, PeerName, PostError};
use crate::instance::InstanceCard;
use crate::peer::WirePeer;
use crate::shared::{LinkCards, State};
use crate::survey::{Survey, survey};

/// Connections that are no part of a link yet, by the epochs of the peers.
type Opened = BTreeMap<u64, (WirePeer, Peer)>;

fn can_connect<'a>(state: &State, mut epochs: impl Iterator<Item = &'a u64>) -> Result<(), ConnectError> {
    if state.stopped {
        return Err(ConnectError::Stopped);
    }
    if state.published.is_none() {
        return Err(ConnectError::Unpublished);
    }
    let known = epochs.find_map(|epoch| state.core.known(*epoch));
    known.map_or(Ok(()), |peer| Err(ConnectError::Already { peer }))
}

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
        let asked = Instant::now();
        let cards = LinkCards { sources: sources.cards().to_vec(), destinations: destinations.cards().to_vec() };
        let Survey { side, peers } = survey(&cards.sources, &cards.destinations, self.epoch(), self.ucx_version())?;
        can_connect(&self.shared.lock(), peers.keys())?;
        let opened = self.open(asked, side, peers)?;
        self.take_up(asked, side, cards, opened)
    }

    /// Opens the connections. Not under the lock, which the progress thread needs before it can answer.
    fn open(&self, asked: Instant, side: Side, peers: BTreeMap<u64, (Card, Peer)>) -> Result<Opened, ConnectError> {
        let waited = self.shared.options.patience;
        let mut opened = Opened::new();
        for (epoch, (card, peer)) in peers {
            let name = PeerName { side: other(side), rank: peer.rank };
            if asked.elapsed() >= waited {
                self.close(opened);
                return Err(ConnectError::NoAnswer { peer: name, waited });
            }
            match WirePeer::connect(self.shared.workers(), side, Arc::new(card)) {
                Ok(wire) => drop(opened.insert(epoch, (wire, peer))),
                Err(source) => {
                    self.close(opened);
                    return Err(ConnectError::Endpoint { peer: name, source });
                }
            }
        }
        Ok(opened)
    }

    /// Makes a link of the connections. Its time runs from when it was asked for.
    fn take_up(&self, asked: Instant, side: Side, cards: LinkCards, opened: Opened) -> Result<Link, ConnectError> {
        let shared = &self.shared;
        let (answer, connected) = channel::bounded(1);
        let mut state = shared.lock();
        // The engine may have stopped meanwhile, or another call may have been faster.
        if let Err(error) = can_connect(&state, opened.keys()) {
            drop(state);
            self.close(opened);
            return Err(error);
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
        let epochs: Vec<u64> = members.keys().copied().collect();
        let mut actions = state.core.connect(asked, link, side, shared.options.rank, members);
        actions.extend(epochs.into_iter().flat_map(|epoch| state.catch_up(asked, epoch)));
        shared.act(state, actions);
        // The control thread answers at the deadline at the latest, and when it ends, however it does.
        connected.recv().unwrap_or(Err(ConnectError::Stopped))?;
        if let Err(error) = self.test_routes(link, asked + shared.options.patience) {
            let mut state = shared.lock();
            let actions = state.core.disconnect(Instant::now(), link).unwrap_or_default();
            state.links.remove(&link);
            shared.act(state, actions);
            return Err(error);
        }
        Ok(Link { engine: shared.epoch, id: link })
    }

    /// Writes a few bytes to each destination of a link, by the way that the options force if they do: the first request
    /// finds connections that have carried bytes.
    fn test_routes(&self, link: LinkId, deadline: Instant) -> Result<(), ConnectError> {
        let shared = &self.shared;
        let mut asked = Vec::new();
        let mut state = shared.lock();
        if state.stopped {
            return Err(ConnectError::Stopped);
        }
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
                Err(RecvTimeoutError::Disconnected) => return Err(ConnectError::Stopped),
                Err(RecvTimeoutError::Timeout) => {
                    shared.lock().probes.remove(&transfer);
                    shared.workers().cancel(transfer);
                    return Err(ConnectError::NoAnswer { peer, waited: shared.options.patience });
                }
            }
        }
        Ok(())
    }

    fn close(&self, opened: Opened) {
        for (peer, _) in opened.into_values() {
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use kvferry_layout::{Cut, Dtype, ModelFacts, TableOptions, build};
    use kvferry_wire::{Event, Status};

    use super::*;
    use crate::options::EngineOptions;

    /// Less than the patience, more than anything else takes.
    const SOON: Duration = Duration::from_secs(10);
    const PATIENCE: Duration = Duration::from_secs(60);

    fn rank(instance: &str) -> Engine {
        let engine = Engine::start(EngineOptions::new(0).instance(instance).patience(PATIENCE)).unwrap();
        let facts = r#"{"model_type": "llama", "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}"#;
        let (facts, cut) = (ModelFacts::from_config(facts).unwrap(), "tp1".parse::<Cut>().unwrap());
        let mut table = build(&facts, &cut, 0, &TableOptions::new(16, Dtype::F16, 8)).unwrap();
        let regions = engine.allocate(&mut table).unwrap();
        engine.publish(table, regions).unwrap();
        engine
    }

    /// What comes of a call that was made so long ago, and in the middle of which something happens, with a peer that is
    /// silent.
    fn check(ago: Duration, meanwhile: impl FnOnce(&Engine, &Opened), expected: impl FnOnce(&ConnectError) -> bool) {
        let (source, destination) = (rank("from"), rank("to"));
        let cards = [&source, &destination].map(|rank| Card::parse(&rank.card().unwrap()).unwrap());
        let [sources, destinations] = cards.map(|card| vec![card]);
        let Survey { side, peers } = survey(&sources, &destinations, source.epoch(), source.ucx_version()).unwrap();
        let opened = source.open(Instant::now(), side, peers).unwrap();
        meanwhile(&source, &opened);
        let (answer, outcome) = mpsc::channel();
        thread::spawn(move || {
            let asked = Instant::now().checked_sub(ago).unwrap();
            answer.send(source.take_up(asked, side, LinkCards { sources, destinations }, opened)).unwrap();
        });
        let error = outcome.recv_timeout(SOON).expect("an answer in time").unwrap_err();
        assert!(expected(&error), "{error}");
    }

    #[test]
    fn an_engine_that_stops_in_the_middle_of_a_call_ends_it() {
        let stop = |source: &Engine, _: &Opened| {
            source.stop();
            while !source.shared.lock().stopped {
                thread::yield_now();
            }
        };
        check(Duration::ZERO, stop, |error| matches!(error, ConnectError::Stopped));
    }

    #[test]
    fn a_connection_that_fails_before_anybody_waits_for_it_is_lost() {
        let fail = |source: &Engine, opened: &Opened| {
            let endpoint = opened.values().next().unwrap().0.endpoint;
            source.shared.hear(Event::EndpointFailed { endpoint, status: Status::ERR_CONNECTION_RESET });
        };
        check(Duration::ZERO, fail, |error| matches!(error, ConnectError::Lost { .. }));
        let die = |source: &Engine, opened: &Opened| {
            let endpoint = opened.values().next().unwrap().0.endpoint;
            source.shared.hear(Event::PeerDied { endpoint });
        };
        check(Duration::ZERO, die, |error| matches!(error, ConnectError::Lost { .. }));
    }

    #[test]
    fn what_was_opened_slowly_is_waited_for_the_less() {
        check(PATIENCE, |_, _| {}, |error| matches!(error, ConnectError::NoAnswer { .. }));
    }
}
