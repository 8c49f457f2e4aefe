//! A template bound to the block maps of one request.

use kvferry_layout::{Digest, PoolId, Slot};

use crate::chunk::Chunk;
use crate::piece::{Dim, Piece};
use crate::slot_set::SlotSet;
use crate::template::{Section, Template};
use crate::text;
use crate::transcript::Transcript;

/// A slot that is read and the slot that is written from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotPair {
    /// Slot of the source's pools.
    pub source: Slot,
    /// Slot of the destination's pools.
    pub destination: Slot,
}

/// Bytes that are contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// Pool that is read.
    pub source_pool: PoolId,
    /// First byte, from the pool's base.
    pub source_offset: u64,
    /// Pool that is written.
    pub destination_pool: PoolId,
    /// First byte, from the pool's base.
    pub destination_offset: u64,
    /// Length.
    pub bytes: u64,
}

/// All that one source rank copies to one destination rank for one request: slot pairs, and a template for each of them.
/// Its memory is that of the pairs; runs exist only while [`Self::for_each_run`] names them.
///
/// The default is a plan of nothing, to be filled by [`Template::bind_into`].
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub(crate) template: Template,
    /// By pairing of the template. May be longer than they are: the rest is kept for its memory, and empty.
    pub(crate) pairs: Vec<Vec<SlotPair>>,
    pub(crate) chunk: Chunk,
    pub(crate) bytes: u64,
    pub(crate) seen: SlotSet,
}

impl Plan {
    /// Each section of the template with its slot pairs. Sections that differ only in their pools share theirs.
    pub fn sections(&self) -> impl Iterator<Item = (&Section, &[SlotPair])> {
        self.template.sections().iter().map(|section| {
            let pairs = self.pairs.get(section.pairing).map_or(&[][..], Vec::as_slice);
            (section, pairs)
        })
    }

    /// The template that was bound.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// The lists of slot pairs that are not empty, each with a number by which its sections
    /// [name it](crate::Section::pairing). In the order of the sections, of which each has at least one.
    pub fn pairings(&self) -> impl Iterator<Item = (usize, &[SlotPair])> {
        self.pairs.iter().map(Vec::as_slice).enumerate().filter(|(_, pairs)| !pairs.is_empty())
    }

    /// The part of the request that the plan was bound for.
    pub fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// Bytes that are copied.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Strided pieces that are copied: those of the template, once for each slot pair.
    pub fn pieces(&self) -> u64 {
        self.sections().map(|(section, pairs)| section.pieces.len() as u64 * pairs.len() as u64).sum()
    }

    /// Contiguous runs that are copied.
    pub fn runs(&self) -> u64 {
        self.sections().map(|(section, pairs)| section.runs_per_pair * pairs.len() as u64).sum()
    }

    /// Digest of the template, the chunk and the destination's slots. The source's slots are not in it, so that the
    /// receiver, who does not know them, can say what it has to be: [`Template::expectation`].
    pub fn digest(&self) -> Digest {
        let mut transcript = begin_digest(&self.template, &self.chunk);
        for pair in self.pairs.iter().flatten() {
            transcript.word(pair.destination.0);
        }
        transcript.finish()
    }

    /// Calls `run` for every run, in no order that means anything.
    pub fn for_each_run(&self, mut run: impl FnMut(Run)) {
        let Template { source, destination, .. } = &self.template;
        for (section, pairs) in self.sections() {
            let source_stride = source.pool(section.source_pool).stride;
            let destination_stride = destination.pool(section.destination_pool).stride;
            for pair in pairs {
                // Binding has checked that the slots are the pools', whose extents fit.
                let source_slot = u64::from(pair.source.0) * source_stride;
                let destination_slot = u64::from(pair.destination.0) * destination_stride;
                for piece in section.pieces.iter() {
                    for (source_offset, destination_offset) in offsets(piece) {
                        run(Run {
                            source_pool: section.source_pool,
                            source_offset: source_slot + source_offset,
                            destination_pool: section.destination_pool,
                            destination_offset: destination_slot + destination_offset,
                            bytes: piece.run_bytes,
                        });
                    }
                }
            }
        }
    }

    /// A table for people: what is copied, by pools and phases.
    pub fn explain(&self) -> String {
        let lines = self.sections().map(|(section, pairs)| {
            let phase = &section.phase;
            let count = pairs.len() as u64;
            [
                format!("{} -> {}", section.source_group, section.destination_group),
                format!("{} -> {}", section.source_pool, section.destination_pool),
                format!("{}..{} of {}", phase.tokens.start, phase.tokens.end, phase.period_tokens),
                count.to_string(),
                (section.pieces.len() as u64 * count).to_string(),
                (section.runs_per_pair * count).to_string(),
                (section.bytes_per_pair * count).to_string(),
            ]
        });
        text::table(["groups", "pools", "tokens", "slot pairs", "pieces", "runs", "bytes"], lines)
    }
}

/// What [`Plan::digest`] begins with: all but the destination's slots.
pub(crate) fn begin_digest(template: &Template, chunk: &Chunk) -> Transcript {
    let mut transcript = Transcript::new("kvferry plan 2");
    transcript.digest(template.digest());
    transcript.words(&[chunk.tokens.start, chunk.tokens.end, chunk.request_tokens]);
    transcript
}

/// Offsets of the runs of a piece, of both sides.
fn offsets(piece: &Piece) -> impl Iterator<Item = (u64, u64)> + use<'_> {
    let steps = |dim: Dim| (0..dim.count).map(move |i| (i * dim.source_stride, i * dim.destination_stride));
    let [outer, inner] = piece.dims;
    steps(outer).flat_map(move |outer| {
        steps(inner)
            .map(move |inner| (piece.source_offset + outer.0 + inner.0, piece.destination_offset + outer.1 + inner.1))
    })
}
