//! One instance's blocks: which are free, which are held under which name, and which may be forgotten first.
//!
//! All ranks of an instance use the same frames for a block, so there is one pool an instance.

use std::collections::HashMap;

use lru::LruCache;

use crate::pattern::Key;
use crate::replay::trace::Block;
use crate::slots;

/// Room for one block of the trace, in the pools of every rank of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame(pub u32);

/// The frames of an instance.
///
/// A block that nobody uses keeps its frame until the frame is needed, the one used longest ago first. Of blocks that were
/// used by the same request the last in the prompt goes first, since it is of no use without those before it.
#[derive(Debug)]
pub struct Pool {
    frame_count: usize,
    free: Vec<Frame>,
    /// Blocks whose bytes are there.
    held: HashMap<Block, Held>,
    /// Those of them that no lease uses, the one used longest ago first.
    idle: LruCache<Block, ()>,
    quarantined: Vec<Frame>,
}

#[derive(Debug)]
struct Held {
    frame: Frame,
    users: usize,
}

/// The frames of one request. Goes back to the pool that gave it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "frames that are not given back are lost"]
pub struct Lease {
    /// A frame for each block of the prompt, in order, then those for what is generated.
    frames: Vec<Frame>,
    blocks: Vec<Block>,
    /// How many of the first blocks were there already.
    reused: usize,
    /// Blocks that the pool holds under their name: the reused ones, and all that were [`Pool::publish`]ed.
    named: Vec<bool>,
}

impl Lease {
    /// A frame for each block of the prompt, in order.
    pub fn frames(&self) -> &[Frame] {
        &self.frames[..self.blocks.len()]
    }

    /// How many of the first blocks were there already.
    pub fn reused(&self) -> usize {
        self.reused
    }
}

impl Pool {
    /// `frame_count` free frames, given out in an order that `key` decides: a pool that has served for a while is as
    /// scattered.
    pub fn new(frame_count: u32, key: Key) -> Self {
        let free =
            slots::shuffled(key, frame_count, frame_count).into_iter().map(|slot| Frame(slot.0)).collect::<Vec<_>>();
        let held = HashMap::new();
        Self { frame_count: free.len(), free, held, idle: LruCache::unbounded(), quarantined: Vec::new() }
    }

    /// Frames that can be had when nobody uses any.
    pub fn capacity(&self) -> usize {
        self.frame_count - self.quarantined.len()
    }

    /// Frames that were taken out of use.
    pub fn quarantined(&self) -> usize {
        self.quarantined.len()
    }

    /// The blocks that are held, and where.
    pub fn held(&self) -> impl Iterator<Item = (Block, Frame)> + '_ {
        self.held.iter().map(|(block, held)| (*block, held.frame))
    }

    /// Whether [`Self::take`] would find room now.
    pub fn has_room(&self, blocks: &[Block], more: usize) -> bool {
        let reused = self.prefix(blocks);
        let idle = blocks[..reused].iter().filter(|block| self.idle.contains(block)).count();
        blocks.len() - reused + more <= self.free.len() + self.idle.len() - idle
    }

    /// Frames for a prompt of `blocks`, of which the first that are held are used again, and `more` for what is generated.
    /// `None`, and nothing has changed, if there is no room now.
    pub fn take(&mut self, blocks: &[Block], more: usize) -> Option<Lease> {
        if !self.has_room(blocks, more) {
            return None;
        }
        let reused = self.prefix(blocks);
        let mut frames = Vec::with_capacity(blocks.len() + more);
        for block in &blocks[..reused] {
            self.idle.pop(block);
            let held = self.held.get_mut(block)?;
            held.users += 1;
            frames.push(held.frame);
        }
        for _ in reused..blocks.len() + more {
            frames.push(self.free.pop().or_else(|| self.forget())?);
        }
        let named = (0..blocks.len()).map(|index| index < reused).collect();
        Some(Lease { frames, blocks: blocks.to_vec(), reused, named })
    }

    /// The bytes of a lease's blocks are there: others may use them too. Of a block that came twice at a time, the first
    /// to be published is kept under the name.
    pub fn publish(&mut self, lease: &mut Lease) {
        for (index, block) in lease.blocks.iter().enumerate().skip(lease.reused) {
            if !lease.named[index] && !self.held.contains_key(block) {
                self.held.insert(*block, Held { frame: lease.frames[index], users: 1 });
                lease.named[index] = true;
            }
        }
    }

    /// A request needs its frames no more, and nobody writes to them.
    pub fn give_back(&mut self, lease: Lease) {
        let unnamed = self.leave(lease);
        self.free.extend(unnamed);
    }

    /// A request needs its frames no more, but somebody may still write to those that were new. They are never used again.
    pub fn quarantine(&mut self, lease: Lease) {
        let unnamed = self.leave(lease);
        self.quarantined.extend(unnamed);
    }

    /// Stops using a lease's named blocks; returns the frames that have no name.
    fn leave(&mut self, lease: Lease) -> Vec<Frame> {
        let Lease { frames, blocks, named, .. } = lease;
        let (of_blocks, more) = frames.split_at(blocks.len());
        let mut unnamed = more.to_vec();
        // From the end, so that the first block is the one used last.
        for ((block, frame), named) in blocks.iter().zip(of_blocks).zip(named).rev() {
            match self.held.get_mut(block).filter(|_| named) {
                Some(held) => {
                    held.users -= 1;
                    if held.users == 0 {
                        self.idle.put(*block, ());
                    }
                }
                None => unnamed.push(*frame),
            }
        }
        unnamed
    }

    /// How many of the first blocks are held.
    fn prefix(&self, blocks: &[Block]) -> usize {
        blocks.iter().take_while(|block| self.held.contains_key(block)).count()
    }

    /// Takes the frame of the block that was used longest ago.
    fn forget(&mut self) -> Option<Frame> {
        let (block, ()) = self.idle.pop_lru()?;
        Some(self.held.remove(&block)?.frame)
    }
}

#[cfg(test)]
mod tests;
