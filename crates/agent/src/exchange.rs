//! Metadata over TCP, for agents that know each other's address and have nothing else to exchange it by.
//!
//! A connection carries one request: magic, version, what is asked, length of the metadata behind it; the answer has the same
//! form. Whoever can connect can be added or asked: listen where only trusted peers are.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{ExchangeError, RemoteError};
use crate::metadata::{AGENT_VERSION, Metadata};
use crate::shared::Shared;

/// Where agents listen unless they are told otherwise, as those of NIXL do.
pub const DEFAULT_PORT: u16 = 8888;

const MAGIC: [u8; 4] = *b"KVFX";

/// Magic, version, what, length.
const HEADER_BYTES: usize = 4 + 2 + 1 + 4;

/// Longest metadata: a hundred thousand regions.
const METADATA_BYTES_MAX: usize = 64 << 20;

/// How long a peer that has connected may take to say what it wants, and then to take the answer.
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);

/// Peers that are served at a time. More are turned away.
const SERVED_MAX: usize = 64;

/// Between two attempts to reach a peer that does not listen yet.
const RETRY: Duration = Duration::from_millis(50);

/// After which a listener that cannot take a connection, for want of descriptors for one, tries again.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// How often somebody who waits for a peer looks whether the agent is stopping.
const LOOK: Duration = Duration::from_secs(1);

/// How long an exchange may go on: until then, or until the agent stops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit<'a> {
    deadline: Instant,
    stopping: &'a AtomicBool,
}

impl<'a> Limit<'a> {
    pub(crate) fn new(timeout: Duration, stopping: &'a AtomicBool) -> Self {
        Self { deadline: Instant::now() + timeout, stopping }
    }

    /// What is left until the next look.
    fn left(&self) -> io::Result<Duration> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::ConnectionAborted.into()); // nothing is read by whoever sees it
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left.min(LOOK)) }
    }
}

/// A connection within a limit: one for all that is read and written, however little comes at a time.
#[derive(Debug)]
struct Limited<'a> {
    stream: TcpStream,
    limit: Limit<'a>,
}

impl Limited<'_> {
    /// Tries until it is not for want of bytes that it fails.
    fn patiently<T>(&self, mut attempt: impl FnMut(&TcpStream, Duration) -> io::Result<T>) -> io::Result<T> {
        loop {
            match attempt(&self.stream, self.limit.left()?) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                done => return done,
            }
        }
    }
}

impl Read for Limited<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.patiently(|mut stream, left| {
            stream.set_read_timeout(Some(left))?;
            stream.read(into)
        })
    }
}

impl Write for Limited<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.patiently(|mut stream, left| {
            stream.set_write_timeout(Some(left))?;
            stream.write(from)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // nothing is put off
    }
}

/// What is asked, or answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum What {
    /// Add this.
    Add = 1,
    /// Give me yours.
    Give = 2,
    /// Remove the agent whose metadata this is.
    Remove = 3,
    /// Done, or here it is.
    Here = 4,
    /// Not done.
    Refused = 5,
}

impl What {
    fn of(byte: u8) -> Option<Self> {
        [Self::Add, Self::Give, Self::Remove, Self::Here, Self::Refused].into_iter().find(|what| *what as u8 == byte)
    }
}

fn write(stream: &mut Limited<'_>, what: What, metadata: &[u8]) -> io::Result<()> {
    let bytes = u32::try_from(metadata.len()).map_err(io::Error::other)?;
    let mut message = Vec::with_capacity(HEADER_BYTES + metadata.len());
    message.extend_from_slice(&MAGIC);
    message.extend_from_slice(&AGENT_VERSION.to_le_bytes());
    message.push(what as u8);
    message.extend_from_slice(&bytes.to_le_bytes());
    message.extend_from_slice(metadata);
    stream.write_all(&message)
}

fn read(stream: &mut Limited<'_>) -> Result<(What, Vec<u8>), ExchangeError> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let [m0, m1, m2, m3, v0, v1, what, l0, l1, l2, l3] = header;
    let known = [m0, m1, m2, m3] == MAGIC && u16::from_le_bytes([v0, v1]) == AGENT_VERSION;
    let what = What::of(what).filter(|_| known).ok_or(ExchangeError::Protocol)?;
    let bytes = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if bytes > METADATA_BYTES_MAX {
        return Err(ExchangeError::Protocol);
    }
    // Grows with what comes: the length is a claim.
    let mut metadata = Vec::new();
    Read::by_ref(stream).take(bytes as u64).read_to_end(&mut metadata)?;
    if metadata.len() < bytes {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok((what, metadata))
}

/// Asks the peer at `address`, which may be about to start, and returns what it has to say.
fn ask(address: SocketAddr, what: What, metadata: &[u8], limit: Limit<'_>) -> Result<Vec<u8>, ExchangeError> {
    let stream = loop {
        match TcpStream::connect_timeout(&address, limit.left()?) {
            Ok(stream) => break stream,
            Err(_) if limit.left().is_ok_and(|left| left > RETRY) => thread::sleep(RETRY),
            Err(error) => return Err(error.into()),
        }
    };
    let mut stream = Limited { stream, limit };
    write(&mut stream, what, metadata)?;
    match read(&mut stream)? {
        (What::Here, answer) => Ok(answer),
        (What::Refused, _) => Err(io::Error::from(io::ErrorKind::PermissionDenied).into()),
        _ => Err(ExchangeError::Protocol),
    }
}

pub(crate) fn send(address: SocketAddr, metadata: &[u8], limit: Limit<'_>) -> Result<(), ExchangeError> {
    ask(address, What::Add, metadata, limit).map(drop)
}

pub(crate) fn fetch(address: SocketAddr, limit: Limit<'_>) -> Result<Vec<u8>, ExchangeError> {
    ask(address, What::Give, &[], limit)
}

pub(crate) fn withdraw(address: SocketAddr, metadata: &[u8], limit: Limit<'_>) -> Result<(), ExchangeError> {
    ask(address, What::Remove, metadata, limit).map(drop)
}

/// Adds metadata that was fetched, if it is of the agent asked for.
pub(crate) fn take(shared: &Shared, metadata: &[u8], name: Option<&str>) -> Result<String, ExchangeError> {
    let found = Metadata::parse(metadata, shared.context.ucx_version()).map_err(RemoteError::from)?.name;
    if let Some(wanted) = name.filter(|wanted| *wanted != found) {
        return Err(ExchangeError::Other { wanted: wanted.to_owned(), found });
    }
    shared.add_remote(metadata)?;
    Ok(found)
}

/// The thread that listens.
#[derive(Debug)]
pub(crate) struct Listening {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Listening {
    pub(crate) fn start(address: SocketAddr, shared: &Arc<Shared>) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let (accepting, for_thread) = (listener.try_clone()?, shared.clone());
        let thread = thread::Builder::new().name("kvferry-listen".to_owned()).spawn(move || {
            let served = Arc::new(AtomicUsize::new(0));
            let accept = || accepting.accept().map(|(stream, _)| stream);
            accept_all(accept, &for_thread.stopping, |stream| serve_apart(&for_thread, &served, stream));
        })?;
        Ok(Self { listener, address, shared: shared.clone(), thread: Some(thread) })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed); // seen by the thread: `shutdown` wakes it afterwards
        // Wakes the thread out of `accept`, which returns an error from then on.
        if rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join(); // it has panicked: its message has been printed
        }
    }
}

/// Serves whoever connects, until the agent stops: no error of one connection ends it.
fn accept_all<T>(mut accept: impl FnMut() -> io::Result<T>, stopping: &AtomicBool, mut serve: impl FnMut(T)) {
    loop {
        let accepted = accept();
        if stopping.load(Ordering::Relaxed) {
            return;
        }
        match accepted {
            Ok(stream) => serve(stream),
            Err(error) => {
                tracing::warn!(%error, "a peer that connects is not heard");
                thread::sleep(ACCEPT_RETRY);
            }
        }
    }
}

/// Serves a peer on a thread of its own, if there are not too many.
fn serve_apart(shared: &Arc<Shared>, served: &Arc<AtomicUsize>, stream: TcpStream) {
    if served.fetch_add(1, Ordering::Relaxed) >= SERVED_MAX {
        served.fetch_sub(1, Ordering::Relaxed); // only a bound
        return;
    }
    let (shared, for_thread) = (shared.clone(), served.clone());
    let serving = thread::Builder::new().name("kvferry-listen".to_owned()).spawn(move || {
        if let Err(error) = serve(&shared, stream) {
            tracing::warn!(%error, "a peer was not served");
        }
        for_thread.fetch_sub(1, Ordering::Relaxed);
    });
    if let Err(error) = serving {
        served.fetch_sub(1, Ordering::Relaxed);
        tracing::warn!(%error, "no thread for a peer");
    }
}

fn serve(shared: &Shared, stream: TcpStream) -> Result<(), ExchangeError> {
    let mut stream = Limited { stream, limit: Limit::new(REQUEST_DEADLINE, &shared.stopping) };
    let (what, metadata) = read(&mut stream)?;
    let done = match what {
        What::Add => shared.add_remote(&metadata).map(|_| Vec::new()),
        What::Give => Ok(shared.metadata(None, true)),
        What::Remove => {
            let parsed = Metadata::parse(&metadata, shared.context.ucx_version());
            parsed.map_err(RemoteError::from).and_then(|theirs| {
                // Not a later life of it, which has been added since.
                let current = shared.state.lock().names.get(theirs.name.as_str()) == Some(&theirs.epoch);
                if current { shared.remove_remote(&theirs.name) } else { Ok(()) }.map(|()| Vec::new())
            })
        }
        What::Here | What::Refused => return Err(ExchangeError::Protocol),
    };
    stream.limit = Limit::new(REQUEST_DEADLINE, &shared.stopping);
    match done {
        Ok(answer) => write(&mut stream, What::Here, &answer)?,
        Err(error) => {
            tracing::warn!(%error, "metadata was not taken");
            write(&mut stream, What::Refused, &[])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_cannot_be_taken_does_not_end_the_listener() {
        let (mut tries, stopping, mut served) = (0, AtomicBool::new(false), Vec::new());
        let accept = || {
            tries += 1;
            if tries == 2 { Err(io::Error::from_raw_os_error(24)) } else { Ok(tries) } // EMFILE
        };
        accept_all(accept, &stopping, |number| {
            served.push(number);
            stopping.store(number == 4, Ordering::Relaxed);
        });
        assert_eq!(served, [1, 3, 4]);
    }
}
