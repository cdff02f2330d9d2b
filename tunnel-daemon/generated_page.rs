//! Pages below docs/reference, which the code writes itself: `cargo xtask docs` has them written, and each other run of the tests
//! compares them.

use std::{env, fs, path::Path};

/// Set where the pages are to be written.
const WRITE: &str = "ADIT_WRITE_REFERENCE";

/// Compares a page with what the code says, or writes it.
///
/// # Panics
/// The page is another one, or cannot be written.
pub(crate) fn is_current(page: &str, text: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    let path = folder.join(page);
    if env::var_os(WRITE).is_some() {
        fs::create_dir_all(folder).expect("a folder can be made");
        fs::write(path, text).expect("the page can be written");
        return;
    }
    let before = fs::read_to_string(path).unwrap_or_default();
    assert!(
        before == text,
        "docs/reference/{page} is not what the code says: `cargo xtask docs` writes it anew"
    );
}

/// A table's cell: one line, in which no character ends it.
pub(crate) fn cell(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").replace('|', "\\|").replace('<', "&lt;")
}
