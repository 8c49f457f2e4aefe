//! Where the time of a transfer goes: from each point that the wire tells of, or that this program marks, to the next.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Points in the order in which they were passed, on whatever thread.
static PASSED: Mutex<Vec<(&str, Instant)>> = Mutex::new(Vec::new());

struct Recorder;

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().ends_with("::stage")
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        pass(event.metadata().name());
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

fn pass(name: &'static str) {
    PASSED.lock().expect("no panic under it").push((name, Instant::now()));
}

/// A point of this program's.
macro_rules! mark {
    ($name:literal) => {
        tracing::trace!(name: $name, target: "gpu::stage", "")
    };
}

pub(crate) use mark;

/// Records from now on.
pub(crate) fn start() {
    // Only one is ever set, here.
    let _ = tracing::subscriber::set_global_default(Recorder);
}

/// What was recorded since the last time: the median of each way from a point to the next that was gone often.
pub(crate) fn take(heading: &str) {
    let passed = std::mem::take(&mut *PASSED.lock().expect("no panic under it"));
    let mut ways: BTreeMap<(&str, &str), Vec<Duration>> = BTreeMap::new();
    for pair in passed.windows(2) {
        ways.entry((pair[0].0, pair[1].0)).or_default().push(pair[1].1 - pair[0].1);
    }
    let most = ways.values().map(Vec::len).max().unwrap_or(0);
    for ((from, to), mut times) in ways.into_iter().filter(|(_, times)| times.len() * 20 >= most && times.len() > 1) {
        times.sort_unstable();
        let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6;
        eprintln!("{heading}: {from} - {to}: {:.1} us (99th {:.1}), {} times", at(50), at(99), times.len());
    }
}
