//! What this process uses.

use rustix::param::page_size;
use rustix::time::{ClockId, clock_gettime};

/// Open descriptors and resident bytes.
///
/// # Panics
///
/// Where there is no `/proc`.
#[must_use]
pub fn footprint() -> (usize, u64) {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count();
    let pages = std::fs::read_to_string("/proc/self/statm").expect("/proc is mounted");
    let resident: u64 = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("its second number");
    (descriptors, resident * page_size() as u64)
}

/// Seconds of processor time since the start, of all threads.
#[must_use]
pub fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
