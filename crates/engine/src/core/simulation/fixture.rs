//! The two instances: sources of one layer each, destinations of one head each, so that everybody sends to everybody.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use kvferry_layout::{Cut, Dtype, ModelFacts, PageTable, TableOptions, build};
use kvferry_match::{Side, assign};

use super::super::Peer;

pub(super) const SOURCES: u32 = 2;
pub(super) const DESTINATIONS: u32 = 2;
pub(super) const SLOTS: u32 = 6;
pub(super) const BLOCK_TOKENS: u64 = 16;

fn tables(cut: &str, ranks: u32) -> Vec<PageTable> {
    let facts = r#"{"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}"#;
    let facts = ModelFacts::from_config(facts).unwrap();
    let options = TableOptions::new(u32::try_from(BLOCK_TOKENS).unwrap(), Dtype::U8, SLOTS);
    let cut: Cut = cut.parse().unwrap();
    (0..ranks).map(|rank| build(&facts, &cut, rank, &options).unwrap()).collect()
}

/// What a rank of `side` has for a peer, by the peer's rank.
pub(super) fn peers(side: Side, rank: u32) -> Vec<Peer> {
    static PEERS: LazyLock<BTreeMap<(bool, u32), Vec<Peer>>> = LazyLock::new(|| {
        let (sources, destinations) = (tables("pp2", SOURCES), tables("tp2", DESTINATIONS));
        let assignments = assign((0..).zip(&sources), (0..).zip(&destinations)).unwrap();
        let peer = |source: u32, destination: u32, rank: u32| {
            let assignment = &assignments[usize::try_from(destination).unwrap()];
            let template = assignment.template(source).unwrap();
            let (instance, rows) = (String::new(), assignment.rows(source));
            Peer { instance, rank, born: 0, rows, template, assignment: None }
        };
        let mut peers = BTreeMap::new();
        for source in 0..SOURCES {
            peers.insert((true, source), (0..DESTINATIONS).map(|rank| peer(source, rank, rank)).collect());
        }
        for destination in 0..DESTINATIONS {
            peers.insert((false, destination), (0..SOURCES).map(|rank| peer(rank, destination, rank)).collect());
        }
        peers
    });
    PEERS[&(side == Side::Source, rank)].clone()
}
