//! The conformance suite, and faults by script, over a UCX that is none. As the oldest release, on which staged chunks travel
//! as messages.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

mod faults;
mod suite;

/// What the fake says it is.
const VERSION: kvferry_wire::Version = kvferry_wire::Version::new(1, 13, 0);

/// A name by which these can be left out where they have run: no real UCX is in them.
mod over_a_fake {
    super::suite::conformance!(crate::faults::run);
    super::faults::faults!();
}
