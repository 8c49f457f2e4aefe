//! The process that writes, and measures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_wire::{EndpointId, Event, Prepared, Region, RemoteRegion, TransferId, TransferStats};
use serde_json::json;

use crate::ask::{ACKNOWLEDGED, ARRIVED, Answer, Ask, Error, Target};
use crate::end::{End, Way};
use crate::job::Job;
use crate::pattern;
use crate::stages::{self, mark};
use crate::{Arguments, Without};

const DEADLINE: Duration = Duration::from_secs(30);

/// Rounds before those that count.
const WARM_UP: usize = 2;

/// Jobs of fewer bytes are over in microseconds.
const SHORT_BYTES: u64 = 64 << 20;

/// A way, connected.
struct Lane {
    name: String,
    end: End,
    local: Region,
    endpoint: EndpointId,
    remote: RemoteRegion,
    /// Parts are made anew for each transfer.
    plain: bool,
    /// The parts of the job at hand, prepared.
    prepared: Option<Prepared>,
    figures: Vec<Figure>,
}

/// One round.
#[derive(Clone, Copy)]
struct Figure {
    bind: Duration,
    post: Duration,
    whole: Duration,
    stats: TransferStats,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let total_bytes = arguments.total_mb << 20;
    let mut jobs = Vec::new();
    for name in &arguments.jobs {
        jobs.push((name.as_str(), Job::parse(name, total_bytes)?));
    }
    let source_bytes = jobs.iter().map(|(_, job)| job.source_bytes).max().ok_or("no jobs")?;
    let target_bytes = jobs.iter().map(|(_, job)| job.target_bytes).max().ok_or("no jobs")?;
    let mut target = Target::start()?;
    let Answer::Opened { address, epoch, card } = target.ask(&Ask::Open { bytes: target_bytes })? else {
        return Err("no card".into());
    };
    let mut lanes: Vec<Lane> = Vec::new();
    let has_gpu = arguments.without != Some(Without::Source);
    for (index, name) in arguments.ways.iter().enumerate() {
        let end = End::open(arguments, has_gpu.then_some(arguments.from), &Way::parse(name)?, 10 + index as u64)?;
        let local = match lanes.first().filter(|_| has_gpu) {
            None => {
                let pool = end.pool(source_bytes)?;
                pattern::fill(&pool, source_bytes)?;
                pool
            }
            // SAFETY: the region is memory of this GPU, and is held.
            Some(first) => unsafe {
                let owner = Arc::new(first.local.clone());
                end.context.register_device(first.local.base(), source_bytes, owner)?
            },
        };
        let endpoint = end.worker.connect(&address, epoch)?;
        let start = Instant::now();
        let remote = end.worker.import(endpoint, &card)?;
        eprintln!("{name}: the pool of {target_bytes} B is imported in {:?}", start.elapsed());
        let connect = Ask::Connect { address: end.worker.address().to_owned(), epoch: end.worker.epoch() };
        target.ask(&connect)?;
        lanes.push(Lane {
            name: name.clone(),
            end,
            local,
            endpoint,
            remote,
            plain: arguments.plain,
            prepared: None,
            figures: Vec::new(),
        });
    }
    let first = lanes.first().ok_or("no ways")?;
    let gpu = first.end.context.gpu_memory()?.map_or("none".to_owned(), |(name, ..)| name);
    let ucx = first.end.context.ucx_version();
    let without = match arguments.without {
        None => "",
        Some(Without::Source) => ", the source without a GPU",
        Some(Without::Target) => ", the target without a GPU",
    };
    eprintln!("{gpu}, from device {} to {}{without}, UCX {ucx}", arguments.from, arguments.to);
    eprintln!("{:>10} {:>12} {:>9} | GB/s median (least, most), us: bind, post, whole p50, p99", "job", "way", "MB");
    for (name, job) in &mut jobs {
        let short = job.bytes < SHORT_BYTES;
        for lane in &mut lanes {
            let parts = job.bind(&lane.local, lane.remote)?;
            lane.prepared = Some(lane.end.worker.prepare(lane.endpoint, parts)?);
        }
        let rounds = if short { arguments.short_rounds } else { arguments.rounds };
        for round in 0..WARM_UP + rounds {
            for lane in &mut lanes {
                let last = round + 1 == WARM_UP + rounds;
                if last {
                    target.ask(&Ask::Scrub { bytes: job.target_bytes })?;
                }
                let figure = lane.round(job, round as u64)?;
                if last {
                    let check = Ask::Check { job: (*name).to_owned(), total_bytes };
                    let Answer::Checked { wrong } = target.ask(&check)? else { return Err("no check".into()) };
                    if let Some(byte) = wrong {
                        return Err(format!("{name}, {}: byte {byte} of the target is wrong", lane.name).into());
                    }
                }
                if round >= WARM_UP {
                    lane.figures.push(figure);
                }
            }
        }
        if arguments.stages {
            stages::take(&format!("{name}, source"));
            target.ask(&Ask::Stages { heading: format!("{name}, target") })?;
        }
        for lane in &mut lanes {
            lane.report(arguments, name, job, &gpu, &ucx.to_string());
        }
    }
    Ok(())
}

impl Lane {
    fn round(&self, job: &mut Job, round: u64) -> Result<Figure, Error> {
        mark!("start");
        let start = Instant::now();
        let (worker, transfer, payload) = (&self.end.worker, TransferId(round), round.to_le_bytes().to_vec());
        let slots = if self.plain { None } else { job.bind_slots()? };
        let bound;
        match slots.zip(self.prepared.as_ref()) {
            Some((sets, prepared)) => {
                bound = start.elapsed();
                mark!("bound");
                worker.put_prepared(transfer, prepared, sets, Some((ARRIVED, payload)))?;
            }
            None => {
                let parts = job.bind(&self.local, self.remote)?;
                bound = start.elapsed();
                mark!("bound");
                worker.put_then_send(self.endpoint, transfer, parts, ARRIVED, payload)?;
            }
        }
        let posted = start.elapsed();
        mark!("posted");
        let mut stats = None;
        loop {
            match self.end.next(start + DEADLINE)? {
                Event::TransferDone { result, .. } => stats = Some(result?),
                Event::Frame(frame) if frame.kind == ACKNOWLEDGED && frame.payload == round.to_le_bytes() => break,
                Event::EndpointFailed { status, .. } => return Err(format!("the endpoint failed: {status}").into()),
                _ => {}
            }
        }
        let whole = start.elapsed();
        mark!("acknowledged");
        // The event of the end comes before the answer to the frame behind it.
        let stats = stats.ok_or("acknowledged before it ended")?;
        Ok(Figure { bind: bound, post: posted - bound, whole, stats })
    }

    fn report(&mut self, arguments: &Arguments, name: &str, job: &Job, gpu: &str, ucx: &str) {
        let figures = std::mem::take(&mut self.figures);
        let us = |of: fn(&Figure) -> Duration| {
            let mut times: Vec<f64> = figures.iter().map(|figure| of(figure).as_secs_f64() * 1e6).collect();
            times.sort_by(f64::total_cmp);
            times
        };
        let (bind, post, whole) = (us(|f| f.bind), us(|f| f.post), us(|f| f.whole));
        let inner = us(|f| f.stats.elapsed);
        let at = |times: &[f64], share: usize| times[(times.len() - 1) * share / 100];
        let gbps = |us: f64| job.bytes as f64 / us / 1e3;
        let (median, slowest, fastest) = (at(&whole, 50), at(&whole, 100), at(&whole, 0));
        let reason = figures.first().map(|figure| figure.stats.reason.to_string());
        eprintln!(
            "{name:>10} {:>12} {:>9.1} | {:6.1} ({:.1}, {:.1}), {:.1}, {:.1}, {median:.1}, {:.1}",
            self.name,
            job.bytes as f64 / 1e6,
            gbps(median),
            gbps(slowest),
            gbps(fastest),
            at(&bind, 50),
            at(&post, 50),
            at(&whole, 99),
        );
        let line = json!({
            "engine": "kvferry", "job": name, "way": self.name, "reason": reason, "bytes": job.bytes, "runs": job.runs,
            "gbps": gbps(median), "gbps_least": gbps(slowest), "gbps_most": gbps(fastest), "bind_us": at(&bind, 50),
            "post_us": at(&post, 50), "post_p99_us": at(&post, 99), "whole_us": median, "whole_p99_us": at(&whole, 99),
            "transfer_us": at(&inner, 50), "rounds": figures.len(), "verified": true, "gpu": gpu, "ucx": ucx,
            "from": arguments.from, "to": arguments.to, "without": arguments.without.map(|side| format!("{side:?}")), "slab_mb": arguments.slab_mb, "chunk_mb": arguments.chunk_mb,
        });
        println!("{line}");
    }
}
