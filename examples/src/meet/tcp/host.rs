//! The host of a meeting: one thread that never waits for anybody in particular.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::super::message::{Message, MessageError};
use super::super::{Attendance, MeetError, Member, Refusal, Roll, Terms};
use super::POLL_INTERVAL;
use crate::deadline::Deadline;

/// How long a stranger may take to say who it is. A rank says so at once, and comes again if that was too late.
const HELLO_LIMIT: Duration = Duration::from_secs(2);

/// Strangers at a time, over the ranks expected. When one more comes, the one that has been silent for longest must go.
const STRANGERS_MAX: usize = 64;

/// How long guests may take to take all cards away.
const CARDS_LIMIT: Duration = Duration::from_secs(10);

/// How long guests may take to hear why there are none: it is one short line, which waits for nobody.
const REFUSAL_LIMIT: Duration = Duration::from_millis(500);

/// Connections taken in at a time, before those that are there are listened to.
const ACCEPTS_MAX: usize = 16;

/// Bytes read from one connection at a time, before others are listened to.
const TURN_BYTES: usize = 64 << 10;

/// The host of a meeting.
#[derive(Debug)]
pub struct Host {
    listener: TcpListener,
    address: SocketAddr,
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
        let mut house = House {
            listener: self.listener,
            roll: Roll::new(attendance, terms),
            strangers: VecDeque::new(),
            guests: Vec::new(),
        };
        let gathered = house.gather(deadline);
        let (answer, limit) = match &gathered {
            Ok(()) => (Message::Cards(house.roll.into_cards()), CARDS_LIMIT),
            Err(refusal) => {
                // Those at the door may well be ranks.
                house.open_the_door();
                house.guests.extend(house.strangers.into_iter().map(|stranger| Guest::new(stranger.stream)));
                (Message::Refused(refusal.clone()), REFUSAL_LIMIT)
            }
        };
        say_goodbye(house.guests, &answer, Deadline::after(limit));
        gathered
    }
}

/// A meeting that is not complete.
struct House {
    listener: TcpListener,
    roll: Roll,
    /// Those who have not said who they are, in the order in which they came.
    strangers: VecDeque<Stranger>,
    /// Those who have.
    guests: Vec<Guest>,
}

impl House {
    fn gather(&mut self, deadline: Deadline) -> Result<(), Refusal> {
        while let Some(member) = self.roll.missing() {
            let came = self.open_the_door();
            let heard = self.bytes_heard();
            let hellos = self.listen();
            let idle = !came && hellos.is_empty() && self.bytes_heard() == heard;
            let mut admitted = Ok(());
            for hello in hellos {
                match admitted {
                    Ok(()) => admitted = self.admit(hello),
                    Err(_) => self.guests.push(Guest::new(hello.stream)),
                }
            }
            admitted?;
            self.turn_away();
            self.guests.retain_mut(|guest| guest.speak().is_ok());
            if deadline.left().is_none() {
                return Err(Refusal::Missing { member, limit_s: deadline.limit_s() });
            }
            if idle {
                thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }

    /// Bytes that strangers have said.
    fn bytes_heard(&self) -> usize {
        self.strangers.iter().map(|stranger| stranger.heard.len()).sum()
    }

    /// Takes in who has come. Whether anybody has.
    fn open_the_door(&mut self) -> bool {
        let before = self.strangers.len();
        for _ in 0..ACCEPTS_MAX {
            // Nobody is there, or there are more open files than allowed, which those who leave make good.
            let Ok((stream, _)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                self.strangers.push_back(Stranger { stream, came: Instant::now(), heard: Vec::new() });
            }
        }
        self.strangers.len() > before
    }

    /// Those who have said who they are. Who says something else, leaves, or takes too long is turned away.
    fn listen(&mut self) -> Vec<Hello> {
        let mut hellos = Vec::new();
        let strangers = std::mem::take(&mut self.strangers);
        self.strangers.extend(strangers.into_iter().filter_map(|mut stranger| match stranger.listen() {
            Ok(None) => (stranger.came.elapsed() < HELLO_LIMIT).then_some(stranger),
            Ok(Some(Message::Hello { member, terms, card })) => {
                hellos.push(Hello { stream: stranger.stream, member, terms, card });
                None
            }
            _ => None,
        }));
        hellos
    }

    /// Writes a rank down, and tells those who wait for whom.
    fn admit(&mut self, Hello { stream, member, terms, card }: Hello) -> Result<(), Refusal> {
        let before = self.roll.missing();
        self.guests.push(Guest::new(stream));
        self.roll.admit(member, &terms, card)?;
        let Some(missing) = self.roll.missing() else { return Ok(()) };
        let first = if before == Some(missing) { self.guests.len() - 1 } else { 0 };
        let line: Option<Arc<[u8]>> = Message::Waiting { missing }.to_bytes().ok().map(Into::into);
        for guest in &mut self.guests[first..] {
            guest.to_say.extend(line.clone());
        }
        Ok(())
    }

    /// Makes room: those who have said nothing go first, the longest there of them.
    fn turn_away(&mut self) {
        while self.strangers.len() > self.roll.attendance.members().count() + STRANGERS_MAX {
            let silent = self.strangers.iter().position(|stranger| stranger.heard.is_empty());
            self.strangers.remove(silent.unwrap_or(0));
        }
    }
}

/// Somebody who has not said who it is.
struct Stranger {
    stream: TcpStream,
    came: Instant,
    heard: Vec<u8>,
}

/// A stranger who has.
struct Hello {
    stream: TcpStream,
    member: Member,
    terms: Terms,
    card: Vec<u8>,
}

impl Stranger {
    /// Its message, once that is whole.
    fn listen(&mut self) -> Result<Option<Message>, MessageError> {
        let mut buffer = [0; 4096];
        let turn_end = self.heard.len() + TURN_BYTES;
        while self.heard.len() < turn_end {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(bytes) => self.heard.extend(&buffer[..bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
            if let Some(message) = Message::hello_at_start(&self.heard)? {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }
}

/// Somebody who is told what there is to tell.
struct Guest {
    stream: TcpStream,
    to_say: VecDeque<Arc<[u8]>>,
    /// Bytes said of the first.
    said: usize,
}

impl Guest {
    fn new(stream: TcpStream) -> Self {
        Self { stream, to_say: VecDeque::new(), said: 0 }
    }

    /// Says what the other side has room for. Fails once nobody is there; the others will notice when they look for it.
    fn speak(&mut self) -> io::Result<()> {
        while let Some(text) = self.to_say.front() {
            match self.stream.write(&text[self.said..]) {
                Ok(bytes) => self.said += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.said == text.len() {
                self.to_say.pop_front();
                self.said = 0;
            }
        }
        Ok(())
    }
}

/// Says the last word to all guests, side by side.
fn say_goodbye(mut guests: Vec<Guest>, answer: &Message, deadline: Deadline) {
    let Ok(answer) = answer.to_bytes() else { return };
    let answer: Arc<[u8]> = answer.into();
    for guest in &mut guests {
        guest.to_say.push_back(answer.clone());
    }
    loop {
        guests.retain_mut(|guest| guest.speak().is_ok() && !guest.to_say.is_empty());
        if guests.is_empty() || deadline.left().is_none() {
            return;
        }
        thread::sleep(POLL_INTERVAL);
    }
}
