//! `/proc/self/mountinfo`: where file systems of a kind are mounted, and which part of them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

const MOUNTINFO: &str = "/proc/self/mountinfo";
/// Digits behind a backslash: a byte, in octal.
const DIGITS: usize = 3;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Which part of the file system is mounted, as our own namespaces see it.
    pub root: PathBuf,
    /// Mount point.
    pub point: PathBuf,
    /// Options of the file system; for a version 1 cgroup its controllers.
    pub options: String,
}

/// The mounts of a kind of file system, in the kernel's order.
///
/// # Errors
/// There is no `/proc`.
pub fn of_kind(kind: &str) -> Result<Vec<Mount>, String> {
    // Bytes: a foreign path that is not UTF-8 must not hide the other mounts.
    let text = fs::read(MOUNTINFO).map_err(|error| format!("{MOUNTINFO}: {error}"))?;
    Ok(among(&text, kind))
}

/// The mounts of a kind in the text of the file.
pub(super) fn among(text: &[u8], kind: &str) -> Vec<Mount> {
    let lines = text.split(|byte| *byte == b'\n');
    lines.filter_map(|line| mount(line, kind)).collect()
}

fn mount(line: &[u8], kind: &str) -> Option<Mount> {
    // Fields: id, parent, device, root, mount point, options, any number of others, a hyphen, kind, source, options.
    let mut fields = line.split(|byte| *byte == b' ');
    let (root, point) = (fields.nth(3)?, fields.next()?);
    let _options = fields.next()?;
    fields.find(|field| *field == b"-")?;
    let (found, _source, options) = (fields.next()?, fields.next()?, fields.next());
    (found == kind.as_bytes()).then(|| Mount {
        root: unescaped(root),
        point: unescaped(point),
        options: String::from_utf8_lossy(options.unwrap_or_default()).into_owned(),
    })
}

/// Decodes a path: the kernel writes blanks, tabs, line ends and backslashes as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, behind)) = rest.split_first() {
        let escaped = (*first == b'\\').then(|| behind.split_at_checked(DIGITS));
        match escaped
            .flatten()
            .and_then(|(code, left)| Some((octal(code)?, left)))
        {
            Some((byte, left)) => {
                path.push(byte);
                rest = left;
            }
            None => {
                path.push(*first);
                rest = behind;
            }
        }
    }
    OsString::from_vec(path).into()
}

fn octal(digits: &[u8]) -> Option<u8> {
    // `from_str_radix` would accept a sign.
    let text = std::str::from_utf8(digits).ok()?;
    let all_digits = digits.iter().all(u8::is_ascii_digit);
    all_digits.then(|| u8::from_str_radix(text, 8).ok())?
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use super::*;

    fn points(text: &str, kind: &str) -> Vec<PathBuf> {
        let mounts = among(text.as_bytes(), kind);
        mounts.into_iter().map(|mount| mount.point).collect()
    }

    #[test]
    fn mounts_are_found_by_their_kind_in_the_kernels_order() {
        let text = "31 24 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
             32 31 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:5 master:2 - cgroup2 cgroup2 rw\n\
             33 31 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
             34 31 0:27 /pods /mnt rw - cgroup2 cgroup2 rw\n";
        assert_eq!(
            points(text, "cgroup2"),
            ["/sys/fs/cgroup/unified", "/mnt"].map(PathBuf::from)
        );
        assert_eq!(
            among(text.as_bytes(), "cgroup2")[1].root,
            Path::new("/pods")
        );
        assert!(points(text, "bpf").is_empty());
    }

    #[test]
    fn kernel_escapes_in_paths_are_decoded() {
        for (escaped, path) in [
            ("/my\\040cgroups", "/my cgroups"),
            ("/a\\011b\\012c\\134d", "/a\tb\nc\\d"),
            // The path of a systemd unit contains systemd's own escape, which the kernel escapes again.
            ("/run-r\\134x2d1.scope", "/run-r\\x2d1.scope"),
            ("/\\134040", "/\\040"),
            ("/\\040", "/ "),
            // None of these is an escape of the kernel.
            ("/end\\", "/end\\"),
            ("/end\\04", "/end\\04"),
            ("/\\048", "/\\048"),
            ("/\\+40", "/\\+40"),
            ("/\\777", "/\\777"),
        ] {
            let line = format!("32 31 0:27 {escaped} {escaped} rw - cgroup2 cgroup2 rw\n");
            let both = Mount {
                root: path.into(),
                point: path.into(),
                options: "rw".to_owned(),
            };
            assert_eq!(among(line.as_bytes(), "cgroup2"), [both], "{escaped}");
        }
    }

    #[test]
    fn non_utf8_mount_points_are_read() {
        let text = b"31 24 0:26 / /\xff rw - ext4 /dev/\xff rw\n32 31 0:27 / /\xfe\\040 rw - cgroup2 cgroup2 rw";
        let mounts = among(text, "cgroup2");
        assert_eq!(mounts.len(), 1);
        assert_eq!(mounts[0].point, Path::new(OsStr::from_bytes(b"/\xfe ")));
    }

    #[test]
    fn malformed_mount_lines_are_skipped() {
        for line in [
            "",
            "32 31 0:27 / /x",
            "32 31 0:27 / /x rw cgroup2 cgroup2 rw",
            "32 31 0:27 / - cgroup2",
            "32 31 0:27 / /x rw -",
        ] {
            assert!(points(line, "cgroup2").is_empty(), "{line:?}");
        }
        assert!(
            of_kind("proc")
                .unwrap()
                .iter()
                .any(|mount| mount.point == Path::new("/proc"))
        );
    }
}
