//! One rank: this test binary again, which runs nothing but [`member`]. It is told what to post and says how that ends; which
//! slots a request has is its own affair, and it checks them itself.

use std::time::Duration;

use crossbeam::channel::{self, RecvTimeoutError};
use kvferry::{InstanceCard, Link, Outcome, Receive, RequestKey, Send};
use kvferry_match::Side;
use kvferry_test_process::{asked, footprint, say, setup};
use serde::{Deserialize, Serialize};

use crate::pool::{Pool, RANKS, map, tokens};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) source: bool,
    pub(crate) rank: u32,
    pub(crate) transports: Option<String>,
    pub(crate) patience: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    Connect { sources: Vec<Vec<u8>>, destinations: Vec<Vec<u8>> },
    Post { key: RequestKey, blocks: usize },
    Cancel { key: RequestKey },
    Report,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Said {
    Card {
        card: Vec<u8>,
        epoch: u64,
        /// Its UCX may abort the process if a peer dies in the milliseconds in which it connects: 1.13.
        fragile: bool,
    },
    Connected(Result<(), String>),
    /// A request that was to be posted has ended; each does, once.
    Ended {
        key: RequestKey,
        how: Result<(), String>,
    },
    Report(Report),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Requests that have not ended or whose slots are not quiet.
    pub(crate) open: Vec<RequestKey>,
    /// Slots that are not free.
    pub(crate) slots: usize,
    /// What the engine says of slots that have to wait: for whom, and as text.
    pub(crate) quarantine: Vec<(RequestKey, u64, String)>,
    pub(crate) descriptors: usize,
    pub(crate) resident: u64,
}

enum Transfer {
    Send(Send),
    Receive(Receive),
}

impl Transfer {
    fn ended(&self) -> Option<Result<(), String>> {
        fn plain<R>(outcome: Outcome<R>) -> Result<(), String> {
            outcome.map(|_| ()).map_err(|error| error.to_string())
        }
        match self {
            Self::Send(send) => send.poll().map(plain),
            Self::Receive(receive) => receive.poll().map(plain),
        }
    }

    fn is_quiet(&self) -> bool {
        match self {
            Self::Send(send) => send.poll_quiet().is_ok(),
            Self::Receive(receive) => receive.poll_quiet().is_ok(),
        }
    }

    fn cancel(&self) {
        match self {
            Self::Send(send) => send.cancel(),
            Self::Receive(receive) => receive.cancel(),
        }
    }
}

struct Request {
    key: RequestKey,
    slots: Vec<u32>,
    transfer: Transfer,
    told: bool,
}

struct Serving {
    pool: Pool,
    link: Option<Link>,
    requests: Vec<Request>,
}

impl Serving {
    fn hear(&mut self, ask: Ask) {
        match ask {
            Ask::Connect { sources, destinations } => {
                let of_all = |cards: Vec<Vec<u8>>| InstanceCard::new(0..RANKS, cards).unwrap();
                let link = self.pool.engine.connect(&of_all(sources), &of_all(destinations));
                say(&Said::Connected(link.as_ref().map(|_| ()).map_err(ToString::to_string)));
                self.link = link.ok();
            }
            Ask::Post { key, blocks } => {
                if let Err(why) = self.post(key, blocks) {
                    say(&Said::Ended { key, how: Err(why) });
                }
            }
            Ask::Cancel { key } => {
                self.requests.iter().filter(|request| request.key == key).for_each(|request| request.transfer.cancel());
            }
            Ask::Report => say(&Said::Report(self.report())),
        }
    }

    fn post(&mut self, key: RequestKey, blocks: usize) -> Result<(), String> {
        let link = self.link.ok_or("not connected")?;
        let slots = self.pool.take(blocks).ok_or("no slots are free")?;
        let (engine, map, tokens) = (&self.pool.engine, map(&slots), tokens(&slots));
        let transfer = match self.pool.side {
            Side::Source => {
                self.pool.fill(key, &slots);
                engine.send(link, key, map, tokens).map(Transfer::Send)
            }
            Side::Destination => engine.receive(link, key, &map, tokens).map(Transfer::Receive),
        };
        match transfer {
            Ok(transfer) => {
                self.requests.push(Request { key, slots, transfer, told: false });
                Ok(())
            }
            Err(error) => {
                self.pool.give_back(slots);
                Err(error.to_string())
            }
        }
    }

    fn look(&mut self) {
        let pool = &mut self.pool;
        self.requests.retain_mut(|request| {
            if !request.told
                && let Some(how) = request.transfer.ended()
            {
                if pool.side == Side::Destination && how.is_ok() {
                    pool.check(request.key, &request.slots);
                }
                say(&Said::Ended { key: request.key, how });
                request.told = true;
            }
            let over = request.told && request.transfer.is_quiet();
            if over {
                // Of a source too: what were read from now on would arrive as something else.
                pool.give_back(std::mem::take(&mut request.slots));
            }
            !over
        });
    }

    fn report(&self) -> Report {
        let (descriptors, resident) = footprint();
        let quarantine = self.pool.engine.quarantine();
        Report {
            open: self.requests.iter().map(|request| request.key).collect(),
            slots: self.pool.check_free(),
            quarantine: quarantine.iter().map(|entry| (entry.key, entry.epoch, entry.to_string())).collect(),
            descriptors,
            resident,
        }
    }
}

#[test]
#[ignore = "one rank of the test here; does nothing by itself"]
fn member() {
    let Some(Setup { source, rank, transports, patience }) = setup() else { return };
    let side = if source { Side::Source } else { Side::Destination };
    let pool = Pool::start(side, rank, transports, patience);
    let (version, epoch) = (pool.engine.ucx_version(), pool.engine.epoch());
    let fragile = (version.major, version.minor) < (1, 14);
    say(&Said::Card { card: pool.engine.card().unwrap(), epoch, fragile });
    let mut serving = Serving { pool, link: None, requests: Vec::new() };
    let (to_main, asks) = channel::unbounded();
    std::thread::spawn(move || {
        asked().for_each(|ask| drop(to_main.send(ask))); // nobody listens: this process ends
    });
    loop {
        match asks.recv_timeout(Duration::from_millis(2)) {
            Ok(ask) => serving.hear(ask),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        serving.look();
    }
}
