//! Two instances of four ranks in network namespaces of their own, with a link between them that is cut: for a while, which
//! costs time and nothing else, or for good, which every rank notices.
//!
//! Needs `ip` and the right to make namespaces. Where that is missing, the tests say so and pass.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use kvferry_test_process::{in_time, within};

use crate::run::{Running, start_in};

/// Four ranks on either side, each of which has to do with two of the other.
const JOB: &str = "--tokens 4096 --from pp2tp2 --to tp4 --block-tokens-to 16 --transport tcp --json";

/// Two namespaces with a cable between them. Taken down when dropped.
struct Cable {
    prefill: String,
    decode: String,
}

/// What `ip` prints, or why it fails.
fn ip(line: &str) -> Result<String, String> {
    let output = Command::new("ip").args(line.split_whitespace()).output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    output.status.success().then(|| text(&output.stdout)).ok_or_else(|| text(&output.stderr))
}

impl Cable {
    /// `None`, said aloud, where that is not permitted.
    fn lay(test: &str) -> Option<Self> {
        let name = |side: char| format!("kvf{}{side}{test}", std::process::id() % 100_000);
        let cable = Self { prefill: name('p'), decode: name('d') };
        let Self { prefill, decode } = &cable;
        let laid = [
            format!("netns add {prefill}"),
            format!("netns add {decode}"),
            format!("-n {prefill} link add {prefill} type veth peer name {decode} netns {decode}"),
            format!("-n {prefill} addr add 10.77.0.1/24 dev {prefill}"),
            format!("-n {decode} addr add 10.77.0.2/24 dev {decode}"),
            format!("-n {prefill} link set lo up"),
            format!("-n {decode} link set lo up"),
            format!("-n {decode} link set {decode} up"),
            format!("-n {prefill} link set {prefill} up"),
        ];
        match laid.iter().try_for_each(|line| ip(line).map(drop)) {
            Ok(()) => {
                cable.wait_until_up();
                Some(cable)
            }
            Err(error) => {
                eprintln!("skipped: network namespaces cannot be had here: {error}");
                None
            }
        }
    }

    /// UCX leaves out a device that is not up yet.
    fn wait_until_up(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        for namespace in [&self.prefill, &self.decode] {
            while !ip(&format!("-n {namespace} link show {namespace}")).unwrap().contains(" state UP ") {
                assert!(Instant::now() < deadline, "{namespace} does not come up");
                thread::sleep(Duration::from_millis(10));
            }
        }
    }

    fn cut(&self) {
        ip(&format!("-n {} link set {} down", self.prefill, self.prefill)).unwrap();
    }

    fn heal(&self) {
        ip(&format!("-n {} link set {} up", self.prefill, self.prefill)).unwrap();
        self.wait_until_up();
    }

    /// Starts all ranks: the senders, then the receivers.
    fn start(&self, deadline: Duration) -> (Vec<Running>, tempfile::TempDir) {
        let meet = tempfile::tempdir().unwrap();
        let ranks = [("sender", &self.prefill), ("receiver", &self.decode)].into_iter();
        let ranks = ranks.flat_map(|(program, namespace)| (0..4).map(move |rank| (program, namespace, rank)));
        let start = |(program, namespace, rank): (_, &String, u32)| {
            let (meet, deadline_s) = (meet.path().display(), deadline.as_secs());
            start_in(namespace, program, &format!("{JOB} --rank {rank} --meet {meet} --deadline-s {deadline_s}"))
        };
        (ranks.map(start).collect(), meet)
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for namespace in [&self.prefill, &self.decode] {
            let _ = ip(&format!("netns del {namespace}")); // it may never have been made
        }
    }
}

/// Cuts the link for a while. Every rank succeeds. Returns whether one still had something to do when the link came back.
fn healed_in_time(cable: &Cable) -> bool {
    let (mut ranks, _meet) = cable.start(Duration::from_secs(40));
    // All of them: one that still connects when the link goes is told that nobody is there.
    ranks.iter_mut().for_each(Running::wait_for_first_bytes);
    cable.cut();
    thread::sleep(Duration::from_secs(2));
    let waited = ranks.iter_mut().any(|rank| rank.process.try_wait().unwrap().is_none());
    cable.heal();
    for ended in ranks.into_iter().map(Running::end) {
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    }
    waited
}

/// Cuts the link for good. Every rank that had more to do says which rank of the other side it was. Returns whether one was in the
/// middle of its request, and when all had ended; on a busy machine some still connect when the first moves bytes, and on an idle
/// one some are done.
fn cut_off(cable: &Cable, deadline: Duration) -> (bool, Duration) {
    let (mut ranks, _meet) = cable.start(deadline);
    ranks[0].wait_for_first_bytes();
    cable.cut();
    let cut = Instant::now();
    let ended: Vec<_> = ranks.into_iter().map(Running::end).collect();
    let took = cut.elapsed();
    let failed = ended.iter().filter(|rank| rank.code != Some(0)).map(|rank| (rank.program, rank.failure(1)));
    let failed: Vec<_> = failed.collect();
    for (program, line) in &failed {
        let other = if *program == "sender" { "destination rank " } else { "source rank " };
        assert!(line.contains(other), "{line}");
    }
    cable.heal();
    (failed.iter().any(|(_, line)| line.starts_with("request 1 attempt 0: ")), took)
}

#[test]
fn a_link_that_is_cut_and_healed_costs_time_only() {
    let Some(cable) = Cable::lay("h") else { return };
    in_time(|| healed_in_time(&cable));
}

#[test]
fn a_link_that_stays_cut_ends_every_rank_within_its_deadline() {
    let Some(cable) = Cable::lay("c") else { return };
    let deadline = Duration::from_secs(4);
    in_time(|| {
        let mut in_the_middle = false;
        // The deadline to notice, as long again to part, and the rest for a busy machine.
        within(4 * deadline, || {
            let took;
            (in_the_middle, took) = cut_off(&cable, deadline);
            took
        });
        in_the_middle
    });
}
