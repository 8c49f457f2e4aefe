//! Ranks that people start by hand: over TCP and in a directory, and what happens if one is not what it says.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use kvferry_examples::meet::message::Message;
use kvferry_examples::meet::{Attendance, Member, Side, directory};

use crate::run::{Ended, run, start};

const JOB: &str = "--tokens 64 --from pp2 --to tp1";
const SENDER_0: Member = Member { side: Side::Sender, rank: 0 };
const SENDER_1: Member = Member { side: Side::Sender, rank: 1 };

/// An address that was free a moment ago, below the ports that the kernel gives to whoever asks for any: the workers of the tests
/// beside this one do.
fn address() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port = |number: u16| 10_000 + number % 20_000;
    let first = u16::try_from(std::process::id() % 20_000).unwrap();
    let ports = std::iter::repeat_with(|| port(first + NEXT.fetch_add(1, Ordering::Relaxed)));
    let free = ports.take(1000).find_map(|port| TcpListener::bind(("127.0.0.1", port)).ok());
    free.expect("one of a thousand").local_addr().unwrap().to_string()
}

/// Two senders and a receiver, started in an order in which nobody is ready for anybody.
fn all_three(meet: &str) -> [Ended; 3] {
    let ranks = [("sender", 1), ("receiver", 0), ("sender", 0)];
    ranks.map(|(program, rank)| start(program, &format!("{JOB} --rank {rank} --meet {meet}"))).map(|rank| rank.end())
}

#[test]
fn ranks_meet_at_an_address_or_in_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    for meet in [address(), directory.path().display().to_string()] {
        for ended in all_three(&meet) {
            assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
            let verdict = ended.stdout.contains("receiver rank 0: verified 3052800 bytes");
            assert_eq!(verdict, ended.program == "receiver", "{}", ended.stdout);
        }
    }
}

#[test]
fn a_rank_that_never_comes() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, address) = (directory.path().display().to_string(), address());
    for (program, meet, expected) in [
        ("receiver", &directory, "sender rank 0 did not come within 1 s".to_owned()),
        ("receiver", &address, "sender rank 0 did not come within 1 s".to_owned()),
        ("sender", &address, format!("nobody answers at {address} within 1 s: Connection refused (os error 111)")),
    ] {
        let ended = run(program, &format!("{JOB} --rank 0 --meet {meet} --deadline-s 1"));
        assert_eq!(ended.failure(1), expected);
        assert!(ended.elapsed < Duration::from_secs(15), "{ended:?}");
    }
}

#[test]
fn ranks_of_different_runs() {
    let address = address();
    let receiver = start("receiver", &format!("{JOB} --rank 0 --meet {address} --seed 2"));
    let sender = start("sender", &format!("{JOB} --rank 0 --meet {address} --seed 3"));
    let expected = "sender rank 0 has --seed 3, others have 2";
    assert_eq!((sender.end().failure(1), receiver.end().failure(1)), (expected, expected));
}

/// The card files of a run, by sender rank.
fn cards(directory: &Path) -> [Vec<u8>; 2] {
    for ended in all_three(&directory.display().to_string()) {
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
    [SENDER_0, SENDER_1].map(|member| fs::read(directory::card_path(directory, member)).unwrap())
}

/// The receiver is given the cards of senders that are gone, one of them changed by `change`.
fn receiver_among(cards: &[Vec<u8>; 2], change: impl Fn(&mut Vec<u8>)) -> Ended {
    let directory = tempfile::tempdir().unwrap();
    for (member, bytes) in [SENDER_0, SENDER_1].into_iter().zip(cards) {
        let mut message = Message::read(&mut &bytes[..], Attendance { senders: 2, receivers: 1 }).unwrap();
        let Message::Hello { card, .. } = &mut message else { panic!("{message:?}") };
        if member == SENDER_1 {
            change(card);
        }
        let mut file = fs::File::create(directory::card_path(directory.path(), member)).unwrap();
        message.write(&mut file).unwrap();
    }
    run("receiver", &format!("{JOB} --rank 0 --meet {} --deadline-s 2", directory.path().display()))
}

#[test]
fn cards_that_cannot_be_used() {
    let directory = tempfile::tempdir().unwrap();
    let cards = cards(directory.path());
    // A card starts with 8 bytes that say what it is and 2 of protocol version.
    let other_version = receiver_among(&cards, |card| card[8..10].copy_from_slice(&999_u16.to_le_bytes()));
    let line = other_version.failure(1);
    assert!(
        line.starts_with(
            "cards of the sender instance: card 1 was refused: it speaks protocol version 999, this side "
        ),
        "{line}"
    );

    let damaged = receiver_among(&cards, |card| card[100] ^= 1);
    assert_eq!(damaged.failure(1), "cards of the sender instance: card 1 was refused: its card was damaged on the way");

    let rubbish = receiver_among(&cards, |card| *card = b"rubbish".into());
    assert_eq!(rubbish.failure(1), "cards of the sender instance: card 1 was refused: 7 B that are no card");
}

/// Cards of an earlier run, whose processes are gone.
#[test]
fn cards_of_ranks_that_are_gone() {
    let directory = tempfile::tempdir().unwrap();
    let ended = receiver_among(&cards(directory.path()), |_| {});
    let line = ended.failure(1);
    // Either is gone, and either may be the first that is noticed.
    assert!(line.contains("source rank "), "{line}");
    assert!(ended.elapsed < Duration::from_secs(20), "{ended:?}");
}
