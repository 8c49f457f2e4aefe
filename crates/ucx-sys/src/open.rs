//! Opening one candidate.

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::environment::Setting;
use crate::mapped;
use crate::search::{Candidate, Origin, Place};

/// Have `dlopen` return a library only if it is loaded already. The same number in glibc and musl.
const RTLD_NOLOAD: i32 = 4;

/// One place that was tried without success.
#[derive(Debug, thiserror::Error)]
#[error("{origin} {place}: {error}")]
pub struct Attempt {
    /// Why this place was tried.
    pub origin: Origin,
    /// What was tried.
    pub place: Place,
    /// Why nothing came of it. Part of the message, not its source: several attempts have no single source.
    pub error: OpenError,
}

/// Why a candidate could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no such directory, or no libucp in it. Install UCX there or name another directory.
    #[error("no libucp there")]
    NoLibrary,
    /// The dynamic loader refused. Its message names the file and the reason, such as a dependency that is missing.
    #[error("{}", reason(.0))]
    Loader(libloading::Error),
}

/// What the dynamic loader said. Without it libloading's message is "dlopen failed".
fn reason(error: &libloading::Error) -> &dyn std::fmt::Display {
    match error {
        libloading::Error::DlOpen { source } => source,
        other => other,
    }
}

/// Opens a candidate. The libraries are for this process's life: UCX has hooks and threads that outlive any handle.
pub(crate) fn open(candidate: &Candidate) -> Result<Library, OpenError> {
    match &candidate.place {
        Place::Name(name) => dlopen(name.as_ref(), RTLD_NOW | RTLD_LOCAL),
        Place::File(file) => dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD),
        Place::Directory(directory) => {
            let file = find_libucp(directory).ok_or(OpenError::NoLibrary)?;
            // Wheels are built with the module directory of the machine that built them.
            let modules = real(&directory.join("ucx"));
            let _modules = modules.is_dir().then(|| Setting::new("UCX_MODULE_DIR", modules)).flatten();
            open_with_companions(&file)
        }
    }
}

/// Opens the libraries that `libucp` depends on from the same directory, then itself, each by its real name: UCX takes
/// the suffix of its plug-ins from its own file name, and a dependency must not come from another release.
fn open_with_companions(libucp: &Path) -> Result<Library, OpenError> {
    let name = libucp.file_name().and_then(|name| name.to_str()).ok_or(OpenError::NoLibrary)?;
    let companion = |library| libucp.with_file_name(name.replacen("libucp", library, 1));
    let open_if_there = |file: PathBuf| file.exists().then(|| dlopen(&real(&file), RTLD_NOW | RTLD_LOCAL)).transpose();

    // Newer releases of libucm and libucs need each other. Then libucm cannot be opened alone, and need not be: such a
    // libucs was linked with a path to find it.
    if let Ok(Some(library)) = open_if_there(companion("libucm")) {
        keep(library);
    }
    for library in ["libucs", "libuct"] {
        if let Some(library) = open_if_there(companion(library))? {
            keep(library);
        }
    }
    dlopen(&real(libucp), RTLD_NOW | RTLD_LOCAL)
}

/// Never closes the library.
pub(crate) fn keep(library: Library) {
    let _handle = library.into_raw();
}

fn dlopen(name: &Path, flags: i32) -> Result<Library, OpenError> {
    // SAFETY: runs the constructors of a library that the user installed, or chose by `KVFERRY_UCX_DIR`, to be run in
    // this process; UCX's own may run in any thread. The handle is never closed, so no destructor runs before exit.
    unsafe { Library::open(Some(name), flags) }.map_err(OpenError::Loader)
}

/// The name behind the symbolic links; the name itself where it cannot be told, for the loader to complain about.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf())
}

/// The libucp of a directory: `libucp.so.0`, or what auditwheel made of it.
fn find_libucp(directory: &Path) -> Option<PathBuf> {
    let usual = directory.join("libucp.so.0");
    if usual.exists() {
        return Some(usual);
    }
    let entries = std::fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path());
    entries.filter(|path| mapped::is_libucp(path)).min()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn directory(origin: Origin, path: &Path) -> Candidate {
        Candidate { origin, place: Place::Directory(path.to_path_buf()) }
    }

    #[test]
    fn a_directory_without_libucp_is_told_from_one_that_cannot_be_opened() {
        let root = tempfile::tempdir().unwrap();
        let absent = open(&directory(Origin::WellKnown, &root.path().join("absent")));
        assert!(matches!(absent, Err(OpenError::NoLibrary)));
        let empty = open(&directory(Origin::Wheel, root.path()));
        assert!(matches!(empty, Err(OpenError::NoLibrary)));

        fs::write(root.path().join("libucp.so.0"), "not a library").unwrap();
        let text = open(&directory(Origin::WellKnown, root.path())).unwrap_err();
        assert!(matches!(text, OpenError::Loader(_)));
        assert!(text.to_string().contains("libucp.so.0"), "{text}");
    }

    #[test]
    fn a_renamed_libucp_is_found_when_the_usual_name_is_missing() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("libucp-77f1.so.0.0.0"), "").unwrap();
        fs::write(root.path().join("libucs-77f1.so.0.0.0"), "").unwrap();
        assert_eq!(find_libucp(root.path()), Some(root.path().join("libucp-77f1.so.0.0.0")));
        fs::write(root.path().join("libucp.so.0"), "").unwrap();
        assert_eq!(find_libucp(root.path()), Some(root.path().join("libucp.so.0")));
    }
}
