//! A guest of a meeting: comes again until it is let in, and is gone at its deadline.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::super::message::{Message, MessageError};
use super::super::{Attendance, Cards, MeetError, Member, Refusal, Terms};
use super::POLL_INTERVAL;
use crate::deadline::Deadline;

/// How long a guest that was turned away waits at the door.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// How a visit ended without cards.
enum Visit {
    /// Turned away before the host said a word. Come again.
    TurnedAway(MessageError),
    /// For good.
    Over(MeetError),
}

/// Comes to the meeting at `address`, brings `card`, and waits for all others' until the deadline.
///
/// # Errors
///
/// [`MeetError`] says whether there is no host, who is missing, or who does not belong.
pub fn meet(
    address: &str,
    member: Member,
    terms: &Terms,
    card: Vec<u8>,
    attendance: Attendance,
    deadline: Deadline,
) -> Result<Cards, MeetError> {
    let broken = |source| MeetError::Broken { address: address.to_owned(), source };
    let hello = Message::Hello { member, terms: terms.clone(), card }.to_bytes().map_err(broken)?;
    let mut last = None;
    loop {
        let stream = match connect(address, deadline) {
            Ok(stream) => stream,
            // Somebody was there, which says more than that nobody is any more.
            Err(error) => return Err(last.map_or(error, broken)),
        };
        match visit(address, &stream, &hello, attendance, deadline) {
            Ok(cards) => return Ok(cards),
            Err(Visit::Over(error)) => return Err(error),
            Err(Visit::TurnedAway(error)) => last = Some(error),
        }
        thread::sleep(RETRY_INTERVAL.min(deadline.left().unwrap_or_default()));
    }
}

fn visit(
    address: &str,
    stream: &TcpStream,
    hello: &[u8],
    attendance: Attendance,
    deadline: Deadline,
) -> Result<Cards, Visit> {
    let mut stream = Timed { stream, deadline };
    // A host that does not listen to the end may have said why.
    let _ = stream.write_all(hello);
    let mut waits_for = None;
    loop {
        let error = match Message::read(&mut stream, attendance) {
            Ok(Message::Waiting { missing }) => {
                waits_for = Some(missing);
                continue;
            }
            Ok(Message::Cards(cards)) => return Ok(cards),
            Ok(Message::Refused(refusal)) => return Err(Visit::Over(refusal.into())),
            Ok(Message::Hello { .. }) => MessageError::OutOfTurn,
            Err(error) => error,
        };
        let limit_s = deadline.limit_s();
        return Err(match (error, waits_for) {
            (MessageError::Io(error), Some(member)) if is_late(&error) => {
                Visit::Over(Refusal::Missing { member, limit_s }.into())
            }
            (MessageError::Io(error), None) if is_late(&error) => {
                Visit::Over(MeetError::Incomplete { address: address.to_owned(), limit_s })
            }
            (error @ MessageError::Io(_), None) => Visit::TurnedAway(error),
            (source, _) => Visit::Over(MeetError::Broken { address: address.to_owned(), source }),
        });
    }
}

/// Whether a read ended at its deadline; which kind it is then depends on the system.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Tries until somebody listens.
fn connect(address: &str, deadline: Deadline) -> Result<TcpStream, MeetError> {
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    while let Some(left) = deadline.left() {
        match resolve(address, left).and_then(|addresses| connect_any(&addresses, deadline)) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
        thread::sleep(POLL_INTERVAL.min(deadline.left().unwrap_or_default()));
    }
    Err(MeetError::NoHost { address: address.to_owned(), limit_s: deadline.limit_s(), source: last })
}

/// Looks a name up on a thread of its own: a name server that keeps silent keeps silent for longer than a deadline.
fn resolve(address: &str, left: Duration) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let (tell, told) = mpsc::channel();
    let name = address.to_owned();
    let look_up = move || {
        // Nobody listens any more after the deadline.
        let _ = tell.send(name.to_socket_addrs().map(Vec::from_iter));
    };
    thread::Builder::new().name("resolve".into()).spawn(look_up)?;
    told.recv_timeout(left).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn connect_any(addresses: &[SocketAddr], deadline: Deadline) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        let Some(left) = deadline.left() else { break };
        match TcpStream::connect_timeout(address, left) {
            // A port from the range of outgoing ones can be connected to itself while nobody listens there.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {}
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A stream whose every read and write ends at the deadline, however slowly bytes drip in.
struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Duration> {
        self.deadline.left().ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
