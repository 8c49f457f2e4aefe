//! The owner's end of an inbox: who may fill which chunk, and where the bytes go.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::address::InboxCard;
use crate::context::Context;
use crate::copy::Stores;
use crate::cuda::expand::UNIT_BYTES;
use crate::cuda::incoming::Incoming;
use crate::cuda::kernel::CHUNKS;
use crate::cuda::scatter::{Scatterer, Scattering};
use crate::cursor::Cursor;
use crate::error::{RegionError, TransferError};
use crate::inbox::message::{Body, ConnectionId, Description, Refusal, StreamId};
use crate::inbox::units::UnitStream;
use crate::inbox::{chunk_offset, chunk_stride};
use crate::permits::Permit;
use crate::pieces::{Shape, Size};
use crate::region::{MemoryKind, Region};

/// Chunks that one connection may hold at a time. A source that is stopped keeps no more from the others.
pub(crate) const CHUNKS_PER_CONNECTION: usize = 8;

/// The same of a slab, and of them those that it may hold ahead of its next transfer.
const SLAB_CHUNKS_PER_CONNECTION: usize = 16;
const AHEAD_PER_CONNECTION: usize = 4;

/// Bytes of descriptions that one connection may have here, complete or not.
pub(crate) const DESCRIPTION_BYTES_MAX: usize = 8 << 20;

/// How long a chunk is left alone whose writer has died, if a GPU may have been writing it: the writer's socket can break before
/// its kernels have been stopped.
const REST: Duration = Duration::from_secs(1);

/// Connections that are served. More are not answered.
const CONNECTIONS_MAX: usize = 4096;

/// A connection of a worker: its epoch, and its own number for the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Peer {
    pub(crate) epoch: u64,
    pub(crate) connection: ConnectionId,
}

/// Something to be said to a peer.
pub(crate) type Reply = (Peer, Body);

pub(crate) struct Inbox {
    region: Region,
    chunk_bytes: u32,
    chunks_per_connection: usize,
    /// Chunks that are granted ahead, and as many as may be.
    ahead: usize,
    ahead_max: usize,
    /// Connections that have nothing under way, and might be granted some ahead.
    idle: VecDeque<Peer>,
    free: Vec<u32>,
    connections: BTreeMap<Peer, Connection>,
    /// Connections in the order of their turns: to be granted a chunk, and to have one scattered.
    grant_turns: VecDeque<Peer>,
    scatter_turns: VecDeque<Peer>,
    /// Chunks that the GPU is scattering.
    scattering: Vec<Pending>,
    /// Chunks whose writer, a GPU, is gone, and from when on they are free.
    resting: VecDeque<(Instant, u32)>,
    /// Chunks that a peer may still write although nothing is heard of it any more.
    lost: Vec<(Peer, Opened)>,
}

/// Chunks that the GPU is scattering. What it reads and writes is held here.
struct Pending {
    peer: Peer,
    stream: StreamId,
    chunks: Vec<u32>,
    scattering: Option<Scattering>,
}

/// Chunks that a peer might write when its connection ended.
struct Opened {
    chunks: Vec<u32>,
    /// By its GPU, perhaps.
    by_gpu: bool,
}

#[derive(Default)]
struct Connection {
    /// Descriptions that have arrived in part, with their full length.
    arriving: BTreeMap<StreamId, (usize, Vec<u8>)>,
    streams: BTreeMap<StreamId, Stream>,
    /// Bytes of descriptions in `arriving`, by their full length, and behind `streams`.
    description_bytes: usize,
    /// Chunks that the peer may write for a stream, or has written and that have not been scattered.
    held: usize,
    /// Chunks that it may write for the next one.
    ahead: BTreeSet<u32>,
    /// The peer has said goodbye, and is granted nothing any more.
    left: bool,
}

/// One transfer on its way in.
struct Stream {
    shapes: Vec<Shape>,
    /// The target of each shape, registered for as long as bytes may come.
    regions: Vec<Region>,
    description_bytes: usize,
    /// What it belongs to, and whether that has been revoked: then nothing more is granted or scattered.
    permit: Option<Permit>,
    revoked: bool,
    /// Set for a stream in the order of a GPU's, whose size is that of its units: shapes and regions are here if a GPU scatters
    /// it, or there.
    device: Option<Rc<Scatterer>>,
    units: Option<UnitStream>,
    size: Size,
    chunk_bytes: u64,
    /// Parts that have been granted a chunk, that have been received, and that have been scattered.
    granted: u64,
    scattered: u64,
    received: Indices,
    /// Chunks that the peer may write.
    open: BTreeSet<u32>,
    /// Parts that have been received, by the first, with the chunks that hold them: one, or several that the GPU scatters at once.
    ready: VecDeque<(u64, Vec<u32>)>,
}

/// A set of indices that is filled more or less from below.
#[derive(Default)]
struct Indices {
    below: u64,
    above: BTreeSet<u64>,
}

impl Indices {
    /// Whether `index` was not in the set.
    fn insert(&mut self, index: u64) -> bool {
        let new = index >= self.below && self.above.insert(index);
        while self.above.remove(&self.below) {
            self.below += 1;
        }
        new
    }
}

impl Indices {
    fn contains(&self, index: u64) -> bool {
        index < self.below || self.above.contains(&index)
    }
}

impl Stream {
    fn new(size: Size, chunk_bytes: u64) -> Self {
        Self {
            shapes: Vec::new(),
            regions: Vec::new(),
            description_bytes: 0,
            permit: None,
            revoked: false,
            device: None,
            units: None,
            size,
            chunk_bytes,
            granted: 0,
            scattered: 0,
            received: Indices::default(),
            open: BTreeSet::new(),
            ready: VecDeque::new(),
        }
    }

    fn of_device(device: Scatterer) -> Self {
        let units = u64::from(device.units());
        let size = Size { bytes: units * UNIT_BYTES, runs: units };
        let chunk_bytes = u64::from(device.chunk_units) * UNIT_BYTES;
        Self { device: Some(Rc::new(device)), ..Self::new(size, chunk_bytes) }
    }

    fn of_units(units: UnitStream) -> Self {
        let (size, chunk_bytes) = (units.size(), units.chunk_bytes());
        Self { units: Some(units), ..Self::new(size, chunk_bytes) }
    }

    fn chunk_count(&self) -> u64 {
        self.size.bytes.div_ceil(self.chunk_bytes)
    }

    fn has_ready(&self) -> bool {
        !self.revoked && !self.ready.is_empty()
    }

    /// Bytes of part `index`, of those that there are.
    fn part_bytes(&self, index: u64) -> u64 {
        self.chunk_bytes.min(self.size.bytes - index * self.chunk_bytes)
    }

    /// Copies part `index` from chunk `chunk` of `inbox` to where it belongs.
    fn scatter(&self, inbox: &Region, chunk_base: u64, index: u64) {
        let start = index * self.chunk_bytes;
        let bytes = self.part_bytes(index);
        if let Some(units) = &self.units {
            return units.scatter(inbox, chunk_base, start, bytes);
        }
        let mut cursor = Cursor::at(&self.shapes, start);
        let mut done = 0;
        let mut next = cursor.next(&self.shapes, bytes);
        while let Some(run) = next {
            let ahead = done + run.bytes;
            let after = if ahead < bytes { cursor.next(&self.shapes, bytes - ahead) } else { None };
            if let Some(after) = after {
                self.regions[after.part].window().prefetch_target(after.remote_offset);
            }
            let target = self.regions[run.part].window();
            let copied =
                target.copy_from(run.remote_offset, inbox.window(), chunk_base + done, run.bytes, Stores::Streaming);
            debug_assert!(copied.is_some(), "the shapes were checked against their regions");
            (done, next) = (ahead, after);
        }
    }
}

impl Inbox {
    /// `None` if the options leave no room for a chunk.
    pub(crate) fn new(context: &Context) -> Result<Option<Self>, RegionError> {
        let options = context.options();
        let chunk_bytes = options.chunk_bytes;
        let stride = chunk_stride(chunk_bytes);
        let chunks = options.inbox_bytes.checked_div(stride).unwrap_or(0);
        let chunks = u32::try_from(chunks).unwrap_or(u32::MAX);
        if chunks == 0 {
            return Ok(None);
        }
        let region = context.allocate(u64::from(chunks) * stride)?;
        Ok(Some(Self::of(region, chunks, chunk_bytes, CHUNKS_PER_CONNECTION)))
    }

    /// A slab of GPU memory. `None` if the options leave no room for a chunk.
    pub(crate) fn on_gpu(context: &Context) -> Result<Option<Self>, RegionError> {
        let Some(options) = &context.options().cuda else { return Ok(None) };
        // Chunks are whole units, a power of two of them: the kernel numbers them so.
        let units = u64::from(options.slab_chunk_bytes) / UNIT_BYTES;
        let chunk_bytes = units.checked_ilog2().map_or(0, |log2| UNIT_BYTES << log2);
        let chunks = u32::try_from(options.slab_bytes.checked_div(chunk_bytes).unwrap_or(0)).unwrap_or(u32::MAX);
        if chunks == 0 {
            return Ok(None);
        }
        let region = context.allocate_device(u64::from(chunks) * chunk_bytes)?;
        let chunk_bytes = u32::try_from(chunk_bytes).expect("at most the option");
        let share = |of: u32| usize::try_from(of).unwrap_or(usize::MAX);
        // What is left serves others while a source that has the most is stopped.
        let most = share(chunks / 4 * 3).clamp(2, SLAB_CHUNKS_PER_CONNECTION);
        Ok(Some(Self { ahead_max: share(chunks / 4), ..Self::of(region, chunks, chunk_bytes, most) }))
    }

    fn of(region: Region, chunks: u32, chunk_bytes: u32, chunks_per_connection: usize) -> Self {
        Self {
            region,
            chunk_bytes,
            free: (0..chunks).rev().collect(),
            connections: BTreeMap::new(),
            grant_turns: VecDeque::new(),
            scatter_turns: VecDeque::new(),
            chunks_per_connection,
            ahead: 0,
            ahead_max: 0,
            idle: VecDeque::new(),
            scattering: Vec::new(),
            resting: VecDeque::new(),
            lost: Vec::new(),
        }
    }

    pub(crate) fn card(&self) -> InboxCard {
        InboxCard { region: self.region.card(), chunk_bytes: self.chunk_bytes }
    }

    /// As a slab does.
    #[cfg(test)]
    pub(crate) fn granting_ahead(self, most: usize) -> Self {
        Self { ahead_max: most, ..self }
    }

    #[cfg(test)]
    pub(crate) fn free_chunks(&self) -> usize {
        self.free.len()
    }

    #[cfg(test)]
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Takes a connection in. `false` if there are too many.
    pub(crate) fn welcome(&mut self, peer: Peer) -> bool {
        if self.connections.contains_key(&peer) || self.connections.len() >= CONNECTIONS_MAX {
            return false;
        }
        self.connections.insert(peer, Connection::default());
        self.grant_turns.push_back(peer);
        self.scatter_turns.push_back(peer);
        self.idle.push_back(peer);
        true
    }

    /// The peer has said goodbye: it has nothing under way into chunks that it was granted, and they go to others at once. So do those
    /// that had been lost to it.
    pub(crate) fn farewell(&mut self, peer: Peer) {
        self.recover(peer);
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        connection.left = true;
        let ahead = std::mem::take(&mut connection.ahead);
        self.ahead -= ahead.len();
        self.free.extend(ahead);
        for stream in connection.streams.values_mut() {
            let open = std::mem::take(&mut stream.open);
            connection.held -= open.len();
            self.free.extend(open);
        }
    }

    /// Forgets a connection. What it was granted goes to others, so it must be certain that it writes no more: it said so,
    /// or its endpoint is closed because it died.
    pub(crate) fn forget(&mut self, peer: Peer) {
        let opened = self.part_from(peer);
        self.reclaim(opened);
    }

    /// Forgets a connection whose peer may still write what it was granted: that is nobody's until [`recover`](Self::recover).
    pub(crate) fn lose(&mut self, peer: Peer) {
        let opened = self.part_from(peer);
        if !opened.chunks.is_empty() {
            let (chunks, left) = (opened.chunks.len(), self.free.len());
            tracing::warn!(epoch = peer.epoch, chunks, left, "a peer that lives may still write what it was granted");
            self.lost.push((peer, opened));
        }
    }

    /// A lost peer, if it is one, is certain not to write any more.
    pub(crate) fn recover(&mut self, peer: Peer) {
        let back: Vec<_> = self.lost.extract_if(.., |(of, _)| *of == peer).collect();
        back.into_iter().for_each(|(_, opened)| self.reclaim(opened));
    }

    /// Ends a connection, behind what the GPU is scattering of it: nobody could wait for that afterwards. Returns the chunks that its
    /// peer might write.
    fn part_from(&mut self, peer: Peer) -> Opened {
        while let Some(stream) =
            self.scattering.iter().find(|pending| pending.peer == peer).map(|pending| pending.stream)
        {
            self.settle_stream(peer, stream);
        }
        let none = Opened { chunks: Vec::new(), by_gpu: false };
        let Some(connection) = self.connections.remove(&peer) else { return none };
        let in_units = |stream: &Stream| stream.device.is_some() || stream.units.is_some();
        let by_gpu = self.region.kind() == MemoryKind::Cuda || connection.streams.values().any(in_units);
        self.ahead -= connection.ahead.len();
        let (opened, ready): (Vec<_>, Vec<_>) =
            connection.streams.into_values().map(|stream| (stream.open, stream.ready)).unzip();
        self.free.extend(ready.into_iter().flatten().flat_map(|(_, chunks)| chunks));
        self.grant_turns.retain(|other| *other != peer);
        self.scatter_turns.retain(|other| *other != peer);
        self.idle.retain(|other| *other != peer);
        Opened { chunks: opened.into_iter().chain([connection.ahead]).flatten().collect(), by_gpu }
    }

    fn reclaim(&mut self, Opened { chunks, by_gpu }: Opened) {
        if by_gpu {
            let until = Instant::now() + REST;
            self.resting.extend(chunks.into_iter().map(|chunk| (until, chunk)));
        } else {
            self.free.extend(chunks);
        }
    }

    /// Whether a worker of this epoch has a connection here.
    pub(crate) fn knows(&self, epoch: u64) -> bool {
        self.connections.keys().any(|peer| peer.epoch == epoch)
    }

    /// The next bytes of a description. When it is complete it is checked, and refused or taken.
    pub(crate) fn describe(
        &mut self,
        context: &Context,
        peer: Peer,
        stream: StreamId,
        total_bytes: u32,
        bytes: &[u8],
    ) -> Option<Reply> {
        let chunk_bytes = self.chunk_bytes;
        self.described(peer, stream, total_bytes, bytes, |arrived| check(context, arrived, chunk_bytes))
    }

    /// The same, of a stream that the GPU scatters.
    pub(crate) fn describe_device(
        &mut self,
        context: &Context,
        gpu: &Incoming,
        peer: Peer,
        stream: StreamId,
        total_bytes: u32,
        bytes: &[u8],
    ) -> Option<Reply> {
        let chunk_bytes = self.chunk_bytes;
        self.described(peer, stream, total_bytes, bytes, |arrived| {
            Scatterer::check(gpu, context, arrived, chunk_bytes).map(Stream::of_device)
        })
    }

    /// The same, of a stream in the order of a GPU's that the host scatters.
    pub(crate) fn describe_units(
        &mut self,
        context: &Context,
        peer: Peer,
        stream: StreamId,
        total_bytes: u32,
        bytes: &[u8],
    ) -> Option<Reply> {
        let chunk_bytes = self.chunk_bytes;
        self.described(peer, stream, total_bytes, bytes, |arrived| {
            UnitStream::check(context, arrived, chunk_bytes).map(Stream::of_units)
        })
    }

    fn described(
        &mut self,
        peer: Peer,
        stream: StreamId,
        total_bytes: u32,
        bytes: &[u8],
        check: impl FnOnce(&[u8]) -> Result<Stream, Refusal>,
    ) -> Option<Reply> {
        let connection = self.connections.get_mut(&peer)?;
        let refused = |refusal| Some((peer, Body::Refused { stream, refusal }));
        if connection.streams.contains_key(&stream) {
            return None; // said already
        }
        let total = usize::try_from(total_bytes).ok()?;
        if !connection.arriving.contains_key(&stream) {
            if connection.description_bytes + total > DESCRIPTION_BYTES_MAX {
                return refused(Refusal::Busy);
            }
            connection.description_bytes += total;
            connection.arriving.insert(stream, (total, Vec::new()));
        }
        let (total, arrived) = connection.arriving.get_mut(&stream)?;
        if arrived.len() + bytes.len() < *total {
            arrived.extend_from_slice(bytes);
            return None;
        }
        arrived.extend_from_slice(bytes);
        let (total, arrived) = connection.arriving.remove(&stream)?;
        let taken = if arrived.len() == total { Ok(&arrived[..]) } else { Err(Refusal::Unreadable) };
        let taken = taken.and_then(check).and_then(|mut checked| {
            // What was granted ahead is the stream's from now on. Refused, it stays what it was.
            let begun = checked.device.as_ref().map_or(&[][..], |device| &device.ahead);
            let distinct: BTreeSet<u32> = begun.iter().copied().collect();
            let known = distinct.len() == begun.len() && distinct.is_subset(&connection.ahead);
            if !known || begun.len() as u64 > checked.chunk_count() {
                return Err(Refusal::Unreadable);
            }
            checked.granted = begun.len() as u64;
            connection.ahead.retain(|chunk| !distinct.contains(chunk));
            connection.held += distinct.len();
            self.ahead -= distinct.len();
            checked.open = distinct;
            Ok(checked)
        });
        match taken {
            Ok(mut checked) => {
                checked.description_bytes = total;
                if checked.size.bytes == 0 {
                    connection.description_bytes -= total;
                    return Some((peer, Body::Landed { stream }));
                }
                connection.streams.insert(stream, checked);
                None
            }
            Err(refusal) => {
                connection.description_bytes -= total;
                refused(refusal)
            }
        }
    }

    /// The peer's GPU has filled chunks, or this side's is to scatter them. As [`filled`](Self::filled), of all of them or none.
    pub(crate) fn filled_all(&mut self, peer: Peer, stream: StreamId, index: u64, chunks: Vec<u32>) {
        let chunk_bytes = self.chunk_bytes;
        let connection = self.connections.get_mut(&peer);
        let Some(stream) = connection.and_then(|connection| connection.streams.get_mut(&stream)) else { return };
        let chunks_max = match (&stream.device, &stream.units) {
            (Some(device), _) => device.chunks_max(chunk_bytes),
            (None, Some(_)) => CHUNKS,
            (None, None) => return,
        };
        let count = chunks.len() as u64;
        let fits = index.checked_add(count).is_some_and(|end| end <= stream.chunk_count());
        let distinct: BTreeSet<u32> = chunks.iter().copied().collect();
        let granted = distinct.len() == chunks.len() && distinct.is_subset(&stream.open);
        if count == 0 || chunks.len() > chunks_max || !fits || !granted {
            return;
        }
        if (index..index + count).any(|index| stream.received.contains(index)) {
            return;
        }
        for index in index..index + count {
            stream.received.insert(index);
        }
        stream.open.retain(|chunk| !distinct.contains(chunk));
        if stream.device.is_some() {
            stream.ready.push_back((index, chunks));
        } else {
            // The host takes one in a turn.
            stream.ready.extend((index..).zip(chunks).map(|(index, chunk)| (index, vec![chunk])));
        }
    }

    /// The peer has filled a chunk, or sends what belongs into it. Anything but a chunk that it was granted, for a part that
    /// has not come yet and in its length, is ignored.
    pub(crate) fn filled(&mut self, peer: Peer, stream: StreamId, index: u64, chunk: u32, bytes: Option<&[u8]>) {
        let connection = self.connections.get_mut(&peer);
        let Some(stream) = connection.and_then(|connection| connection.streams.get_mut(&stream)) else { return };
        if index >= stream.chunk_count() || !stream.open.contains(&chunk) {
            return;
        }
        if let Some(bytes) = bytes {
            let base = chunk_offset(chunk, self.chunk_bytes);
            if bytes.len() as u64 != stream.part_bytes(index) || self.region.write(base, bytes).is_err() {
                return;
            }
        }
        if stream.received.insert(index) {
            stream.open.remove(&chunk);
            stream.ready.push_back((index, vec![chunk]));
        }
    }

    /// Whether the stream is here, whole or in part.
    pub(crate) fn has(&self, peer: Peer, stream: StreamId) -> bool {
        let connection = self.connections.get(&peer);
        connection.is_some_and(|c| c.streams.contains_key(&stream) || c.arriving.contains_key(&stream))
    }

    /// Waits for what the GPU is scattering of a stream: a few chunks, some microseconds each.
    fn settle_stream(&mut self, peer: Peer, stream: StreamId) -> Option<Reply> {
        let mut landed = None;
        while let Some(position) = self.scattering.iter().position(|p| (p.peer, p.stream) == (peer, stream)) {
            let mut pending = self.scattering.swap_remove(position);
            while let Some(scattering) = &mut pending.scattering
                && scattering.poll().is_none()
            {
                std::hint::spin_loop();
            }
            landed = self.scattered(peer, stream, &pending.chunks).or(landed);
        }
        landed
    }

    /// Says what a stream belongs to.
    pub(crate) fn belongs(&mut self, peer: Peer, stream: StreamId, permit: Option<Permit>) {
        let connection = self.connections.get_mut(&peer);
        if let Some(stream) = connection.and_then(|connection| connection.streams.get_mut(&stream)) {
            stream.permit = permit;
        }
    }

    /// Scatters nothing more of what belongs to a permit of a peer's. Its chunks stay its own until the peer says that it writes
    /// none of them any more: these are the inbox's memory, and not what they were meant for.
    pub(crate) fn revoke(&mut self, epoch: u64, permit: Permit) -> Vec<Reply> {
        let of_epoch = self.connections.iter().filter(|(peer, _)| peer.epoch == epoch);
        let streams = of_epoch.flat_map(|(peer, connection)| {
            let revoked = connection.streams.iter().filter(|(_, stream)| stream.permit == Some(permit));
            revoked.map(|(id, _)| (*peer, *id))
        });
        let mut replies = Vec::new();
        for (peer, id) in streams.collect::<Vec<_>>() {
            if let Some(landed) = self.settle_stream(peer, id) {
                replies.push(landed);
                continue;
            }
            let connection = self.connections.get_mut(&peer);
            if let Some(stream) = connection.and_then(|connection| connection.streams.get_mut(&id)) {
                (stream.revoked, stream.granted) = (true, stream.chunk_count());
                replies.push((peer, Body::Revoked { stream: id }));
            }
        }
        replies
    }

    /// The peer gives a stream up and writes none of its chunks any more. What it has filled is forgotten.
    pub(crate) fn drop_stream(&mut self, peer: Peer, stream: StreamId) -> Option<Reply> {
        if let Some(landed) = self.settle_stream(peer, stream) {
            return Some(landed);
        }
        let connection = self.connections.get_mut(&peer)?;
        if let Some((total, _)) = connection.arriving.remove(&stream) {
            connection.description_bytes -= total;
        }
        if let Some(dropped) = connection.streams.remove(&stream) {
            connection.description_bytes -= dropped.description_bytes;
            let freed: Vec<u32> =
                dropped.open.into_iter().chain(dropped.ready.into_iter().flat_map(|(_, c)| c)).collect();
            connection.held -= freed.len();
            self.free.extend(freed);
            self.idle.push_back(peer);
        }
        Some((peer, Body::Dropped { stream }))
    }

    /// Scatters one chunk of the connection whose turn it is. `None` if there is none.
    pub(crate) fn scatter(&mut self) -> Option<Option<Reply>> {
        let has_ready = |connection: &Connection| connection.streams.values().any(Stream::has_ready);
        let turn = self.scatter_turns.iter().position(|peer| self.connections.get(peer).is_some_and(has_ready))?;
        let peer = self.scatter_turns.remove(turn)?;
        self.scatter_turns.push_back(peer);
        let connection = self.connections.get_mut(&peer)?;
        let (&id, stream) = connection.streams.iter_mut().find(|(_, stream)| stream.has_ready())?;
        let (index, chunks) = stream.ready.pop_front()?;
        if let Some(device) = &stream.device {
            let scattering = device.scatter(&self.region, self.chunk_bytes, &chunks, index);
            self.scattering.push(Pending { peer, stream: id, chunks, scattering });
            return Some(None);
        }
        for (index, chunk) in (index..).zip(&chunks) {
            stream.scatter(&self.region, chunk_offset(*chunk, self.chunk_bytes), index);
        }
        Some(self.scattered(peer, id, &chunks))
    }

    /// Takes up what the GPU has scattered.
    pub(crate) fn settle(&mut self) -> Vec<Reply> {
        let mut replies = Vec::new();
        let mut position = 0;
        while let Some(pending) = self.scattering.get_mut(position) {
            let ended = match &mut pending.scattering {
                Some(scattering) => scattering.poll(),
                None => Some(false),
            };
            let Some(well) = ended else {
                position += 1;
                continue;
            };
            let Pending { peer, stream, chunks, .. } = self.scattering.swap_remove(position);
            if well {
                replies.extend(self.scattered(peer, stream, &chunks));
            } else {
                // The stream keeps its chunks: a GPU that has failed once serves nobody any more.
                replies.push((peer, Body::Refused { stream, refusal: Refusal::Gpu }));
            }
        }
        replies
    }

    /// Whether the GPU is scattering something.
    pub(crate) fn is_scattering(&self) -> bool {
        !self.scattering.is_empty()
    }

    /// Chunks have been scattered and are free.
    fn scattered(&mut self, peer: Peer, id: StreamId, chunks: &[u32]) -> Option<Reply> {
        self.free.extend(chunks);
        let connection = self.connections.get_mut(&peer)?;
        let stream = connection.streams.get_mut(&id)?;
        stream.scattered += chunks.len() as u64;
        connection.held -= chunks.len();
        if stream.scattered < stream.chunk_count() {
            return None;
        }
        connection.description_bytes -= stream.description_bytes;
        connection.streams.remove(&id);
        self.idle.push_back(peer);
        Some((peer, Body::Landed { stream: id }))
    }

    /// Grants free chunks, one a turn, to the connections that have a use for them.
    pub(crate) fn grant(&mut self) -> Vec<Reply> {
        let mut grants: BTreeMap<(Peer, StreamId), (u64, Vec<u32>)> = BTreeMap::new();
        let most = self.chunks_per_connection;
        let wants = |connection: &Connection| {
            !connection.left
                && connection.held < most
                && connection.streams.values().any(|stream| stream.granted < stream.chunk_count())
        };
        while let Some((until, chunk)) = self.resting.front()
            && *until <= Instant::now()
        {
            self.free.push(*chunk);
            self.resting.pop_front();
        }
        while !self.free.is_empty() {
            let turn = self.grant_turns.iter().position(|peer| self.connections.get(peer).is_some_and(wants));
            let Some(peer) = turn.and_then(|turn| self.grant_turns.remove(turn)) else { break };
            self.grant_turns.push_back(peer);
            let Some(connection) = self.connections.get_mut(&peer) else { break };
            let wanting = connection.streams.iter_mut().find(|(_, stream)| stream.granted < stream.chunk_count());
            let (Some((&id, stream)), Some(chunk)) = (wanting, self.free.pop()) else { break };
            let (_, chunks) = grants.entry((peer, id)).or_insert((stream.granted, Vec::new()));
            chunks.push(chunk);
            stream.granted += 1;
            stream.open.insert(chunk);
            connection.held += 1;
        }
        let grant = |((peer, stream), (before, chunks))| (peer, Body::Grant { stream, before, chunks });
        let mut replies: Vec<Reply> = grants.into_iter().map(grant).collect();
        self.grant_ahead(&mut replies);
        replies
    }

    /// Grants chunks ahead to connections that have nothing under way, out of a part of the slab that is set apart for it: a
    /// transfer that begins with them does not wait for an answer first.
    fn grant_ahead(&mut self, replies: &mut Vec<Reply>) {
        let connections = self.connections.len();
        while let Some(peer) = self.idle.pop_front() {
            let Some(connection) = self.connections.get_mut(&peer) else { continue };
            let share = self.ahead_max.checked_div(connections).unwrap_or(0).clamp(1, AHEAD_PER_CONNECTION);
            let wanted = share.saturating_sub(connection.ahead.len());
            let count = wanted.min(self.ahead_max - self.ahead).min(self.free.len());
            // What has begun meanwhile comes here again when it ends.
            if count == 0 || connection.left || !connection.streams.is_empty() || !connection.arriving.is_empty() {
                continue;
            }
            let chunks = self.free.split_off(self.free.len() - count);
            self.ahead += count;
            connection.ahead.extend(&chunks);
            replies.push((peer, Body::Ahead { chunks }));
        }
    }
}

/// Checks a description against the regions that it names.
fn check(context: &Context, bytes: &[u8], inbox_chunk_bytes: u32) -> Result<Stream, Refusal> {
    let description = Description::parse(bytes).ok_or(Refusal::Unreadable)?;
    if description.chunk_bytes == 0 || description.chunk_bytes > inbox_chunk_bytes {
        return Err(Refusal::Unreadable);
    }
    let (mut shapes, mut regions, mut size) = (Vec::new(), Vec::new(), Size::default());
    for (part, claim) in description.parts.iter().enumerate() {
        let region = context.region(claim.region).ok_or(Refusal::Unregistered { part })?;
        let shape = claim.shape(region.bytes());
        let checked = shape.check(part).map_err(|error| match error {
            TransferError::OutsideRemote { .. } => Refusal::Outside { part },
            _ => Refusal::Unreadable,
        })?;
        size = size.checked_add(checked).ok_or(Refusal::Unreadable)?;
        shapes.push(shape);
        regions.push(region);
    }
    let chunk_bytes = u64::from(description.chunk_bytes);
    Ok(Stream { shapes, regions, ..Stream::new(size, chunk_bytes) })
}
