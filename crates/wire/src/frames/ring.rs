//! A queue of records in memory that two processes map: one of them writes, the other reads.
//!
//! Positions count bytes since the beginning and never fall; byte `position` is at `position % capacity`. A record is its
//! number and length, 8 bytes each, and its bytes, filled up to a multiple of 8.
//!
//! | shared word | written by | pairs |
//! | --- | --- | --- |
//! | `tail` | writer | stored with `Release` behind the bytes of a record, loaded with `Acquire` before they are read |
//! | `head` | reader | stored with `Release` behind the copying out of a record, loaded with `Acquire` before its bytes are overwritten |
//! | `asleep` | both | the reader stores it, passes a `SeqCst` fence and looks at `tail`; the writer stores `tail`, passes a `SeqCst` fence and looks at `asleep`: one of the two sees the other |
//! | `link` | reader | stored with `Release`, loaded with `Acquire` |

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Number and length, in front of the bytes of a record.
const HEAD_BYTES: usize = 16;

/// A record takes a multiple of this.
const ALIGN: u64 = 8;

/// Values of `link`: nobody reads yet, somebody does, and nobody will any more.
const OFFERED: u64 = 0;
const ATTACHED: u64 = 1;
const GONE: u64 = 2;

/// A word in cache lines of its own: two of them, since processors fetch pairs.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Apart<T>(T);

/// What the two ends share besides the bytes.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Words {
    tail: Apart<AtomicU64>,
    head: Apart<AtomicU64>,
    reader: Apart<Reader>,
}

/// What changes seldom.
#[derive(Debug, Default)]
struct Reader {
    asleep: AtomicU64,
    link: AtomicU64,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Words>() == 384);

/// Memory that both ends map.
pub(crate) trait Memory {
    fn words(&self) -> &Words;

    /// Bytes for records, a multiple of 8.
    fn capacity(&self) -> u64;

    /// Copies `from` to byte `start` and on. In bounds.
    fn write(&self, start: u64, from: &[u8]);

    /// Copies byte `start` and on to `to`. In bounds.
    fn read(&self, start: u64, to: &mut [u8]);
}

/// The other end has written what cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Damaged;

/// What has become of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// It can be read. The reader sleeps if `bell`, and is to be woken: that is said once for each time it lies down.
    Published { bell: bool },
    /// There is no room for it now.
    NoRoom,
    /// Nor will there ever be.
    TooLong,
    /// Nobody reads here yet.
    Unattached,
    /// Nobody reads here any more, or the reader claims what cannot be.
    Gone,
}

/// The writing end.
#[derive(Debug)]
pub(crate) struct Writer<M> {
    memory: M,
    written: u64,
    /// `head` as it was last seen.
    head: u64,
}

impl<M: Memory> Writer<M> {
    /// Of fresh, zeroed memory.
    pub(crate) fn new(memory: M) -> Self {
        Self { memory, written: 0, head: 0 }
    }

    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// The same through another handle of the memory.
    pub(crate) fn map<N>(self, memory: impl FnOnce(M) -> N) -> Writer<N> {
        Writer { memory: memory(self.memory), written: self.written, head: self.head }
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.memory.words().reader.0.link.load(Ordering::Acquire) == ATTACHED
    }

    pub(crate) fn push(&mut self, number: u64, bytes: &[u8]) -> Pushed {
        match self.memory.words().reader.0.link.load(Ordering::Acquire) {
            OFFERED => return Pushed::Unattached,
            ATTACHED => {}
            _ => return Pushed::Gone,
        }
        let capacity = self.memory.capacity();
        let length = bytes.len() as u64;
        let Some(record) = record_bytes(length).filter(|record| *record <= capacity) else { return Pushed::TooLong };
        if self.written - self.head + record > capacity {
            let head = self.memory.words().head.0.load(Ordering::Acquire);
            // From where it was seen last to what has been written is where the reader can be.
            if head < self.head || head > self.written {
                return Pushed::Gone;
            }
            self.head = head;
            if self.written - head + record > capacity {
                return Pushed::NoRoom;
            }
        }
        let mut front = [0; HEAD_BYTES];
        front[..8].copy_from_slice(&number.to_le_bytes());
        front[8..].copy_from_slice(&length.to_le_bytes());
        write_around(&self.memory, self.written, &front);
        write_around(&self.memory, self.written + HEAD_BYTES as u64, bytes);
        self.written += record;
        let words = self.memory.words();
        words.tail.0.store(self.written, Ordering::Release);
        fence(Ordering::SeqCst);
        let asleep = &words.reader.0.asleep;
        let bell = asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::Relaxed) != 0;
        Pushed::Published { bell }
    }
}

/// The first record of a ring, checked: its bytes are there.
#[derive(Clone, Copy, Debug)]
struct Front {
    number: u64,
    length: usize,
    record: u64,
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct Reading<M: Memory> {
    memory: M,
    taken: u64,
    /// `tail` as it was last seen.
    tail: u64,
    front: Option<Front>,
}

impl<M: Memory> Reading<M> {
    /// Lets the writer know that this end reads, which may be `asleep`.
    pub(crate) fn attach(memory: M, asleep: bool) -> Self {
        let reader = &memory.words().reader.0;
        reader.asleep.store(u64::from(asleep), Ordering::Relaxed); // seen with the link
        reader.link.store(ATTACHED, Ordering::Release);
        Self { memory, taken: 0, tail: 0, front: None }
    }

    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// The number of the first record, if there is one.
    pub(crate) fn front(&mut self) -> Result<Option<u64>, Damaged> {
        if self.front.is_none() {
            self.front = self.look()?;
        }
        Ok(self.front.map(|front| front.number))
    }

    fn look(&mut self) -> Result<Option<Front>, Damaged> {
        let capacity = self.memory.capacity();
        if self.tail == self.taken {
            let tail = self.memory.words().tail.0.load(Ordering::Acquire);
            if tail < self.taken || tail - self.taken > capacity || !tail.is_multiple_of(ALIGN) {
                return Err(Damaged);
            }
            self.tail = tail;
        }
        if self.tail == self.taken {
            return Ok(None);
        }
        let there = self.tail - self.taken;
        let mut front = [0; HEAD_BYTES];
        if there < HEAD_BYTES as u64 {
            return Err(Damaged);
        }
        // Copied out before anything is made of it: the writer may change it meanwhile.
        read_around(&self.memory, self.taken, &mut front);
        let word = |at: usize| u64::from_le_bytes(front[at..at + 8].try_into().expect("8 of 16 bytes"));
        let (number, length) = (word(0), word(8));
        let record = record_bytes(length).filter(|record| *record <= there).ok_or(Damaged)?;
        let length = usize::try_from(length).map_err(|_| Damaged)?;
        Ok(Some(Front { number, length, record }))
    }

    /// Takes the record that [`front`](Self::front) has told of.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let Front { length, record, .. } = self.front.take()?;
        let mut bytes = vec![0; length];
        read_around(&self.memory, self.taken + HEAD_BYTES as u64, &mut bytes);
        self.taken += record;
        self.memory.words().head.0.store(self.taken, Ordering::Release);
        Some(bytes)
    }

    /// Asks to be woken for the next record. To be followed by a `SeqCst` fence, and then [`front`](Self::front).
    pub(crate) fn lie_down(&self) {
        self.memory.words().reader.0.asleep.store(1, Ordering::Relaxed); // the fence orders it
    }

    /// This end looks by itself again.
    pub(crate) fn get_up(&self) {
        self.memory.words().reader.0.asleep.store(0, Ordering::Relaxed); // too late is a bell too many
    }
}

impl<M: Memory> Drop for Reading<M> {
    fn drop(&mut self) {
        self.memory.words().reader.0.link.store(GONE, Ordering::Release);
    }
}

/// What a record of so many bytes takes.
fn record_bytes(length: u64) -> Option<u64> {
    length.checked_next_multiple_of(ALIGN)?.checked_add(HEAD_BYTES as u64)
}

/// Copies to `position`, around the end of the memory if need be. At most the capacity.
fn write_around(memory: &impl Memory, position: u64, bytes: &[u8]) {
    let (start, first) = place(memory, position, bytes.len());
    let (before, behind) = bytes.split_at(first);
    memory.write(start, before);
    if !behind.is_empty() {
        memory.write(0, behind);
    }
}

fn read_around(memory: &impl Memory, position: u64, bytes: &mut [u8]) {
    let (start, first) = place(memory, position, bytes.len());
    let (before, behind) = bytes.split_at_mut(first);
    memory.read(start, before);
    if !behind.is_empty() {
        memory.read(0, behind);
    }
}

/// Where a position is, and how many of `bytes` bytes from there are before the end.
fn place(memory: &impl Memory, position: u64, bytes: usize) -> (u64, usize) {
    let start = position % memory.capacity();
    let left = memory.capacity() - start;
    (start, usize::try_from(left).map_or(bytes, |left| left.min(bytes)))
}

#[cfg(all(test, loom))]
mod model;

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
