//! The atomics of [`sleepers`](crate::sleepers), in the place of which its test puts loom's.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
