//! A CUDA driver for tests: a `libcuda.so.1` that is opened as any other and has two GPUs, whose memory is the host's. Memory
//! that can be shared is a memory file, so that processes share it as they do the driver's; streams are threads; and the one
//! kernel that is ever launched is `kernels/move.cu` in Rust.
//!
//! It is as unkind as the driver may be. Copies from locked memory read it when the stream gets there, not when they are
//! asked for; memory that nobody has been given access to cannot be touched; a word that is not aligned is the end of the
//! context; and a GPU's memory of one process is at another address in the next.

mod exports;
mod kernel;
mod memory;
mod stream;

use std::io;
use std::path::{Path, PathBuf};

/// Fills `directory` with the library under the driver's name: for `LD_LIBRARY_PATH` of a process that is to have it.
///
/// # Errors
///
/// The library is not where cargo puts it, beside the test or one above, or the directory cannot be written.
pub fn install(directory: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(library()?, directory.join("libcuda.so.1"))
}

fn library() -> io::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let directories = test.ancestors().skip(1).take(2);
    let mut files = directories.map(|directory| directory.join("libkvferry_fake_cuda.so"));
    files.find(|file| file.exists()).ok_or_else(|| io::ErrorKind::NotFound.into())
}
