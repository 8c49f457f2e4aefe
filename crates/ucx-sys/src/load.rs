use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::os::unix::Library;

use crate::bindings::Functions;
use crate::open::{self, Attempt};
use crate::search::{Candidate, Origin, Place, SONAME, Surroundings};
use crate::{API_FLOOR, Version, environment, mapped};

/// The UCX of this process: its functions as methods under their C names, and where it came from.
///
/// A function that not every version has is not called but returned, as a pointer in an `Option`:
///
/// ```no_run
/// # let ucx = ucx_sys::load()?;
/// if let Some(ucp_rkey_compare) = ucx.ucp_rkey_compare() { /* UCX 1.16 or newer */ }
/// # Ok::<(), ucx_sys::LoadError>(())
/// ```
///
/// A *field* of a structure that is newer than the library is another matter: an old library ignores its mask bit in
/// silence. Compare [`Ucx::version`] before setting a bit that 1.13 does not know.
pub struct Ucx {
    functions: Functions,
    version: Version,
    path: PathBuf,
    origin: Origin,
    overridden: Option<PathBuf>,
}

impl Ucx {
    /// What `ucp_get_version` says: 1.13.0 or newer.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The file of libucp, behind symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it was found.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The value of `KVFERRY_UCX_DIR` when it names another directory than the one in use, because the process had a
    /// libucp mapped before. Worth a warning: the user's wish was not met.
    pub fn overridden_directory(&self) -> Option<&Path> {
        self.overridden.as_deref()
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }
}

impl std::fmt::Debug for Ucx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { functions: _, version, path, origin, overridden } = self;
        let mut fields = f.debug_struct("Ucx");
        fields.field("version", version).field("path", path).field("origin", origin);
        fields.field("overridden", overridden).finish()
    }
}

/// Why there is no UCX to use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Nothing could be opened. Install UCX or name its directory, then call [`load`] again.
    #[error(
        "no UCX found (install libucx0, or the Python wheel libucx-cu13, or set KVFERRY_UCX_DIR); tried {}",
        list(tried)
    )]
    NotFound {
        /// Every place that was tried, in order.
        tried: Vec<Attempt>,
    },

    /// Another part of the process has loaded a libucp that cannot be shared, such as one in a linker namespace of its
    /// own. A second copy would hang, so none was opened. Use a process of its own for one of the two.
    #[error("libucp is loaded already and cannot be shared: {attempt}")]
    MappedUnusable {
        /// The attempt to reuse it.
        attempt: Attempt,
    },

    /// The library is older than [`API_FLOOR`]. Replace it, or name the directory of a newer one, and restart: the old
    /// one stays mapped in this process, and a second copy would hang.
    #[error("UCX {version} at {} is older than {API_FLOOR} (set KVFERRY_UCX_DIR to use another)", path.display())]
    TooOld {
        /// What the library says of itself.
        version: Version,
        /// Its file.
        path: PathBuf,
    },

    /// The library lacks a function that every UCX since 1.13 has. Replace it, and restart: it stays mapped in this
    /// process.
    #[error("libucp of {place} does not export {function}: it is older than {API_FLOOR}, or no UCX")]
    MissingFunction {
        /// The first function that was not found.
        function: &'static str,
        /// Where the library was found.
        place: Place,
    },
}

fn list(tried: &[Attempt]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Opens UCX, once a process; later calls return the same. A failed call may be repeated after its cause is gone.
///
/// Where it looks, in this order:
///
/// 1. A libucp that the process has mapped already is used whatever else is asked for: a second copy hangs.
/// 2. If `KVFERRY_UCX_DIR` is set, the directory that it names, and nothing else.
/// 3. The dynamic loader's own path, by the name `libucp.so.0`.
/// 4. The `libucx-cu12` and `libucx-cu13` Python wheels: in `VIRTUAL_ENV` and `CONDA_PREFIX`, beside each `python3` on
///    the `PATH`, in pyenv's versions, in `~/.local`, `/usr/local` and `/usr`.
/// 5. `/opt/hpcx/ucx/lib`, then `/usr/local/ucx/lib`.
///
/// The library is never closed.
///
/// # Environment
///
/// UCX reads some settings only while it is being loaded, and only from the environment. This function sets
/// `UCX_HANDLE_ERRORS=none` and `UCX_DEBUG_SIGNO=0` (so that UCX installs no signal handlers), `UCX_LOG_FILE=stderr` (it
/// logs to standard output otherwise), and `UCX_MODULE_DIR` for a library of 2, 4 or 5 (so that it finds its transports),
/// for the time of the call; a variable that has a value is left alone. C code that reads the environment at that moment in another thread may crash. So call this early, before such
/// threads are started, or set the variables before the process starts: then nothing is changed here.
///
/// # Errors
///
/// [`LoadError`] says what was tried, or what is wrong with the library that was found.
pub fn load() -> Result<&'static Ucx, LoadError> {
    static UCX: OnceLock<Ucx> = OnceLock::new();
    static LOADING: Mutex<()> = Mutex::new(());

    if let Some(ucx) = UCX.get() {
        return Ok(ucx);
    }
    // Guards no data: a panic in an earlier call left nothing half done.
    let _one_at_a_time = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ucx) = UCX.get() {
        return Ok(ucx);
    }
    let ucx = open_first(&Surroundings::of_this_process())?;
    Ok(UCX.get_or_init(|| ucx))
}

fn open_first(surroundings: &Surroundings) -> Result<Ucx, LoadError> {
    // A library that is mapped already has read its settings.
    let _quiet = surroundings.mapped.is_none().then(environment::well_behaved);
    let mut tried = Vec::new();
    for candidate in surroundings.candidates() {
        let error = match open::open(&candidate) {
            Ok(library) => return take(library, candidate, surroundings),
            Err(error) => error,
        };
        let attempt = Attempt { origin: candidate.origin, place: candidate.place, error };
        if attempt.origin == Origin::AlreadyMapped {
            return Err(LoadError::MappedUnusable { attempt });
        }
        tried.push(attempt);
    }
    Err(LoadError::NotFound { tried })
}

/// Takes what is needed from an open library and leaves it open for good.
fn take(library: Library, candidate: Candidate, surroundings: &Surroundings) -> Result<Ucx, LoadError> {
    let Candidate { origin, place } = candidate;
    let functions = Functions::of(&library);
    open::keep(library);
    let functions = functions.map_err(|function| LoadError::MissingFunction { function, place })?;

    let mut version = Version::new(0, 0, 0);
    let ucp_get_version = functions.ucp_get_version;
    // SAFETY: three valid places to write to; the function needs no set-up and the library is never unloaded.
    unsafe { ucp_get_version(&mut version.major, &mut version.minor, &mut version.release) };

    // Asked of the system, since a name was all that the loader was given.
    let path = mapped::file_at(&mapped::of_this_process(), (ucp_get_version as *const ()).addr());
    let path = path.unwrap_or_else(|| SONAME.into());
    if version < API_FLOOR {
        return Err(LoadError::TooOld { version, path });
    }
    let overridden = surroundings.explicit.clone().filter(|directory| !holds(directory, &path));
    Ok(Ucx { functions, version, path, origin, overridden })
}

/// Whether `file`, a name without symbolic links, lies in `directory`.
fn holds(directory: &Path, file: &Path) -> bool {
    directory.canonicalize().is_ok_and(|directory| file.parent() == Some(&directory))
}
