//! What a run prints at its end: a table for people, or the same as one JSON object.

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde_json::{Value, json};

use crate::check::Verified;
use crate::event::{Event, Pair};
use crate::meet::{Member, Terms};

/// What happened in a run, or in one rank's part of it.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Rank pairs, in order.
    pub pairs: Vec<Pair>,
    /// What each receiver rank found, in order of rank.
    pub receivers: Vec<(u32, Verified)>,
}

impl Summary {
    /// Takes note of what a rank has done.
    pub fn add(&mut self, member: Member, event: Event) {
        match event {
            Event::Pair(pair) => self.pairs.push(pair),
            Event::Verified(verified) => self.receivers.push((member.rank, verified)),
            Event::Progress { .. } | Event::Error { .. } => {}
        }
    }

    /// Whether a receiver rank has compared every byte.
    pub fn has_verified(&self, receiver: Member) -> bool {
        self.receivers.iter().any(|(rank, _)| *rank == receiver.rank)
    }

    /// Puts pairs and receivers in order of rank.
    pub fn sort(&mut self) {
        self.pairs.sort_by_key(|pair| (pair.source_rank, pair.destination_rank));
        self.receivers.sort_by_key(|(rank, _)| *rank);
    }

    /// The table of rank pairs, and a line for each receiver.
    pub fn text(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["from -> to", "rows", "pieces", "bytes", "route", "GB/s", "ms"]);
        for pair in &self.pairs {
            table.add_row([
                format!("{} -> {}", pair.source_rank, pair.destination_rank),
                pair.rows.to_string(),
                or_dash(&pair.pieces),
                pair.bytes.to_string(),
                pair.route.clone(),
                format!("{:.2}", pair.gb_per_s()),
                format!("{:.1}", pair.elapsed_ms),
            ]);
        }
        for column in [1, 2, 3, 5, 6] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let mut text = table.to_string();
        for (rank, Verified { request_bytes, spare_bytes, canary_bytes }) in &self.receivers {
            text +=
                &format!("\nreceiver rank {rank}: verified {request_bytes} bytes, canary {canary_bytes} bytes intact");
            if *spare_bytes > 0 {
                text += &format!(", {spare_bytes} bytes that the request can do without came along");
            }
        }
        text
    }

    /// The same as JSON.
    pub fn json(&self, terms: &Terms, outcome: &str) -> Value {
        let pairs: Vec<Value> = self.pairs.iter().map(pair_json).collect();
        let receivers: Vec<Value> = self.receivers.iter().map(receiver_json).collect();
        json!({ "options": terms, "pairs": pairs, "receivers": receivers, "outcome": outcome })
    }
}

fn or_dash<T: ToString>(value: &Option<T>) -> String {
    value.as_ref().map_or_else(|| "-".to_owned(), T::to_string)
}

fn pair_json(pair: &Pair) -> Value {
    let mut value = json!(pair);
    value["gb_per_s"] = json!(pair.gb_per_s());
    value
}

fn receiver_json((rank, verified): &(u32, Verified)) -> Value {
    let mut value = json!(verified);
    value["rank"] = json!(rank);
    value
}
