//! Replays the fuzz corpus, so that regressions of fuzz findings are caught without a nightly compiler.

use std::collections::BTreeSet;
use std::{fs, path::Path};

use adit_core::wire;

/// Runs one input; panics when it finds a fault.
type Entry = fn(&[u8]);

/// Every fuzz target and its entry function.
const TARGETS: &[(&str, Entry)] = &[
    ("http2", adit_core::http2::fuzz::fuzz_entry),
    ("connect_request", adit_core::connect::fuzz_entry),
    ("socks5", adit_core::socks5::fuzz_entry),
    ("proxy_header", adit_core::proxy_header::fuzz_entry),
    ("connect_answer", adit_proxy::connect::fuzz_entry),
    ("absolute_form", adit_proxy::http::fuzz_entry),
    ("packet", wire::decode::fuzz::fuzz_entry),
    ("metadata", wire::metadata::fuzz::fuzz_entry),
    ("lane", adit_core::lane::fuzz::fuzz_entry),
    ("tls_records", adit_core::tls13::fuzz::fuzz_entry),
];

/// Runs every file of `tunnel-daemon/fuzz/corpus/<target>` through `entry`, which panics on a fault.
fn replay(target: &str, entry: Entry) {
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

fn replay_target(target: &str) {
    let (name, entry) = TARGETS
        .iter()
        .find(|(name, _)| *name == target)
        .expect("a target of the list");
    replay(name, *entry);
}

#[test]
fn http2_takes_its_corpus() {
    replay_target("http2");
}

#[test]
fn connect_request_takes_its_corpus() {
    replay_target("connect_request");
}

#[test]
fn socks5_takes_its_corpus() {
    replay_target("socks5");
}

#[test]
fn proxy_header_takes_its_corpus() {
    replay_target("proxy_header");
}

#[test]
fn connect_answer_takes_its_corpus() {
    replay_target("connect_answer");
}

#[test]
fn absolute_form_takes_its_corpus() {
    replay_target("absolute_form");
}

#[test]
fn packet_takes_its_corpus() {
    replay_target("packet");
}

#[test]
fn metadata_takes_its_corpus() {
    replay_target("metadata");
}

#[test]
fn lane_takes_its_corpus() {
    replay_target("lane");
}

/// Limit (sizes): TLS message split over several records, on a lane
#[test]
fn tls_records_takes_its_corpus() {
    replay_target("tls_records");
}

/// A target missing in one of the places would be fuzzed without being replayed, or not fuzzed at all.
#[test]
fn every_fuzz_target_is_built_and_replayed() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let replayed: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let sources: BTreeSet<String> = fs::read_dir(fuzz.join("fuzz_targets"))
        .expect("the fuzz package is there")
        .map(|file| file.expect("an entry can be read").file_name())
        .filter_map(|name| Some(name.to_str()?.strip_suffix(".rs")?.to_owned()))
        .collect();
    assert_eq!(sources, replayed);
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).expect("a manifest");
    for name in &replayed {
        assert!(
            manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")),
            "{name} is no [[bin]] of the fuzz package: cargo-fuzz does not build it"
        );
    }
}
