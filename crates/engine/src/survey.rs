//! What two instances' cards mean for one of their ranks: which side it is on, which ranks of the other instance it
//! exchanges bytes with, and which bytes those are. A pure function: every rank that is given the same cards finds the same.

use std::collections::BTreeMap;

use kvferry_layout::PageTable;
use kvferry_match::{Side, assign};
use kvferry_wire::Version;

use crate::card::{Card, ucx_agree};
use crate::core::Peer;
use crate::error::{CardError, ConnectError, PeerName};

/// A link as one of its ranks sees it.
#[derive(Debug)]
pub(crate) struct Survey {
    pub(crate) side: Side,
    /// By epoch.
    pub(crate) peers: BTreeMap<u64, (Card, Peer)>,
}

/// Parses the cards of one instance, in the order of its ranks.
fn parse(side: Side, cards: &[Vec<u8>]) -> Result<Vec<Card>, ConnectError> {
    let parse = |(rank, card): (u32, &Vec<u8>)| {
        let peer = PeerName { side, rank };
        let card = Card::parse(card).map_err(|source| ConnectError::Card { peer, source })?;
        if card.rank == rank { Ok(card) } else { Err(ConnectError::Order { peer, found: card.rank }) }
    };
    (0..).zip(cards).map(parse).collect()
}

/// Finds the rank of `epoch` among the cards, matches the two instances as far as it is concerned, and proves that every
/// byte its destinations need has one source.
pub(crate) fn survey(
    sources: &[Vec<u8>],
    destinations: &[Vec<u8>],
    epoch: u64,
    ucx: Version,
) -> Result<Survey, ConnectError> {
    let mut sources = parse(Side::Source, sources)?;
    let destinations = parse(Side::Destination, destinations)?;
    let place = |cards: &[Card]| cards.iter().position(|card| card.epoch == epoch);
    let tables = |cards: &mut [Card]| -> Vec<PageTable> { cards.iter().map(|card| card.table.clone()).collect() };
    let source_tables = tables(&mut sources);
    let mut peers = BTreeMap::new();
    let side = match (place(&sources), place(&destinations)) {
        (None, Some(own)) => {
            let assignment = matched(&source_tables, &destinations[own])?;
            for rank in assignment.sources() {
                let Some(card) = sources.get(rank as usize) else { continue };
                let name = PeerName { side: Side::Source, rank };
                let peer = peer(&assignment, rank, name)?;
                add(&mut peers, card, peer, name, ucx)?;
            }
            Side::Destination
        }
        (Some(own), None) => {
            let own = sources[own].rank;
            for card in &destinations {
                let assignment = matched(&source_tables, card)?;
                if assignment.sources().any(|rank| rank == own) {
                    let name = PeerName { side: Side::Destination, rank: card.rank };
                    let peer = Peer { rank: card.rank, ..peer(&assignment, own, name)? };
                    add(&mut peers, card, peer, name, ucx)?;
                }
            }
            Side::Source
        }
        _ => return Err(ConnectError::NotAmong),
    };
    Ok(Survey { side, peers })
}

fn matched(sources: &[PageTable], destination: &Card) -> Result<kvferry_match::Assignment, ConnectError> {
    let peer = PeerName { side: Side::Destination, rank: destination.rank };
    assign(sources, &destination.table, destination.rank).map_err(|source| ConnectError::Match { peer, source })
}

/// What `source_rank` sends in `assignment`, with the source as the peer.
fn peer(assignment: &kvferry_match::Assignment, source_rank: u32, name: PeerName) -> Result<Peer, ConnectError> {
    let template = assignment.template(source_rank);
    let template = template.map_err(|source| ConnectError::Template { peer: name, source })?;
    Ok(Peer { rank: source_rank, rows: assignment.rows(source_rank), template })
}

fn add(
    peers: &mut BTreeMap<u64, (Card, Peer)>,
    card: &Card,
    peer: Peer,
    name: PeerName,
    ucx: Version,
) -> Result<(), ConnectError> {
    if !ucx_agree(card.ucx, ucx) {
        return Err(ConnectError::Ucx { peer: name, theirs: card.ucx, ours: ucx });
    }
    match peers.insert(card.epoch, (card.clone(), peer)) {
        None => Ok(()),
        // Two ranks with one epoch are one card given twice.
        Some(_) => Err(ConnectError::Card { peer: name, source: CardError::Damaged }),
    }
}
