//! What users do.

use kvferry_layout::Slot;
use kvferry_match::{BlockMap, Side};

use super::super::super::{Handle, PartSpec, Ticket};
use super::super::fixture::{BLOCK_TOKENS, SLOTS};
use super::World;
use crate::message::RequestKey;

/// What a user will do at some time.
#[derive(Clone, Debug)]
pub(super) enum Deed {
    Receive { key: RequestKey, blocks: usize },
    Send { key: RequestKey, blocks: usize, held: usize },
    Push { key: RequestKey, part: PartSpec, ready: bool },
    Ready { key: RequestKey, index: usize },
    Cancel { key: RequestKey },
}

impl World {
    /// Has users post a request everywhere.
    pub(super) fn post(&mut self) -> RequestKey {
        let key = RequestKey { request: self.next_request, attempt: 0 };
        self.next_request += 1;
        self.keys.push(key);
        let blocks = 1 + self.random.below(3);
        // Some blocks may be there already.
        let held = if self.random.one_in(4) { self.random.below(blocks) } else { 0 };
        for index in 0..self.ranks.len() {
            let deed = match self.ranks[index].side {
                Side::Source => Deed::Send { key, blocks, held },
                Side::Destination => Deed::Receive { key, blocks },
            };
            self.deeds.push((index, deed));
        }
        key
    }

    pub(super) fn do_deed(&mut self, index: usize, deed: Deed) {
        if !self.runs(index) {
            if self.ranks[index].alive {
                self.deeds.push((index, deed));
            }
            return;
        }
        let (now, epoch, link, side) =
            (self.now, self.ranks[index].epoch, self.ranks[index].link, self.ranks[index].side);
        self.say(|| format!("{epoch}: {deed:?}"));
        match deed {
            Deed::Receive { key, blocks } => {
                let free = self.books.free(epoch);
                if free.len() < blocks {
                    return;
                }
                let slots: Vec<u32> = free[..blocks].to_vec();
                let map = BlockMap::new(0, slots.iter().map(|slot| Some(Slot(*slot))).collect());
                let handle = Handle::Receive(key);
                self.books.posted(epoch, handle, slots);
                let tokens = 0..blocks as u64 * BLOCK_TOKENS;
                match self.ranks[index].core.receive(now, key, &[link], &[map], &tokens) {
                    Ok(actions) => self.act(index, actions),
                    Err(_) => self.books.not_posted(epoch, handle),
                }
            }
            Deed::Send { key, blocks, held } => {
                let slots = (0..blocks).map(|block| Some(Slot(u32::try_from(block).unwrap() % SLOTS))).collect();
                let (ticket, end) = (Ticket { link, key }, blocks as u64 * BLOCK_TOKENS);
                let handle = Handle::Send(ticket);
                self.books.posted(epoch, handle, Vec::new());
                match self.ranks[index].core.send(now, ticket, vec![BlockMap::new(0, slots)], 0..end) {
                    Ok(actions) => self.act(index, actions),
                    Err(_) => return self.books.not_posted(epoch, handle),
                }
                let middle = held as u64 * BLOCK_TOKENS + 5;
                let whole = held == 0 || middle >= end;
                let bounds = if whole { vec![0, end] } else { vec![0, middle, end] };
                for (number, bounds) in bounds.windows(2).enumerate() {
                    let part = PartSpec { tokens: bounds[0]..bounds[1], ..PartSpec::default() };
                    let deed = Deed::Push { key, part, ready: !self.random.one_in(3) };
                    // Parts follow each other.
                    if number == 0 { self.do_deed(index, deed) } else { self.deeds.push((index, deed)) }
                }
            }
            Deed::Push { key, part, ready } => {
                if let Ok((number, actions)) = self.ranks[index].core.push(now, Ticket { link, key }, part, ready) {
                    self.act(index, actions);
                    if !ready {
                        self.deeds.push((index, Deed::Ready { key, index: number }));
                    }
                }
            }
            Deed::Ready { key, index: number } => {
                let actions = self.ranks[index].core.part_ready(now, Ticket { link, key }, number);
                self.act(index, actions);
            }
            Deed::Cancel { key } => {
                let core = &mut self.ranks[index].core;
                let actions = match side {
                    Side::Source => core.cancel_send(now, Ticket { link, key }),
                    Side::Destination => core.cancel_receive(now, key),
                };
                self.act(index, actions);
            }
        }
    }
}
