//! The parts of a send, as its user pushes them.

use std::ops::Range;

use kvferry_match::BlockMap;
use kvferry_wire::FRAME_PAYLOAD_BYTES_MAX;

use super::{Pushed, Sending};
use crate::error::PushError;

/// Bytes that a sender's user may add to the last part.
pub(crate) const NOTE_BYTES_MAX: usize = 4096;

/// Parts of one send: those of which the report, with a checksum each, surely fits a frame, at 41 bytes a part and 16 KiB for
/// the rest.
pub(crate) const PARTS_MAX: usize = (FRAME_PAYLOAD_BYTES_MAX - (16 << 10)) / 41;

/// A part of a send.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartSpec {
    /// Its tokens. Parts follow each other; the one that ends where the request ends is the last.
    pub tokens: Range<u64>,
    /// The model's layers that it has of them. `None`: all. Of the same tokens, ranges follow each other, ascending.
    pub layers: Option<Range<u32>>,
    /// The block maps, if blocks have been added since the send was posted.
    pub block_maps: Option<Vec<BlockMap>>,
    /// A few bytes for the destination, of the last part only: a first token, say.
    pub note: Vec<u8>,
}

impl Sending {
    /// Takes a part up, if it follows those before.
    pub(super) fn push(&mut self, spec: PartSpec, own_layers: &Range<u32>, ready: bool) -> Result<(), PushError> {
        if self.pushed.len() >= PARTS_MAX {
            return Err(PushError::TooManyParts { parts_max: PARTS_MAX });
        }
        let PartSpec { tokens, layers, block_maps, note } = spec;
        let next_token = match (&self.open_chunk, self.pushed.last()) {
            (Some((chunk, _)), _) => chunk.start,
            (None, Some(last)) => last.tokens.end,
            (None, None) => self.tokens.start,
        };
        let ends = match &self.open_chunk {
            Some((chunk, _)) => tokens == *chunk,
            None => tokens.start == next_token && (tokens.start..=self.tokens.end).contains(&tokens.end),
        };
        if self.complete || !ends {
            return Err(PushError::Tokens { pushed: tokens, next: next_token, end: self.tokens.end });
        }
        let next_layer = self.open_chunk.as_ref().map(|(_, layer)| *layer);
        let whole = match (&layers, next_layer) {
            (None, None) => true,
            (Some(layers), None) if layers.start <= own_layers.start && layers.start < layers.end => {
                layers.end >= own_layers.end
            }
            (Some(layers), Some(next)) if layers.start == next && layers.start < layers.end => {
                layers.end >= own_layers.end
            }
            _ => return Err(PushError::Layers { pushed: layers, next: next_layer, own: own_layers.clone() }),
        };
        let last = whole && tokens.end == self.tokens.end;
        if note.len() > NOTE_BYTES_MAX || !(last || note.is_empty()) {
            return Err(PushError::Note { bytes: note.len(), bytes_max: if last { NOTE_BYTES_MAX } else { 0 } });
        }
        if let Some(block_maps) = block_maps {
            self.block_maps = block_maps.into();
        }
        let next_layer = layers.as_ref().map_or(0, |layers| layers.end);
        self.open_chunk = (!whole).then(|| (tokens.clone(), next_layer));
        (self.complete, self.note) = (last, note);
        self.pushed.push(Pushed { tokens, layers, block_maps: self.block_maps.clone(), ready });
        self.parts.values_mut().for_each(|part| part.started.push(false));
        Ok(())
    }
}
