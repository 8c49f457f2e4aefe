//! The other process of a test: the same test binary again, which runs one ignored test and in it answers what it is asked,
//! in lines of JSON.
//!
//! ```no_run
//! use kvferry_test_process::{Process, serve, setup};
//!
//! // In the test:
//! let (mut other, mut answers) = Process::start("child::adder", &20, |_| {});
//! other.tell(&22);
//! assert_eq!(answers.next(), Some(42));
//!
//! // In `mod child`, `#[test]` and `#[ignore]`:
//! fn adder() {
//!     let Some(first) = setup::<i32>() else { return };
//!     serve(|second: i32| first + second);
//! }
//! ```
#![forbid(unsafe_code)]

mod again;
mod process;
mod usage;

pub use again::{in_time, within};
pub use process::{Answers, Process, asked, say, serve, setup};
pub use usage::{cpu_seconds, footprint};
