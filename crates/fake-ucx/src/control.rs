//! How a test opens and steers the library.
#![allow(unsafe_code, reason = "sets the environment before UCX is opened, and reaches into the library")]

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::os::unix::Library;
use ucx_sys::{DIRECTORY_VARIABLE, Version};

use crate::exports;
use crate::script::Script;
use crate::world::World;

/// What the library says of its version.
pub(crate) const VERSION_VARIABLE: &str = "KVFERRY_FAKE_UCX_VERSION";

/// The library, opened in place of UCX for the life of this process.
#[derive(Debug)]
pub struct Fake {
    world: &'static Mutex<Option<World>>,
    playing: Mutex<()>,
}

/// A script that is being played. One at a time: others wait. When it ends, the test fails if the program broke a rule of
/// `ucp.h`: memory unregistered or keys destroyed under an operation, bytes outside of what is registered, an endpoint used
/// after its close, a request freed twice, a worker destroyed before its endpoints.
#[derive(Debug)]
pub struct Session {
    fake: &'static Fake,
    _alone: MutexGuard<'static, ()>,
}

/// Makes this process use the fake, as version `version`. Call it before anything opens UCX, at the head of each test.
///
/// # Panics
///
/// If the library is not where cargo puts it, or another UCX is open already.
pub fn install(version: Version) -> &'static Fake {
    static FAKE: OnceLock<Fake> = OnceLock::new();
    FAKE.get_or_init(|| {
        let file = library();
        let directory = tempfile::tempdir().expect("a temporary directory").keep();
        std::os::unix::fs::symlink(&file, directory.join("libucp.so.0")).expect("a link in a directory of our own");
        let text = format!("{}.{}.{}", version.major, version.minor, version.release);
        for (name, value) in [(DIRECTORY_VARIABLE, directory.clone().into_os_string()), (VERSION_VARIABLE, text.into())]
        {
            // SAFETY: every test of the binary comes here first and waits for this, so no other thread of it is further than
            // the test harness, which does not read the environment from C.
            unsafe { std::env::set_var(name, value) }
        }
        let ucx = ucx_sys::load().expect("the fake has every function");
        std::fs::remove_dir_all(directory).expect("a directory of our own");
        assert_eq!(ucx.path(), file, "another UCX was open before");
        // SAFETY: the library is open already, and its constructors have run.
        let library = unsafe { Library::new(&file) }.expect("open already");
        // SAFETY: the function that this crate exports under this name.
        let world = unsafe { library.get::<extern "C" fn() -> *const c_void>("kvferry_fake_ucx") }.expect("exported");
        let world = world().cast::<Mutex<Option<World>>>();
        let _never_closed = library.into_raw();
        // SAFETY: the static of the library, which is this crate in the same compilation and is never closed.
        Fake { world: unsafe { &*world }, playing: Mutex::new(()) }
    })
}

/// Where cargo puts the library: beside the test, or one above.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a process knows its file");
    let directories = test.ancestors().skip(1).take(2);
    let mut files = directories.map(|directory| directory.join("libkvferry_fake_ucx.so"));
    let found = files.find(|file| file.exists()).expect("the library is built with the tests that depend on it");
    found.canonicalize().expect("it exists")
}

impl Fake {
    /// Begins a script, when the one before has ended.
    pub fn play(&'static self, script: Script) -> Session {
        let alone = self.playing.lock().unwrap_or_else(PoisonError::into_inner);
        exports::with(self.world, |world| world.play(script));
        Session { fake: self, _alone: alone }
    }
}

impl Session {
    /// Puts that were under way on endpoints when these were closed, so far.
    #[must_use]
    pub fn cut_puts(&self) -> usize {
        exports::with(self.fake.world, |world| world.cut_puts)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let violations = exports::with(self.fake.world, |world| std::mem::take(&mut world.violations));
        if !std::thread::panicking() {
            assert!(violations.is_empty(), "{violations:?}");
        }
    }
}
