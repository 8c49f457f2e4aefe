//! The workers of the process, and what is under way between them. Nothing here calls the program.
#![allow(unsafe_code, reason = "reads and writes the memory that operations name")]

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::ptr;

use rustix::event::{EventfdFlags, eventfd};
use ucx_sys::{Status, ucp_err_handler_cb_t};

use crate::request::{Call, Callback, Request};
use crate::script::{Act, Fault, Script, scramble};

/// Turns of a worker for which a completed put is not there unless a flush asks for it.
const UNFLUSHED_TURNS: u64 = 50;

/// Longest put that goes as one part.
const WHOLE_BYTES_MAX: u64 = 4096;

/// Turns after which a message that nothing overtakes arrives all the same.
const OVERTAKEN_TURNS: u64 = 400;

#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) script: Script,
    /// What the program did and must not do.
    pub(crate) violations: Vec<String>,
    /// Puts under way on endpoints that were closed.
    pub(crate) cut_puts: usize,
    next: u64,
    created: usize,
    memories: BTreeMap<u64, Memory>,
    keys: BTreeMap<u64, Key>,
    workers: BTreeMap<u64, Worker>,
    endpoints: BTreeMap<u64, Endpoint>,
    requests: BTreeMap<u64, Request>,
    messages: BTreeMap<u64, Message>,
}

#[derive(Clone, Copy, Debug)]
struct Memory {
    base: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Key {
    endpoint: u64,
    memory: u64,
}

#[derive(Debug)]
struct Worker {
    name: usize,
    event: OwnedFd,
    dead: bool,
    turn: u64,
    counts: [u64; 4],
    inbox: VecDeque<Message>,
    receiving: Vec<Receiving>,
    /// What closed endpoints leave behind: requests with their ends, and puts that still land.
    ended: Vec<(u64, Status)>,
    adrift: Vec<Landing>,
}

#[derive(Clone, Debug)]
struct Message {
    tag: u64,
    bytes: Vec<u8>,
    /// The rest of it never comes.
    torn: bool,
}

#[derive(Debug)]
struct Receiving {
    request: u64,
    to: u64,
    bytes: Vec<u8>,
    status: Status,
}

#[derive(Debug)]
struct Endpoint {
    worker: u64,
    peer: u64,
    on_failure: (ucp_err_handler_cb_t, usize),
    failure: Option<Status>,
    told: bool,
    sends: VecDeque<Outgoing>,
    overtaken: Option<Outgoing>,
    /// Requests that only wait for their turn, with their ends.
    ending: Vec<(u64, Status)>,
    copies: Vec<Copy>,
    landings: Vec<Landing>,
    flushes: Vec<Flush>,
}

#[derive(Debug)]
struct Outgoing {
    message: Message,
    due: u64,
    serial: u64,
}

/// A put or a get that has not completed.
#[derive(Debug)]
struct Copy {
    request: Option<u64>,
    get: bool,
    local: (u64, u64),
    remote: u64,
    memory: u64,
    bytes: u64,
    due: u64,
    serial: u64,
}

/// A put that has completed and is not there yet.
#[derive(Debug)]
struct Landing {
    bytes: Vec<u8>,
    to: u64,
    memory: u64,
    due: u64,
    serial: u64,
}

#[derive(Debug)]
struct Flush {
    request: u64,
    serial: u64,
}

/// What an operation is answered with.
pub(crate) enum Start {
    Now(Status),
    Request(u64),
}

/// What a put or a get names.
pub(crate) struct Range {
    pub(crate) local_memory: u64,
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) key: u64,
    pub(crate) bytes: u64,
}

impl World {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Starts a script. Workers that there are already go on, out of its reach.
    pub(crate) fn play(&mut self, script: Script) {
        self.script = script;
        self.created = 0;
        self.violations.clear();
        self.cut_puts = 0;
        self.workers.values_mut().for_each(|worker| worker.name = usize::MAX);
    }

    fn violation(&mut self, what: impl Into<String>) {
        self.violations.push(what.into());
    }

    pub(crate) fn register(&mut self, base: u64, bytes: u64) -> u64 {
        let number = self.number();
        self.memories.insert(number, Memory { base, bytes });
        number
    }

    pub(crate) fn unregister(&mut self, memory: u64) {
        let used = self.endpoints.values().flat_map(|endpoint| &endpoint.copies).any(|copy| copy.local.1 == memory);
        if self.memories.remove(&memory).is_none() || used {
            self.violation("memory is unregistered twice, or under an operation");
        }
    }

    pub(crate) fn create_worker(&mut self) -> Option<u64> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        let (number, name) = (self.number(), self.created);
        self.created += 1;
        let worker = Worker {
            name,
            event,
            dead: false,
            turn: 0,
            counts: [0; 4],
            inbox: VecDeque::new(),
            receiving: Vec::new(),
            ended: Vec::new(),
            adrift: Vec::new(),
        };
        self.workers.insert(number, worker);
        Some(number)
    }

    pub(crate) fn destroy_worker(&mut self, worker: u64) {
        if self.workers.remove(&worker).is_none() || self.endpoints.values().any(|endpoint| endpoint.worker == worker) {
            self.violation("a worker is destroyed twice, or before its endpoints");
        }
        self.fail_endpoints_to(worker);
    }

    pub(crate) fn event(&self, worker: u64) -> Option<&OwnedFd> {
        self.workers.get(&worker).map(|worker| &worker.event)
    }

    fn signal(&self, worker: u64) {
        if let Some(event) = self.event(worker) {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes()); // a full counter is a signal too
        }
    }

    /// Neither says nor hears anything any more. Its program, which there is, finds all of its endpoints failed.
    fn kill(&mut self, worker: u64) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.dead = true;
            worker.inbox.clear();
        }
        for endpoint in self.endpoints.values_mut().filter(|endpoint| endpoint.worker == worker) {
            endpoint.failure.get_or_insert(Status::ERR_CONNECTION_RESET);
        }
        self.signal(worker);
        self.fail_endpoints_to(worker);
    }

    fn fail_endpoints_to(&mut self, peer: u64) {
        let mut owners = Vec::new();
        for endpoint in self.endpoints.values_mut().filter(|endpoint| endpoint.peer == peer) {
            endpoint.failure.get_or_insert(Status::ERR_CONNECTION_RESET);
            owners.push(endpoint.worker);
        }
        owners.into_iter().for_each(|owner| self.signal(owner));
    }

    pub(crate) fn connect(&mut self, worker: u64, peer: u64, on_failure: (ucp_err_handler_cb_t, usize)) -> u64 {
        let number = self.number();
        let alive = [worker, peer].iter().all(|end| self.workers.get(end).is_some_and(|end| !end.dead));
        let endpoint = Endpoint {
            worker,
            peer,
            on_failure,
            failure: (!alive).then_some(Status::ERR_UNREACHABLE),
            told: false,
            sends: VecDeque::new(),
            overtaken: None,
            ending: Vec::new(),
            copies: Vec::new(),
            landings: Vec::new(),
            flushes: Vec::new(),
        };
        self.endpoints.insert(number, endpoint);
        number
    }

    pub(crate) fn unpack(&mut self, endpoint: u64, memory: u64) -> u64 {
        let number = self.number();
        self.keys.insert(number, Key { endpoint, memory });
        number
    }

    pub(crate) fn destroy_key(&mut self, key: u64) {
        let key = self.keys.remove(&key);
        let endpoint = key.and_then(|key| self.endpoints.get(&key.endpoint).map(|endpoint| (key, endpoint)));
        let used = endpoint.is_some_and(|(key, endpoint)| endpoint.copies.iter().any(|copy| copy.memory == key.memory));
        if key.is_none() || used {
            self.violation("a key is destroyed twice, or under an operation");
        }
    }

    /// Counts an operation of an endpoint, and draws its fate: the fault, the turn it is at, a serial number, and whether it
    /// completes in its call. An error if the endpoint takes none.
    fn begin(&mut self, endpoint: u64, act: Act) -> Result<(Option<Fault>, u64, u64, bool), Status> {
        let serial = self.number();
        let Some(known) = self.endpoints.get(&endpoint) else {
            self.violation("an operation on an endpoint that is closed");
            return Err(Status::ERR_INVALID_PARAM);
        };
        if let Some(failure) = known.failure {
            return Err(failure);
        }
        let (peer, worker) = (known.peer, known.worker);
        let Some(worker) = self.workers.get_mut(&worker) else { return Err(Status::ERR_INVALID_PARAM) };
        let nth = worker.counts[act as usize];
        worker.counts[act as usize] += 1;
        let (name, turn) = (worker.name, worker.turn);
        let fault = self.script.fault(name, act, nth);
        match fault {
            Some(Fault::KillPeer) => self.kill(peer),
            Some(Fault::Break(status)) => {
                self.endpoints.get_mut(&endpoint).expect("found above").failure = Some(status);
            }
            _ => {}
        }
        let at_once = scramble(nth ^ (act as u64) << 40).is_multiple_of(2);
        Ok((fault, turn, serial, at_once))
    }

    fn request(&mut self, callback: Option<Callback>) -> u64 {
        let number = self.number();
        self.requests.insert(number, Request { status: None, callback, freed: false });
        number
    }

    /// Answers an operation that needs nothing more than its turn.
    fn end(&mut self, endpoint: u64, at_once: bool, status: Status, callback: Option<Callback>) -> Start {
        if at_once {
            return Start::Now(status);
        }
        let request = self.request(callback);
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            endpoint.ending.push((request, status));
        }
        Start::Request(request)
    }

    pub(crate) fn send(&mut self, endpoint: u64, tag: u64, bytes: Vec<u8>, callback: Option<Callback>) -> Start {
        let mut message = Message { tag, bytes, torn: false };
        let (fault, turn, serial, at_once) = match self.begin(endpoint, Act::Send) {
            Ok(begun) => begun,
            Err(status) => return Start::Now(status),
        };
        let Some(known) = self.endpoints.get_mut(&endpoint) else { return Start::Now(Status::ERR_INVALID_PARAM) };
        let mut due = turn + 1;
        match fault {
            Some(Fault::Fail(status) | Fault::Break(status)) => return self.end(endpoint, at_once, status, callback),
            Some(Fault::Lose | Fault::KillPeer) => return self.end(endpoint, at_once, Status::OK, callback),
            Some(Fault::Overtaken) if known.overtaken.is_none() => {
                known.overtaken = Some(Outgoing { message, due: turn + OVERTAKEN_TURNS, serial });
                return self.end(endpoint, at_once, Status::OK, callback);
            }
            Some(Fault::Double) => {
                known.sends.push_back(Outgoing { message: message.clone(), due, serial });
            }
            Some(Fault::Tear) => message.torn = true,
            Some(Fault::Delay(turns)) => due += turns,
            Some(Fault::Damage(place)) if !message.bytes.is_empty() => {
                let place = place % message.bytes.len();
                message.bytes[place] ^= 1 << (place % 8);
            }
            _ => {}
        }
        known.sends.push_back(Outgoing { message, due, serial });
        self.end(endpoint, at_once, Status::OK, callback)
    }

    pub(crate) fn copy(&mut self, endpoint: u64, get: bool, range: &Range, callback: Option<Callback>) -> Start {
        let act = if get { Act::Get } else { Act::Put };
        let (fault, turn, serial, at_once) = match self.begin(endpoint, act) {
            Ok(begun) => begun,
            Err(status) => return Start::Now(status),
        };
        let local = self.memories.get(&range.local_memory).copied();
        let inside =
            |memory: &Memory| range.local >= memory.base && range.local + range.bytes <= memory.base + memory.bytes;
        let key = self.keys.get(&range.key).copied().filter(|key| key.endpoint == endpoint);
        let (Some(key), true) = (key, local.as_ref().is_some_and(inside)) else {
            self.violation("an operation outside of its local memory, or with a key of another endpoint");
            return Start::Now(Status::ERR_INVALID_PARAM);
        };
        let mut due = turn + 1;
        match fault {
            Some(Fault::Fail(status) | Fault::Break(status)) => return self.end(endpoint, at_once, status, callback),
            Some(Fault::Delay(turns)) => due += turns,
            _ => {}
        }
        let mut copy = Copy {
            request: None,
            get,
            local: (range.local, range.local_memory),
            remote: range.remote,
            memory: key.memory,
            bytes: range.bytes,
            due,
            serial,
        };
        if at_once && fault.is_none() {
            let landing = self.carry_out(&copy, turn);
            if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
                endpoint.landings.extend(landing);
            }
            return Start::Now(Status::OK);
        }
        let request = self.request(callback);
        copy.request = Some(request);
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            endpoint.copies.push(copy);
        }
        Start::Request(request)
    }

    /// Reads what a put writes, later; or does what a get asks for.
    fn carry_out(&mut self, copy: &Copy, turn: u64) -> Option<Landing> {
        if !self.memories.contains_key(&copy.local.1) {
            self.violation("the local memory of an operation is not registered any more");
            return None;
        }
        if copy.get {
            if self.reaches(copy.memory, copy.remote, copy.bytes) {
                // SAFETY: both ranges lie in memory that the program has registered.
                unsafe { ptr::copy(at(copy.remote), at_mut(copy.local.0), length(copy.bytes)) }
            }
            return None;
        }
        let mut bytes = vec![0; length(copy.bytes)];
        // SAFETY: the range lies in memory that the program has registered.
        unsafe { ptr::copy(at(copy.local.0), bytes.as_mut_ptr(), bytes.len()) }
        let due = turn + UNFLUSHED_TURNS;
        Some(Landing { bytes, to: copy.remote, memory: copy.memory, due, serial: copy.serial })
    }

    /// Whether a remote range is in memory that is still registered. What is not is dropped: the transport finds nobody.
    fn reaches(&mut self, memory: u64, to: u64, bytes: u64) -> bool {
        let Some(memory) = self.memories.get(&memory) else { return false };
        let inside = to >= memory.base && to + bytes <= memory.base + memory.bytes;
        if !inside {
            self.violation(format!("{bytes} B at {to:#x} leave their remote memory"));
        }
        inside
    }

    fn land(&mut self, landing: &Landing) {
        if self.reaches(landing.memory, landing.to, landing.bytes.len() as u64) {
            // SAFETY: the range lies in memory that the program has registered.
            unsafe { ptr::copy(landing.bytes.as_ptr(), at_mut(landing.to), landing.bytes.len()) }
        }
    }

    pub(crate) fn flush(&mut self, endpoint: u64) -> Start {
        let (fault, _, serial, at_once) = match self.begin(endpoint, Act::Flush) {
            Ok(begun) => begun,
            Err(status) => return Start::Now(status),
        };
        if let Some(Fault::Fail(status) | Fault::Break(status)) = fault {
            return self.end(endpoint, at_once, status, None);
        }
        let request = self.request(None);
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            endpoint.flushes.push(Flush { request, serial });
        }
        Start::Request(request)
    }

    /// Closes by force: what is on the endpoint is cancelled, what has left it lands all the same.
    pub(crate) fn close(&mut self, endpoint: u64) -> Start {
        let Some(closed) = self.endpoints.remove(&endpoint) else {
            self.violation("an endpoint is closed twice");
            return Start::Now(Status::ERR_INVALID_PARAM);
        };
        let request = self.request(None);
        self.cut_puts += closed.copies.iter().filter(|copy| !copy.get).count();
        if let Some(worker) = self.workers.get_mut(&closed.worker) {
            let cancelled = Status::ERR_CANCELED;
            worker.ended.extend(closed.ending);
            worker
                .ended
                .extend(closed.copies.iter().filter_map(|copy| copy.request).map(|request| (request, cancelled)));
            worker.ended.extend(closed.flushes.iter().map(|flush| (flush.request, cancelled)));
            worker.ended.push((request, Status::OK));
            worker.adrift.extend(closed.landings);
        }
        Start::Request(request)
    }

    /// Takes the first message of a worker with a tag that has these bits under the mask. Returns its name, tag and length.
    pub(crate) fn probe(&mut self, worker: u64, tag: u64, mask: u64) -> Option<(u64, u64, usize)> {
        let inbox = &mut self.workers.get_mut(&worker)?.inbox;
        let first = inbox.iter().position(|message| (message.tag ^ tag) & mask == 0)?;
        let message = inbox.remove(first)?;
        let number = self.number();
        let found = (number, message.tag, message.bytes.len());
        self.messages.insert(number, message);
        Some(found)
    }

    pub(crate) fn receive(
        &mut self,
        worker: u64,
        message: u64,
        to: u64,
        room: usize,
        callback: Option<Callback>,
    ) -> Start {
        let Some(Message { bytes, torn, .. }) = self.messages.remove(&message) else {
            self.violation("a message is received twice");
            return Start::Now(Status::ERR_INVALID_PARAM);
        };
        let status = if bytes.len() > room { Status::ERR_MESSAGE_TRUNCATED } else { Status::OK };
        let request = self.request(callback);
        if let Some(worker) = self.workers.get_mut(&worker).filter(|_| !torn) {
            worker.receiving.push(Receiving { request, to, bytes, status });
        }
        Start::Request(request)
    }

    pub(crate) fn status(&self, request: u64) -> Status {
        self.requests
            .get(&request)
            .map_or(Status::ERR_INVALID_PARAM, |request| request.status.unwrap_or(Status::INPROGRESS))
    }

    pub(crate) fn free(&mut self, request: u64) {
        match self.requests.get_mut(&request) {
            Some(open) if open.status.is_none() && !open.freed => open.freed = true,
            Some(open) if !open.freed => drop(self.requests.remove(&request)),
            _ => self.violation("a request is freed twice"),
        }
    }

    fn complete(&mut self, request: u64, status: Status, length: usize) -> Option<Call> {
        let done = self.requests.get_mut(&request)?;
        done.status = Some(status);
        let callback = done.callback;
        if done.freed {
            self.requests.remove(&request);
        }
        callback.map(|callback| Call::Completed { request, status, callback, length })
    }

    /// Whether a worker that sleeps would miss something.
    pub(crate) fn is_busy(&self, worker: u64) -> bool {
        let Some(known) = self.workers.get(&worker) else { return false };
        let waits = |endpoint: &Endpoint| {
            let quiet = endpoint.sends.is_empty()
                && endpoint.overtaken.is_none()
                && endpoint.ending.is_empty()
                && endpoint.copies.is_empty()
                && endpoint.landings.is_empty()
                && endpoint.flushes.is_empty();
            !quiet || (endpoint.failure.is_some() && !endpoint.told)
        };
        let mut own = self.endpoints.values().filter(|endpoint| endpoint.worker == worker);
        own.any(waits)
            || !known.inbox.is_empty()
            || !known.receiving.is_empty()
            || !known.ended.is_empty()
            || !known.adrift.is_empty()
    }

    /// One turn of a worker. Returns what it is to be told.
    pub(crate) fn progress(&mut self, worker: u64) -> Vec<Call> {
        let Some(known) = self.workers.get_mut(&worker) else { return Vec::new() };
        known.turn += 1;
        let turn = known.turn;
        let (ended, receiving) = (std::mem::take(&mut known.ended), std::mem::take(&mut known.receiving));
        let landed: Vec<Landing> = known.adrift.extract_if(.., |landing| landing.due <= turn).collect();
        let mut calls = Vec::new();
        for Receiving { request, to, bytes, status } in receiving {
            if status == Status::OK {
                // SAFETY: the program gave a buffer of at least this length, which lives until it is called.
                unsafe { ptr::copy(bytes.as_ptr(), at_mut(to), bytes.len()) }
            }
            calls.extend(self.complete(request, status, bytes.len()));
        }
        landed.iter().for_each(|landing| self.land(landing));
        calls.extend(ended.into_iter().filter_map(|(request, status)| self.complete(request, status, 0)));
        let own: Vec<u64> = self
            .endpoints
            .iter()
            .filter(|(_, endpoint)| endpoint.worker == worker)
            .map(|(number, _)| *number)
            .collect();
        own.into_iter().for_each(|endpoint| self.progress_endpoint(endpoint, turn, &mut calls));
        calls
    }

    fn progress_endpoint(&mut self, number: u64, turn: u64, calls: &mut Vec<Call>) {
        let Some(endpoint) = self.endpoints.get_mut(&number) else { return };
        let mut ended = std::mem::take(&mut endpoint.ending);
        if let Some(status) = endpoint.failure {
            let copies = std::mem::take(&mut endpoint.copies);
            ended.extend(copies.iter().filter_map(|copy| copy.request).map(|request| (request, status)));
            let flushes = std::mem::take(&mut endpoint.flushes);
            ended.extend(flushes.iter().map(|flush| (flush.request, status)));
            (endpoint.sends, endpoint.overtaken) = (VecDeque::new(), None);
            if !std::mem::replace(&mut endpoint.told, true) {
                let (callback, argument) = endpoint.on_failure;
                calls.push(Call::Failed { callback, argument, endpoint: number, status });
            }
        }
        let peer = endpoint.peer;
        let mut arrived: Vec<Message> = Vec::new();
        while endpoint.sends.front().is_some_and(|message| message.due <= turn) {
            arrived.extend(endpoint.sends.pop_front().map(|sent| sent.message));
            arrived.extend(endpoint.overtaken.take().map(|sent| sent.message));
        }
        if endpoint.overtaken.as_ref().is_some_and(|message| message.due <= turn) {
            arrived.extend(endpoint.overtaken.take().map(|sent| sent.message));
        }
        let copies: Vec<Copy> = endpoint.copies.extract_if(.., |copy| copy.due <= turn).collect();
        let mut landings = Vec::new();
        for copy in copies {
            landings.extend(self.carry_out(&copy, turn));
            ended.extend(copy.request.map(|request| (request, Status::OK)));
        }
        let Some(endpoint) = self.endpoints.get_mut(&number) else { return };
        endpoint.landings.extend(landings);
        // A flush is done when nothing older is on its way, and has the puts that have completed land. Of a long one that has not
        // completed it covers a part, which is the same as nothing.
        let covered = endpoint.copies.iter().filter(|copy| copy.get || copy.bytes <= WHOLE_BYTES_MAX);
        let copying = covered.map(|copy| copy.serial);
        let oldest = copying.chain(endpoint.sends.iter().map(|message| message.serial)).min().unwrap_or(u64::MAX);
        let flushed: Vec<Flush> = endpoint.flushes.extract_if(.., |flush| flush.serial < oldest).collect();
        let newest = flushed.iter().map(|flush| flush.serial).max().unwrap_or(0);
        let due = |landing: &mut Landing| landing.due <= turn || landing.serial < newest;
        let landed: Vec<Landing> = endpoint.landings.extract_if(.., due).collect();
        landed.iter().for_each(|landing| self.land(landing));
        ended.extend(flushed.into_iter().map(|flush| (flush.request, Status::OK)));
        calls.extend(ended.into_iter().filter_map(|(request, status)| self.complete(request, status, 0)));
        if !arrived.is_empty() {
            if let Some(peer) = self.workers.get_mut(&peer).filter(|peer| !peer.dead) {
                peer.inbox.extend(arrived);
            }
            self.signal(peer);
        }
    }
}

fn at(address: u64) -> *const u8 {
    ptr::with_exposed_provenance(length(address))
}

fn at_mut(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(length(address))
}

fn length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("an address space of 64 bits")
}
