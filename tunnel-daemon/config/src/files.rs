//! The only I/O of this module: does a file exist. Reading and checking content is up to who uses it.

use std::io::ErrorKind;
use std::path::Path;

/// Whether a stat of `path` says "not exist". Any other failure counts as existing, as upstream does:
/// the file may become readable by the time it is used, and the reader names the real cause.
pub(crate) fn is_missing(path: &Path) -> bool {
    matches!(std::fs::metadata(path), Err(error) if error.kind() == ErrorKind::NotFound)
}
