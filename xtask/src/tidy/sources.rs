//! Text of files: sources begin with a module doc, have a bounded length, and no mark of unfinished work lacks an issue. No
//! file contains paths of one machine. Only `adit_net::direct` connects.

use crate::workspace::Workspace;

/// Most lines of a Rust source. Longer files usually do two jobs.
const LINES_MAX: usize = 800;

/// First line of files that `cargo xtask codegen` writes.
const GENERATED: &str = "//! Made by `cargo xtask codegen`";

/// Marks of unfinished work, spelled so that this file does not contain them.
const MARKS: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME")];

/// Folders in which people and machines work.
const HOMES: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/Us", "ers/"),
    concat!("/wo", "rk/"),
];

/// Settings that redirect package tools to other registries.
const REGISTRIES: &[&str] = &[
    concat!("replace", "-with"),
    concat!("[regis", "tries"),
    concat!("arti", "factory"),
    concat!("index", "-url"),
    concat!("GOPROXY", "=http"),
];

/// The only package source that a lock file may name.
const PUBLIC_SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Path prefixes of sources that may connect without `adit_net::direct`, which bypasses Adit's redirect: that module, a route
/// lookup, clients of the demo, and the relay's probe of kernel TLS. Any other connection may be redirected back to its own
/// process.
const CONNECTS: &[&str] = &[
    "tunnel-daemon/net/src/direct.rs",
    // A unix socket, which nothing redirects.
    "tunnel-daemon/net/src/unix.rs",
    "tunnel-daemon/redirect/src/namespaces/helper.rs",
    "tunnel-daemon/src/demo/",
    "tunnel-daemon/relay/src/kernel_tls.rs",
];

/// Socket types that connect after creation: a source that names one is searched for `.connect(`.
const SOCKETS: &[&str] = &["TcpSocket", "Socket::new", "SockRef"];

/// Checks all files.
///
/// # Errors
/// A file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut homes: Vec<String> = HOMES.iter().map(|home| (*home).to_owned()).collect();
    // A checkout directly below `/` has a path like the repository's own folders ("/src/"), so that path proves nothing.
    let checkout = format!("{}/", workspace.root().display());
    if checkout.matches('/').count() > 2 {
        homes.push(checkout);
    }
    let mut findings = Vec::new();
    for file in workspace.files(".")? {
        let Some(text) = workspace.text(&file)? else {
            continue;
        };
        if file.ends_with(".rs") {
            findings.extend(check_rust(&text).map(|what| format!("{file}: {what}")));
        }
        let is_daemon = file.starts_with("tunnel-daemon/") && file.contains("/src/");
        let may_connect = CONNECTS.iter().any(|part| file.starts_with(part));
        let connects = if is_daemon && !may_connect && !is_test(&file) {
            connects(&text)
        } else {
            Vec::new()
        };
        let is_lock = file.ends_with("Cargo.lock");
        for (number, line) in (1..).zip(text.lines()) {
            let what = if is_lock && line.starts_with("source = ") && !line.contains(PUBLIC_SOURCE)
            {
                "a package source that is not the public one"
            } else if homes.iter().any(|home| names_path(line, home)) {
                "an absolute path of one machine"
            } else if REGISTRIES.iter().any(|setting| line.contains(setting)) {
                "a package registry of one machine"
            } else if has_loose_end(line) {
                "unfinished work without an issue: write MARK(#number)"
            } else if connects.contains(&number) {
                "it connects by itself, and not by `adit_net::direct`"
            } else {
                continue;
            };
            findings.push(format!("{file}:{number}: {what}"));
        }
    }
    Ok(findings)
}

fn check_rust(text: &str) -> impl Iterator<Item = String> {
    let first = text.lines().find(|line| !line.starts_with("#!"));
    let has_doc = first.is_some_and(|line| line.starts_with("//!"));
    let lines = text.lines().count();
    let is_long = lines > LINES_MAX && !text.starts_with(GENERATED);
    let undocumented = "begins without `//!`, which says what the module owns".to_owned();
    let long = format!("{lines} lines, more than {LINES_MAX}: split it");
    let undocumented = (!has_doc).then_some(undocumented);
    undocumented.into_iter().chain(is_long.then_some(long))
}

/// Whether the line contains a path that begins with `home`; a path with `home` in its middle does not count.
fn names_path(line: &str, home: &str) -> bool {
    line.match_indices(home).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        before.is_none_or(|c| !c.is_alphanumeric() && !"._-/{}*~$>".contains(c))
    })
}

/// Whether a line has a mark that is a word of its own, without an issue as in `MARK(#12)`.
fn has_loose_end(line: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let has = |mark: &&str| {
        line.match_indices(*mark).any(|(at, _)| {
            let (before, after) = (line.get(..at), line.get(at + mark.len()..));
            let after = after.unwrap_or_default();
            let names_issue = after.starts_with("(#") && after.get(2..3) != Some(")");
            !before.is_some_and(|text| text.ends_with(is_word))
                && !after.starts_with(is_word)
                && !names_issue
        })
    };
    MARKS.iter().any(has)
}

/// Whether a source contains only tests.
pub(super) fn is_test(file: &str) -> bool {
    file.split(['/', '.'])
        .any(|part| part == "tests" || part.ends_with("_tests"))
}

/// A source without its unit tests, which come last.
pub(super) fn without_tests(text: &str) -> &str {
    let is_module = |at: &usize| {
        let module = text.get(*at..).and_then(|rest| rest.lines().nth(2));
        module.is_some_and(|line| line.ends_with("mod tests {"))
    };
    let attributes = text.match_indices("\n#[cfg(test)]\n").map(|(at, _)| at);
    let tests = attributes.into_iter().find(is_module);
    tests.and_then(|at| text.get(..at)).unwrap_or(text)
}

/// Line numbers of code that connects, except in tests.
fn connects(text: &str) -> Vec<usize> {
    let text = without_tests(text);
    let has_sockets = SOCKETS.iter().any(|socket| text.contains(socket));
    let is_connect = |line: &str| {
        let any = |calls: &[&str]| calls.iter().any(|call| line.contains(call));
        any(&[
            "TcpStream::connect",
            "TcpSocket::connect",
            ".connect_tcp(",
            "rustix::net::connect",
            "libc::connect",
        ]) || (has_sockets && any(&[".connect(", ".connect_timeout("]))
    };
    let lines = (1..).zip(text.lines());
    let lines = lines.filter(|(_, line)| !line.trim_start().starts_with("//") && is_connect(line));
    lines.map(|(number, _)| number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn source_without_module_doc_and_long_ones_are_found_unless_generated() {
        let long = "\n".repeat(LINES_MAX + 1);
        for (text, count) in [
            ("use b;\n".to_owned(), 1),
            ("//! Owns a.\nuse b;\n".to_owned(), 0),
            (format!("//! Owns a.{long}"), 1),
            (format!("{GENERATED}{long}"), 0),
        ] {
            assert_eq!(check_rust(&text).count(), count, "{text}");
        }
    }

    #[test]
    fn loose_end_needs_an_issue_number() {
        for mark in MARKS {
            assert!(has_loose_end(&format!("// {mark}: later")));
            assert!(has_loose_end(&format!("// {mark}(#): later")));
            assert!(!has_loose_end(&format!("// {mark}(#12): later")));
            assert!(!has_loose_end(&format!("// MY{mark}S")));
        }
    }

    #[test]
    fn machine_specific_paths_and_sources_are_found() {
        let lock = "[[package]]\nsource = \"registry+https://packages.example\"\n";
        let (folder, workspace) = sample(&[("Cargo.lock", lock), ("target/a.rs", "")]);
        let checkout = format!("cd {}/docs", folder.path().display());
        let home = format!("see {}me/notes, net{}x", HOMES[0], HOMES[0]);
        std::fs::write(folder.path().join("a.txt"), checkout).unwrap();
        std::fs::write(folder.path().join("b.txt"), home).unwrap();
        assert_eq!(
            check(&workspace).unwrap(),
            [
                "Cargo.lock:2: a package source that is not the public one",
                "a.txt:1: an absolute path of one machine",
                "b.txt:1: an absolute path of one machine",
            ]
        );
        assert!(!names_path(&format!("net{}x", HOMES[0]), HOMES[0]));
    }

    #[test]
    fn direct_connects_are_found_outside_tests() {
        for text in [
            "async fn f() { tokio::net::TcpStream::connect(at).await }",
            "use tokio::net::TcpSocket;\nfn f(socket: TcpSocket) { socket.connect(at) }",
            "fn f() { self.runtime.connect_tcp(at, None, None) }",
        ] {
            assert_eq!(connects(text).len(), 1, "{text}");
        }
        for text in [
            "fn f(socket: TcpSocket) { direct::connect(own, socket, at) }",
            "fn f(stream: TcpStream) { self.reach.connect(at) }",
            "// TcpStream::connect(at)\nfn f() { UnixStream::connect(path) }",
            "fn f() {}\n\n#[cfg(test)]\nmod tests {\n    TcpStream::connect(at)\n}\n",
        ] {
            assert_eq!(connects(text).len(), 0, "{text}");
        }
        assert!(is_test("net/dial/tests.rs") && is_test("a_tests.rs"));
        assert!(!is_test("net/latests.rs"));
    }
}
