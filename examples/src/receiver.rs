//! One rank of the receiving instance.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::process::ExitCode;

use kvferry::Engine;
use kvferry_layout::PoolId;

use crate::check::check;
use crate::event::{Event, Pair, Phase, routes};
use crate::failure::{self, Failure};
use crate::meet::{Member, Side};
use crate::options::{ReceiverOptions, parse};
use crate::rank::{PoolError, Rank, tell, wait};
use crate::voice::Voice;

/// The pools do not hold what was counted. A bug of the engine's or of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{counted_bytes} bytes were counted and {found_bytes} bytes of the request are in the pools")]
pub struct CountError {
    /// What the engine counted, over all sources.
    pub counted_bytes: u64,
    /// What the check found.
    pub found_bytes: u64,
}

/// Runs the program. Whatever it has to say is said before it cleans up.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let options = match parse::<ReceiverOptions>(args) {
        Ok(Some(options)) => options,
        Ok(None) => return ExitCode::SUCCESS,
        Err(failure) => return failure::exit("receiver", &Err(failure)),
    };
    let member = Member { side: Side::Receiver, rank: options.rank.rank };
    tell(member, &options.moving, |voice, engine| run(member, &options, voice, engine))
}

fn run(member: Member, options: &ReceiverOptions, voice: &mut Voice, engine: &OnceCell<Engine>) -> Result<(), Failure> {
    let rank = Rank::start(member, &options.job, &options.rank, &options.moving, voice, engine)?;
    let image = rank.job.image(member, &rank.table, &rank.slots).map_err(Failure::failed)?;
    let receive = rank.receive()?;
    let mut counted_bytes = 0;
    let received = receive.map(|receive| wait(&receive, Some(image.moved_bytes_max()), voice)).transpose()?;
    for received in received.iter().flat_map(|received| received.iter()) {
        counted_bytes += received.bytes;
        voice.say(Event::Pair(Pair {
            source_rank: received.rank,
            destination_rank: member.rank,
            rows: received.rows,
            pieces: None,
            runs: received.carried.iter().map(|carried| carried.runs).sum(),
            bytes: received.bytes,
            route: routes(&received.carried),
            elapsed_ms: received.elapsed.as_secs_f64() * 1e3,
        }));
    }
    voice.progress(Phase::Move, image.moved_bytes_max(), Some(image.moved_bytes_max()));
    if options.flip_byte {
        flip_byte(&rank).map_err(Failure::failed)?;
    }
    let pool_bytes = rank.pool_bytes();
    let total = Some(pool_bytes.iter().sum());
    let read = |pool: PoolId, offset: u64, out: &mut [u8]| rank.regions[usize::from(pool.0)].read(offset, out);
    let verified =
        check(&image, &pool_bytes, read, |done| voice.progress(Phase::Check, done, total)).map_err(Failure::failed)?;
    let found_bytes = verified.request_bytes + verified.spare_bytes;
    if found_bytes != counted_bytes {
        return Err(Failure::failed(CountError { counted_bytes, found_bytes }));
    }
    voice.say(Event::Verified(verified));
    Ok(())
}

/// Flips a bit of the first byte of the first row's middle block.
fn flip_byte(rank: &Rank) -> Result<(), PoolError> {
    let Some((group, row)) = rank.table.rows().next() else { return Ok(()) };
    let slots = &rank.slots[usize::from(group.0)];
    let slot = u64::from(slots[slots.len() / 2].0);
    let pool = &rank.table.pools[usize::from(row.pool.0)];
    let region = &rank.regions[usize::from(row.pool.0)];
    let offset = slot * pool.slot_stride + row.offset;
    let mut byte = [0];
    let flip = region.read(offset, &mut byte).and_then(|()| region.write(offset, &[byte[0] ^ 1]));
    flip.map_err(|source| PoolError { pool: row.pool, offset, source })
}
