//! How frames get from one worker to another: as messages of UCX, or, on one host, through a ring in memory that both map.
//!
//! A message over a socket of one host takes some microseconds, and UCX's own shared memory has one queue for all peers of a
//! process, which stops for all of them when one is stopped or killed in the middle of an insertion. So each sending end of a
//! connection has a ring of its own, with one writer and one reader:
//!
//! ```text
//! sender                                  receiver
//!   Ring {file}         -> UCX ->           maps the file, and writes into it that it reads from there
//!   frame 1             -> UCX ->           (sent before the sender has seen that)
//!   frames 2, 3         -> ring ->
//!   frame 4             -> UCX ->           (longer than the ring)
//!   frame 5             -> ring ->
//!   Bell                -> UCX ->           only if the receiver had gone to sleep
//! ```
//!
//! Frames are numbered from the offer on. Both ways keep their order, so the receiver takes whichever has the next number: what
//! comes by UCX finds all that is before it delivered, or in the ring, and what is in the ring ahead of its turn stays there.
//! What a ring has no room for waits at the sender, and all behind it. Nothing else is ever held back: a message of UCX says which stream it belongs to before it has come whole, and one whose sender is
//! stopped or killed in the middle of it holds up its own stream.
//!
//! The file is the sender's, made for one connection and never used again: nobody else writes to it, and it is freed when both
//! have let go of it. A writer that is killed or stopped at any instruction leaves a ring in which what it had published can be
//! read, and holds up nobody else. What it wrote is a claim: lengths and indices are copied out once and then checked, and what
//! cannot be ends this connection.

pub(crate) mod arriving;
pub(crate) mod incoming;
pub(crate) mod outgoing;
pub(crate) mod ring;
