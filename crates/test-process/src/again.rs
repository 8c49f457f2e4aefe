//! Attempts that say nothing, because of what else the machine did meanwhile or because of how fast it is, and are made again.

use std::time::Duration;

/// A busy machine is late now and then; what is wrong is late each time.
const LATE_MAX: usize = 3;

/// A fault may come when what it was meant for is over.
const MISSED_MAX: usize = 10;

/// Has something done within `bound`, which a machine that does other things too may miss once or twice. `attempt` says how long
/// it took, and looks at everything else each time.
///
/// # Panics
///
/// If it takes longer three times in a row.
pub fn within(bound: Duration, mut attempt: impl FnMut() -> Duration) {
    let mut late = Vec::new();
    while late.len() < LATE_MAX {
        match attempt() {
            took if took < bound => return,
            took => late.push(took),
        }
        println!("not within {bound:?}: {late:?}");
    }
    panic!("not within {bound:?}: {late:?}");
}

/// Has a fault happen while there is something for it to happen to: `attempt` says whether there was.
///
/// # Panics
///
/// If ten attempts in a row come too late.
pub fn in_time(mut attempt: impl FnMut() -> bool) {
    assert!((0..MISSED_MAX).any(|_| attempt()), "too late {MISSED_MAX} times");
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn what_is_late_each_time_fails() {
        let bound = Duration::from_secs(2);
        for (took, attempts) in [(vec![1], Some(1)), (vec![2, 3, 1], Some(3)), (vec![2, 3, 4], None)] {
            let mut seconds = took.into_iter();
            let mut made = 0;
            let attempt = || {
                made += 1;
                Duration::from_secs(seconds.next().expect("no more than three attempts"))
            };
            let well = catch_unwind(AssertUnwindSafe(|| within(bound, attempt))).is_ok();
            assert_eq!(well.then_some(made), attempts);
        }
    }

    #[test]
    fn a_fault_that_always_comes_too_late_fails() {
        let mut made = 0;
        in_time(|| {
            made += 1;
            made == MISSED_MAX
        });
        assert!(catch_unwind(|| in_time(|| false)).is_err());
    }
}
