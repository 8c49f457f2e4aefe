//! What a replay prints: what is scaled at its begin, and what came of it at its end.

use std::collections::BTreeMap;

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use kvferry_wire::Version;
use serde_json::{Value, json};

use crate::replay::dispatch::{Account, Speed};
use crate::replay::options::ReplayOptions;
use crate::replay::record::{Figures, Quantiles};
use crate::replay::setup::{Instance, Setup};
use crate::replay::trace::{BLOCK_TOKENS, Trace};

/// What is replayed, and what is not as it was.
#[derive(Clone, Debug)]
pub struct Preface {
    /// The trace, in one line.
    pub trace: String,
    /// What is scaled and what is not.
    pub scaled: String,
    /// How time goes.
    pub time: String,
    /// Room.
    pub pools: String,
}

/// How a replay came out.
#[derive(Clone, Debug)]
pub struct Report {
    /// Requests by what became of them.
    pub account: Account,
    /// Requests of the trace.
    pub requests: usize,
    /// The UCX of all ranks.
    pub ucx: Version,
    /// What was measured.
    pub figures: Figures,
    /// Frames of both instances that somebody may still touch.
    pub quarantined: usize,
    /// With `--verify`: blocks that the decode instance still held at the end, each of which was compared once more.
    pub audited_blocks: Option<usize>,
}

impl Preface {
    /// Says it in words.
    pub fn new(options: &ReplayOptions, setup: &Setup, trace: &Trace) -> Self {
        let (blocks, again) = trace.blocks();
        let input: u64 = trace.requests.iter().map(|request| request.input_tokens).sum();
        let name = match &options.trace {
            Some(path) => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
            None => format!("made with seed {}", options.seed),
        };
        let frame_tokens = setup.tokens(BLOCK_TOKENS);
        let speed = match options.speed {
            Speed::Times(times) => format!(
                "{times} s of the trace are 1 s here; a generated token takes {} ms of the trace, and as long decode keeps \
                 the request's blocks",
                options.token_ms
            ),
            Speed::Max => "requests begin as soon as there is room, decode keeps no block for generating".to_owned(),
        };
        let instance = |what: &str, instance: &Instance| {
            format!("{what} {} in blocks of {} tokens", instance.cut, instance.tokens_per_block)
        };
        Self {
            trace: format!(
                "{name}: {} requests in {:.1} s, {input} input tokens in {blocks} blocks of {BLOCK_TOKENS}, {again} of them \
                 named before",
                trace.requests.len(),
                trace.span().as_secs_f64(),
            ),
            scaled: format!(
                "tokens only: {} of the trace are 1 here, so that a block of the trace is {frame_tokens} tokens; layers, \
                 heads and the {} bytes a token (over all decode ranks) are those of {} in {}",
                setup.scale,
                setup.decode.token_bytes(),
                options.model,
                options.dtype,
            ),
            time: format!("{speed}; at most {} requests are moved at a time", options.in_flight),
            pools: format!(
                "{}, {}; room for {} blocks of the trace each, {} in all",
                instance("prefill", &setup.prefill),
                instance("decode", &setup.decode),
                options.pool_blocks,
                size(setup.pool_bytes()),
            ),
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let Self { trace, scaled, time, pools } = self;
        format!("trace   {trace}\nscaled  {scaled}\ntime    {time}\npools   {pools}")
    }
}

impl Report {
    /// Whether each request of the trace has an end, and none two.
    pub fn is_complete(&self) -> bool {
        self.account.total() == self.requests
    }

    /// For people.
    pub fn text(&self) -> String {
        let Self { account, figures, requests, .. } = self;
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["time, ms", "count", "p50", "p95", "p99", "most"]);
        for (name, Quantiles { count, p50_ms, p95_ms, p99_ms, max_ms }) in [
            ("transfer of a request, of those with bytes to move", figures.transfer),
            ("write from one rank to another", figures.write),
            ("wait of a request before it", figures.wait),
        ] {
            let times = [p50_ms, p95_ms, p99_ms, max_ms].map(|ms| format!("{ms:.2}"));
            table.add_row([name.to_owned(), count.to_string()].into_iter().chain(times));
        }
        for column in 1..6 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let mut lines = vec![
            table.to_string(),
            format!(
                "moved     {} in {:.1} s: {:.2} GB/s, {:.2} GB/s in the {:.1} s in which something moved; UCX {}, {}",
                size(figures.moved_bytes),
                figures.elapsed_s,
                figures.gb_per_s(),
                figures.moving_gb_per_s(),
                figures.moving_s,
                self.ucx,
                routes(&figures.routes),
            ),
            format!(
                "saved     {} by prefix reuse: decode held {} of {} blocks ({:.1} %), and all of {} requests",
                size(figures.saved_bytes),
                figures.reused_blocks,
                figures.blocks,
                100.0 * figures.reused_blocks as f64 / figures.blocks.max(1) as f64,
                figures.nothing_to_move,
            ),
        ];
        if let Some(blocks) = self.audited_blocks {
            lines.push(format!(
                "verified  {} of prompts as they arrived, prefixes included, and {blocks} blocks that decode held at the end",
                size(figures.checked_bytes)
            ));
        }
        if self.quarantined > 0 {
            lines.push(format!("lost      room for {} blocks, which somebody may still touch", self.quarantined));
        }
        let all = if self.is_complete() { "all accounted for" } else { "SOME UNACCOUNTED FOR" };
        lines.push(format!(
            "requests  {requests}: {} done, {} rejected as longer than the pool, {} failed: {all}",
            account.done, account.rejected, account.failed
        ));
        lines.join("\n")
    }

    /// The same as JSON, with the options.
    pub fn json(&self, preface: &Preface, outcome: &str) -> Value {
        let Account { done, rejected, failed } = self.account;
        let mut figures = json!(self.figures);
        figures["gb_per_s"] = json!(self.figures.gb_per_s());
        figures["moving_gb_per_s"] = json!(self.figures.moving_gb_per_s());
        json!({
            "trace": preface.trace,
            "scaled": preface.scaled,
            "time": preface.time,
            "pools": preface.pools,
            "requests": { "all": self.requests, "done": done, "rejected": rejected, "failed": failed },
            "figures": figures,
            "audited_blocks": self.audited_blocks,
            "quarantined_blocks": self.quarantined,
            "ucx": self.ucx.to_string(),
            "outcome": outcome,
        })
    }
}

/// The ways that bytes took.
fn routes(routes: &BTreeMap<String, u64>) -> String {
    let all: u64 = routes.values().sum();
    match routes.len() {
        0 => "no route".to_owned(),
        1 => routes.keys().map(|route| format!("route {route}")).collect(),
        _ => {
            let share = |bytes: &u64| 100.0 * *bytes as f64 / all as f64;
            let routes = routes.iter().map(|(route, bytes)| format!("{route} {:.0} %", share(bytes)));
            format!("routes {}", routes.collect::<Vec<_>>().join(", "))
        }
    }
}

/// Bytes in units of 1000, as speeds are.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{bytes} B"),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_missing_is_told() {
        let account = Account { done: 2, rejected: 1, failed: 1 };
        let ucx = Version { major: 1, minor: 13, release: 1 };
        let report = |requests| Report {
            ucx,
            account,
            requests,
            figures: Figures::default(),
            quarantined: 3,
            audited_blocks: None,
        };
        assert!(report(4).is_complete() && !report(5).is_complete());
        let last = "requests  4: 2 done, 1 rejected as longer than the pool, 1 failed: all accounted for";
        assert!(report(4).text().ends_with(last), "{}", report(4).text());
        assert!(report(5).text().ends_with("SOME UNACCOUNTED FOR"));
        assert!(report(4).text().contains("lost      room for 3 blocks"));
    }
}
