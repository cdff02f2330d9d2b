//! The direction of the code, as data: which module may use which, and what the core may not name.

use std::path::Path;

use crate::tidy::paths::{NamedPath, paths};
use crate::workspace::Workspace;

/// The modules of the daemon. A module uses only rows before its own; modules of one row never use each other.
const LAYERS: &[&[&str]] = &[
    &["reference"],
    &["config", "telemetry"],
    &["ebpf"],
    &["net"],
    &["lane"],
    &["hub"],
    &["frontend", "backend", "agent"],
    &["app"],
];

const DAEMON: &str = "tunnel-daemon/src";
const CORE: &str = "tunnel-daemon/core/src";
const RELAY: &str = "tunnel-daemon/relay/src";

/// Crates the relay must not name: it knows descriptors and bytes, no protocol, runtime or TLS.
const RELAY_CRATES: &[&str] = &[
    "adit_core",
    "adit",
    "tokio",
    "rustls",
    "h2",
    "hyper",
    "tonic",
    "prost",
];
/// The only modules of the relay that may contain unsafe code or name the crate that needs it.
const RELAY_UNSAFE: &str = "tunnel-daemon/relay/src/syscall/";

/// Crates the core must not name at all.
const CORE_CRATES: &[&str] = &[
    "tokio", "socket2", "rustix", "libc", "mio", "hyper", "h2", "tonic", "rand",
];
/// Types that are sockets, whatever path leads to them.
const CORE_TYPES: &[&str] = &[
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "UnixStream",
    "UnixListener",
    "UnixDatagram",
    "OwnedFd",
];
/// Modules of the standard library that do I/O or hold process state.
const CORE_STD: &[&str] = &["env", "fs", "os", "process", "thread"];
/// Calls that read the clock.
const CORE_CLOCKS: &[&str] = &["Instant", "SystemTime"];

/// Checks the packages of the daemon.
///
/// # Errors
/// When a source cannot be read or is no Rust.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in workspace
        .files(DAEMON)?
        .iter()
        .filter(|file| file.ends_with(".rs"))
    {
        findings.extend(check_daemon(file, &source(workspace, file)?)?);
    }
    for file in workspace
        .files(CORE)?
        .iter()
        .filter(|file| file.ends_with(".rs"))
    {
        findings.extend(check_core(file, &source(workspace, file)?)?);
    }
    for file in workspace
        .files(RELAY)?
        .iter()
        .filter(|file| file.ends_with(".rs"))
    {
        findings.extend(check_relay(file, &source(workspace, file)?)?);
    }
    Ok(findings)
}

fn source(workspace: &Workspace, file: &str) -> anyhow::Result<String> {
    Ok(workspace.text(file)?.unwrap_or_default())
}

/// The crate-relative module of a file: `hub/shard.rs` is `hub::shard`, `hub/mod.rs` is `hub`.
fn module_of(file: &str, source_root: &str) -> Vec<String> {
    let file = Path::new(file);
    let below = file
        .strip_prefix(source_root)
        .unwrap_or(file)
        .with_extension("");
    let mut parts: Vec<String> = below
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if parts.last().is_some_and(|last| last == "mod") {
        parts.pop();
    }
    parts
}

fn row_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|row| row.contains(&module))
}

fn check_daemon(file: &str, text: &str) -> anyhow::Result<Vec<String>> {
    let module = module_of(file, DAEMON);
    let Some(top) = module.first() else {
        return Ok(Vec::new());
    };
    if module.len() == 1 && (top == "lib" || top == "main") {
        return Ok(Vec::new()); // The roots only declare modules and start the program.
    }
    let Some(own) = row_of(top) else {
        return Ok(vec![format!(
            "{file}: module `{top}` is in no row of LAYERS in xtask/src/tidy/layers.rs"
        )]);
    };
    let mut findings = Vec::new();
    for path in paths(text).map_err(|error| error.context(file.to_owned()))? {
        let Some(used) = used_module(&path, module.len()) else {
            continue;
        };
        let Some(row) = row_of(used) else { continue }; // An item of lib.rs, no module.
        if used != top && row >= own {
            let why = if row == own {
                "a module of the same row"
            } else {
                "a later row"
            };
            findings.push(format!(
                "{file}:{}: `{top}` uses `{used}`, {why}",
                path.line
            ));
        }
    }
    Ok(findings)
}

/// The top module a path leads to, if it starts at the crate root or climbs up to it.
fn used_module(path: &NamedPath, file_depth: usize) -> Option<&str> {
    let mut segments = path.segments.iter().map(String::as_str).peekable();
    match *segments.peek()? {
        "crate" => {
            segments.next();
            segments.next()
        }
        "self" | "super" => {
            let _here = segments.next_if_eq(&"self");
            let mut climbed = 0;
            while segments.next_if_eq(&"super").is_some() {
                climbed += 1;
            }
            segments
                .next()
                .filter(|_| climbed == file_depth + path.depth)
        }
        _ => None,
    }
}

fn check_core(file: &str, text: &str) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for path in paths(text).map_err(|error| error.context(file.to_owned()))? {
        if let Some(what) = banned_in_core(&path.segments) {
            findings.push(format!(
                "{file}:{}: the core has no I/O and no clock, but names `{what}`",
                path.line
            ));
        }
    }
    Ok(findings)
}

fn banned_in_core(segments: &[String]) -> Option<String> {
    let first = segments.first()?.as_str();
    let starts_path = segments.len() > 1;
    if starts_path && CORE_CRATES.contains(&first) {
        return Some(first.to_owned());
    }
    if let Some(socket) = segments
        .iter()
        .find(|segment| CORE_TYPES.contains(&segment.as_str()))
    {
        return Some(socket.clone());
    }
    if let Some(second) = segments
        .get(1)
        .filter(|second| first == "std" && CORE_STD.contains(&second.as_str()))
    {
        return Some(format!("std::{second}"));
    }
    let clock = segments.windows(2).find(|pair| {
        matches!(pair, [kind, call] if CORE_CLOCKS.contains(&kind.as_str()) && call == "now")
    })?;
    Some(clock.join("::"))
}

fn check_relay(file: &str, text: &str) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    let may_be_unsafe = file.starts_with(RELAY_UNSAFE);
    for path in paths(text).map_err(|error| error.context(file.to_owned()))? {
        let Some(first) = path.segments.first().map(String::as_str) else {
            continue;
        };
        let line = path.line;
        if path.segments.len() > 1 && RELAY_CRATES.contains(&first) {
            findings.push(format!(
                "{file}:{line}: the relay knows no protocol and no runtime, but names `{first}`"
            ));
        }
        if path.segments.len() > 1 && ["io_uring", "libc"].contains(&first) && !may_be_unsafe {
            findings.push(format!(
                "{file}:{line}: only {RELAY_UNSAFE} makes system calls of its own, but this names `{first}`"
            ));
        }
    }
    // The compiler denies unsafe code at the crate root; only these modules may ask for it back.
    for (number, line) in text.lines().enumerate() {
        let asks = line.trim_start().starts_with("#[") || line.trim_start().starts_with("#![");
        let denies = line.contains("deny(unsafe_code)");
        if asks && line.contains("unsafe_code") && !denies && !may_be_unsafe {
            findings.push(format!(
                "{file}:{}: unsafe code of the relay belongs below {RELAY_UNSAFE}",
                number + 1
            ));
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relay(file: &str, text: &str) -> Vec<String> {
        check_relay(&format!("{RELAY}/{file}"), text).unwrap()
    }

    #[test]
    fn relay_names_no_protocol_runtime_or_tls() {
        for text in [
            "use adit_core::ids::AgentId;",
            "fn f() { tokio::spawn(x) }",
            "use rustls::ClientConfig;",
        ] {
            assert_eq!(relay("flow.rs", text).len(), 1, "{text}");
        }
        assert_eq!(
            relay("flow.rs", "use std::os::fd::OwnedFd; use bytes::Bytes;"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn unsafe_code_of_the_relay_stays_in_its_system_calls() {
        let asks = "#[expect(unsafe_code, reason = \"speed\")]\nmod fast;";
        assert_eq!(relay("flow.rs", asks).len(), 1);
        assert_eq!(relay("syscall/mod.rs", asks), Vec::<String>::new());
        assert_eq!(relay("flow.rs", "use io_uring::opcode;").len(), 1);
        assert_eq!(
            relay("syscall/ring.rs", "use io_uring::opcode;"),
            Vec::<String>::new()
        );
        assert_eq!(
            relay("lib.rs", "#![deny(unsafe_code)]"),
            Vec::<String>::new()
        );
    }

    fn daemon(file: &str, text: &str) -> Vec<String> {
        check_daemon(&format!("{DAEMON}/{file}"), text).unwrap()
    }

    fn core(text: &str) -> Vec<String> {
        check_core("core.rs", text).unwrap()
    }

    #[test]
    fn later_rows_and_the_same_row_are_refused() {
        assert_eq!(
            daemon("hub/shard.rs", "use crate::{config, frontend::grpc};").len(),
            1
        );
        assert_eq!(
            daemon("backend/link.rs", "fn f() { crate::frontend::serve() }").len(),
            1
        );
        assert_eq!(
            daemon("config/mod.rs", "use crate::telemetry::log;").len(),
            1
        );
    }

    #[test]
    fn earlier_rows_and_the_own_module_are_fine() {
        assert_eq!(
            daemon(
                "hub/shard.rs",
                "use crate::hub::route; use crate::net::tls;"
            ),
            Vec::<String>::new()
        );
        assert_eq!(
            daemon("app/mod.rs", "use crate::{hub, frontend, agent, config};"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn climbing_to_the_root_is_seen_through() {
        assert_eq!(daemon("hub/shard.rs", "use super::super::app::x;").len(), 1);
        assert_eq!(
            daemon(
                "hub/mod.rs",
                "#[cfg(test)] mod tests { use super::super::app; }"
            )
            .len(),
            1
        );
        assert_eq!(
            daemon("hub/shard.rs", "use super::app;"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn module_outside_all_rows_is_named() {
        let findings = daemon("misc.rs", "");
        assert!(
            findings
                .iter()
                .any(|finding| finding.contains("`misc` is in no row")),
            "{findings:?}"
        );
    }

    #[test]
    fn core_names_no_runtime_socket_file_or_clock() {
        for text in [
            "use tokio::sync::mpsc;",
            "use std::{net::TcpStream, sync::Arc};",
            "use std::{fs, fmt};",
            "fn f() { std::process::exit(1) }",
            "fn f() { let t = Instant::now(); }",
        ] {
            assert_eq!(core(text).len(), 1, "{text}");
        }
    }

    #[test]
    fn core_may_hold_addresses_and_instants() {
        let text = "use std::net::{IpAddr, SocketAddr}; use std::time::{Duration, Instant}; // Instant::now";
        assert_eq!(core(text), Vec::<String>::new());
    }
}
