//! Opens files that somebody else names or puts there.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};

/// Something that is no file of bytes: a directory, a device that may never end, a pipe that may never begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a regular file")]
pub struct NotRegular;

/// Opens a regular file to read. Never waits for somebody to open the other end of a pipe.
///
/// # Errors
///
/// What the operating system says, or [`NotRegular`].
pub fn open_regular(path: &Path) -> io::Result<File> {
    let file =
        File::from(open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?);
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other(NotRegular)) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;

    use rustix::fs::{CWD, mkfifoat};

    use super::*;

    #[test]
    fn only_regular_files_open() {
        let directory = tempfile::tempdir().unwrap();
        let (file, pipe) = (directory.path().join("file"), directory.path().join("pipe"));
        fs::write(&file, "text").unwrap();
        let mut text = String::new();
        open_regular(&file).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");

        mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        for path in [directory.path(), &pipe, Path::new("/dev/zero")] {
            assert_eq!(open_regular(path).unwrap_err().to_string(), "not a regular file", "{}", path.display());
        }
        assert_eq!(open_regular(&directory.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
