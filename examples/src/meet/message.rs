//! What ranks say to each other at a meeting: a fixed head, a JSON header, a body of cards.
//!
//! Magic, header length, body length (8 bytes each, little endian), header, body. A card's file in a directory
//! holds one [`Message::Hello`].

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use super::{Attendance, CARD_BYTES_MAX, Cards, Member, Refusal, Terms};

/// First bytes of a message; the digit is the version.
const MAGIC: [u8; 8] = *b"KVFMEET1";

/// Bytes of the head: magic and two lengths.
const HEAD_BYTES: u64 = 24;

/// Bytes of a JSON header at most: the lengths of the cards of thousands of ranks.
const HEADER_BYTES_MAX: u64 = 1 << 18;

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// A rank comes.
    Hello {
        /// Who.
        member: Member,
        /// What it was told.
        terms: Terms,
        /// Its card.
        card: Vec<u8>,
    },
    /// The host has this rank's hello, and waits for others.
    Waiting {
        /// The first of them.
        missing: Member,
    },
    /// Everyone came.
    Cards(Cards),
    /// The meeting broke up.
    Refused(Refusal),
}

/// Why bytes are not a message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The bytes ended, or could not be read or written in time. Whoever sent them is gone or stuck.
    #[error("it ended too early")]
    Io(#[from] io::Error),
    /// The first bytes are not those of a message of this version.
    #[error("it starts with {found:02x?}")]
    Magic {
        /// The first bytes.
        found: [u8; 8],
    },
    /// A length over its bound.
    #[error("its {part} has {bytes} bytes, at most {max} are taken")]
    TooLong {
        /// Header or body.
        part: &'static str,
        /// What was announced.
        bytes: u64,
        /// The bound.
        max: u64,
    },
    /// The header does not parse.
    #[error("its header does not parse")]
    Header(#[source] serde_json::Error),
    /// The body is not as long as the header says.
    #[error("its body has {bytes} bytes, its header says otherwise")]
    Body {
        /// Bytes of the body.
        bytes: u64,
    },
    /// A message of another kind was due.
    #[error("it is out of turn")]
    OutOfTurn,
}

/// The JSON header of a message.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Header {
    Hello { member: Member, terms: Terms },
    Waiting { missing: Member },
    Cards { senders: Vec<u64>, receivers: Vec<u64> },
    Refused(Refusal),
}

/// What the head of a message announces, both under their bounds.
struct Lengths {
    header_bytes: u64,
    body_bytes: u64,
}

impl Lengths {
    fn parse(words: &[[u8; 8]; 2], attendance: Attendance) -> Result<Self, MessageError> {
        let [header_bytes, body_bytes] = words.map(u64::from_le_bytes);
        let ranks = u64::from(attendance.senders) + u64::from(attendance.receivers);
        check_length("header", header_bytes, HEADER_BYTES_MAX)?;
        check_length("body", body_bytes, CARD_BYTES_MAX * ranks)?;
        Ok(Self { header_bytes, body_bytes })
    }
}

impl Message {
    /// The message as it goes over a wire or into a file.
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLong`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, MessageError> {
        let lengths = |cards: &[Vec<u8>]| cards.iter().map(|card| card.len() as u64).collect();
        let (header, body) = match self {
            Self::Hello { member, terms, card } => {
                check_length("card", card.len() as u64, CARD_BYTES_MAX)?;
                (Header::Hello { member: *member, terms: terms.clone() }, card.clone())
            }
            Self::Waiting { missing } => (Header::Waiting { missing: *missing }, Vec::new()),
            Self::Cards(Cards { senders, receivers }) => (
                Header::Cards { senders: lengths(senders), receivers: lengths(receivers) },
                [senders.concat(), receivers.concat()].concat(),
            ),
            Self::Refused(refusal) => (Header::Refused(refusal.clone()), Vec::new()),
        };
        let header = serde_json::to_vec(&header).map_err(MessageError::Header)?;
        let header_bytes = header.len() as u64;
        check_length("header", header_bytes, HEADER_BYTES_MAX)?;
        let head = [&MAGIC[..], &header_bytes.to_le_bytes(), &(body.len() as u64).to_le_bytes()].concat();
        Ok([head, header, body].concat())
    }

    /// Writes the message.
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLong`] before anything is written, else [`MessageError::Io`].
    pub fn write(&self, out: &mut impl Write) -> Result<(), MessageError> {
        out.write_all(&self.to_bytes()?)?;
        Ok(out.flush()?)
    }

    /// The message, of one card at most, that `bytes` start with; `None` while it is not whole.
    ///
    /// # Errors
    ///
    /// [`MessageError`] says what is wrong with the bytes, as soon as their lengths are known.
    pub fn hello_at_start(bytes: &[u8]) -> Result<Option<Self>, MessageError> {
        const ALONE: Attendance = Attendance { senders: 1, receivers: 0 };
        let (words, _) = bytes.as_chunks::<8>();
        if let Some(magic) = words.first() {
            check_magic(*magic)?;
        }
        let Some(&[_, header_bytes, body_bytes]) = words.first_chunk() else { return Ok(None) };
        let Lengths { header_bytes, body_bytes } = Lengths::parse(&[header_bytes, body_bytes], ALONE)?;
        if (bytes.len() as u64) < HEAD_BYTES + header_bytes + body_bytes {
            return Ok(None);
        }
        Self::read(&mut &bytes[..], ALONE).map(Some)
    }

    /// Reads one message of a meeting of `attendance`.
    ///
    /// Memory grows with the bytes that come, not with the lengths that are announced.
    ///
    /// # Errors
    ///
    /// [`MessageError`] says what is wrong with the bytes.
    pub fn read(input: &mut impl Read, attendance: Attendance) -> Result<Self, MessageError> {
        check_magic(take_word(input)?)?;
        let Lengths { header_bytes, body_bytes } = Lengths::parse(&[take_word(input)?, take_word(input)?], attendance)?;
        let header = serde_json::from_slice(&take(input, header_bytes)?).map_err(MessageError::Header)?;
        if matches!(header, Header::Hello { .. }) {
            check_length("card", body_bytes, CARD_BYTES_MAX)?;
        }
        let body = take(input, body_bytes)?;
        match header {
            Header::Hello { member, terms } => Ok(Self::Hello { member, terms, card: body }),
            Header::Waiting { missing } => Ok(Self::Waiting { missing }),
            Header::Cards { senders, receivers } => {
                let error = || MessageError::Body { bytes: body_bytes };
                let (senders, rest) = split(&body, &senders).ok_or_else(error)?;
                let (receivers, rest) = split(rest, &receivers).ok_or_else(error)?;
                if rest.is_empty() { Ok(Self::Cards(Cards { senders, receivers })) } else { Err(error()) }
            }
            Header::Refused(refusal) => Ok(Self::Refused(refusal)),
        }
    }
}

fn check_length(part: &'static str, bytes: u64, max: u64) -> Result<(), MessageError> {
    if bytes > max { Err(MessageError::TooLong { part, bytes, max }) } else { Ok(()) }
}

fn check_magic(found: [u8; 8]) -> Result<(), MessageError> {
    if found == MAGIC { Ok(()) } else { Err(MessageError::Magic { found }) }
}

fn take_word(input: &mut impl Read) -> Result<[u8; 8], MessageError> {
    let mut word = [0; 8];
    input.read_exact(&mut word)?;
    Ok(word)
}

fn take(input: &mut impl Read, bytes: u64) -> Result<Vec<u8>, MessageError> {
    let mut out = Vec::new();
    if input.take(bytes).read_to_end(&mut out)? as u64 == bytes {
        Ok(out)
    } else {
        Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())
    }
}

/// Cuts cards of the given lengths off the front of `body`.
fn split<'a>(body: &'a [u8], lengths: &[u64]) -> Option<(Vec<Vec<u8>>, &'a [u8])> {
    let mut rest = body;
    let mut cards = Vec::new();
    for &length in lengths {
        let (card, tail) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        cards.push(card.to_vec());
        rest = tail;
    }
    Some((cards, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meet::Side;

    const ATTENDANCE: Attendance = Attendance { senders: 2, receivers: 1 };

    fn bytes(message: &Message) -> Vec<u8> {
        let mut out = Vec::new();
        message.write(&mut out).unwrap();
        out
    }

    fn samples() -> [Message; 4] {
        let member = Member { side: Side::Receiver, rank: 3 };
        [
            Message::Hello { member, terms: [("--tokens".into(), "7".into())].into(), card: vec![9; 100] },
            Message::Waiting { missing: member },
            Message::Cards(Cards { senders: vec![vec![1; 3], vec![]], receivers: vec![vec![2; 4]] }),
            Message::Refused(Refusal::Missing { member, limit_s: 30.0 }),
        ]
    }

    #[test]
    fn messages_come_back() {
        for message in samples() {
            assert_eq!(Message::read(&mut &bytes(&message)[..], ATTENDANCE).unwrap(), message);
        }
    }

    /// Cut short or changed anywhere, a message is an error or another message, never a panic.
    #[test]
    fn damaged_messages_are_errors() {
        for message in samples() {
            let whole = bytes(&message);
            for end in 0..whole.len() {
                assert!(Message::read(&mut &whole[..end], ATTENDANCE).is_err(), "cut at {end}");
                let mut damaged = whole.clone();
                damaged[end] ^= 0x80;
                if let Ok(read) = Message::read(&mut &damaged[..], ATTENDANCE) {
                    assert_ne!(read, message, "byte {end}");
                }
            }
        }
    }

    #[test]
    fn lengths_are_bounded_before_anything_is_read() {
        let mut head = MAGIC.to_vec();
        head.extend(u64::MAX.to_le_bytes());
        head.extend(u64::MAX.to_le_bytes());
        let error = Message::read(&mut &head[..], ATTENDANCE).unwrap_err();
        assert_eq!(error.to_string(), "its header has 18446744073709551615 bytes, at most 262144 are taken");
        head[8..16].copy_from_slice(&2_u64.to_le_bytes());
        let error = Message::read(&mut &head[..], ATTENDANCE).unwrap_err();
        assert_eq!(error.to_string(), "its body has 18446744073709551615 bytes, at most 12582912 are taken");
    }

    #[test]
    fn a_hello_is_one_once_it_is_whole() {
        let [hello, ..] = samples();
        let mut bytes = bytes(&hello);
        for end in 0..bytes.len() {
            assert!(matches!(Message::hello_at_start(&bytes[..end]), Ok(None)), "cut at {end}");
        }
        assert_eq!(Message::hello_at_start(&bytes).unwrap(), Some(hello));
        assert!(matches!(Message::hello_at_start(b"GET / HTTP"), Err(MessageError::Magic { .. })));
        // One card, however many ranks meet: a stranger is not listened to for longer.
        bytes[16..24].copy_from_slice(&(CARD_BYTES_MAX + 1).to_le_bytes());
        let error = Message::hello_at_start(&bytes[..24]).unwrap_err();
        assert_eq!(error.to_string(), "its body has 4194305 bytes, at most 4194304 are taken");
    }
}
