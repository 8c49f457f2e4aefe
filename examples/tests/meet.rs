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
use kvferry_test_process::within;

const ATTENDANCE: Attendance = Attendance { senders: 2, receivers: 1 };
const PLENTY: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// For guests to come and to hear who is missing, on a busy machine.
const ENOUGH: Duration = Duration::from_secs(2);

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
    guest_for(PLENTY, address, member, tokens)
}

fn guest_for(limit: Duration, address: &str, member: Member, tokens: &str) -> JoinHandle<Result<Cards, MeetError>> {
    let (address, terms) = (address.to_owned(), terms(tokens));
    thread::spawn(move || tcp::meet(&address, member, &terms, card(member), ATTENDANCE, Deadline::after(limit)))
}

/// Somebody who comes, if anybody does.
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(10) {
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(false).unwrap();
            return stream;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("nobody came");
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

/// Strangers that send rubbish, or nothing, keep nobody waiting, however many they are and whenever they come.
#[test]
fn strangers_do_not_count() {
    // A silent one is turned away after two seconds; nobody waits for that.
    within(Duration::from_secs(2), met_among_strangers);
}

/// How long the guests took.
fn met_among_strangers() -> Duration {
    let (address, host) = host(PLENTY);
    let knock = |_| TcpStream::connect(&address).unwrap();
    let _silent: Vec<_> = (0..100).map(knock).collect();
    let mut loud = knock(0);
    loud.write_all(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n").unwrap();
    let started = Instant::now();
    let early = [SENDER_0, SENDER_1].map(|member| guest(&address, member, "512"));
    let _more: Vec<_> = (0..100).map(knock).collect();
    let late = [guest(&address, RECEIVER_0, "512")];
    for guest in early.into_iter().chain(late) {
        assert_eq!(guest.join().unwrap().unwrap(), all_cards());
    }
    assert_eq!(host.join().unwrap(), Ok(()));
    started.elapsed()
}

/// There is room for so many strangers, and then the one that has been silent for longest goes.
#[test]
fn the_longest_silent_goes_first() {
    // Else they go because they take too long.
    within(Duration::from_secs(2), || {
        let (address, _host) = host(PLENTY);
        let started = Instant::now();
        let mut silent: Vec<_> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
        silent[0].set_read_timeout(Some(PLENTY)).unwrap();
        assert!(matches!(silent[0].read(&mut [0]), Ok(0) | Err(_)));
        silent[99].set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let last = silent[99].read(&mut [0]).map_err(|error| error.kind());
        let took = started.elapsed();
        assert!(last == Err(std::io::ErrorKind::WouldBlock) || took >= Duration::from_secs(2), "{last:?}");
        took
    });
}

/// Who is turned away comes again.
#[test]
fn a_guest_comes_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let guest = guest(&listener.local_addr().unwrap().to_string(), SENDER_0, "512");
    for _ in 0..3 {
        drop(accept(&listener));
    }
    let mut stream = accept(&listener);
    assert!(matches!(Message::read(&mut stream, ATTENDANCE), Ok(Message::Hello { member: SENDER_0, .. })));
    Message::Cards(all_cards()).write(&mut stream).unwrap();
    assert_eq!(guest.join().unwrap().unwrap(), all_cards());
}

/// A guest that takes nothing away keeps no other from doing so.
#[test]
fn a_guest_that_does_not_listen() {
    let (address, host) = host(PLENTY);
    // More than any socket holds, so that the answer to the silent guest cannot be written.
    let large = Message::Hello { member: SENDER_0, terms: terms("512"), card: vec![1; 4 << 20] };
    let mut silent = TcpStream::connect(&address).unwrap();
    large.write(&mut silent).unwrap();
    let mut heavy = TcpStream::connect(&address).unwrap();
    Message::Hello { member: SENDER_1, terms: terms("512"), card: vec![1; 4 << 20] }.write(&mut heavy).unwrap();
    let started = Instant::now();
    assert_eq!(guest(&address, RECEIVER_0, "512").join().unwrap().unwrap().receivers, [card(RECEIVER_0)]);
    // The host gives the others up after ten seconds.
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    drop((silent, heavy));
    assert_eq!(host.join().unwrap(), Ok(()));
}

/// Who runs out of time before the host does can still say who is missing, and is not late.
#[test]
fn a_guest_with_less_time_than_its_host() {
    let (address, _) = host(PLENTY);
    let started = Instant::now();
    let long = guest_for(ENOUGH + SHORT, &address, SENDER_0, "512");
    let short = guest_for(ENOUGH, &address, RECEIVER_0, "512");
    assert_eq!(line(short.join().unwrap()), "sender rank 1 did not come within 2 s");
    assert_eq!(line(long.join().unwrap()), "sender rank 1 did not come within 2.3 s");
    assert!(started.elapsed() < PLENTY / 2, "{:?}", started.elapsed());
}

#[test]
fn all_hear_who_is_missing() {
    let (address, host) = host(ENOUGH);
    let guests = [guest(&address, SENDER_0, "512"), guest(&address, RECEIVER_0, "512")];
    for guest in guests {
        assert_eq!(line(guest.join().unwrap()), "sender rank 1 did not come within 2 s");
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
        let limit = Duration::from_secs(5);
        let guests = [guest_for(limit, &address, SENDER_0, "512"), guest_for(limit, &address, member, tokens)];
        assert_eq!(failure::line(&host.join().unwrap().unwrap_err()), expected);
        // The other may have come when the meeting had broken up.
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

/// A host that is something else, or goes away once it has answered, has spoiled the meeting for good.
#[test]
fn hosts_that_are_none() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let waiting = Message::Waiting { missing: SENDER_1 }.to_bytes().unwrap();
    let answers: [&[u8]; 3] =
        [&waiting, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"KVFMEET1\xff\xff\xff\xff\0\0\0\0\0\0\0\0\0\0\0\0"];
    let expected = [
        "it ended too early: failed to fill whole buffer",
        "it starts with [48, 54, 54, 50, 2f, 31, 2e, 31]",
        "its header has 4294967295 bytes, at most 262144 are taken",
    ];
    for (answer, expected) in answers.into_iter().zip(expected) {
        let guest = guest(&address, SENDER_0, "512");
        let mut stream = accept(&listener);
        assert!(matches!(Message::read(&mut stream, ATTENDANCE), Ok(Message::Hello { member: SENDER_0, .. })));
        stream.write_all(answer).unwrap();
        drop(stream);
        assert_eq!(line(guest.join().unwrap()), format!("the meeting at {address} broke off: {expected}"));
    }
}

/// A host that lets nobody in is tried until the deadline.
#[test]
fn a_host_that_lets_nobody_in() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let guest = guest_for(ENOUGH, &address, SENDER_0, "512");
    let turned_away = thread::spawn(move || (0..3).for_each(|_| drop(accept(&listener))));
    let line = line(guest.join().unwrap());
    assert!(line.starts_with(&format!("the meeting at {address} broke off: it ended too early: ")), "{line}");
    turned_away.join().unwrap();
}

/// A silent host is left at the deadline, however slowly it drips.
#[test]
fn a_silent_host_is_left() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let drip = thread::spawn(move || {
        let mut stream = accept(&listener);
        for byte in b"KVFMEET1" {
            if stream.write_all(&[*byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(200));
        }
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let started = Instant::now();
    let outcome = tcp::meet(&address, SENDER_0, &terms("512"), vec![], ATTENDANCE, Deadline::after(SHORT));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
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
