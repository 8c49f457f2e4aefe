//! Ranks meet, over TCP and in a directory: all get all cards, and whatever goes wrong is named before the deadline.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test they help")]

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvferry_examples::deadline::Deadline;
use kvferry_examples::failure;
use kvferry_examples::meet::message::Message;
use kvferry_examples::meet::tcp::Host;
use kvferry_examples::meet::{Attendance, Cards, MeetError, Member, Refusal, Side, Terms, directory, tcp};

const ATTENDANCE: Attendance = Attendance { senders: 2, receivers: 1 };
const PLENTY: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

const SENDER_0: Member = Member { side: Side::Sender, rank: 0 };
const SENDER_1: Member = Member { side: Side::Sender, rank: 1 };
const RECEIVER_0: Member = Member { side: Side::Receiver, rank: 0 };

fn terms(tokens: &str) -> Terms {
    [("--tokens".to_owned(), tokens.to_owned())].into()
}

fn card(member: Member) -> Vec<u8> {
    member.to_string().into_bytes()
}

fn all_cards() -> Cards {
    Cards { senders: vec![card(SENDER_0), card(SENDER_1)], receivers: vec![card(RECEIVER_0)] }
}

/// A host on a free port, and what it returns.
fn host(limit: Duration) -> (String, JoinHandle<Result<(), Refusal>>) {
    let host = Host::bind("127.0.0.1:0").unwrap();
    let address = host.address().to_string();
    (address, thread::spawn(move || host.serve(ATTENDANCE, terms("512"), Deadline::after(limit))))
}

fn guest(address: &str, member: Member, tokens: &str) -> JoinHandle<Result<Cards, MeetError>> {
    let (address, terms) = (address.to_owned(), terms(tokens));
    thread::spawn(move || tcp::meet(&address, member, &terms, card(member), ATTENDANCE, Deadline::after(PLENTY)))
}

fn in_directory(path: &Path, member: Member, limit: Duration) -> JoinHandle<Result<Cards, MeetError>> {
    let path = path.to_owned();
    thread::spawn(move || {
        directory::meet(&path, member, &terms("512"), card(member), ATTENDANCE, Deadline::after(limit))
    })
}

fn line<T: std::fmt::Debug>(outcome: Result<T, MeetError>) -> String {
    failure::line(&outcome.unwrap_err())
}

#[test]
fn all_get_all_cards_over_tcp() {
    let (address, host) = host(PLENTY);
    let guests: Vec<_> = [SENDER_1, RECEIVER_0, SENDER_0].map(|member| guest(&address, member, "512")).into();
    for guest in guests {
        assert_eq!(guest.join().unwrap().unwrap(), all_cards());
    }
    assert_eq!(host.join().unwrap(), Ok(()));
}

#[test]
fn all_get_all_cards_in_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("made on demand");
    let ranks: Vec<_> = [SENDER_1, RECEIVER_0, SENDER_0].map(|member| in_directory(&path, member, PLENTY)).into();
    for rank in ranks {
        assert_eq!(rank.join().unwrap().unwrap(), all_cards());
    }
}

/// Strangers that send rubbish, or nothing, keep nobody waiting.
#[test]
fn strangers_do_not_count() {
    let (address, host) = host(PLENTY);
    let _silent = TcpStream::connect(&address).unwrap();
    let mut loud = TcpStream::connect(&address).unwrap();
    loud.write_all(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n").unwrap();
    let started = Instant::now();
    let guests: Vec<_> = [SENDER_0, SENDER_1, RECEIVER_0].map(|member| guest(&address, member, "512")).into();
    for guest in guests {
        assert_eq!(guest.join().unwrap().unwrap(), all_cards());
    }
    assert_eq!(host.join().unwrap(), Ok(()));
    // A silent guest is given up after ten seconds; nobody waited for that.
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn all_hear_who_is_missing() {
    let (address, host) = host(SHORT);
    let guests = [guest(&address, SENDER_0, "512"), guest(&address, RECEIVER_0, "512")];
    for guest in guests {
        assert_eq!(line(guest.join().unwrap()), "sender rank 1 did not come within 0.3 s");
    }
    assert!(matches!(host.join().unwrap(), Err(Refusal::Missing { member: SENDER_1, .. })));
}

#[test]
fn who_does_not_belong_breaks_it_up() {
    let stranger = Member { side: Side::Sender, rank: 2 };
    for (member, tokens, expected) in [
        (SENDER_1, "64", "sender rank 1 has --tokens 64, others have 512"),
        (SENDER_0, "512", "sender rank 0 came twice"),
        (stranger, "512", "sender rank 2 came, but that instance has 2 ranks here"),
    ] {
        let (address, host) = host(PLENTY);
        let guests = [guest(&address, SENDER_0, "512"), guest(&address, member, tokens)];
        assert_eq!(failure::line(&host.join().unwrap().unwrap_err()), expected);
        // The other may have been at the door when the meeting broke up.
        let lines = guests.map(|guest| line(guest.join().unwrap()));
        assert!(lines.contains(&expected.to_owned()), "{lines:?}");
    }
}

#[test]
fn nobody_at_the_address() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let outcome = tcp::meet(&address, SENDER_0, &terms("512"), vec![], ATTENDANCE, Deadline::after(SHORT));
    assert_eq!(line(outcome), format!("nobody answers at {address} within 0.3 s: Connection refused (os error 111)"));
}

/// A host that goes away, keeps silent, or is something else.
#[test]
fn hosts_that_are_none() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answers: [&[u8]; 3] =
        [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"KVFMEET1\xff\xff\xff\xff\0\0\0\0\0\0\0\0\0\0\0\0"];
    let expected = [
        "it ended too early: failed to fill whole buffer",
        "it starts with [48, 54, 54, 50, 2f, 31, 2e, 31]",
        "its header has 4294967295 bytes, at most 262144 are taken",
    ];
    for (answer, expected) in answers.into_iter().zip(expected) {
        let guest = guest(&address, SENDER_0, "512");
        let (mut stream, _) = listener.accept().unwrap();
        assert!(matches!(Message::read(&mut stream, ATTENDANCE), Ok(Message::Hello { member: SENDER_0, .. })));
        stream.write_all(answer).unwrap();
        drop(stream);
        assert_eq!(line(guest.join().unwrap()), format!("the meeting at {address} broke off: {expected}"));
    }
}

/// A silent host is left a little after the deadline, however slowly it drips.
#[test]
fn a_silent_host_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let drip = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        for byte in b"KVFMEET1" {
            if stream.write_all(&[*byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(200));
        }
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let outcome = tcp::meet(&address, SENDER_0, &terms("512"), vec![], ATTENDANCE, Deadline::after(SHORT));
    assert_eq!(line(outcome), format!("the meeting at {address} was not complete within 0.3 s"));
    drip.join().unwrap();
}

#[test]
fn an_address_that_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let line = failure::line(&Host::bind(&address).unwrap_err());
    assert_eq!(line, format!("cannot host the meeting at {address}: Address already in use (os error 98)"));
}

#[test]
fn who_is_missing_in_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let sender = in_directory(directory.path(), SENDER_0, SHORT);
    assert_eq!(line(sender.join().unwrap()), "sender rank 1 did not come within 0.3 s");
}

/// A card of an earlier run is not taken for one of this run by its own rank.
#[test]
fn a_used_directory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory::card_path(directory.path(), SENDER_0);
    fs::write(&path, "old").unwrap();
    let line = line(in_directory(directory.path(), SENDER_0, PLENTY).join().unwrap());
    let why = "exists already: give each run a fresh directory and each rank its own number";
    assert_eq!(line, format!("{} {why}", path.display()));
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn files_that_are_no_cards() {
    let whose = |member| {
        let mut bytes = Vec::new();
        Message::Hello { member, terms: terms("512"), card: vec![] }.write(&mut bytes).unwrap();
        bytes
    };
    for (bytes, expected) in [
        (vec![], "it ended too early: failed to fill whole buffer"),
        (whose(SENDER_0), "it is out of turn"),
        (b"KVFMEET9........".into(), "it starts with [4b, 56, 46, 4d, 45, 45, 54, 39]"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory::card_path(directory.path(), SENDER_1);
        fs::write(&path, bytes).unwrap();
        let line = line(in_directory(directory.path(), SENDER_0, PLENTY).join().unwrap());
        assert_eq!(line, format!("{} is not a card: {expected}", path.display()));
    }
}

/// Files and directories that cannot be what they must be: the line says what was tried.
#[test]
fn files_in_the_way() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let expected = format!("cannot make the directory {}: File exists (os error 17)", file.display());
    assert_eq!(line(in_directory(&file, SENDER_0, PLENTY).join().unwrap()), expected);

    // A pipe that nobody writes to, in the place of a card.
    let path = directory::card_path(directory.path(), SENDER_1);
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let expected = format!("cannot read {}: not a regular file", path.display());
    assert_eq!(line(in_directory(directory.path(), SENDER_0, PLENTY).join().unwrap()), expected);
}
