//! The other process: sends what it is told to.

use std::error::Error;
use std::io::BufRead;
use std::time::{Duration, Instant};

use kvferry::{Engine, InstanceCard, Link, PartSpec, Ready, RequestKey};

use crate::pair::{Answer, Ask, BLOCK_TOKENS, PATIENCE, clock, engine, map};

pub(crate) fn serve() -> Result<(), Box<dyn Error>> {
    let mut started: Option<Engine> = None;
    let mut link: Option<Link> = None;
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Ask::Start { transports, verify, pools } => {
                let engine = started.insert(engine(&transports, verify, pools)?);
                Answer::Card(engine.card().ok_or("no card")?)
            }
            Ask::Connect { source, destination } => {
                let [source, destination] = [source, destination].map(|card| InstanceCard::new(0..1, [card]));
                link = Some(started.as_ref().ok_or("not started")?.connect(&source?, &destination?)?);
                Answer::Done
            }
            Ask::Send { first, count, blocks, pause_us } => {
                let (engine, link) = (started.as_ref().ok_or("not started")?, link.ok_or("not connected")?);
                for request in first..first + count {
                    send(engine, link, request, blocks, pause_us)?;
                }
                Answer::Done
            }
        };
        println!("{}", serde_json::to_string(&answer)?);
    }
    Ok(())
}

fn send(engine: &Engine, link: Link, request: u64, blocks: u32, pause_us: u64) -> Result<(), Box<dyn Error>> {
    // Until the receive of it is here, and as long as a model computes at the least.
    let start = Instant::now();
    while start.elapsed() < Duration::from_micros(pause_us) {
        if pause_us > 100 {
            std::thread::sleep(Duration::from_micros(50));
        } else {
            std::thread::yield_now();
        }
    }
    let (key, tokens) = (RequestKey { request, attempt: 0 }, 0..u64::from(blocks) * BLOCK_TOKENS);
    let sent = clock();
    let send = engine.send_in_parts(link, key, map(blocks), tokens.clone())?;
    let note = sent.to_le_bytes().to_vec();
    send.push(PartSpec { tokens, note, ..PartSpec::default() }, Ready::now())?;
    send.wait(PATIENCE).ok_or("no end")??;
    Ok(())
}
