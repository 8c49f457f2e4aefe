//! The control thread: keeps the time, and does what takes long or has to wait for the progress thread, but for checksums.

use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender};
use kvferry_match::Side;
use kvferry_wire::Status;
use thiserror::Error;

use crate::card::Card;
use crate::core::{LinkId, Peer};
use crate::error::{CardError, ConnectError};
use crate::message::Hello;
use crate::peer::WirePeer;
use crate::shared::{Chore, Shared};
use crate::sums::Check;
use crate::survey::survey;

/// Ends everything when the control thread ends, also if that is because of a bug: nobody waits for ever then.
struct EndAll<'a>(&'a Shared);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        self.0.end_all();
    }
}

/// The body of the thread: until told to stop, or until another of the engine's threads is gone.
pub(crate) fn run(shared: &Shared, chores: &Receiver<Chore>, sums: &Sender<Check>) {
    keep_time(shared, chores, sums);
    // What was asked for meanwhile: whoever is to do it finds that everything has ended.
    for chore in chores.try_iter() {
        if let Chore::Check(check) = chore {
            let _ = sums.send(check); // nobody there: nothing is left to be told
        }
    }
}

fn keep_time(shared: &Shared, chores: &Receiver<Chore>, sums: &Sender<Check>) {
    let _end_all = EndAll(shared);
    loop {
        let armed = {
            let mut state = shared.lock();
            state.armed = state.core.next_deadline();
            state.armed
        };
        let chore = match armed {
            Some(deadline) => chores.recv_deadline(deadline),
            None => chores.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match chore {
            Ok(Chore::Stop | Chore::Gone) | Err(RecvTimeoutError::Disconnected) => break,
            Ok(Chore::Look) | Err(RecvTimeoutError::Timeout) => {}
            Ok(Chore::Dial { epoch }) => dial(shared, epoch),
            Ok(Chore::Introduce { link, old, epoch, hello }) => introduce(shared, link, old, epoch, *hello),
            Ok(Chore::Check(check)) => {
                let _ = sums.send(check); // nobody there: this thread is told that it is gone
            }
        }
        let now = Instant::now();
        let mut state = shared.lock();
        let actions = state.core.tick(now);
        shared.telemetry.ticked(&actions);
        shared.act(state, actions);
    }
}

/// Connects again to a peer whose connection has failed.
fn dial(shared: &Shared, epoch: u64) {
    let known = {
        let state = shared.lock();
        state.peers.get(&epoch).map(|peer| peer.card.clone()).zip(state.core.side_to(epoch))
    };
    let Some((card, side)) = known else { return };
    let connected = WirePeer::connect(shared.workers(), side, card);
    let mut state = shared.lock();
    let now = Instant::now();
    let actions = match connected {
        Ok(peer) if state.peers.contains_key(&epoch) => {
            state.connected(shared.workers(), epoch, peer);
            let mut actions = state.core.dialed(now, epoch);
            actions.extend(state.catch_up(now, epoch));
            actions
        }
        // It has been forgotten in between.
        Ok(peer) => {
            let _ = shared.workers().get(peer.worker).close(peer.endpoint);
            Vec::new()
        }
        Err(error) => {
            tracing::debug!(epoch, %error, "a peer cannot be connected to again");
            state.core.lost(now, epoch, Status::ERR_UNREACHABLE)
        }
    };
    shared.act(state, actions);
}

/// Why what claims to be a peer's next life is not taken for it.
#[derive(Debug, Error)]
enum Disbelief {
    #[error("its card cannot be used")]
    Card(#[from] CardError),
    #[error("its card is that of another rank")]
    OtherRank,
    #[error("its page table is laid out differently: every rank has to be connected anew")]
    OtherLayout,
    #[error("it does not match")]
    Match(#[from] ConnectError),
    #[error("it cannot be connected to")]
    Endpoint(#[from] kvferry_wire::CommandError),
    #[error("it is no peer of this rank")]
    NoPeer,
}

/// Connects to what claims to be the next life of a peer, if its card holds.
fn introduce(shared: &Shared, link: LinkId, old: u64, epoch: u64, hello: Hello) {
    let now = Instant::now();
    match believe(shared, link, old, epoch, &hello) {
        Ok((card, peer, wire)) => {
            let mut state = shared.lock();
            if let Some(cards) = state.links.get_mut(&link) {
                let all = cards.sources.iter_mut().chain(&mut cards.destinations);
                all.filter(|known| known.epoch == old).for_each(|known| *known = card.clone());
            }
            state.connected(shared.workers(), epoch, wire);
            let mut actions = state.core.replace(now, link, old, epoch, peer, hello);
            actions.extend(state.catch_up(now, epoch));
            shared.act(state, actions);
        }
        Err(disbelief) => {
            let error: &dyn std::error::Error = &disbelief;
            tracing::warn!(rank = hello.rank, epoch, error, "the next life of a peer is refused");
            shared.lock().core.not_replaced(epoch);
        }
    }
}

fn believe(
    shared: &Shared,
    link: LinkId,
    old: u64,
    epoch: u64,
    hello: &Hello,
) -> Result<(Card, Peer, WirePeer), Disbelief> {
    let card = Card::parse(&hello.card)?;
    if (card.epoch, card.rank, &card.instance) != (epoch, hello.rank, &hello.instance) {
        return Err(Disbelief::OtherRank);
    }
    let mut cards = shared.lock().links.get(&link).cloned().ok_or(Disbelief::NoPeer)?;
    let members = if hello.source { &mut cards.sources } else { &mut cards.destinations };
    let member = members.iter_mut().find(|member| member.epoch == old).ok_or(Disbelief::NoPeer)?;
    if card.table.shape_digest() != member.table.shape_digest() {
        return Err(Disbelief::OtherLayout);
    }
    *member = card.clone();
    let ucx = shared.context.ucx_version();
    let mut survey = survey(&cards.sources, &cards.destinations, shared.epoch, ucx)?;
    let (_, peer) = survey.peers.remove(&epoch).ok_or(Disbelief::NoPeer)?;
    let side = if hello.source { Side::Destination } else { Side::Source };
    let wire = WirePeer::connect(shared.workers(), side, Arc::new(card.clone()))?;
    Ok((card, peer, wire))
}
