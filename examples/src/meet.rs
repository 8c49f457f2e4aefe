//! Where ranks meet: each brings the card of its engine and takes the cards of all others away.
//!
//! Ranks meet at one TCP address, whose host collects and hands out ([`tcp`]), or in a directory that all can reach
//! ([`directory`]). Whatever comes from another rank is a claim: bounded, checked, and refused with a reason. Every wait has
//! a deadline.

pub mod directory;
pub mod message;
pub mod tcp;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use message::MessageError;

/// Bytes of a card at most: a page table of a few thousand rows takes a few KiB.
pub const CARD_BYTES_MAX: u64 = 4 << 20;

/// Which instance a rank belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The instance that has the cache.
    Sender,
    /// The instance that gets it.
    Receiver,
}

/// One rank of the two instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Member {
    /// Its instance.
    pub side: Side,
    /// Its rank there.
    pub rank: u32,
}

/// How many ranks meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attendance {
    /// Ranks of the sending instance.
    pub senders: u32,
    /// Ranks of the receiving instance.
    pub receivers: u32,
}

/// What all ranks must have been told alike: option -> value. A difference would show as wrong bytes, much later.
pub type Terms = BTreeMap<String, String>;

/// The cards of all ranks, by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cards {
    /// Cards of the sending instance.
    pub senders: Vec<Vec<u8>>,
    /// Cards of the receiving instance.
    pub receivers: Vec<Vec<u8>>,
}

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MeetingPoint {
    /// At a TCP address, `HOST:PORT`.
    Address(String),
    /// In a directory, which is made if it is missing.
    Directory(PathBuf),
}

/// A text that names no meeting point.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeetingPointError {
    /// Give `HOST:PORT` or a directory.
    #[error("{text:?} is neither HOST:PORT nor a directory")]
    Syntax {
        /// The text.
        text: String,
    },
    /// Port 0 is any free one, which nobody else would be told. Choose one.
    #[error("port 0 of {text:?} is any free one, and nobody else is told which: give the same port to all ranks")]
    AnyPort {
        /// The text.
        text: String,
    },
}

/// Why a meeting broke up. Everyone who had come by then is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Refusal {
    /// A rank is missing. Start it, or look at why it failed.
    #[error("{member} did not come within {limit_s} s")]
    Missing {
        /// The first that is missing.
        member: Member,
        /// How long the others waited.
        limit_s: f64,
    },
    /// Two processes say that they are the same rank. Give each its own `--rank`.
    #[error("{member} came twice")]
    Twice {
        /// The rank.
        member: Member,
    },
    /// A rank that the cuts do not have. Check `--rank`, `--from` and `--to`.
    #[error("{member} came, but that instance has {ranks} ranks here")]
    NotExpected {
        /// The rank.
        member: Member,
        /// Ranks of its instance.
        ranks: u32,
    },
    /// A rank was started for another run. Give all ranks the same options.
    #[error("{member} has {option} {theirs}, others have {ours}")]
    Terms {
        /// The rank.
        member: Member,
        /// The first option that differs.
        option: String,
        /// Its value there; `none` if it is not set.
        theirs: String,
        /// Its value at whoever noticed.
        ours: String,
    },
}

/// What was tried with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// To make the directory.
    MakeDirectory,
    /// To make a card.
    Make,
    /// To write a card.
    Write,
    /// To remove a card's draft.
    Remove,
    /// To read a card.
    Read,
}

/// Why a meeting failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeetError {
    /// The meeting broke up. The refusal says what to do.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Nobody hosts the meeting. Start receiver rank 0, which does.
    #[error("nobody answers at {address} within {limit_s} s")]
    NoHost {
        /// Where.
        address: String,
        /// How long was tried.
        limit_s: f64,
        /// What the last try returned.
        source: io::Error,
    },
    /// The address cannot be hosted. Take another one.
    #[error("cannot host the meeting at {address}")]
    Host {
        /// Where.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The host keeps silent: it waits for others for longer than this rank does. Look at who is missing.
    #[error("the meeting at {address} was not complete within {limit_s} s")]
    Incomplete {
        /// Where.
        address: String,
        /// How long this rank waited.
        limit_s: f64,
    },
    /// The host broke off or sent something else. Look at what receiver rank 0 says.
    #[error("the meeting at {address} broke off")]
    Broken {
        /// Where.
        address: String,
        /// What came.
        source: MessageError,
    },
    /// A file of the directory cannot be written or read. Check its permissions.
    #[error("cannot {attempt} {}", path.display())]
    Directory {
        /// What was tried.
        attempt: Attempt,
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A card's file is there already: of an earlier run, or of another process with this rank. Use a fresh directory.
    #[error("{} exists already: give each run a fresh directory and each rank its own number", path.display())]
    Occupied {
        /// The file.
        path: PathBuf,
    },
    /// A card's file holds something else. Use a fresh directory.
    #[error("{} is not a card", path.display())]
    NotACard {
        /// The file.
        path: PathBuf,
        /// What is in it.
        source: MessageError,
    },
}

impl Member {
    /// Who hosts a meeting at an address, unless somebody else does.
    pub const HOST: Self = Self { side: Side::Receiver, rank: 0 };
}

impl Attendance {
    /// Ranks of one side.
    pub fn ranks(&self, side: Side) -> u32 {
        match side {
            Side::Sender => self.senders,
            Side::Receiver => self.receivers,
        }
    }

    /// Everyone who is to come.
    pub fn members(&self) -> impl Iterator<Item = Member> + use<> {
        let senders = (0..self.senders).map(|rank| Member { side: Side::Sender, rank });
        senders.chain((0..self.receivers).map(|rank| Member { side: Side::Receiver, rank }))
    }
}

/// Who has come so far, with their cards.
#[derive(Debug)]
struct Roll {
    attendance: Attendance,
    terms: Terms,
    cards: BTreeMap<Member, Vec<u8>>,
}

impl Roll {
    fn new(attendance: Attendance, terms: Terms) -> Self {
        Self { attendance, terms, cards: BTreeMap::new() }
    }

    /// Takes a card, if its bringer belongs here.
    fn admit(&mut self, member: Member, terms: &Terms, card: Vec<u8>) -> Result<(), Refusal> {
        let ranks = self.attendance.ranks(member.side);
        if member.rank >= ranks {
            return Err(Refusal::NotExpected { member, ranks });
        }
        let none = || "none".to_owned();
        let options = self.terms.keys().chain(terms.keys());
        if let Some(option) = options.into_iter().find(|&option| self.terms.get(option) != terms.get(option)) {
            return Err(Refusal::Terms {
                member,
                option: option.clone(),
                theirs: terms.get(option).cloned().unwrap_or_else(none),
                ours: self.terms.get(option).cloned().unwrap_or_else(none),
            });
        }
        match self.cards.insert(member, card) {
            Some(_) => Err(Refusal::Twice { member }),
            None => Ok(()),
        }
    }

    /// Whether `member` has come.
    fn has(&self, member: Member) -> bool {
        self.cards.contains_key(&member)
    }

    /// The first who has not come.
    fn missing(&self) -> Option<Member> {
        self.attendance.members().find(|member| !self.has(*member))
    }

    /// All cards. Those who have not come have none.
    fn into_cards(self) -> Cards {
        let (senders, receivers): (Vec<_>, Vec<_>) =
            self.cards.into_iter().partition(|(member, _)| member.side == Side::Sender);
        let cards = |side: Vec<(Member, Vec<u8>)>| side.into_iter().map(|(_, card)| card).collect();
        Cards { senders: cards(senders), receivers: cards(receivers) }
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MakeDirectory => "make the directory",
            Self::Make => "make",
            Self::Write => "write",
            Self::Remove => "remove",
            Self::Read => "read",
        })
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sender => "sender",
            Self::Receiver => "receiver",
        })
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rank {}", self.side, self.rank)
    }
}

impl FromStr for MeetingPoint {
    type Err = MeetingPointError;

    /// A text with a slash, or without a colon, is a directory.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || MeetingPointError::Syntax { text: text.to_owned() };
        match text.rsplit_once(':') {
            _ if text.is_empty() => Err(error()),
            Some((host, port)) if !text.contains('/') => match port.parse::<u16>() {
                Ok(0) if !host.is_empty() => Err(MeetingPointError::AnyPort { text: text.to_owned() }),
                Ok(_) if !host.is_empty() => Ok(Self::Address(text.to_owned())),
                _ => Err(error()),
            },
            _ => Ok(Self::Directory(text.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(tokens: &str) -> Terms {
        [("--tokens".to_owned(), tokens.to_owned())].into()
    }

    const SENDER: Member = Member { side: Side::Sender, rank: 0 };

    #[test]
    fn meeting_points() {
        for (text, is_address) in [("127.0.0.1:5000", true), ("[::1]:5000", true), ("a:1/b", false), ("meet", false)] {
            let point: MeetingPoint = text.parse().unwrap();
            assert_eq!(matches!(point, MeetingPoint::Address(_)), is_address, "{text}");
        }
        for text in ["", ":5000", "localhost:http", "localhost:70000"] {
            assert_eq!(text.parse::<MeetingPoint>(), Err(MeetingPointError::Syntax { text: text.to_owned() }));
        }
        let any_port = Err(MeetingPointError::AnyPort { text: "localhost:00".to_owned() });
        assert_eq!("localhost:00".parse::<MeetingPoint>(), any_port);
    }

    #[test]
    fn the_roll_refuses_who_does_not_belong() {
        let mut roll = Roll::new(Attendance { senders: 1, receivers: 1 }, terms("512"));
        let stranger = Member { side: Side::Receiver, rank: 1 };
        assert_eq!(
            roll.admit(stranger, &terms("512"), vec![]).unwrap_err().to_string(),
            "receiver rank 1 came, but that instance has 1 ranks here"
        );
        assert_eq!(
            roll.admit(SENDER, &terms("64"), vec![]).unwrap_err().to_string(),
            "sender rank 0 has --tokens 64, others have 512"
        );
        assert_eq!(
            roll.admit(SENDER, &Terms::new(), vec![]).unwrap_err().to_string(),
            "sender rank 0 has --tokens none, others have 512"
        );
        roll.admit(SENDER, &terms("512"), vec![1]).unwrap();
        assert_eq!(roll.admit(SENDER, &terms("512"), vec![2]), Err(Refusal::Twice { member: SENDER }));
        assert_eq!(roll.missing(), Some(Member { side: Side::Receiver, rank: 0 }));
    }
}
