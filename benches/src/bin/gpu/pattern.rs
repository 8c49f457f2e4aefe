//! What is in the pools: words that follow from their place at the source, and a canary.

use kvferry_wire::Region;

use crate::ask::Error;
use crate::job::Job;

/// What the target holds where nothing was written.
const CANARY: u64 = 0xeeee_eeee_eeee_eeee;

/// Bytes that are written or read at a time.
const STEP: usize = 64 << 20;

/// The word at byte `offset` of the source.
fn word(offset: u64) -> u64 {
    let z = (offset / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn write(region: &Region, bytes: u64, word: impl Fn(u64) -> u64) -> Result<(), Error> {
    let mut offset = 0;
    let mut buffer = Vec::with_capacity(STEP);
    while offset < bytes {
        buffer.clear();
        let step = (STEP as u64).min(bytes - offset);
        (0..step / 8).for_each(|index| buffer.extend(word(offset + index * 8).to_le_bytes()));
        region.write(offset, &buffer)?;
        offset += step;
    }
    Ok(())
}

pub(crate) fn fill(region: &Region, bytes: u64) -> Result<(), Error> {
    write(region, bytes, word)
}

pub(crate) fn scrub(region: &Region, bytes: u64) -> Result<(), Error> {
    write(region, bytes, |_| CANARY)
}

/// The first byte that is not what it must be after the job, canary elsewhere.
pub(crate) fn check(region: &Region, job: &Job) -> Result<Option<u64>, Error> {
    let mut expected = vec![CANARY; usize::try_from(job.target_bytes / 8)?];
    job.for_each_run(|from, to, bytes| {
        let first = usize::try_from(to / 8).expect("inside the pool");
        for index in 0..bytes / 8 {
            expected[first + usize::try_from(index).expect("inside the pool")] = word(from + index * 8);
        }
    });
    let mut buffer = vec![0; STEP];
    for (step, expected) in expected.chunks(STEP / 8).enumerate() {
        let (offset, found) = ((step * STEP) as u64, &mut buffer[..expected.len() * 8]);
        region.read(offset, found)?;
        let wrong = found.chunks_exact(8).zip(expected).position(|(found, word)| found != word.to_le_bytes());
        if let Some(wrong) = wrong {
            return Ok(Some(offset + wrong as u64 * 8));
        }
    }
    Ok(None)
}
