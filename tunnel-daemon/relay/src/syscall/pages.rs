//! Memory of this program's code and constants.

use std::{fs, io};

/// Unmaps the pages of this program that were needed so far; those that are needed again come back from the page cache. For a small
/// process whose start needs far more of them than its work. Returns the bytes of their mappings.
///
/// # Errors
/// The mappings are not found, or the kernel refuses.
pub fn give_back_program_pages() -> io::Result<usize> {
    let own = give_back_program_pages as fn() -> io::Result<usize> as usize;
    let mut given_back = 0;
    for (start, length) in pristine_mappings(&fs::read_to_string("/proc/self/smaps")?, own) {
        let start = std::ptr::without_provenance_mut(start);
        // SAFETY: the range is one mapping of the program's own file, which stays mapped while this runs. It is private and
        // read-only, and the kernel has just said that all of its pages are those of the file, so dropping them loses nothing:
        // the next access maps them again.
        let result = unsafe { libc::madvise(start, length, libc::MADV_DONTNEED) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        given_back += length;
    }
    if given_back == 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(given_back)
}

/// A mapping of a file as smaps shows it.
struct Mapping<'a> {
    start: usize,
    end: usize,
    permissions: &'a str,
    /// Device, inode and path.
    file: [&'a str; 3],
    /// It has pages that are not the file's, in memory or swapped out: relocated data, or a debugger's breakpoint.
    is_changed: bool,
}

/// Start and length in bytes of each private, read-only and unchanged mapping of the file that is mapped at `address`. `smaps` is
/// `/proc/PID/smaps`, see proc(5).
fn pristine_mappings(smaps: &str, address: usize) -> Vec<(usize, usize)> {
    let mut mappings: Vec<Mapping<'_>> = Vec::new();
    for line in smaps.lines() {
        match line.split_once(':') {
            Some(("Anonymous" | "Swap", size)) => {
                if let Some(mapping) = mappings.last_mut() {
                    mapping.is_changed |= size.trim() != "0 kB";
                }
            }
            // `THPeligible:` and its like have no space before the colon, as lines of mappings have.
            Some((field, _)) if !field.contains(' ') => (),
            _ => mappings.extend(mapping(line)),
        }
    }
    let holds = |mapping: &&Mapping<'_>| (mapping.start..mapping.end).contains(&address);
    let Some(own) = mappings.iter().find(holds).map(|mapping| mapping.file) else {
        return Vec::new();
    };
    let is_pristine = |mapping: &&Mapping<'_>| {
        mapping.file == own
            && !mapping.is_changed
            && ["r-xp", "r--p"].contains(&mapping.permissions)
    };
    let pristine = mappings.iter().filter(is_pristine);
    pristine
        .map(|mapping| (mapping.start, mapping.end - mapping.start))
        .collect()
}

/// `START-END PERMISSIONS OFFSET DEVICE INODE PATH`
fn mapping(line: &str) -> Option<Mapping<'_>> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let permissions = words.next()?;
    let _offset = words.next()?;
    let (device, inode) = (words.next()?, words.next()?);
    let file = [device, inode, words.next().unwrap_or_default().trim_start()];
    let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16));
    let (start, end) = (start.ok()?, end.ok()?);
    (start <= end).then_some(Mapping {
        start,
        end,
        permissions,
        file,
        is_changed: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code between its two calls has to run, with its constants.
    #[test]
    fn code_that_was_given_back_runs_on() {
        for again in 0..3 {
            let bytes = give_back_program_pages().expect("this program has code");
            assert!(bytes > 64 * 1024, "{bytes}");
            assert_eq!(format!("round {again}").len(), 7);
        }
    }

    /// Other files may be unmapped meanwhile; a relocated mapping would be lost, also one that is swapped out.
    #[test]
    fn only_unchanged_mappings_of_the_own_file_are_given_back() {
        let mapping = |range: &str, kind: &str, file: &str, anonymous: u32, swap: u32| {
            format!(
                "{range} {kind} 00000000 fe:00 {file}\nSize:                  8 kB\nAnonymous:             {anonymous} kB\n\
                 Swap:                  {swap} kB\nSwapPss:               0 kB\nTHPeligible:           0\nVmFlags: rd mr\n"
            )
        };
        let own = "7                    /a folder: of programs/adit";
        let smaps = [
            mapping("1000-3000", "r--p", own, 0, 0),
            mapping("3000-7000", "r-xp", own, 0, 0),
            mapping("7000-8000", "r--p", own, 4, 0),
            mapping("8000-9000", "r--p", own, 0, 4),
            mapping("9000-a000", "rw-p", own, 0, 0),
            mapping("a000-b000", "r--s", own, 0, 0),
            mapping(
                "b000-c000",
                "r-xp",
                "8                    /a folder: of programs/adit",
                0,
                0,
            ),
            mapping("c000-d000", "r--p", "0 ", 0, 0),
            mapping("d000-e000", "r-xp", "0                    [vdso]", 0, 0),
        ];
        let smaps = smaps.concat();
        assert_eq!(
            pristine_mappings(&smaps, 0x4000),
            [(0x1000, 0x2000), (0x3000, 0x4000)]
        );
        assert_eq!(pristine_mappings(&smaps, 0xf000), []);
    }
}
