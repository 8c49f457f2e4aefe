//! Memory that a peer on the same host can map: a sealed memory file, named by a cookie that nobody can guess or meet by
//! accident.
//!
//! The file is this crate's own rather than UCX's (`UCP_MEM_MAP_ALLOCATE` with `ucp_rkey_ptr`, which was measured to work
//! on 1.13 and 1.22, with peer error handling and without a shared memory lane). A memory file can be sealed, so that no
//! peer can take pages away from under a copy; it is not bounded by the size of `/dev/shm`; a mapping of it lives as long
//! as whoever copies through it, whatever becomes of the endpoint; and its last page says whether the owner still has it
//! registered, which no UCX key does on one host.
//!
//! # Safety
//!
//! A mapping is `bytes` long and stays so: the file cannot shrink, which is checked before it is mapped. It is reached by
//! raw pointers only, since the peer writes it at any time.
#![allow(unsafe_code, reason = "maps memory files")]

pub(crate) mod ring;

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};

use crate::copy::Window;
use crate::options::Pages;
use crate::process::Process;

/// Names of the files, before the cookie.
const NAME: &str = "kvferry-";

/// Populated between two looks at whether somebody still wants it.
const POPULATE_BYTES: usize = 32 << 20;

/// State of a file's memory, in its control page.
const OFFERED: u64 = u64::from_le_bytes(*b"offered!");
const WITHDRAWN: u64 = u64::from_le_bytes(*b"withdrew");

/// Where a peer on the same host finds the file. A claim, until [`Mapped::open`] has found the cookie in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShareCard {
    process: u32,
    descriptor: u32,
    cookie: u128,
}

impl ShareCard {
    pub(crate) fn cookie(&self) -> u128 {
        self.cookie
    }

    /// The owner, if it is on this host. Its file is looked at after it was opened: if it has the file then, it is the one that was
    /// meant, and not another that got its number.
    pub(crate) fn owner(&self) -> Option<Process> {
        let process = Process::open(self.process)?;
        self.is_there().then_some(process)
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", self.process, self.descriptor)
    }

    /// Whether a file of the name is where this says.
    fn is_there(&self) -> bool {
        let name = rustix::fs::readlink(self.path(), Vec::new());
        name.is_ok_and(|name| name.to_bytes().starts_with(format!("/memfd:{}", name_of(self.cookie)).as_bytes()))
    }
}

/// The last page of a file. Its owner writes it, peers read it.
#[repr(C)]
struct Control {
    state: AtomicU64,
    cookie: [AtomicU64; 2],
}

/// A live mapping of a memory file: the memory, then the control page.
#[derive(Debug)]
pub(crate) struct Mapped {
    base: NonNull<u8>,
    bytes: usize,
    mapped_bytes: usize,
    page_bytes: usize,
    cookie: u128,
}

// SAFETY: an address and lengths; every access through it is a raw copy or an atomic one.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn map(file: &OwnedFd, bytes: usize, cookie: u128) -> Option<Self> {
        let page_bytes = page_bytes(file)?;
        let mapped_bytes = file_bytes(bytes, page_bytes)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), mapped_bytes, access, MapFlags::SHARED, file, 0) };
        let base = NonNull::new(base.ok()?.cast())?;
        Some(Self { base, bytes, mapped_bytes, page_bytes, cookie })
    }

    /// Maps a peer's file of `bytes`. `None` if it is not there: the peer runs on another host, in another container, as
    /// another user, or is gone.
    pub(crate) fn open(card: &ShareCard, bytes: u64) -> Option<Self> {
        // The name is looked at before the file is opened: opening what is not ours could block, or have an effect.
        if !card.is_there() {
            return None;
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(Path::new(&card.path()), flags, Mode::empty()).ok()?;
        let sealed = rustix::fs::fcntl_get_seals(&file).ok()?.contains(SealFlags::SHRINK);
        let bytes = usize::try_from(bytes).ok()?;
        let size = usize::try_from(rustix::fs::fstat(&file).ok()?.st_size).ok()?;
        if !sealed || file_bytes(bytes, page_bytes(&file)?) != Some(size) {
            return None;
        }
        let mapped = Self::map(&file, bytes, card.cookie)?;
        let [low, high] = &mapped.control().cookie;
        // What was opened is the file that was named, not one that took its place in between.
        let found = u128::from(high.load(Ordering::Relaxed)) << 64 | u128::from(low.load(Ordering::Relaxed));
        (found == card.cookie).then_some(mapped)
    }

    fn control(&self) -> &Control {
        // SAFETY: the control page is the last of the mapping.
        let control = unsafe { self.base.add(self.mapped_bytes - self.page_bytes) }.cast::<Control>();
        // SAFETY: the page is mapped while `self` lives, aligned, and accessed by atomics only, in every process.
        unsafe { control.as_ref() }
    }

    /// The memory, in whole pages, without the control page.
    pub(crate) fn range(&self) -> (NonNull<u8>, usize) {
        (self.base, self.mapped_bytes - self.page_bytes)
    }

    /// Tells the peers that map the file that its memory is no longer registered. For its owner. Pairs with the load in
    /// [`is_offered`](Self::is_offered).
    pub(crate) fn withdraw(&self) {
        self.control().state.store(WITHDRAWN, Ordering::Release);
    }

    /// Whether the owner still has the memory registered. Pairs with the store in
    /// [`withdraw`](Self::withdraw).
    pub(crate) fn is_offered(&self) -> bool {
        self.control().state.load(Ordering::Acquire) == OFFERED
    }

    /// Maps the pages in `range` here, taking those that nobody has touched: else each first copy to one stops for it.
    /// `false` past the end, or where the kernel cannot (before 5.14).
    pub(crate) fn populate(&self, start: usize, bytes: usize) -> bool {
        let bytes = bytes.min(self.mapped_bytes.saturating_sub(start));
        if bytes == 0 {
            return false;
        }
        let start = self.base.as_ptr().wrapping_add(start).cast();
        // SAFETY: the range is inside the mapping, whose bytes this does not change.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxPopulateWrite) }.is_ok()
    }

    /// Has all of it populated by a thread of its own, which stops when the mapping is given up.
    pub(crate) fn populate_aside(self: &Arc<Self>) {
        let mapped = Arc::downgrade(self);
        let populate = move || {
            let mut start = 0;
            while mapped.upgrade().is_some_and(|mapped| mapped.populate(start, POPULATE_BYTES)) {
                start += POPULATE_BYTES;
            }
        };
        // Without a thread the pages are taken when they are touched.
        let _ = thread::Builder::new().name("kvferry-map".to_owned()).spawn(populate);
    }

    /// The memory, without the control page.
    pub(crate) fn window(&self) -> Window<'_> {
        // SAFETY: the mapping holds `bytes` bytes while `self` lives.
        unsafe { Window::new(self.base, self.bytes) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let base = self.base.as_ptr().cast::<c_void>();
        // SAFETY: `base` and `mapped_bytes` are the mapping made in `map`, undone only here; nobody holds a pointer into it
        // who does not hold `self`.
        let unmapped = unsafe { rustix::mm::munmap(base, self.mapped_bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own can be unmapped");
    }
}

/// A memory file of this process, with the mapping of its owner.
#[derive(Debug)]
pub(crate) struct Share {
    mapped: Mapped,
    file: OwnedFd,
}

impl Share {
    /// Makes a file of `bytes`, zeroed, whose pages are taken when first touched. `None` if the system refuses, which with
    /// huge pages it does unless enough of them have been set aside.
    pub(crate) fn create(bytes: usize, pages: Pages) -> Option<Self> {
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).ok()?;
        let cookie = u128::from_le_bytes(random);
        let huge = if pages == Pages::Huge { MemfdFlags::HUGETLB } else { MemfdFlags::empty() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
        let file = rustix::fs::memfd_create(name_of(cookie), flags).ok()?;
        rustix::fs::ftruncate(&file, u64::try_from(file_bytes(bytes, page_bytes(&file)?)?).ok()?).ok()?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
        let mapped = Mapped::map(&file, bytes, cookie)?;
        let control = mapped.control();
        for (word, half) in control.cookie.iter().zip([cookie, cookie >> 64]) {
            word.store(low_half(half), Ordering::Relaxed);
        }
        // Pairs with the load in `is_offered`.
        control.state.store(OFFERED, Ordering::Release);
        Some(Self { mapped, file })
    }

    pub(crate) fn card(&self) -> Option<ShareCard> {
        let process = std::process::id();
        let descriptor = u32::try_from(self.file.as_raw_fd()).ok()?;
        Some(ShareCard { process, descriptor, cookie: self.mapped.cookie })
    }

    /// As [`Mapped::withdraw`].
    pub(crate) fn withdraw(&self) {
        self.mapped.withdraw();
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.mapped.base
    }
}

fn low_half(number: u128) -> u64 {
    u64::try_from(number & u128::from(u64::MAX)).expect("masked to 64 bits")
}

fn name_of(cookie: u128) -> String {
    format!("{NAME}{cookie:032x}")
}

/// Bytes of a page of the file, which may be made of huge ones.
fn page_bytes(file: &OwnedFd) -> Option<usize> {
    usize::try_from(rustix::fs::fstatfs(file).ok()?.f_bsize).ok().filter(|bytes| *bytes >= size_of::<Control>())
}

/// Memory in whole pages, and the control page.
fn file_bytes(bytes: usize, page_bytes: usize) -> Option<usize> {
    let whole = bytes.checked_next_multiple_of(page_bytes)?.checked_add(page_bytes)?;
    isize::try_from(whole).ok().map(|_| whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::Stores;

    #[test]
    fn both_mappings_are_the_same_memory_until_it_is_withdrawn() {
        let share = Share::create(5000, Pages::Normal).unwrap();
        let card = share.card().unwrap();
        let mapped = Mapped::open(&card, 5000).unwrap();
        let end = 4999;
        // SAFETY: byte 4999 is inside the mapping, and nobody else accesses it.
        unsafe { share.base().as_ptr().wrapping_add(end).write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { mapped.base.as_ptr().wrapping_add(end).read() }, 7);
        assert!(mapped.window().copy_from(end as u64, mapped.window(), 0, 2, Stores::Cached).is_none());
        assert!(mapped.is_offered());
        share.withdraw();
        assert!(!mapped.is_offered());
    }

    #[test]
    fn a_claim_is_believed_only_if_the_cookie_the_size_and_the_process_are_right() {
        let share = Share::create(4096, Pages::Normal).unwrap();
        let card = share.card().unwrap();
        assert!(Mapped::open(&card, 4096).is_some());
        assert!(Mapped::open(&ShareCard { cookie: card.cookie ^ 1, ..card }, 4096).is_none());
        assert!(Mapped::open(&ShareCard { process: u32::MAX, ..card }, 4096).is_none());
        assert!(Mapped::open(&ShareCard { descriptor: 0, ..card }, 4096).is_none());
        assert!(Mapped::open(&card, 4097).is_none());
        assert!(Mapped::open(&card, u64::MAX).is_none());
        drop(share);
        assert!(Mapped::open(&card, 4096).is_none());
    }

    #[test]
    fn a_mapping_outlives_its_owner() {
        let share = Share::create(4096, Pages::Normal).unwrap();
        let mapped = Mapped::open(&share.card().unwrap(), 4096).unwrap();
        drop(share);
        assert!(mapped.window().copy_from(1, mapped.window(), 0, 1, Stores::Cached).is_some());
    }

    #[test]
    fn a_populated_mapping_takes_no_more_faults() {
        const BYTES: usize = 16 << 20;
        let faults = || -> u64 {
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            // Behind the name, which may hold anything: the eighth field.
            stat.rsplit(')').next().unwrap().split_whitespace().nth(7).unwrap().parse().unwrap()
        };
        let share = Share::create(BYTES, Pages::Normal).unwrap();
        let touch = |mapped: &Mapped| {
            let before = faults();
            for page in (0..BYTES as u64).step_by(4096) {
                mapped.window().copy_from(page, mapped.window(), page + 64, 1, Stores::Cached).unwrap();
            }
            faults() - before
        };
        let mapped = Mapped::open(&share.card().unwrap(), BYTES as u64).unwrap();
        assert!(touch(&mapped) > 100, "the kernel maps a page, or a few, at a time");
        let mapped = Mapped::open(&share.card().unwrap(), BYTES as u64).unwrap();
        if mapped.populate(0, BYTES) {
            assert!(touch(&mapped) < 10);
        }
        assert!(!mapped.populate(2 * BYTES, BYTES), "past the end");
    }

    #[test]
    fn huge_pages_are_had_or_refused() {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
        let free = line.is_some_and(|count| count.trim().parse::<u64>().unwrap() >= 2);
        match Share::create(5000, Pages::Huge) {
            Some(share) => {
                let mapped = Mapped::open(&share.card().unwrap(), 5000).unwrap();
                assert!(
                    mapped.is_offered() && mapped.page_bytes > 4096 && mapped.mapped_bytes == 2 * mapped.page_bytes
                );
            }
            None => assert!(!free, "two are enough"),
        }
    }
}
