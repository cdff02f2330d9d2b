//! Replays the fuzz corpus, so that what a fuzzer once found stays found without a nightly compiler.

use std::{fs, path::Path};

/// Runs every file of `tunnel-daemon/fuzz/corpus/<target>` through `entry`, which panics on what is wrong.
fn replay(target: &str, entry: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(target);
    let files = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("cannot list {}: {error}", folder.display()));
    let mut replayed = 0;
    for file in files {
        let path = file
            .expect("an entry of the corpus folder can be read")
            .path();
        println!("{}", path.display()); // Shown when the entry panics: names the input.
        entry(&fs::read(&path).expect("a corpus file can be read"));
        replayed += 1;
    }
    assert!(
        replayed > 0,
        "{} is empty: restore the committed seeds",
        folder.display()
    );
}

#[test]
fn header_rewrite_takes_its_corpus() {
    replay("header_rewrite", adit_core::http2::fuzz_entry);
}

#[test]
fn connect_request_takes_its_corpus() {
    replay("connect_request", adit_core::connect::fuzz_entry);
}
