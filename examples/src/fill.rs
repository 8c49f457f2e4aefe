//! Fills a rank's pools: the source's with a request, the destination's with a canary.

use kvferry_layout::PoolId;

use crate::image::Image;

/// Writes the whole image: `pool_bytes` bytes of each pool, in order.
///
/// `write` gets the pool, the offset in it, and the bytes; `progress` gets the bytes written so far.
///
/// # Errors
///
/// Whatever `write` returns.
pub fn fill<E>(
    image: &Image<'_>,
    pool_bytes: &[u64],
    mut write: impl FnMut(PoolId, u64, &[u8]) -> Result<(), E>,
    mut progress: impl FnMut(u64),
) -> Result<(), E> {
    let mut buffer = Vec::new();
    let mut done = 0;
    for (pool, &bytes) in (0..).map(PoolId).zip(pool_bytes) {
        for span in image.spans(pool, bytes) {
            buffer.resize(span.len(), 0);
            image.paint(&span, &mut buffer);
            write(pool, span.bytes.start, &buffer)?;
            done += span.bytes.end - span.bytes.start;
            progress(done);
        }
    }
    Ok(())
}
