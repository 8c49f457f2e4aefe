//! Remote agents: added, reached, removed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_wire::{CommandError, EndpointId, MemoryKind, RegionCard, Run, Side};

use crate::error::RemoteError;
use crate::message::Message;
use crate::metadata::Metadata;
use crate::peer::{Connection, Peer};
use crate::shared::Shared;

impl Shared {
    /// This agent's metadata: all of it, or of these regions.
    pub(crate) fn metadata(&self, regions: Option<Vec<RegionCard>>, address: bool) -> Vec<u8> {
        let version = self.context.ucx_version();
        let whole = regions.is_none();
        let all = || self.state.lock().regions.values().map(kvferry_wire::Region::card).collect();
        let metadata = Metadata {
            name: self.name.to_string(),
            epoch: self.epoch,
            ucx: (version.major, version.minor, version.release),
            address: address.then(|| self.worker().address().to_owned()),
            whole,
            regions: regions.unwrap_or_else(all),
        };
        metadata.to_bytes()
    }

    pub(crate) fn add_remote(&self, bytes: &[u8]) -> Result<Arc<str>, RemoteError> {
        let metadata = Metadata::parse(bytes, self.context.ucx_version())?;
        let (name, epoch): (Arc<str>, u64) = (metadata.name.as_str().into(), metadata.epoch);
        let mut state = self.state.lock();
        let earlier = state.names.insert(name.clone(), epoch).filter(|earlier| *earlier != epoch);
        state.peers.entry(epoch).or_insert_with(|| Peer::new(name.clone(), None)).add(metadata);
        drop(state);
        if let Some(earlier) = earlier {
            self.part_with(earlier);
        }
        Ok(name)
    }

    pub(crate) fn remove_remote(&self, name: &str) -> Result<(), RemoteError> {
        let epoch = self.state.lock().names.remove(name);
        let epoch = epoch.ok_or_else(|| RemoteError::Unknown { name: name.to_owned() })?;
        self.part_with(epoch);
        Ok(())
    }

    /// Gives up what is under way with a life of a remote agent, and then its connection.
    fn part_with(&self, epoch: u64) {
        let mut state = self.state.lock();
        if let Some(peer) = state.peers.get_mut(&epoch) {
            (peer.added, peer.leaving) = (false, true);
            peer.cards.clear();
        }
        let reads: Vec<_> = state.reads.values().map(|read| read.transfer.clone()).collect();
        drop(state);
        for transfer in reads.into_iter().filter(|transfer| transfer.epoch == epoch) {
            transfer.give_up(crate::Failure::Disconnected { name: transfer.name.to_string() });
        }
        self.leave(epoch);
        self.carry_out();
    }

    /// The life of a remote agent that was added. This agent knows itself.
    pub(crate) fn epoch_of(&self, name: &str) -> Result<u64, RemoteError> {
        let found = self.state.lock().names.get(name).copied();
        match found {
            Some(epoch) => Ok(epoch),
            None if *name == *self.name => self.add_remote(&self.metadata(None, true)).map(|_| self.epoch),
            None => Err(RemoteError::Unknown { name: name.to_owned() }),
        }
    }

    /// The connection to a peer, made if there is none. Not on the progress thread.
    pub(crate) fn link(&self, epoch: u64) -> Result<EndpointId, RemoteError> {
        let _alone = self.dialling.lock();
        let (name, address) = {
            let state = self.state.lock();
            let peer = state.peers.get(&epoch).ok_or_else(|| RemoteError::Unknown { name: String::new() })?;
            if let Some(endpoint) = peer.endpoint() {
                return Ok(endpoint);
            }
            (peer.name.to_string(), peer.address.clone())
        };
        let address = address.ok_or_else(|| RemoteError::NoAddress { name: name.clone() })?;
        let connected = self.worker().connect(&address, epoch);
        let endpoint = connected.map_err(|source| RemoteError::Command { name: name.clone(), source })?;
        let mut state = self.state.lock();
        state.connections += 1;
        let number = state.connections;
        let Some(peer) = state.peers.get_mut(&epoch) else {
            drop(state);
            let _ = self.worker().close(endpoint);
            return Err(RemoteError::Disconnected { name });
        };
        let connection = peer.connection.insert(Connection::new(endpoint, number));
        self.greet(connection, false);
        state.endpoints.insert(endpoint, epoch);
        Ok(endpoint)
    }

    fn greet(&self, connection: &Connection, answer: bool) {
        let (name, address) = (self.name.to_string(), self.worker().address().to_owned());
        self.say(connection.endpoint, &Message::Hello { name, address, answer, connection: connection.number });
    }

    /// Makes a peer's memory reachable on a connection. Not on the progress thread.
    pub(crate) fn import(&self, epoch: u64, endpoint: EndpointId, cards: &[RegionCard]) -> Result<(), RemoteError> {
        let _alone = self.dialling.lock();
        for card in cards {
            let name = {
                let state = self.state.lock();
                let name = state.peers.get(&epoch).map(|peer| peer.name.to_string()).unwrap_or_default();
                match state.connection(epoch, endpoint) {
                    Some(connection) if connection.imported.contains_key(&card.id()) => continue,
                    Some(_) => name,
                    None => return Err(RemoteError::Disconnected { name }),
                }
            };
            let region = self.worker().import(endpoint, card).map_err(|source| match source {
                CommandError::NoEndpoint => RemoteError::Disconnected { name: name.clone() },
                source => RemoteError::Command { name: name.clone(), source },
            })?;
            let mut state = self.state.lock();
            let connection = state.peers.get_mut(&epoch).and_then(|peer| peer.connection.as_mut());
            if let Some(connection) = connection.filter(|connection| connection.endpoint == endpoint) {
                connection.imported.insert(card.id(), region);
            }
        }
        Ok(())
    }

    /// Waits for an answer of the remote agent.
    pub(crate) fn meet(&self, name: &str, timeout: Duration) -> Result<(), RemoteError> {
        let deadline = Instant::now() + timeout;
        let epoch = self.epoch_of(name)?;
        let endpoint = self.link(epoch)?;
        let gone = || RemoteError::Disconnected { name: name.to_owned() };
        self.greet(self.state.lock().connection(epoch, endpoint).ok_or_else(gone)?, true);
        self.carry_out();
        let mut state = self.state.lock();
        while !state.connection(epoch, endpoint).ok_or_else(gone)?.welcomed {
            if self.answered.wait_until(&mut state, deadline).timed_out() {
                return Err(RemoteError::Silent { name: name.to_owned(), waited: timeout });
            }
        }
        Ok(())
    }

    /// Whether the metadata of the remote agent tells of memory around all of these runs.
    pub(crate) fn knows(&self, name: &str, kind: MemoryKind, runs: &[Run]) -> bool {
        let state = self.state.lock();
        let Some(peer) = state.names.get(name).and_then(|epoch| state.peers.get(epoch)) else { return false };
        let cards: Vec<RegionCard> = peer.cards.values().filter(|card| card.kind() == kind).cloned().collect();
        drop(state);
        Side::new(cards, runs).is_ok()
    }
}
