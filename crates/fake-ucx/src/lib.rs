//! A UCX for tests: a `libucp` that is opened as any other, moves bytes between the workers of one process, and goes wrong
//! when a [`Script`] says so, at the same operation in every run.
//!
//! It is as unkind as UCX may be. Every other operation completes in its call and the others later; a put that has completed
//! is not there before a flush behind it has, or a while has passed; messages overtake puts; an endpoint that is closed by
//! force leaves its puts under way. What a caller must not do is noted, and fails the test: see [`Session`].
//!
//! ```no_run
//! use kvferry_fake_ucx::{Act, Fault, Rule, Script, install};
//! use ucx_sys::{Status, Version};
//!
//! let fake = install(Version::new(1, 22, 0));
//! // The second put of the first worker fails.
//! let rule = Rule { worker: 0, act: Act::Put, nth: 1, fault: Fault::Fail(Status::ERR_IO_ERROR) };
//! let session = fake.play(Script { rules: vec![rule], ..Script::default() });
//! ```

mod control;
mod exports;
mod request;
mod script;
mod world;

pub use control::{Fake, Session, install};
pub use script::{Act, Fault, Noise, Rule, Script};
