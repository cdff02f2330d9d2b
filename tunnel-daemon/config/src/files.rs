//! The only I/O of this module: checks that files exist. Code that uses a file reads and checks its content.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

/// How long a file system may take to answer. The start waits for the file again, where a signal ends it.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// Whether a stat of `path` fails with "not exist". Any other failure counts as existing, as upstream does: the file may be
/// readable when it is used, and its reader reports the real cause.
pub(crate) fn is_missing(path: &Path) -> bool {
    let path = path.to_owned();
    let found = adit_host::files::within(ANSWERS_WITHIN, || std::fs::metadata(path));
    matches!(found, Ok(Err(error)) if error.kind() == ErrorKind::NotFound)
}
