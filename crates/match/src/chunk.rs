//! Which part of a request is moved.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A part of a request: some of its tokens, and where the request ends.
///
/// A request may be moved in several chunks, as its tokens are computed. Whatever the block sizes, each overlap of a source
/// block and a destination block moves once, whole, with the chunk that has its last token: chunks round down to blocks,
/// and the last one has the rest. State moves with the last chunk. Of a group with a sliding window, only the overlaps that
/// reach into the window at the request's end move.
///
/// A range of tokens alone is a whole request, or what is left of one whose first tokens the destination holds already:
///
/// ```
/// use kvferry_match::Chunk;
///
/// assert_eq!(Chunk::from(128..1000), Chunk::new(128..1000, 1000));
/// assert!(!Chunk::new(0..512, 1000).is_last());
/// // All tokens are there already. State is not: it belongs to one request.
/// assert!(Chunk::from(1000..1000).is_last());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// Tokens of the chunk.
    pub tokens: Range<u64>,
    /// Tokens of the whole request, not below the end of the chunk's. The chunk that ends there is the last one.
    pub request_tokens: u64,
}

impl Chunk {
    /// Some tokens of a request of `request_tokens`.
    pub const fn new(tokens: Range<u64>, request_tokens: u64) -> Self {
        Self { tokens, request_tokens }
    }

    /// Whether it ends where the request ends.
    pub fn is_last(&self) -> bool {
        self.tokens.end == self.request_tokens
    }

    /// The tokens of which an overlap has to have its last one, so that it moves: those of the chunk that are among the
    /// last `window_tokens` of the request.
    pub(crate) fn within(&self, window_tokens: Option<u32>) -> Range<u64> {
        let window = window_tokens.map_or(0, |window| self.request_tokens.saturating_sub(window.into()));
        self.tokens.start.max(window)..self.tokens.end
    }
}

impl From<Range<u64>> for Chunk {
    fn from(tokens: Range<u64>) -> Self {
        Self { request_tokens: tokens.end, tokens }
    }
}
