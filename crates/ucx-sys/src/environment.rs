//! Settings that UCX reads from the environment while it is being loaded, and at no other time.

/// A variable that is set for the length of a scope, unless it had a value before.
pub(crate) struct Setting {
    name: &'static str,
}

impl Setting {
    /// Sets `name`, or leaves the user's value alone.
    pub(crate) fn new(name: &'static str, value: impl AsRef<std::ffi::OsStr>) -> Option<Self> {
        if std::env::var_os(name).is_some() {
            return None;
        }
        // SAFETY: the standard library's own accesses are under a lock; what remains is C code that reads the
        // environment in another thread right now. Nobody can rule that out from here: `load` asks its callers to run
        // it before they start such threads, and to set the variables themselves where they cannot (then this is not
        // reached). UCX reads its global options in a constructor, so there is no other way to hand them over.
        unsafe { std::env::set_var(name, value) };
        Some(Self { name })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // SAFETY: as in `new`. The variable is taken back so that child processes, which may load another UCX, do not
        // inherit a choice that was made for this one.
        unsafe { std::env::remove_var(self.name) };
    }
}

/// Keeps UCX from taking what belongs to the program when it is loaded. Signal handlers: some versions take over SIGSEGV,
/// which Rust needs to tell a stack overflow, and all of them SIGHUP. Standard output: UCX logs there by default. To be
/// held while the library is opened.
pub(crate) fn well_behaved() -> [Option<Setting>; 3] {
    [
        Setting::new("UCX_HANDLE_ERRORS", "none"),
        Setting::new("UCX_DEBUG_SIGNO", "0"),
        Setting::new("UCX_LOG_FILE", "stderr"),
    ]
}
