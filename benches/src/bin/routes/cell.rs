//! One size, all ways in turn.

use std::time::Instant;

use kvferry_wire::{RemoteRegion, SlotPair, TransferStats};

use crate::Arguments;
use crate::ask::{Answer, Ask, Blocks, Error, Pool};
use crate::end;
use crate::memory;
use crate::order;
use crate::pattern;
use crate::target::cpu_seconds;
use crate::ways::{By, Source, Way};

/// What one way made of one size.
pub(crate) struct Measured {
    /// Of the very first round.
    pub(crate) first_seconds: f64,
    pub(crate) seconds: Vec<f64>,
    pub(crate) cpu_seconds: f64,
    pub(crate) stats: Option<TransferStats>,
    pub(crate) right: bool,
}

impl Measured {
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }

    pub(crate) fn best(&self) -> f64 {
        self.seconds.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(crate) fn worst(&self) -> f64 {
        self.seconds.iter().copied().fold(0.0, f64::max)
    }
}

/// Runs `warmup + rounds` rounds of all ways, in turn.
pub(crate) fn measure(
    arguments: &Arguments,
    source: &mut Source,
    ways: &[Way],
    blocks: &Blocks,
    warmup: usize,
    rounds: usize,
) -> Result<Vec<Measured>, Error> {
    let bytes = blocks.size * blocks.pool_blocks;
    let from = order::blocks(blocks.order, blocks.pool_blocks, blocks.count, blocks.seed);
    let to = order::blocks(blocks.order, blocks.pool_blocks, blocks.count, blocks.seed + 1);
    let pairs = order::pairs(blocks);
    pattern::fill(&source.pool, blocks.size, blocks.pool_blocks)?;
    let new =
        |_: &Way| Measured { first_seconds: 0.0, seconds: Vec::new(), cpu_seconds: 0.0, stats: None, right: true };
    let mut measured: Vec<Measured> = ways.iter().map(new).collect();
    for round in 0..warmup + rounds {
        let tag = 1000 + 2 * round as u64;
        let whole = round == 0 || round + 1 == warmup + rounds;
        pattern::stamp(&source.pool, blocks, tag)?;
        for (way, measured) in ways.iter().zip(&mut measured) {
            source.line(arguments, way.transports, way.by)?; // so that opening it is not measured
            if whole && way.by != By::Copy {
                source.target.ask(&Ask::Scrub { pool: way.pool, bytes })?;
            }
            let cpu = cpu_of_both(source)?;
            let start = Instant::now();
            let stats = go(arguments, source, way, blocks, &from, &to, &pairs)?;
            let seconds = start.elapsed().as_secs_f64();
            let cpu = cpu_of_both(source)? - cpu;
            if whole && way.by != By::Copy {
                let check = Ask::Check { pool: way.pool, blocks: *blocks, tag };
                measured.right &= matches!(source.target.ask(&check)?, Answer::Checked { right: true });
            }
            if round == 0 {
                measured.first_seconds = seconds;
            }
            if round >= warmup {
                measured.seconds.push(seconds);
                measured.cpu_seconds += cpu;
                measured.stats = stats;
            }
        }
    }
    Ok(measured)
}

fn go(
    arguments: &Arguments,
    source: &mut Source,
    way: &Way,
    blocks: &Blocks,
    from: &[u32],
    to: &[u32],
    pairs: &[SlotPair],
) -> Result<Option<TransferStats>, Error> {
    let size = blocks.size;
    match way.by {
        By::Copy => {
            source.copy.copy_pieces(&source.pool, size, from, to);
            Ok(None)
        }
        By::Writev => {
            let Answer::Where { process, address } = source.target.ask(&Ask::Where { pool: way.pool })? else {
                return Err("the target did not say where".into());
            };
            memory::write_pieces(process, &source.pool, address, size, from, to)?;
            Ok(None)
        }
        By::Both | By::Pulled => {
            let transports = way.transports.map(str::to_owned);
            let from = if way.by == By::Both { pairs.len() / 2 } else { 0 };
            source.target.tell(&Ask::Pull { transports, blocks: *blocks, from })?;
            let line = source.line(arguments, way.transports, way.by)?;
            let part = end::blocks(&line.local, line.allocated, size, pairs[..from].to_vec());
            let stats = line.end.put(line.endpoint, part)?;
            let Answer::Done = source.target.hear()? else { return Err("the target did not pull".into()) };
            Ok((from > 0).then_some(stats))
        }
        By::TwoThreads | By::Route(_) => {
            let line = source.line(arguments, way.transports, way.by)?;
            let remote: RemoteRegion = if way.pool == Pool::Callers { line.callers } else { line.allocated };
            let part = end::blocks(&line.local, remote, size, pairs.to_vec());
            line.end.put(line.endpoint, part).map(Some)
        }
    }
}

fn cpu_of_both(source: &mut Source) -> Result<f64, Error> {
    match source.target.ask(&Ask::Cpu)? {
        Answer::Cpu { seconds } => Ok(seconds + cpu_seconds()),
        _ => Err("the target did not say its CPU time".into()),
    }
}
