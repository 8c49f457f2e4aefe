//! Whether a peer on this host lives. The kernel says so at once; UCX finds out when a socket breaks, over shared memory not
//! before its next look, and on a connection that has carried no message yet never.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process, whoever gets its number later.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    descriptor: Arc<OwnedFd>,
}

/// The descriptors that are open, by the number of the process: connections to one come and go, and what watches them later.
static OPEN: Mutex<BTreeMap<u32, Weak<OwnedFd>>> = Mutex::new(BTreeMap::new());

impl Process {
    /// `None` if there is no such process, or the kernel has no descriptors for processes.
    pub(crate) fn open(number: u32) -> Option<Self> {
        let pid = Pid::from_raw(i32::try_from(number).ok()?)?;
        let mut open = OPEN.lock();
        let known = open.get(&number).and_then(Weak::upgrade).map(|descriptor| Self { descriptor });
        // The number is another's once the process has ended.
        if let Some(known) = known.filter(|known| !known.has_ended()) {
            return Some(known);
        }
        let descriptor = Arc::new(pidfd_open(pid, PidfdFlags::empty()).ok()?);
        open.retain(|_, descriptor| descriptor.strong_count() > 0);
        open.insert(number, Arc::downgrade(&descriptor));
        Some(Self { descriptor })
    }

    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.descriptor, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }

    /// Readable when the process has ended.
    pub(crate) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.descriptor
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(!process.has_ended());
        assert!(Arc::ptr_eq(process.descriptor(), Process::open(child.id()).unwrap().descriptor()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
        assert!(Process::open(0).is_none());
    }
}
