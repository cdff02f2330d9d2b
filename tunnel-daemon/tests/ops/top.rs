//! `adit status` and `adit top`: what they show of a running stack, and how they leave the terminal.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Demo, adit, text};

#[test]
fn status_and_top_show_a_running_stack() {
    let demo = Demo::start();
    let (server, north) = (demo.socket("admin.sock"), demo.socket("north-admin.sock"));

    let shown = adit(&["status", "--admin-socket", &server]);
    let lines = text(&shown.stdout);
    let errors = text(&shown.stderr);
    assert_eq!(shown.status.code(), Some(0), "{lines}{errors}");
    for part in ["server  ", "ready        yes", "AGENT ", "north ", "south "] {
        assert!(lines.contains(part), "{part} in\n{lines}");
    }
    let fits = lines.lines().all(|line| line.chars().count() <= 80);
    assert!(fits, "{lines}");
    let json = adit(&["status", "--json", "--admin-socket", &north]);
    let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    for (field, value) in [("role", "agent"), ("id", "north")] {
        assert_eq!(json[field], value);
    }
    assert_eq!(json["api"], 1);

    let mut command = vec!["top", "--once", "--interval", "300ms"];
    command.extend(["--admin-socket", &server]);
    for sort in ["rate", "destination"] {
        command.extend(["--sort", sort]);
        let picture = adit(&command);
        let lines = text(&picture.stdout);
        assert_eq!(picture.status.code(), Some(0), "{}", text(&picture.stderr));
        assert!(lines.contains("/s to targets"), "{lines}");
        assert!(lines.contains("DESTINATION"), "{lines}");
        assert_eq!(lines.contains("DESTINATION*"), sort == "destination");
        assert!(!lines.contains("TENANT"), "{lines}");
        assert!(!lines.contains('\x1b'), "a pipe gets no colours: {lines}");
        assert!(!lines.contains('~'), "nothing is shortened: {lines}");
        command.truncate(6);
    }
    command.push("--json");
    let json = adit(&command);
    let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(json["api"], 1);
    assert_eq!(json["role"], "server");
    let tunnels = json["tunnels"].as_array().expect("tunnels");
    assert_eq!(json["open"], tunnels.len(), "{json}");
    let rates = ["to_target_per_second", "to_client_per_second"];
    let has_rates = |tunnel: &Value| rates.iter().all(|rate| tunnel[*rate].is_u64());
    assert!(tunnels.iter().all(has_rates), "{json}");
}

#[test]
fn top_without_a_terminal_names_the_missing_flag() {
    let refused = adit(&["top", "--admin-socket", "/nonexistent/s"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("add --once"));
    let refused = adit(&["top", "--once", "--admin-socket", "/nonexistent/s"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("there is no such socket"));
    let refused = adit(&["top", "--interval=1ms"]);
    assert!(text(&refused.stderr).contains("must be from 100ms"));
    let refused = adit(&["top", "--sort=colour"]);
    assert!(text(&refused.stderr).contains("rate, bytes, age"));
}

/// Runs `adit top` on its own terminal, ends it by a key or a signal, and returns its output.
fn on_terminal(wrap: &str, server: &str, typed: Stdio) -> String {
    let program = env!("CARGO_BIN_EXE_adit");
    let command = format!(
        "stty rows 24 cols 80; {wrap} {program} top --interval 100ms --admin-socket {server}; stty -a"
    );
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &command, "/dev/null"]);
    let mut child = script
        .stdin(typed)
        .stdout(Stdio::piped())
        .spawn()
        .expect("script starts");
    let mut bytes = Vec::new();
    let mut out = child.stdout.take().expect("piped");
    out.read_to_end(&mut bytes).expect("it ends");
    assert!(child.wait().expect("a child").success());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Whether script(1) can provide a terminal; prints a skip if not.
fn has_script() -> bool {
    let has_it = Command::new("script").arg("--version").output().is_ok();
    if !has_it {
        assert!(std::env::var_os("CI").is_none(), "CI has script(1)");
        // Writes to the real standard error, because the harness captures the output of tests.
        writeln!(std::io::stderr(), "SKIPPED a terminal: no script(1)").ok();
    }
    has_it
}

/// This happens when an SSH session breaks. `top` gets no SIGHUP, because the shell leads the session and survives.
#[test]
fn top_exits_when_its_terminal_closes() {
    if !has_script() {
        return;
    }
    let demo = Demo::start();
    let fifo = demo.dir.with_file_name("ended").display().to_string();
    let made = Command::new("mkfifo").arg(&fifo).status();
    assert!(made.expect("mkfifo runs").success());
    let (program, server) = (env!("CARGO_BIN_EXE_adit"), demo.socket("admin.sock"));
    let command = format!(
        "trap '' HUP; stty rows 24 cols 80; {program} top --interval 100ms --admin-socket {server}; echo $? > {fifo}"
    );
    let mut script = Command::new("script");
    script.args(["--quiet", "--command", &command, "/dev/null"]);
    script.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut terminal = script.spawn().expect("script starts");
    let mut out = terminal.stdout.take().expect("piped");
    let mut shown = Vec::new();
    while !String::from_utf8_lossy(&shown).contains("DESTINATION") {
        let mut more = [0; 4096];
        let count = out.read(&mut more).expect("a terminal");
        assert_ne!(count, 0, "ended: {}", String::from_utf8_lossy(&shown));
        shown.extend_from_slice(&more[..count]);
    }
    terminal.kill().expect("it runs");
    terminal.wait().expect("a child");
    let ended = Command::new("timeout").args(["30", "cat", &fifo]).output();
    let ended = text(&ended.expect("timeout runs").stdout);
    assert!(!ended.is_empty(), "it goes on without a terminal");
}

#[test]
fn the_terminal_is_put_back_after_a_signal() {
    if !has_script() {
        return;
    }
    let demo = Demo::start();
    let server = demo.socket("admin.sock");
    for signal in ["TERM", "HUP", "INT"] {
        let wrap = format!("timeout --foreground --preserve-status --signal={signal} 5");
        let shown = on_terminal(&wrap, &server, Stdio::null());
        let (before, after) = shown
            .split_once("\x1b[?1049l")
            .unwrap_or_else(|| panic!("{signal}: the other screen is never left: {shown:?}"));
        for part in ["\x1b[?1049h", "DESTINATION"] {
            assert!(before.contains(part), "{before:?}");
        }
        // `stty` shows that line editing and echo are on again.
        for setting in [" icanon ", " echo ", " iexten "] {
            assert!(after.contains(setting), "{signal}: {setting} in {after:?}");
        }
    }
}
