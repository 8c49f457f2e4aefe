//! The destination, and the other process on a pipe.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvferry::{Engine, EngineOptions, InstanceCard, Link, Receive, RequestKey};
use kvferry_layout::{
    Dtype, GroupKind, GroupSpec, Layer, LayerMask, MemoryKind, PageTable, Pooling, RankSpec, Role, RowSpec, Slot,
    Storage, lay_out,
};
use kvferry_match::BlockMap;
use kvferry_wire::CudaOptions;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Tokens of a block.
pub(crate) const BLOCK_TOKENS: u64 = 16;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    Start {
        transports: String,
        verify: bool,
        pools: Pools,
    },
    Connect {
        source: Vec<u8>,
        destination: Vec<u8>,
    },
    /// Send requests `first..first + count` of `blocks` blocks, one after the other or, if `wait` is given, with a pause in
    /// front of each.
    Send {
        first: u64,
        count: u64,
        blocks: u32,
        pause_us: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Card(Vec<u8>),
    Done,
}

/// The pools of a side.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Pools {
    pub(crate) slots: u32,
    pub(crate) slot_bytes: u64,
    pub(crate) count: u32,
    /// On the first GPU.
    pub(crate) cuda: bool,
}

impl Pools {
    /// One in host memory.
    pub(crate) fn of_host(slots: u32, slot_bytes: u64) -> Self {
        Self { slots, slot_bytes, count: 1, cuda: false }
    }
}

/// A pool a layer.
fn table(pools: Pools) -> Result<PageTable, Box<dyn Error>> {
    let Pools { slots, slot_bytes, count, cuda } = pools;
    let cell = u32::try_from(slot_bytes / BLOCK_TOKENS)?;
    let row = RowSpec::single(Role::Key, Dtype::U8, LayerMask::all(count), 1, cell)?;
    let kind = GroupKind::paged(u32::try_from(BLOCK_TOKENS)?);
    let groups = vec![GroupSpec { kind, slot_count: slots, pools: vec![vec![row]] }];
    let layers = (0..count).map(Layer).collect();
    let rank = RankSpec { hidden_layers: count, layers, tp_rank: 0, tp_size: 1, groups };
    let mut table = lay_out(&rank, Storage { pooling: Pooling::LayerSplit, ..Storage::default() })?;
    if cuda {
        table.pools.iter_mut().for_each(|pool| pool.memory = MemoryKind::Cuda { device: 0 });
    }
    Ok(table)
}

pub(crate) fn engine(transports: &str, verify: bool, pools: Pools) -> Result<Engine, Box<dyn Error>> {
    let options = EngineOptions::new(0).patience(PATIENCE).verify(verify);
    let options = if transports == "default" { options } else { options.transports(transports) };
    let engine = if pools.cuda { Engine::start_on_gpu(options, CudaOptions::new(0))? } else { Engine::start(options)? };
    let mut table = table(pools)?;
    let regions = engine.allocate(&mut table)?;
    for region in &regions {
        region.write(0, &vec![1; usize::try_from(region.bytes())?])?;
    }
    engine.publish(table, regions)?;
    Ok(engine)
}

/// Nanoseconds of the clock that both processes read.
pub(crate) fn clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

pub(crate) fn map(blocks: u32) -> Vec<BlockMap> {
    vec![BlockMap::dense(0, (0..blocks).map(Slot))]
}

pub(crate) struct Pair {
    engine: Engine,
    link: Link,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    next: u64,
    held: Vec<Receive>,
}

impl Pair {
    pub(crate) fn start(transports: &str, verify: bool, pools: Pools) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.arg("--source").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (child.stdin.take().ok_or("no pipe")?, child.stdout.take().ok_or("no pipe")?);
        let (mut input, mut output) = (input, BufReader::new(output));
        let engine = engine(transports, verify, pools)?;
        tell(&mut input, &Ask::Start { transports: transports.to_owned(), verify, pools })?;
        let Answer::Card(source) = hear(&mut output)? else { return Err("no card".into()) };
        let destination = engine.card().ok_or("no card")?;
        tell(&mut input, &Ask::Connect { source: source.clone(), destination: destination.clone() })?;
        let link = engine.connect(&InstanceCard::new(0..1, [source])?, &InstanceCard::new(0..1, [destination])?)?;
        hear::<Answer>(&mut output)?;
        Ok(Self { engine, link, child, input, output, next: 0, held: Vec::new() })
    }

    pub(crate) fn ucx_version(&self) -> String {
        self.engine.ucx_version().to_string()
    }

    fn receive(&mut self, blocks: u32) -> Result<Receive, Box<dyn Error>> {
        let key = RequestKey { request: self.next, attempt: 0 };
        self.next += 1;
        Ok(self.engine.receive(self.link, key, &map(blocks), 0..u64::from(blocks) * BLOCK_TOKENS)?)
    }

    /// One request at a time: from `send` until the receiver knows.
    pub(crate) fn latencies(
        &mut self,
        count: usize,
        pause_us: u64,
        spin: bool,
    ) -> Result<Vec<Duration>, Box<dyn Error>> {
        let first = self.next;
        let ask = Ask::Send { first, count: count as u64, blocks: 1, pause_us };
        let mut latencies = Vec::with_capacity(count);
        let mut receive = self.receive(1)?;
        tell(&mut self.input, &ask)?;
        for left in (0..count).rev() {
            let outcome = if spin {
                loop {
                    if let Some(outcome) = receive.poll() {
                        break outcome;
                    }
                    std::hint::spin_loop();
                }
            } else {
                receive.wait(PATIENCE).ok_or("no end")?
            };
            let now = clock();
            let received = outcome?;
            let sent = u64::from_le_bytes(received[0].note[..8].try_into()?);
            latencies.push(Duration::from_nanos(now.saturating_sub(sent)));
            if left > 0 {
                receive = self.receive(1)?;
            }
        }
        hear::<Answer>(&mut self.output)?;
        Ok(latencies)
    }

    /// Receives that nobody serves, on top of those that there are.
    pub(crate) fn hold(&mut self, count: usize) -> Result<(), Box<dyn Error>> {
        for _ in 0..count {
            let held = self.receive(1)?;
            self.held.push(held);
        }
        Ok(())
    }

    /// As many requests as there are, one after the other from both ends' view, all posted at first.
    pub(crate) fn throughput(&mut self, count: usize) -> Result<Duration, Box<dyn Error>> {
        let (first, start) = (self.next, Instant::now());
        // A few at a time, so that what is in flight is what is held.
        for batch in 0..count / 10 {
            let receives = (0..10).map(|_| self.receive(1)).collect::<Result<Vec<_>, _>>()?;
            tell(&mut self.input, &Ask::Send { first: first + batch as u64 * 10, count: 10, blocks: 1, pause_us: 0 })?;
            for receive in receives {
                receive.wait(PATIENCE).ok_or("no end")??;
            }
            hear::<Answer>(&mut self.output)?;
        }
        Ok(start.elapsed())
    }

    /// One large request.
    pub(crate) fn large(&mut self, blocks: u32) -> Result<Duration, Box<dyn Error>> {
        let first = self.next;
        let receive = self.receive(blocks)?;
        std::thread::sleep(Duration::from_millis(5));
        let start = Instant::now();
        tell(&mut self.input, &Ask::Send { first, count: 1, blocks, pause_us: 0 })?;
        receive.wait(PATIENCE).ok_or("no end")??;
        let elapsed = start.elapsed();
        hear::<Answer>(&mut self.output)?;
        Ok(elapsed)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn tell(input: &mut impl Write, ask: &impl Serialize) -> Result<(), Box<dyn Error>> {
    writeln!(input, "{}", serde_json::to_string(ask)?)?;
    Ok(input.flush()?)
}

pub(crate) fn hear<A: DeserializeOwned>(output: &mut impl BufRead) -> Result<A, Box<dyn Error>> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
