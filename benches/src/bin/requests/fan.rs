//! One rank that sends to four at once, with one progress thread and with several, in turn.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvferry::{Engine, EngineOptions, InstanceCard, Link, Receive, RequestKey};
use kvferry_layout::{Dtype, GroupKind, GroupSpec, Layer, LayerMask, RankSpec, Role, RowSpec, block_major};
use kvferry_wire::Route;
use serde::{Deserialize, Serialize};

use crate::pair::{BLOCK_TOKENS, PATIENCE, hear, map, tell};

/// Ranks that are sent to: each gets one head of four.
const RANKS: u32 = 4;

/// Bytes of a token and head; those of a block lie together.
const CELL: u32 = 4096;

/// Blocks of the request, 256 KiB each with all heads.
const BLOCKS: u32 = 1024;

const BYTES: u64 = BLOCKS as u64 * BLOCK_TOKENS * RANKS as u64 * CELL as u64;

const ROUNDS: usize = 15;

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Start { rank: u32, transports: String, route: Option<Route> },
    Connect { source: Vec<u8>, destinations: Vec<Vec<u8>> },
    Receive { request: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Card(Vec<u8>),
    Done,
}

/// Sends the request in turn with each number of workers, and prints what was moved in a second.
pub(crate) fn run(transports: &str, route: Option<Route>, workers: &[usize]) -> Result<(), Box<dyn Error>> {
    let mut fans = Vec::new();
    for workers in workers {
        let mut fan = Fan::start(transports, route, *workers)?;
        fan.request()?; // page faults of pools that have just been mapped
        fans.push((*workers, fan, Vec::new()));
    }
    for _ in 0..ROUNDS {
        for (_, fan, rounds) in &mut fans {
            rounds.push(fan.request()?);
        }
    }
    let mut first = None;
    for (workers, fan, rounds) in &mut fans {
        rounds.sort();
        let rate = |round: usize| BYTES as f64 / rounds[round].as_secs_f64() / 1e9;
        let median = rate(ROUNDS / 2);
        println!(
            "{workers} workers to {RANKS} ranks, UCX {}, {transports}, {}: {median:.2} GB/s (least {:.2}, most {:.2}), {:.2} of the \
             first",
            fan.engine.ucx_version(),
            fan.routes,
            rate(ROUNDS - 1),
            rate(0),
            median / *first.get_or_insert(median),
        );
    }
    Ok(())
}

fn engine(of: &str, rank: u32, options: impl FnOnce(EngineOptions) -> EngineOptions) -> Result<Engine, Box<dyn Error>> {
    let engine = Engine::start(options(EngineOptions::new(rank).instance(of).patience(PATIENCE)))?;
    let row = RowSpec::single(Role::Key, Dtype::U8, LayerMask::all(1), RANKS, CELL)?;
    let kind = GroupKind::paged(u32::try_from(BLOCK_TOKENS)?);
    let groups = vec![GroupSpec { kind, slot_count: BLOCKS, pools: vec![vec![row]] }];
    let (tp_rank, tp_size) = if of == "decode" { (rank, RANKS) } else { (0, 1) };
    let mut table = block_major(&RankSpec { hidden_layers: 1, layers: vec![Layer(0)], tp_rank, tp_size, groups })?;
    let regions = engine.allocate(&mut table)?;
    for region in &regions {
        region.write(0, &vec![1; usize::try_from(region.bytes())?])?;
    }
    engine.publish(table, regions)?;
    Ok(engine)
}

fn on(options: EngineOptions, transports: &str, route: Option<Route>) -> EngineOptions {
    let options = if transports == "default" { options } else { options.transports(transports) };
    EngineOptions { route, ..options }
}

/// The rank that sends, and the others in processes of their own.
struct Fan {
    engine: Engine,
    link: Link,
    others: Vec<(Child, ChildStdin, BufReader<ChildStdout>)>,
    next: u64,
    routes: String,
}

impl Fan {
    fn start(transports: &str, route: Option<Route>, workers: usize) -> Result<Self, Box<dyn Error>> {
        let engine = engine("prefill", 0, |options| on(options, transports, route).workers(workers))?;
        let (mut others, mut destinations) = (Vec::new(), Vec::new());
        for rank in 0..RANKS {
            let mut command = Command::new(std::env::current_exe()?);
            let mut child = command.arg("--destination").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let mut input = child.stdin.take().ok_or("no pipe")?;
            let mut output = BufReader::new(child.stdout.take().ok_or("no pipe")?);
            tell(&mut input, &Ask::Start { rank, transports: transports.to_owned(), route })?;
            let Answer::Card(card) = hear(&mut output)? else { return Err("no card".into()) };
            destinations.push(card);
            others.push((child, input, output));
        }
        let source = engine.card().ok_or("no card")?;
        for (_, input, _) in &mut others {
            tell(input, &Ask::Connect { source: source.clone(), destinations: destinations.clone() })?;
        }
        let link = engine.connect(&InstanceCard::new(0..1, [source])?, &InstanceCard::new(0..RANKS, destinations)?)?;
        for (_, _, output) in &mut others {
            hear::<Answer>(output)?;
        }
        Ok(Self { engine, link, others, next: 0, routes: String::new() })
    }

    /// Moves all of it, from the call of `send` to the last destination's word.
    fn request(&mut self) -> Result<Duration, Box<dyn Error>> {
        for (_, input, _) in &mut self.others {
            tell(input, &Ask::Receive { request: self.next })?;
        }
        for (_, _, output) in &mut self.others {
            hear::<Answer>(output)?;
        }
        std::thread::sleep(Duration::from_millis(5)); // until what is wanted has come
        let key = RequestKey { request: self.next, attempt: 0 };
        self.next += 1;
        let start = Instant::now();
        let send = self.engine.send(self.link, key, map(BLOCKS), 0..u64::from(BLOCKS) * BLOCK_TOKENS)?;
        let sent = send.wait(PATIENCE).ok_or("no end")??;
        let elapsed = start.elapsed();
        self.routes =
            sent.iter().flat_map(|sent| &sent.carried).map(|of| of.route.to_string()).next().unwrap_or_default();
        Ok(elapsed)
    }
}

impl Drop for Fan {
    fn drop(&mut self) {
        for (child, ..) in &mut self.others {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// One of the four: receives what it is told to.
pub(crate) fn serve() -> Result<(), Box<dyn Error>> {
    let (mut started, mut link) = (None::<Engine>, None::<Link>);
    let mut receive: Option<Receive> = None;
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Ask::Start { rank, transports, route } => {
                let engine = started.insert(engine("decode", rank, |options| on(options, &transports, route))?);
                Answer::Card(engine.card().ok_or("no card")?)
            }
            Ask::Connect { source, destinations } => {
                let (source, destinations) =
                    (InstanceCard::new(0..1, [source])?, InstanceCard::new(0..RANKS, destinations)?);
                link = Some(started.as_ref().ok_or("not started")?.connect(&source, &destinations)?);
                Answer::Done
            }
            Ask::Receive { request } => {
                if let Some(last) = receive.take() {
                    last.wait(PATIENCE).ok_or("no end")??;
                }
                let (engine, link) = (started.as_ref().ok_or("not started")?, link.ok_or("not connected")?);
                let (key, tokens) = (RequestKey { request, attempt: 0 }, 0..u64::from(BLOCKS) * BLOCK_TOKENS);
                receive = Some(engine.receive(link, key, &map(BLOCKS), tokens)?);
                Answer::Done
            }
        };
        println!("{}", serde_json::to_string(&answer)?);
    }
    Ok(())
}
