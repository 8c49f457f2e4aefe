//! The process that is written to: owns a pool, acknowledges what has arrived, and does what it is asked.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_wire::{EndpointId, Event, Region};

use crate::ask::{ACKNOWLEDGED, ARRIVED, Answer, Ask, Error};
use crate::end::{End, Way};
use crate::job::Job;
use crate::pattern;
use crate::stages::{self, mark};
use crate::{Arguments, Without};

const EPOCH: u64 = 1;

pub(crate) fn serve(arguments: &Arguments) -> Result<(), Error> {
    let end = Arc::new(End::open(
        arguments,
        (arguments.without != Some(Without::Target)).then_some(arguments.to),
        &Way { blocks: arguments.target_blocks, ..Way::default() },
        EPOCH,
    )?);
    let endpoints: Arc<Mutex<BTreeMap<u64, EndpointId>>> = Arc::default();
    let (acknowledging, known) = (end.clone(), endpoints.clone());
    thread::spawn(move || {
        loop {
            let event = acknowledging.next(Instant::now() + Duration::from_secs(3600));
            let Ok(event) = event else { return };
            let Event::Frame(frame) = event else { continue };
            let endpoint = known.lock().expect("no panic under it").get(&frame.source_epoch).copied();
            mark!("frame taken");
            if let Some(endpoint) = endpoint.filter(|_| frame.kind == ARRIVED) {
                let _ = acknowledging.worker.send(endpoint, ACKNOWLEDGED, frame.payload); // else the source times out
            }
        }
    });
    let mut pool: Option<Region> = None;
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Ask::Open { bytes } => {
                let region = pool.insert(end.pool(bytes)?);
                let address = end.worker.address().to_owned();
                Answer::Opened { address, epoch: EPOCH, card: Box::new(region.card()) }
            }
            Ask::Connect { address, epoch } => {
                let endpoint = end.worker.connect(&address, epoch)?;
                endpoints.lock().expect("no panic under it").insert(epoch, endpoint);
                Answer::Done
            }
            Ask::Scrub { bytes } => {
                pattern::scrub(pool.as_ref().ok_or("no pool")?, bytes)?;
                Answer::Done
            }
            Ask::Stages { heading } => {
                stages::take(&heading);
                Answer::Done
            }
            Ask::Check { job, total_bytes } => {
                let job = Job::parse(&job, total_bytes)?;
                Answer::Checked { wrong: pattern::check(pool.as_ref().ok_or("no pool")?, &job)? }
            }
        };
        println!("{}", serde_json::to_string(&answer)?);
        std::io::stdout().flush()?;
    }
    Ok(())
}
