//! One rank of the sending instance.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::process::ExitCode;

use kvferry::Engine;

use crate::event::{Event, Pair, routes};
use crate::failure::{self, Failure};
use crate::meet::{Member, Side};
use crate::options::{SenderOptions, parse};
use crate::rank::{Rank, tell, wait};
use crate::voice::Voice;

/// Runs the program. Whatever it has to say is said before it cleans up.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let options = match parse::<SenderOptions>(args) {
        Ok(Some(options)) => options,
        Ok(None) => return ExitCode::SUCCESS,
        Err(failure) => return failure::exit("sender", &Err(failure)),
    };
    let member = Member { side: Side::Sender, rank: options.rank.rank };
    tell(member, &options.moving, |voice, engine| run(member, &options, voice, engine))
}

fn run(member: Member, options: &SenderOptions, voice: &mut Voice, engine: &OnceCell<Engine>) -> Result<(), Failure> {
    let rank = Rank::start(member, &options.job, &options.rank, &options.moving, voice, engine)?;
    let Some(send) = rank.send()? else { return Ok(()) };
    // How much this rank sends depends on what its destinations ask for.
    for sent in wait(&send, None, voice)?.iter() {
        voice.say(Event::Pair(Pair {
            source_rank: member.rank,
            destination_rank: sent.rank,
            rows: sent.rows,
            pieces: Some(sent.pieces),
            runs: sent.runs,
            bytes: sent.bytes,
            route: routes(&sent.carried),
            elapsed_ms: sent.elapsed.as_secs_f64() * 1e3,
        }));
    }
    Ok(())
}
