//! Whether the machine has the memory that a run asks for. Asking for too much would end in the kernel's killing somebody.

use std::fs;

/// A run that is too large for this machine. Ask for fewer tokens or ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the pools take {} MiB and this machine has {} MiB available", asked_bytes >> 20, available_bytes >> 20)]
pub struct TooLarge {
    /// Bytes of all pools of the run on this machine.
    pub asked_bytes: u64,
    /// Bytes that the kernel says can be had.
    pub available_bytes: u64,
}

/// Refuses pools of `asked_bytes` that are larger than what the kernel says can be had.
///
/// A machine that does not say (no `/proc/meminfo`) is trusted.
///
/// # Errors
///
/// [`TooLarge`] with both sizes.
pub fn check(asked_bytes: u64) -> Result<(), TooLarge> {
    let available_bytes = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_bytes(&text));
    match available_bytes {
        Some(available_bytes) if asked_bytes > available_bytes => Err(TooLarge { asked_bytes, available_bytes }),
        _ => Ok(()),
    }
}

/// `MemAvailable` of `/proc/meminfo`.
fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes() {
        let text = "MemTotal:       24609268 kB\nMemFree:        1 kB\nMemAvailable:   24301140 kB\n";
        assert_eq!(available_bytes(text), Some(24_301_140 * 1024));
        assert_eq!(available_bytes("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn refuses_more_than_any_machine_has() {
        assert!(check(0).is_ok());
        if fs::exists("/proc/meminfo").unwrap() {
            assert_eq!(check(u64::MAX).unwrap_err().asked_bytes, u64::MAX);
        }
    }
}
