//! Memory of this program's code.

use std::{fs, io};

/// Unmaps the pages of this program's code that were needed so far; those that are needed again come back from the page cache.
/// For a small process whose start needs far more code than its work. Returns the bytes of the code.
///
/// # Errors
/// The mapping is not found, or the kernel refuses.
pub fn give_back_code() -> io::Result<usize> {
    let own = give_back_code as fn() -> io::Result<usize> as usize;
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mapping = maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        // Private, of a file, and never written: every page can be read again.
        let is_code = rest.starts_with("r-xp ") && rest.contains('/');
        (is_code && (start..end).contains(&own)).then_some((start, end - start))
    });
    let (start, length) = mapping.ok_or(io::ErrorKind::NotFound)?;
    let start = std::ptr::without_provenance_mut(start);
    // SAFETY: the range is one mapping of this process, as the kernel has just said. It is private and read-only, of a file,
    // so its pages are those of the file, and dropping them loses nothing: the next access maps them again.
    let result = unsafe { libc::madvise(start, length, libc::MADV_DONTNEED) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code between its two calls has to run.
    #[test]
    fn code_that_was_given_back_runs_on() {
        for _again in 0..3 {
            let bytes = give_back_code().expect("this program has code");
            assert!(bytes > 64 * 1024, "{bytes}");
        }
    }
}
