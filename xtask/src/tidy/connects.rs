//! Who connects goes past a redirect of our own, by `net::direct`: what connects by itself may come back to ourselves.

use crate::tidy::paths::paths;
use crate::workspace::Workspace;

const DAEMON: &str = "tunnel-daemon";
/// Sources that connect by themselves, or folders of such, and why they may.
const MAY: &[(&str, &str)] = &[
    ("tunnel-daemon/net/src/direct.rs", "the way itself"),
    (
        "tunnel-daemon/redirect/src/namespaces/helper.rs",
        "no TCP: it asks for a route",
    ),
    (
        "tunnel-daemon/relay/",
        "loopback only: the probe of kernel TLS, and benches",
    ),
    (
        "tunnel-daemon/src/demo/",
        "clients, which are not to go past anything",
    ),
];

/// What is not connected when it is made: methods of these call connect(2).
const SOCKETS: &[&str] = &["TcpSocket", "Socket", "SockRef"];

/// Checks the daemon, without its tests.
///
/// # Errors
/// When a source cannot be read or is no Rust.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    let mut idle: Vec<&str> = MAY.iter().map(|(place, _why)| *place).collect();
    for file in workspace.files(DAEMON)? {
        if !file.ends_with(".rs") || is_test(&file) {
            continue;
        }
        let text = workspace.text(&file)?.unwrap_or_default();
        let lines = connects(&text).map_err(|error| error.context(file.clone()))?;
        if lines.is_empty() {
            continue;
        }
        match MAY.iter().find(|(place, _why)| file.starts_with(*place)) {
            Some((place, _why)) => idle.retain(|one| one != place),
            None => {
                for line in lines {
                    findings.push(format!(
                        "{file}:{line}: it connects by itself, and not by `net::direct`"
                    ));
                }
            }
        }
    }
    for place in idle {
        findings.push(format!(
            "{place}: listed in MAY of xtask/src/tidy/connects.rs, but does not connect"
        ));
    }
    Ok(findings)
}

/// Whether a source is tests as a whole.
pub(super) fn is_test(file: &str) -> bool {
    file.split(['/', '.'])
        .any(|part| part == "tests" || part.ends_with("_tests"))
}

/// Lines that connect, but for those of the tests, which are last.
fn connects(text: &str) -> anyhow::Result<Vec<usize>> {
    let text = text.split("\n#[cfg(test)]\nmod tests {").next();
    let text = text.unwrap_or_default();
    let named = paths(text)?;
    let has_sockets = named.iter().any(|path| {
        let mut segments = path.segments.iter();
        segments.any(|segment| SOCKETS.contains(&segment.as_str()))
    });
    let mut lines = Vec::new();
    for path in &named {
        if is_connect(&path.segments) {
            lines.push(path.line);
        }
    }
    for (line, number) in text.lines().zip(1..) {
        let is_comment = line.trim_start().starts_with("//");
        let is_call = line.contains(".connect(") || line.contains(".connect_timeout(");
        // The DNS library's own way.
        let is_of_library = line.contains(".connect_tcp(");
        if !is_comment && (is_of_library || (has_sockets && is_call)) {
            lines.push(number);
        }
    }
    Ok(lines)
}

/// Whether a path names a function that calls connect(2) for TCP.
fn is_connect(segments: &[String]) -> bool {
    let [.., of, function] = segments else {
        return false;
    };
    let is_socket = of == "TcpStream" || SOCKETS.contains(&of.as_str());
    // That of libc, and `rustix::net::connect`.
    let is_bare = of == "libc" || of == "net";
    (is_socket && function.starts_with("connect")) || (is_bare && function == "connect")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_connects_by_itself_is_found() {
        for text in [
            "async fn f() { tokio::net::TcpStream::connect(at).await }",
            "use std::net::TcpStream;\nfn f() { TcpStream::connect_timeout(&at, limit) }",
            "use tokio::net::TcpSocket;\nfn f(socket: TcpSocket) { socket.connect(at) }",
            "fn f() { let way = TcpSocket::connect; }",
            "use rustix::net::connect;",
            "fn f() { self.runtime.connect_tcp(at, None, None) }",
        ] {
            assert_eq!(connects(text).unwrap().len(), 1, "{text}");
        }
        assert_eq!(connects("\n\nuse libc::connect;").unwrap(), [3]);
    }

    #[test]
    fn the_way_past_a_redirect_other_connects_and_tests_are_fine() {
        for text in [
            "fn f(socket: TcpSocket) { direct::connect(own, socket, at) }",
            "fn f(stream: TcpStream) { self.reach.connect(at) }",
            "// TcpStream::connect(at)\nfn f() { UnixStream::connect(path) }",
            "fn f() {}\n\n#[cfg(test)]\nmod tests {\n    fn g() { TcpStream::connect(at) }\n}\n",
        ] {
            assert_eq!(connects(text).unwrap(), Vec::<usize>::new(), "{text}");
        }
        for file in ["net/dial/tests.rs", "hub/tests/a.rs", "a_tests.rs"] {
            assert!(is_test(file), "{file}");
        }
        assert!(!is_test("net/latests.rs"));
    }
}
