//! Which files are mapped into this process, from `/proc/self/maps`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const DELETED: &[u8] = b" (deleted)";

/// The text of `/proc/self/maps`; empty where it cannot be read (no `/proc`), which reads as nothing mapped.
pub(crate) fn of_this_process() -> Vec<u8> {
    std::fs::read("/proc/self/maps").unwrap_or_default()
}

/// The file of the first libucp in `maps`.
pub(crate) fn libucp(maps: &[u8]) -> Option<PathBuf> {
    files(maps).map(|(_, path)| path).find(|path| is_libucp(path)).map(Path::to_path_buf)
}

/// The file that is mapped at `address`.
pub(crate) fn file_at(maps: &[u8], address: usize) -> Option<PathBuf> {
    files(maps).find(|(range, _)| range.contains(&address)).map(|(_, path)| path.to_path_buf())
}

/// `libucp.so`, with any version behind, also under the names that auditwheel gives (`libucp-5f3a.so.0.0.0`).
pub(crate) fn is_libucp(path: &Path) -> bool {
    let name = path.file_name().map_or(&[][..], OsStr::as_bytes);
    let Some(rest) = name.strip_prefix(b"libucp") else {
        return false;
    };
    let Some(dot) = rest.windows(3).position(|window| window == b".so") else {
        return false;
    };
    let (hash, suffix) = (&rest[..dot], &rest[dot + 3..]);
    (hash.is_empty() || hash.starts_with(b"-")) && (suffix.is_empty() || suffix.starts_with(b"."))
}

fn files(maps: &[u8]) -> impl Iterator<Item = (std::ops::Range<usize>, &Path)> {
    maps.split(|&byte| byte == b'\n').filter_map(file)
}

/// One line: `start-end permissions offset device inode      path`.
fn file(line: &[u8]) -> Option<(std::ops::Range<usize>, &Path)> {
    let path = &line[line.iter().position(|&byte| byte == b'/')?..];
    let path = path.strip_suffix(DELETED).unwrap_or(path);
    let range = std::str::from_utf8(line.split(|&byte| byte == b' ').next()?).ok()?;
    let (start, end) = range.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    Some((range, Path::new(OsStr::from_bytes(path))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"\
55d0c0a00000-55d0c0a21000 rw-p 00000000 00:00 0                          [heap]
7f10a0000000-7f10a0010000 r--p 00000000 fe:00 1201                       /opt/u c x/lib/libucp.so.0.0.0
7f10a0010000-7f10a0080000 r-xp 00010000 fe:00 1201                       /opt/u c x/lib/libucp.so.0.0.0
7f10a0100000-7f10a0110000 r--p 00000000 fe:00 1202                       /opt/u c x/lib/libucs.so.0.0.0 (deleted)
7f10a0200000-7f10a0210000 rw-p 00000000 00:00 0
";

    #[test]
    fn a_mapped_libucp_is_found_by_its_file_name() {
        assert_eq!(libucp(MAPS), Some(PathBuf::from("/opt/u c x/lib/libucp.so.0.0.0")));
        assert_eq!(libucp(&MAPS[..70]), None);
        assert_eq!(libucp(b""), None);
    }

    #[test]
    fn an_address_belongs_to_the_file_mapped_there() {
        let path = |address| file_at(MAPS, address).map(|path| path.display().to_string());
        assert_eq!(path(0x7f10_a001_0000).as_deref(), Some("/opt/u c x/lib/libucp.so.0.0.0"));
        assert_eq!(path(0x7f10_a010_ffff).as_deref(), Some("/opt/u c x/lib/libucs.so.0.0.0"));
        assert_eq!(path(0x7f10_a011_0000), None);
        assert_eq!(path(0x7f10_a020_0000), None);
    }

    #[test]
    fn libucp_is_told_from_its_neighbours() {
        for (name, expected) in [
            ("libucp.so", true),
            ("libucp.so.0", true),
            ("libucp-8a1c43f0.so.0.0.0", true),
            ("libucp_fault.so", false),
            ("libucp.sock", false),
            ("libucs.so.0", false),
            ("libucp.a", false),
            ("libucp", false),
        ] {
            assert_eq!(is_libucp(&Path::new("/lib").join(name)), expected, "{name}");
        }
    }
}
