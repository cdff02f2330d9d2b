//! The only I/O of this module: checks that files exist. Code that uses a file reads and checks its content.

use std::io::ErrorKind;
use std::path::Path;

/// Whether a stat of `path` fails with "not exist". Any other failure counts as existing, as upstream does: the file may be
/// readable when it is used, and its reader reports the real cause.
pub(crate) fn is_missing(path: &Path) -> bool {
    matches!(std::fs::metadata(path), Err(error) if error.kind() == ErrorKind::NotFound)
}
