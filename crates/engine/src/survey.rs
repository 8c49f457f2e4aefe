//! What two instances' cards mean for one of their ranks: which side it is on, which ranks of the other instance it
//! exchanges bytes with, and which bytes those are. A pure function: every rank that is given the same cards finds the same.

use std::collections::BTreeMap;

use kvferry_layout::PageTable;
use kvferry_match::{Assignment, Side, Templates, assign, prove_whole};
use kvferry_wire::{Version, keys_agree};

use crate::card::Card;
use crate::core::Peer;
use crate::error::{ConnectError, PeerName};

/// A link as one of its ranks sees it.
#[derive(Debug)]
pub(crate) struct Survey {
    pub(crate) side: Side,
    /// By epoch.
    pub(crate) peers: BTreeMap<u64, (Card, Peer)>,
}

/// Finds the rank of `epoch` among the cards, matches the two instances as far as it is concerned, and proves that every
/// byte its destinations need has one source, and that the destinations miss nothing of what they hold a part of.
pub(crate) fn survey(
    sources: &[Card],
    destinations: &[Card],
    epoch: u64,
    ucx: Version,
) -> Result<Survey, ConnectError> {
    let place = |cards: &[Card]| cards.iter().position(|card| card.epoch == epoch);
    let (side, own) = match (place(sources), place(destinations)) {
        (None, Some(own)) => (Side::Destination, own),
        (Some(own), None) => (Side::Source, own),
        _ => return Err(ConnectError::NotAmong),
    };
    fn tables(cards: &[Card]) -> impl Iterator<Item = (u32, &PageTable)> {
        cards.iter().map(|card| (card.rank, &card.table))
    }
    let assignments = assign(tables(sources), tables(destinations)).map_err(ConnectError::Match)?;
    let left = prove_whole(tables(sources), tables(destinations)).map_err(ConnectError::Match)?;
    if !left.is_empty() {
        tracing::warn!(layers = %left, "the destination does not hold these layers of the source: nothing of them moves");
    }
    let mut templates = Templates::default();
    let mut peers = BTreeMap::new();
    match side {
        Side::Destination => {
            let assignment = &assignments[own];
            for rank in assignment.sources() {
                let Some(card) = sources.iter().find(|card| card.rank == rank) else { continue };
                let name = PeerName { side: Side::Source, rank };
                let peer = peer(&mut templates, assignment, rank, card, name)?;
                add(&mut peers, card, peer, name, &destinations[own], ucx)?;
            }
        }
        Side::Source => {
            let (own_card, own) = (&sources[own], sources[own].rank);
            for (card, assignment) in destinations.iter().zip(&assignments) {
                if assignment.sources().any(|rank| rank == own) {
                    let name = PeerName { side: Side::Destination, rank: card.rank };
                    let peer = peer(&mut templates, assignment, own, card, name)?;
                    add(&mut peers, card, peer, name, own_card, ucx)?;
                }
            }
        }
    }
    Ok(Survey { side, peers })
}

/// What `source_rank` sends in `assignment`, to or from the rank of `card`.
fn peer(
    templates: &mut Templates,
    assignment: &Assignment,
    source_rank: u32,
    card: &Card,
    name: PeerName,
) -> Result<Peer, ConnectError> {
    let template = templates.template(assignment, source_rank);
    let template = template.map_err(|source| ConnectError::Template { peer: name, source })?;
    Ok(Peer {
        instance: card.instance.clone(),
        rank: card.rank,
        born: card.born,
        rows: assignment.rows(source_rank),
        template,
        assignment: Some((assignment.clone(), source_rank)),
    })
}

fn add(
    peers: &mut BTreeMap<u64, (Card, Peer)>,
    card: &Card,
    peer: Peer,
    name: PeerName,
    own: &Card,
    ucx: Version,
) -> Result<(), ConnectError> {
    if !keys_agree(card.ucx, ucx) {
        return Err(ConnectError::Ucx { peer: name, theirs: card.ucx, ours: ucx });
    }
    if card.verify != own.verify {
        return Err(ConnectError::Verify { peer: name, theirs: card.verify, ours: own.verify });
    }
    peers.insert(card.epoch, (card.clone(), peer));
    Ok(())
}
