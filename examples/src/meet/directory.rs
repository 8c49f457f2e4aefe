//! Meeting in a directory: each rank puts a file with its card there and polls for the others'.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::message::{Message, MessageError};
use super::{Attempt, Attendance, Cards, MeetError, Member, Refusal, Roll, Terms};
use crate::deadline::Deadline;
use crate::files::open_regular;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Brings `card` and waits for all others'.
///
/// # Errors
///
/// [`MeetError`] names the rank that is missing or does not belong, or the file that is in the way.
pub fn meet(
    directory: &Path,
    member: Member,
    terms: &Terms,
    card: Vec<u8>,
    attendance: Attendance,
    deadline: Deadline,
) -> Result<Cards, MeetError> {
    fs::create_dir_all(directory).map_err(|source| MeetError::Directory {
        attempt: Attempt::MakeDirectory,
        path: directory.to_owned(),
        source,
    })?;
    let mut roll = Roll::new(attendance, terms.clone());
    roll.admit(member, terms, card.clone())?;
    put(directory, &Message::Hello { member, terms: terms.clone(), card }, member)?;
    loop {
        let missing: Vec<Member> = attendance.members().filter(|member| !roll.has(*member)).collect();
        for member in &missing {
            if let Some((terms, card)) = read(directory, *member, attendance)? {
                roll.admit(*member, &terms, card)?;
            }
        }
        let Some(member) = roll.missing() else {
            return Ok(roll.into_cards());
        };
        if deadline.left().is_none() {
            return Err(Refusal::Missing { member, limit_s: deadline.limit_s() }.into());
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Where a rank's card is.
pub fn card_path(directory: &Path, member: Member) -> PathBuf {
    directory.join(format!("{}-{}.card", member.side, member.rank))
}

/// Puts a whole file under its name at once: a reader never sees half a card, and a card is never replaced.
fn put(directory: &Path, hello: &Message, member: Member) -> Result<(), MeetError> {
    let path = card_path(directory, member);
    let draft = path.with_extension(format!("card.{}", std::process::id()));
    let mut file = File::create_new(&draft).map_err(|error| in_the_way(&draft, Attempt::Make, error))?;
    let written = hello.write(&mut file).map_err(|error| match error {
        MessageError::Io(error) => in_the_way(&draft, Attempt::Write, error),
        source => MeetError::NotACard { path: draft.clone(), source },
    });
    let linked =
        written.and_then(|()| fs::hard_link(&draft, &path).map_err(|error| in_the_way(&path, Attempt::Make, error)));
    let removed = fs::remove_file(&draft).map_err(|error| in_the_way(&draft, Attempt::Remove, error));
    linked.and(removed)
}

/// A file is made only where none is: what is there belongs to somebody else.
fn in_the_way(path: &Path, attempt: Attempt, source: io::Error) -> MeetError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::AlreadyExists => MeetError::Occupied { path },
        _ => MeetError::Directory { attempt, path, source },
    }
}

/// The card of `member`, once its file is there.
fn read(directory: &Path, member: Member, attendance: Attendance) -> Result<Option<(Terms, Vec<u8>)>, MeetError> {
    let path = card_path(directory, member);
    let mut file = match open_regular(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(MeetError::Directory { attempt: Attempt::Read, path, source }),
    };
    match Message::read(&mut file, attendance) {
        Ok(Message::Hello { member: found, terms, card }) if found == member => Ok(Some((terms, card))),
        Ok(_) => Err(MeetError::NotACard { path, source: MessageError::OutOfTurn }),
        Err(source) => Err(MeetError::NotACard { path, source }),
    }
}
