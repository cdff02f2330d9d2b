//! Memory of this program's code and constants.

use std::{fs, io};

/// Unmaps the pages of this program and its libraries that were needed so far; those that are needed again come back from the
/// page cache. For a small process whose start needs far more of them than its work. Returns the bytes of these mappings.
///
/// # Errors
/// The mappings cannot be read, there are none, or the kernel refuses.
pub fn give_back_program_pages() -> io::Result<usize> {
    let mut given_back = 0;
    for (start, length) in mappings_without_own_pages(&fs::read_to_string("/proc/self/smaps")?) {
        let start = std::ptr::without_provenance_mut(start);
        // SAFETY: the range is one mapping of this process, as the kernel has just said. It is private, read-only, of a file, and
        // all of its pages are those of the file, so dropping them loses nothing: the next access maps them again.
        let result = unsafe { libc::madvise(start, length, libc::MADV_DONTNEED) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        given_back += length;
    }
    if given_back == 0 {
        Err(io::ErrorKind::NotFound.into())
    } else {
        Ok(given_back)
    }
}

/// Start and length in bytes of each private mapping of a file that is read-only and of which this process has no page of its own.
/// `smaps` is `/proc/PID/smaps`, see proc(5). Pages that were relocated at the start, or that hold a debugger's breakpoint, are
/// anonymous there.
fn mappings_without_own_pages(smaps: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut mapping = None;
    for line in smaps.lines() {
        if let Some(pages) = line.strip_prefix("Anonymous:") {
            found.extend(mapping.take().filter(|_| pages.trim() == "0 kB"));
        } else if !line
            .split(' ')
            .next()
            .is_some_and(|word| word.ends_with(':'))
        {
            mapping = read_only_mapping_of_a_file(line);
        }
    }
    found
}

fn read_only_mapping_of_a_file(line: &str) -> Option<(usize, usize)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    ((rest.starts_with("r-xp ") || rest.starts_with("r--p ")) && rest.contains('/'))
        .then(|| (start, end.saturating_sub(start)))
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

    /// A mapping that was relocated would be lost, and so would a writable one; others have no file that their pages come back from.
    #[test]
    fn only_mappings_whose_pages_are_all_of_their_file_are_given_back() {
        let mapping = |range: &str, kind: &str, name: &str, anonymous: u32| {
            format!(
                "{range} {kind} 00000000 fe:00 7 {name}\nSize: 8 kB\nRss: 8 kB\nAnonymous: {anonymous} kB\nVmFlags: rd mr\n"
            )
        };
        let smaps = [
            mapping("1000-3000", "r--p", "/usr/bin/adit", 0),
            mapping("3000-7000", "r-xp", "/usr/bin/adit", 0),
            mapping("7000-8000", "r--p", "/usr/bin/adit", 4),
            mapping("8000-9000", "rw-p", "/usr/bin/adit", 0),
            mapping("9000-a000", "r--s", "/usr/bin/adit", 0),
            mapping("a000-b000", "r--p", "", 0),
            mapping("b000-c000", "r-xp", "[vdso]", 0),
            mapping("c000-d000", "r-xp", "/lib/libc: 6.so", 0),
        ];
        assert_eq!(
            mappings_without_own_pages(&smaps.concat()),
            [(0x1000, 0x2000), (0x3000, 0x4000), (0xc000, 0x1000)]
        );
    }
}
