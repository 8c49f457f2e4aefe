//! A point in time that a wait must not pass, and how long that was from the start.

use std::time::{Duration, Instant};

/// A deadline, and its length for whoever has to say that it passed.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    started: Instant,
    limit: Duration,
}

impl Deadline {
    /// A deadline `limit` from now.
    pub fn after(limit: Duration) -> Self {
        Self { started: Instant::now(), limit }
    }

    /// Time left; `None` once the deadline has passed.
    pub fn left(&self) -> Option<Duration> {
        self.limit.checked_sub(self.started.elapsed()).filter(|left| !left.is_zero())
    }

    /// The whole time given, in seconds.
    pub fn limit_s(&self) -> f64 {
        self.limit.as_secs_f64()
    }
}
