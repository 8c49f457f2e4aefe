//! Meeting at a TCP address: one process hosts, all others, its own rank included, come as guests.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use super::message::{Message, MessageError};
use super::{Attendance, Cards, MeetError, Member, Refusal, Roll, Terms};
use crate::deadline::Deadline;

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// How long one guest may take to say who it is, and to take the answer.
const GUEST_LIMIT: Duration = Duration::from_secs(10);

/// How long a guest waits past its own deadline: its host, whose deadline ends later, knows who is missing.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// Guests that have not said who they are yet, over those expected, before more are turned away.
const STRANGERS_MAX: usize = 64;

/// The host of a meeting.
#[derive(Debug)]
pub struct Host {
    listener: TcpListener,
    address: SocketAddr,
}

/// A guest that said who it is.
struct Guest {
    stream: TcpStream,
    member: Member,
    terms: Terms,
    card: Vec<u8>,
}

impl Host {
    /// Opens the house at `address`, `HOST:PORT`; port 0 takes a free one.
    ///
    /// # Errors
    ///
    /// [`MeetError::Host`] if the address does not resolve or is taken.
    pub fn bind(address: &str) -> Result<Self, MeetError> {
        let failed = |source| MeetError::Host { address: address.to_owned(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address: bound })
    }

    /// The address that guests come to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for everyone, then gives everyone all cards, or the reason why there are none.
    ///
    /// Whoever connects and does not speak this protocol is turned away and does not count.
    ///
    /// # Errors
    ///
    /// [`Refusal`], which every guest gets too.
    pub fn serve(self, attendance: Attendance, terms: Terms, deadline: Deadline) -> Result<(), Refusal> {
        let mut roll = Roll::new(attendance, terms);
        let mut streams = Vec::new();
        let collected = self.collect(&mut roll, &mut streams, deadline);
        let answer = match &collected {
            Ok(()) => Message::Cards(roll.into_cards()),
            Err(refusal) => Message::Refused(refusal.clone()),
        };
        for stream in streams {
            let mut stream = Timed { stream: &stream, deadline: Deadline::after(GUEST_LIMIT) };
            // A guest that cannot be answered has left; the others will notice when they look for it.
            let _ = answer.write(&mut stream);
        }
        collected
    }

    fn collect(&self, roll: &mut Roll, streams: &mut Vec<TcpStream>, deadline: Deadline) -> Result<(), Refusal> {
        let (arrivals, arrived) = mpsc::channel();
        let strangers = Arc::new(());
        let expected = roll.attendance.members().count();
        while let Some(member) = roll.missing() {
            let mut idle = true;
            if let Ok((stream, _)) = self.listener.accept() {
                idle = false;
                if Arc::strong_count(&strangers) <= expected + STRANGERS_MAX {
                    welcome(stream, roll.attendance, arrivals.clone(), Arc::clone(&strangers));
                }
            }
            if let Some(guest) = next(&arrived) {
                idle = false;
                streams.push(guest.stream);
                roll.admit(guest.member, &guest.terms, guest.card)?;
            }
            if deadline.left().is_none() {
                return Err(Refusal::Missing { member, limit_s: deadline.limit_s() });
            }
            if idle {
                thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }
}

fn next(arrived: &Receiver<Guest>) -> Option<Guest> {
    arrived.try_recv().ok()
}

/// Reads a guest's hello on a thread of its own, so that a silent stranger keeps nobody waiting.
fn welcome(stream: TcpStream, attendance: Attendance, arrivals: Sender<Guest>, stranger: Arc<()>) {
    let listen = move || {
        let _stranger = stranger;
        if stream.set_nonblocking(false).is_err() {
            return;
        }
        let hello = Message::read(&mut Timed { stream: &stream, deadline: Deadline::after(GUEST_LIMIT) }, attendance);
        if let Ok(Message::Hello { member, terms, card }) = hello {
            // The host may have closed the meeting meanwhile; the guest then sees its connection end.
            let _ = arrivals.send(Guest { stream, member, terms, card });
        }
    };
    // Without a thread the stream is dropped: the guest sees its connection end.
    let _ = thread::Builder::new().name("guest".into()).spawn(listen);
}

/// Comes to the meeting at `address`, brings `card`, and waits for all others'.
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
    let stream = connect(address, deadline)?;
    let broken = |source| MeetError::Broken { address: address.to_owned(), source };
    let mut timed = Timed { stream: &stream, deadline: deadline.extended(ANSWER_GRACE) };
    Message::Hello { member, terms: terms.clone(), card }.write(&mut timed).map_err(broken)?;
    match Message::read(&mut timed, attendance) {
        Ok(Message::Cards(cards)) => Ok(cards),
        Ok(Message::Refused(refusal)) => Err(refusal.into()),
        Ok(Message::Hello { .. }) => Err(broken(MessageError::OutOfTurn)),
        Err(MessageError::Io(_)) if timed.deadline.left().is_none() => {
            Err(MeetError::Incomplete { address: address.to_owned(), limit_s: deadline.limit_s() })
        }
        Err(error) => Err(broken(error)),
    }
}

/// Tries until somebody listens.
fn connect(address: &str, deadline: Deadline) -> Result<TcpStream, MeetError> {
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    while let Some(left) = deadline.left() {
        match address.to_socket_addrs().and_then(|addresses| connect_any(addresses, left)) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
        thread::sleep(POLL_INTERVAL);
    }
    Err(MeetError::NoHost { address: address.to_owned(), limit_s: deadline.limit_s(), source: last })
}

fn connect_any(addresses: impl Iterator<Item = SocketAddr>, left: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect_timeout(&address, left) {
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
