//! What ranks say to each other at a meeting: a fixed head, a JSON header, a body of cards.
//!
//! Magic, header length, body length (8 bytes each, little endian), header, body. A card's file in a directory
//! holds one [`Message::Hello`].

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use super::{Attendance, CARD_BYTES_MAX, Cards, Member, Refusal, Terms};

/// First bytes of a message; the digit is the version.
const MAGIC: [u8; 8] = *b"KVFMEET1";

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
    Cards { senders: Vec<u64>, receivers: Vec<u64> },
    Refused(Refusal),
}

impl Message {
    /// Writes the message.
    ///
    /// # Errors
    ///
    /// [`MessageError::TooLong`] before anything is written, else [`MessageError::Io`].
    pub fn write(&self, out: &mut impl Write) -> Result<(), MessageError> {
        let lengths = |cards: &[Vec<u8>]| cards.iter().map(|card| card.len() as u64).collect();
        let (header, body) = match self {
            Self::Hello { member, terms, card } => {
                check_length("card", card.len() as u64, CARD_BYTES_MAX)?;
                (Header::Hello { member: *member, terms: terms.clone() }, card.clone())
            }
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
        out.write_all(&[head, header, body].concat())?;
        Ok(out.flush()?)
    }

    /// Reads one message of a meeting of `attendance`.
    ///
    /// Memory grows with the bytes that come, not with the lengths that are announced.
    ///
    /// # Errors
    ///
    /// [`MessageError`] says what is wrong with the bytes.
    pub fn read(input: &mut impl Read, attendance: Attendance) -> Result<Self, MessageError> {
        let magic = take_array(input)?;
        if magic != MAGIC {
            return Err(MessageError::Magic { found: magic });
        }
        let header_bytes = u64::from_le_bytes(take_array(input)?);
        let body_bytes = u64::from_le_bytes(take_array(input)?);
        let ranks = u64::from(attendance.senders) + u64::from(attendance.receivers);
        check_length("header", header_bytes, HEADER_BYTES_MAX)?;
        check_length("body", body_bytes, CARD_BYTES_MAX * ranks)?;
        let header = serde_json::from_slice(&take(input, header_bytes)?).map_err(MessageError::Header)?;
        if matches!(header, Header::Hello { .. }) {
            check_length("card", body_bytes, CARD_BYTES_MAX)?;
        }
        let body = take(input, body_bytes)?;
        match header {
            Header::Hello { member, terms } => Ok(Self::Hello { member, terms, card: body }),
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

fn take_array<const N: usize>(input: &mut impl Read) -> Result<[u8; N], MessageError> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
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

    fn samples() -> [Message; 3] {
        let member = Member { side: Side::Receiver, rank: 3 };
        [
            Message::Hello { member, terms: [("--tokens".into(), "7".into())].into(), card: vec![9; 100] },
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
}
