//! Where a UCX may be, in the order in which the places are tried. Decides only: nothing is opened here.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::mapped;

/// The environment variable that names the directory of the libucp to use.
pub const DIRECTORY_VARIABLE: &str = "KVFERRY_UCX_DIR";

/// The name that the dynamic loader is asked for.
pub(crate) const SONAME: &str = "libucp.so.0";

/// Where a library was looked for, and why there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// The directory that [`DIRECTORY_VARIABLE`] names.
    Variable,
    /// The process had it mapped before.
    AlreadyMapped,
    /// The dynamic loader's own path: `LD_LIBRARY_PATH`, `ld.so.cache`, the system's directories.
    Loader,
    /// A `libucx-cu12` or `libucx-cu13` Python wheel.
    Wheel,
    /// A directory that vendors install to.
    WellKnown,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Variable => DIRECTORY_VARIABLE,
            Self::AlreadyMapped => "already mapped",
            Self::Loader => "dynamic loader",
            Self::Wheel => "Python wheel",
            Self::WellKnown => "well-known directory",
        })
    }
}

/// What was tried at one step of the search.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// The libucp inside this directory, with the rest of UCX from there too.
    Directory(PathBuf),
    /// This file, if it is mapped already.
    File(PathBuf),
    /// A name for the dynamic loader to resolve.
    Name(&'static str),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) | Self::File(path) => path.display().fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// One step of the search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) origin: Origin,
    pub(crate) place: Place,
}

/// What the search depends on, as values, so that a test can make them up.
#[derive(Debug, Default)]
pub(crate) struct Surroundings {
    /// The libucp that this process has mapped.
    pub(crate) mapped: Option<PathBuf>,
    /// [`DIRECTORY_VARIABLE`].
    pub(crate) explicit: Option<PathBuf>,
    /// Prefixes of active Python environments (`VIRTUAL_ENV`, `CONDA_PREFIX`).
    pub(crate) python_prefixes: Vec<PathBuf>,
    /// `PATH`, to find a `python3` on. It is not run: the prefix is the directory above its own.
    pub(crate) path: Vec<PathBuf>,
    /// The user's home.
    pub(crate) home: Option<PathBuf>,
    /// `PYENV_ROOT`: its `python3` on the path is a script, so its versions are listed instead.
    pub(crate) pyenv: Option<PathBuf>,
    /// `/`, except in tests.
    pub(crate) root: PathBuf,
}

impl Surroundings {
    pub(crate) fn of_this_process() -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let directory = |name: &str| variable(name).map(PathBuf::from);
        let home = std::env::home_dir();
        Self {
            mapped: mapped::libucp(&mapped::of_this_process()),
            explicit: directory(DIRECTORY_VARIABLE),
            python_prefixes: ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(directory).collect(),
            path: variable("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default(),
            pyenv: directory("PYENV_ROOT").or_else(|| home.as_ref().map(|home| home.join(".pyenv"))),
            home,
            root: PathBuf::from("/"),
        }
    }

    /// The places to try, best first. A mapped libucp leaves no choice: a second copy in one process hangs. A directory
    /// that was asked for leaves none either: quietly taking another UCX is worse than an error.
    pub(crate) fn candidates(&self) -> Vec<Candidate> {
        if let Some(file) = &self.mapped {
            return vec![Candidate { origin: Origin::AlreadyMapped, place: Place::File(file.clone()) }];
        }
        if let Some(directory) = &self.explicit {
            return vec![Candidate { origin: Origin::Variable, place: Place::Directory(directory.clone()) }];
        }
        let mut candidates = vec![Candidate { origin: Origin::Loader, place: Place::Name(SONAME) }];
        let directory = |origin, path| Candidate { origin, place: Place::Directory(path) };
        for packages in self.package_directories() {
            candidates.push(directory(Origin::Wheel, packages.join("libucx/lib")));
        }
        for known in ["opt/hpcx/ucx/lib", "usr/local/ucx/lib"] {
            candidates.push(directory(Origin::WellKnown, self.root.join(known)));
        }
        candidates
    }

    /// The directories that Python packages are installed to, active environments first, each once.
    fn package_directories(&self) -> Vec<PathBuf> {
        let mut prefixes = self.python_prefixes.clone();
        for directory in self.path.iter().filter(|directory| directory.join("python3").exists()) {
            prefixes.extend(directory.parent().map(Path::to_path_buf));
        }
        if let Some(pyenv) = &self.pyenv {
            prefixes.extend(children(&pyenv.join("versions"), ""));
        }
        prefixes.extend(self.home.as_ref().map(|home| home.join(".local")));
        prefixes.extend(["usr/local", "usr"].map(|prefix| self.root.join(prefix)));

        let mut found: Vec<PathBuf> = Vec::new();
        for prefix in prefixes {
            // `python3` itself holds Debian's dist-packages, `python3.12` everybody's site-packages.
            for python in children(&prefix.join("lib"), "python3") {
                for packages in ["site-packages", "dist-packages"].map(|name| python.join(name)) {
                    if packages.is_dir() && !found.contains(&packages) {
                        found.push(packages);
                    }
                }
            }
        }
        found
    }
}

/// The entries of `directory` whose names start with `prefix`, newest version first as far as names tell; none if it
/// cannot be listed.
fn children(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(prefix))
        .map(|name| (numbers(&name), name))
        .collect();
    names.sort_unstable_by(|left, right| right.cmp(left));
    names.into_iter().map(|(_, name)| directory.join(name)).collect()
}

/// The numbers in a name, so that `python3.9` sorts below `python3.12`.
fn numbers(name: &str) -> Vec<u32> {
    name.split(|character: char| !character.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tree(directories: &[&str], files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        directories.iter().for_each(|path| fs::create_dir_all(root.path().join(path)).unwrap());
        for file in files.iter().map(|path| root.path().join(path)) {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        root
    }

    /// The candidates as `origin: place`, with the root of the test cut off.
    fn check(surroundings: &Surroundings, expected: &[&str]) {
        let root = format!("{}/", surroundings.root.display());
        let root = if root == "/" { "\0" } else { &root }; // nothing to cut off
        let line = |candidate: &Candidate| format!("{}: {}", candidate.origin, candidate.place).replace(root, "");
        assert_eq!(surroundings.candidates().iter().map(line).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_bare_machine_has_the_loader_and_the_well_known_directories() {
        let root = tree(&[], &[]);
        check(
            &Surroundings { root: root.path().into(), ..Surroundings::default() },
            &[
                "dynamic loader: libucp.so.0",
                "well-known directory: opt/hpcx/ucx/lib",
                "well-known directory: usr/local/ucx/lib",
            ],
        );
    }

    #[test]
    fn wheels_are_looked_for_in_active_environments_first() {
        let root = tree(
            &[
                "venv/lib/python3.9/site-packages",
                "venv/lib/python3.12/site-packages",
                "tools/lib/python3.11/site-packages",
                "pyenv/versions/3.9.1/lib/python3.9/site-packages",
                "pyenv/versions/3.13.0/lib/python3.13/site-packages",
                "home/.local/lib/python3.10/site-packages",
                "usr/lib/python3/dist-packages",
                "usr/local/lib/python3.11/dist-packages",
            ],
            &["tools/bin/python3", "usr/bin/python3", "none/bin/other"],
        );
        let at = |path: &str| root.path().join(path);
        check(
            &Surroundings {
                python_prefixes: vec![at("venv"), at("conda")],
                path: vec![at("none/bin"), at("tools/bin"), at("usr/bin")],
                pyenv: Some(at("pyenv")),
                home: Some(at("home")),
                root: root.path().into(),
                ..Surroundings::default()
            },
            &[
                "dynamic loader: libucp.so.0",
                "Python wheel: venv/lib/python3.12/site-packages/libucx/lib",
                "Python wheel: venv/lib/python3.9/site-packages/libucx/lib",
                "Python wheel: tools/lib/python3.11/site-packages/libucx/lib",
                "Python wheel: usr/lib/python3/dist-packages/libucx/lib",
                "Python wheel: pyenv/versions/3.13.0/lib/python3.13/site-packages/libucx/lib",
                "Python wheel: pyenv/versions/3.9.1/lib/python3.9/site-packages/libucx/lib",
                "Python wheel: home/.local/lib/python3.10/site-packages/libucx/lib",
                "Python wheel: usr/local/lib/python3.11/dist-packages/libucx/lib",
                "well-known directory: opt/hpcx/ucx/lib",
                "well-known directory: usr/local/ucx/lib",
            ],
        );
    }

    #[test]
    fn a_named_directory_is_the_only_place() {
        let surroundings = Surroundings { explicit: Some("/opt/mine".into()), ..Surroundings::default() };
        check(&surroundings, &["KVFERRY_UCX_DIR: /opt/mine"]);
    }

    #[test]
    fn a_mapped_library_comes_before_a_named_directory() {
        let surroundings = Surroundings {
            mapped: Some("/wheel/libucp-1.so.0.0.0".into()),
            explicit: Some("/opt/mine".into()),
            ..Surroundings::default()
        };
        check(&surroundings, &["already mapped: /wheel/libucp-1.so.0.0.0"]);
    }
}
