//! A worker that has nothing to do.

use std::time::Duration;

use kvferry_test_process::{cpu_seconds, within};

use crate::child::Target;
use crate::end::{DEADLINE, End, PIECE, WAYS};

/// Less than a hundredth of a core, connected and alone.
#[test]
fn an_idle_worker_sleeps() {
    for way in [WAYS[0], WAYS[5]] {
        let mut target = Target::start(way.0, 1, PIECE);
        let end = End::start(way, PIECE, DEADLINE);
        end.connect(&target);
        std::thread::sleep(Duration::from_millis(100));
        within(Duration::from_millis(30), || {
            // The tests of this binary run beside this one, so the time of this process says nothing.
            let (ours, theirs) = (cpu_seconds(), target.cpu_seconds());
            std::thread::sleep(Duration::from_secs(3));
            let (ours, theirs) = (cpu_seconds() - ours, target.cpu_seconds() - theirs);
            println!(
                "{way:?}: {:.2} % of a core at the target, {:.2} % here with the other tests",
                theirs / 0.03,
                ours / 0.03
            );
            Duration::from_secs_f64(theirs)
        });
    }
}
