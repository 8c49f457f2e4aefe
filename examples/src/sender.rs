//! One rank of the sending instance.

use std::ffi::OsString;

use crate::event::{Event, Pair};
use crate::failure::Failure;
use crate::meet::{Member, Side};
use crate::options::{SenderOptions, parse};
use crate::rank::{Rank, tell, wait};
use crate::voice::Voice;

/// Runs the program.
///
/// # Errors
///
/// [`Failure`] with the line and exit code to end with.
pub fn main(args: impl IntoIterator<Item = OsString>) -> Result<(), Failure> {
    let Some(options) = parse::<SenderOptions>(args)? else { return Ok(()) };
    let member = Member { side: Side::Sender, rank: options.rank.rank };
    tell(member, &options.moving, |voice| run(member, &options, voice))
}

fn run(member: Member, options: &SenderOptions, voice: &mut Voice) -> Result<(), Failure> {
    let rank = Rank::start(member, &options.job, &options.rank, &options.moving, voice)?;
    let send = rank.send()?;
    // How much this rank sends depends on what its destinations ask for.
    for sent in wait(&send, None, voice)?.iter() {
        voice.say(Event::Pair(Pair {
            source_rank: member.rank,
            destination_rank: sent.rank,
            rows: sent.rows,
            pieces: Some(sent.pieces),
            runs: Some(sent.runs),
            bytes: sent.bytes,
            route: Some(sent.route.to_string()),
            elapsed_ms: sent.elapsed.as_secs_f64() * 1e3,
        }));
    }
    Ok(())
}
