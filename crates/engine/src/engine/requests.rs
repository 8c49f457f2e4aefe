//! Requests: how they are posted.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvferry_match::{BlockMap, Side};

use super::{Engine, Link};
use crate::completion::Completion;
use crate::core::{Handle, PartSpec, Ticket};
use crate::error::PostError;
use crate::message::RequestKey;
use crate::transfer::{Receive, Send, Transfer};

impl Engine {
    /// Asks the sources of `link` for the `tokens` of a request, into the slots of `block_maps` (one a layer group of this
    /// rank's table). The slots are exposed from now until the handle gives them back as [`Quiet`](crate::Quiet).
    ///
    /// Tokens that this side has already are left out at the start of the range.
    ///
    /// # Errors
    ///
    /// [`PostError`]: nothing was sent, no slot is exposed.
    pub fn receive(
        &self,
        link: Link,
        key: RequestKey,
        block_maps: &[BlockMap],
        tokens: Range<u64>,
    ) -> Result<Receive, PostError> {
        self.receive_from_any(&[link], key, block_maps, tokens)
    }

    /// As [`receive`](Self::receive), before it is known which of several instances, or data-parallel parts of one, will send
    /// the request. The first whose sources post a send of it is asked, or of those that have posted one already the latest; until
    /// then no slot is exposed. The sends of the others end with [`Refusal::NotChosen`](crate::Refusal::NotChosen).
    ///
    /// Each rank of this rank's instance chooses by itself. Where there are several, only one group of sources may post a send of
    /// the same attempt: of two groups one rank might choose one and another rank the other, and both sends would fail.
    ///
    /// # Errors
    ///
    /// [`PostError`]: nothing was sent, no slot is exposed.
    pub fn receive_from_any(
        &self,
        links: &[Link],
        key: RequestKey,
        block_maps: &[BlockMap],
        tokens: Range<u64>,
    ) -> Result<Receive, PostError> {
        let posted = Instant::now();
        let links = links.iter().map(|link| self.id_of(*link)).collect::<Result<Vec<_>, _>>()?;
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(PostError::Stopped);
        }
        let actions = state.core.receive(Instant::now(), key, &links, block_maps, &tokens)?;
        let completion = Completion::new();
        state.receives.insert(key, completion.clone());
        let slots = block_maps.iter().flat_map(BlockMap::slots).flatten().count();
        self.shared.telemetry.receive_begun(key, &tokens, slots, posted);
        state.core.receive_posted_in(key, posted.elapsed());
        self.shared.act(state, actions);
        self.shared.telemetry.posted(Side::Destination, posted.elapsed());
        Ok(Transfer::new(completion, Arc::downgrade(&self.shared), Handle::Receive(key)))
    }

    /// Writes the `tokens` of a request from the slots of `block_maps` (one a layer group of this rank's table) to each
    /// destination of `link` that this rank serves, as soon as it has said where to. A destination may ask for less, if it
    /// has the first tokens already. The slots must hold the bytes now and must not change until they are
    /// [`Quiet`](crate::Quiet), which of a send that ended well they are.
    ///
    /// # Errors
    ///
    /// [`PostError`]: nothing was written.
    pub fn send(
        &self,
        link: Link,
        key: RequestKey,
        block_maps: Vec<BlockMap>,
        tokens: Range<u64>,
    ) -> Result<Send, PostError> {
        let whole = PartSpec { tokens: tokens.clone(), ..PartSpec::default() };
        self.post_send(link, key, block_maps, tokens, Some(whole))
    }

    /// As [`send`](Self::send), of bytes that are yet to come: they leave as they are pushed, by [`Send::push`].
    ///
    /// # Errors
    ///
    /// [`PostError`]: nothing was written.
    pub fn send_in_parts(
        &self,
        link: Link,
        key: RequestKey,
        block_maps: Vec<BlockMap>,
        tokens: Range<u64>,
    ) -> Result<Send, PostError> {
        self.post_send(link, key, block_maps, tokens, None)
    }

    fn post_send(
        &self,
        link: Link,
        key: RequestKey,
        block_maps: Vec<BlockMap>,
        tokens: Range<u64>,
        whole: Option<PartSpec>,
    ) -> Result<Send, PostError> {
        let now = Instant::now();
        let ticket = Ticket { link: self.id_of(link)?, key };
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(PostError::Stopped);
        }
        let mut actions = state.core.send(now, ticket, block_maps, tokens.clone())?;
        self.shared.telemetry.send_begun(ticket, &tokens, now);
        // Nothing follows a whole that it could not, so the only error is that the send has ended, which its handle says.
        if let Some(whole) = whole
            && let Ok((_, pushed)) = state.core.push(now, ticket, whole, true)
        {
            actions.extend(pushed);
        }
        let posting = now.elapsed();
        state.core.posted_in(ticket, posting);
        let completion = Completion::new();
        state.sends.insert(ticket, completion.clone());
        self.shared.act(state, actions);
        self.shared.telemetry.posted(Side::Source, now.elapsed());
        Ok(Transfer::new(completion, Arc::downgrade(&self.shared), Handle::Send(ticket)))
    }
}
