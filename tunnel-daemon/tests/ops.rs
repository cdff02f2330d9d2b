//! `adit status`, `adit top` and `adit check` as a user runs them: the built binary beside a running demo.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use adit::net::selfsigned::{ThrowawayFiles, Usage};
use serde_json::Value;

fn adit(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
    let output = command.args(args).stdin(Stdio::null()).output();
    output.expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// A demo that drives tunnels until dropped.
struct Demo {
    child: Child,
    /// Read no further; open as long as the demo writes.
    _lines: BufReader<ChildStdout>,
    dir: PathBuf,
    _outer: tempfile::TempDir,
}

impl Demo {
    fn start() -> Self {
        let outer = tempfile::Builder::new()
            .prefix("adit-")
            .tempdir()
            .expect("a temporary folder");
        let dir = outer.path().join("demo");
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        command.args(["demo", "--plain", "--dir"]).arg(&dir);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the demo starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped"));
        let mut seen = String::new();
        // Both agents are linked by then.
        while !seen.contains("adit top --admin-socket") {
            assert_ne!(
                lines.read_line(&mut seen).expect("a line"),
                0,
                "ended:\n{seen}"
            );
        }
        Self {
            child,
            _lines: lines,
            dir,
            _outer: outer,
        }
    }

    fn socket(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // Both fail when it has ended already.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

#[test]
fn status_and_top_show_a_running_stack() {
    let demo = Demo::start();
    let (server, north) = (demo.socket("admin.sock"), demo.socket("north-admin.sock"));

    let shown = adit(&["status", "--admin-socket", &server]);
    let lines = text(&shown.stdout);
    assert_eq!(
        shown.status.code(),
        Some(0),
        "{lines}{}",
        text(&shown.stderr)
    );
    for part in ["server  ", "ready        yes", "AGENT ", "north ", "south "] {
        assert!(lines.contains(part), "{part} in\n{lines}");
    }
    assert!(
        lines.lines().all(|line| line.chars().count() <= 80),
        "{lines}"
    );
    let json = adit(&["status", "--json", "--admin-socket", &north]);
    let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(
        (json["role"].as_str(), json["id"].as_str()),
        (Some("agent"), Some("north"))
    );
    assert_eq!(json["api"], 1);

    let mut command = vec![
        "top",
        "--once",
        "--interval",
        "300ms",
        "--admin-socket",
        &server,
    ];
    for sort in ["rate", "destination", "tenant"] {
        command.extend(["--sort", sort]);
        let picture = adit(&command);
        let lines = text(&picture.stdout);
        assert_eq!(picture.status.code(), Some(0), "{}", text(&picture.stderr));
        assert!(lines.contains("/s to targets"), "{lines}");
        assert!(lines.contains("DESTINATION"), "{lines}");
        assert_eq!(lines.contains("TENANT*"), sort == "tenant", "{lines}");
        assert!(!lines.contains('\x1b'), "a pipe gets no colours: {lines}");
        assert!(
            lines.lines().all(|line| line.chars().count() <= 80),
            "{lines}"
        );
        command.truncate(6);
    }
}

#[test]
fn top_without_a_terminal_says_what_to_add() {
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

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
    command
        .arg("check")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("a child");
    assert_eq!(text(&output.stderr), "");
    assert!(matches!(output.status.code(), Some(0..=2)), "{output:?}");
}

/// A pipe whose reader has gone.
fn unread() -> std::io::PipeWriter {
    let (_gone, writer) = std::io::pipe().expect("a pipe");
    writer
}

#[test]
fn help_and_errors_that_nobody_reads_end_as_if_they_were_read() {
    for args in [&["--version"][..], &["--help"], &["server", "--help"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        let output = command.args(args).stdout(unread()).output();
        let output = output.expect("the binary runs");
        assert_eq!(text(&output.stderr), "", "{args:?}");
        assert_eq!(output.status.code(), Some(0), "{args:?}");
    }
    for (args, code) in [
        (&["server", "--nonsense"][..], 2),
        (&["status", "--admin-socket=/nonexistent/s"], 1),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        let status = command.args(args).stderr(unread()).status();
        let status = status.expect("the binary runs");
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
}

/// Runs `adit top` on a terminal of its own and tells it to end, in one of two ways; what the terminal got.
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

/// Whether there are terminals for tests; says so if not.
fn has_script() -> bool {
    let has_it = Command::new("script").arg("--version").output().is_ok();
    if !has_it {
        assert!(std::env::var_os("CI").is_none(), "CI has script(1)");
        // Past the harness, which keeps what tests print.
        writeln!(std::io::stderr(), "SKIPPED a terminal: no script(1)").ok();
    }
    has_it
}

/// As when an SSH session breaks. Nobody sends it a signal: the shell leads the session, and goes on.
#[test]
fn top_ends_with_its_terminal() {
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
        assert!(
            before.contains("\x1b[?1049h") && before.contains("DESTINATION"),
            "{before:?}"
        );
        // What stty says then: lines are edited and echoed again.
        for setting in [" icanon ", " echo ", " iexten "] {
            assert!(after.contains(setting), "{signal}: {setting} in {after:?}");
        }
    }
}

struct Files(ThrowawayFiles);

impl Files {
    fn create() -> Self {
        let names = ["127.0.0.1".to_owned()];
        Self(ThrowawayFiles::create(&names).expect("certificates"))
    }

    fn path(&self, name: &str) -> String {
        self.0.dir().join(name).display().to_string()
    }

    /// A check of a server with this certificate and key, as JSON, and its exit code.
    fn check(&self, cert: &Path, key: &Path) -> (Value, Option<i32>) {
        self.check_with(cert, key, &[])
    }

    /// With more flags.
    fn check_with(&self, cert: &Path, key: &Path, flags: &[String]) -> (Value, Option<i32>) {
        let output = Command::new(env!("CARGO_BIN_EXE_adit"))
            .args([
                "check",
                "--json",
                "server",
                "--agent-port=0",
                "--health-port=off",
            ])
            .arg("--admin-port=off")
            .arg(format!("--frontend=grpc=unix:{}", self.path("kas.sock")))
            .arg("--cluster-cert")
            .arg(cert)
            .arg("--cluster-key")
            .arg(key)
            .arg("--cluster-ca-cert")
            .arg(self.0.ca_file())
            .args(flags)
            .output()
            .expect("the binary runs");
        let json = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
        (json, output.status.code())
    }
}

/// The lines of a name, as (verdict, text).
fn lines_of(json: &Value, name: &str) -> Vec<(String, String)> {
    let lines = json["lines"].as_array().expect("lines");
    lines
        .iter()
        .filter(|line| line["name"] == name)
        .map(|line| {
            let word = |field: &str| line[field].as_str().expect("text").to_owned();
            (word("verdict"), word("text"))
        })
        .collect()
}

fn has(json: &Value, name: &str, verdict: &str, part: &str) -> bool {
    lines_of(json, name)
        .iter()
        .any(|(found, text)| found == verdict && text.contains(part))
}

/// Valid from `days.0` to `days.1`, counted from now, signed by itself.
#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn dated(files: &Files, name: &str, days: (i64, i64)) -> (PathBuf, PathBuf) {
    let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("names");
    let now = std::time::SystemTime::now();
    let at = |days: i64| {
        let span = std::time::Duration::from_secs(days.unsigned_abs() * 86_400 + 3600);
        if days < 0 { now - span } else { now + span }
    };
    (params.not_before, params.not_after) = (at(days.0).into(), at(days.1).into());
    let key = rcgen::KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate");
    let (cert_path, key_path) = (
        PathBuf::from(files.path(&format!("{name}.crt"))),
        PathBuf::from(files.path(&format!("{name}.key"))),
    );
    fs::write(&cert_path, certificate.pem()).expect("a file");
    fs::write(&key_path, key.serialize_pem()).expect("a file");
    (cert_path, key_path)
}

#[test]
fn check_finds_what_is_wrong_with_certificates() {
    let files = Files::create();
    let (cert, key) = (files.0.cert("server"), files.0.key("server"));
    let (json, _) = files.check(&cert, &key);
    assert!(
        has(&json, "agent-listener", "ok", "certificate, key and CA fit"),
        "{json}"
    );
    // Throw-away certificates last for days only.
    assert!(
        has(&json, "agent-listener", "degraded", "expires in"),
        "{json}"
    );
    assert!(has(&json, "frontend", "ok", "can be made"), "{json}");

    let (cert, key) = dated(&files, "fresh", (-1, 400));
    let (json, code) = files.check(&cert, &key);
    assert!(
        has(
            &json,
            "agent-listener",
            "ok",
            "is valid for 400 days, for ip:127.0.0.1"
        ),
        "{json}"
    );
    assert_eq!(code, Some(1), "the CA is about to expire: {json}");

    let (cert, key) = dated(&files, "late", (-10, -2));
    let (json, code) = files.check(&cert, &key);
    assert!(
        has(
            &json,
            "agent-listener",
            "missing",
            "has expired, 2 days ago"
        ),
        "{json}"
    );
    assert_eq!((code, json["result"].as_str()), (Some(2), Some("missing")));

    let (cert, key) = dated(&files, "early", (3, 9));
    let (json, code) = files.check(&cert, &key);
    assert!(
        has(&json, "agent-listener", "missing", "is not valid yet"),
        "{json}"
    );
    assert_eq!(code, Some(2));

    let (json, code) = files.check(&files.0.cert("server"), &files.0.key("agent"));
    let mismatch = lines_of(&json, "agent-listener").remove(0);
    assert_eq!((mismatch.0.as_str(), code), ("missing", Some(2)), "{json}");
    assert!(mismatch.1.contains("agent.key"), "{json}");

    let folder = files.path("folder.crt");
    fs::create_dir(&folder).unwrap();
    let (json, code) = files.check(Path::new(&folder), &files.0.key("server"));
    assert!(
        has(&json, "agent-listener", "missing", "cannot read"),
        "{json}"
    );
    assert_eq!(code, Some(2));

    let (json, code) = files.check(Path::new("/nonexistent/tls.crt"), &files.0.key("server"));
    assert!(
        has(
            &json,
            "configuration",
            "missing",
            "/nonexistent/tls.crt: no such file"
        ),
        "{json}"
    );
    assert_eq!(code, Some(2));
}

#[test]
fn check_says_what_redirect_and_accounting_would_meet() {
    let files = Files::create();
    let (cert, key) = (files.0.cert("server"), files.0.key("server"));
    let (json, _) = files.check(&cert, &key);
    for name in ["redirect", "redirect-cgroup", "account", "transparent"] {
        assert!(lines_of(&json, name).is_empty(), "nobody asked: {json}");
    }
    let rules = files.path("rules");
    fs::write(&rules, "redirect 192.0.2.0/24\n").expect("a file");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = listener.local_addr().expect("an address");
    let flags = [
        "--redirect=10.0.0.0/8".to_owned(),
        "--redirect-cgroup=/nonexistent/cgroup".to_owned(),
        format!("--redirect-file={rules}"),
        "--redirect-netns=/nonexistent/netns".to_owned(),
        "--account=auto".to_owned(),
        format!("--transparent-bind-address={taken}"),
    ];
    let (json, code) = files.check_with(&cert, &key, &flags);
    for (name, verdict, part) in [
        ("redirect-cgroup", "missing", "/nonexistent/cgroup"),
        ("redirect-rules", "ok", "2 of flags and file"),
        ("redirect-netns", "degraded", "/nonexistent/netns"),
        ("transparent", "missing", "cannot listen"),
    ] {
        assert!(has(&json, name, verdict, part), "{name}: {json}");
    }
    // What they say is the host's matter.
    for name in ["redirect", "account"] {
        assert_eq!(lines_of(&json, name).len(), 1, "{name}: {json}");
    }
    assert_eq!(code, Some(2));
    fs::write(&rules, "redirect nothing\n").expect("a file");
    let (json, _) = files.check_with(&cert, &key, &flags);
    assert!(has(&json, "redirect-rules", "missing", "line 1"), "{json}");
}

#[test]
fn check_connects_as_an_agent_would_and_registers_nothing() {
    let demo = Demo::start();
    let status = adit(&[
        "status",
        "--json",
        "--admin-socket",
        &demo.socket("north-admin.sock"),
    ]);
    let status: Value = serde_json::from_slice(&status.stdout).expect("JSON");
    let server = status["links"][0]["address"].as_str().expect("an address");
    let file = |name: &str| demo.dir.join(name).display().to_string();
    let host = format!("--proxy-server-host={server}");
    let check = |ca: &str, cert: &str, key: &str| {
        let output = adit(&[
            "check",
            "--json",
            "--connect",
            "agent",
            &host,
            "--health-server-port=off",
            "--admin-server-port=off",
            "--ca-cert",
            ca,
            "--agent-cert",
            cert,
            "--agent-key",
            key,
        ]);
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
    };
    let json = check(&file("ca.crt"), &file("north.crt"), &file("north.key"));
    assert!(
        has(&json, "server", "ok", "both ends accept each other"),
        "{json}"
    );

    let strangers = Files::create();
    strangers
        .0
        .issue("stranger", Usage::Client, &[])
        .expect("a certificate");
    let (cert, key) = (
        strangers.path("stranger.crt"),
        strangers.path("stranger.key"),
    );
    let json = check(&file("ca.crt"), &cert, &key);
    assert!(has(&json, "server", "missing", "refused"), "{json}");
    let ca = strangers.0.ca_file().display().to_string();
    let json = check(&ca, &cert, &key);
    assert!(has(&json, "server", "missing", server), "{json}");

    let after = adit(&[
        "status",
        "--json",
        "--admin-socket",
        &demo.socket("admin.sock"),
    ]);
    let after: Value = serde_json::from_slice(&after.stdout).expect("JSON");
    assert_eq!(after["links_total"], 2, "{after}");
}

#[test]
fn check_of_the_host_alone_prints_lines_and_a_code_for_scripts() {
    let output = adit(&["check"]);
    let lines = text(&output.stdout);
    for name in [
        "kernel",
        "btf",
        "cgroup2",
        "seccomp",
        "io_uring",
        "splice",
        "sockmap",
        "kernel-tls",
        "clock",
    ] {
        let found = lines
            .lines()
            .any(|line| line.split_whitespace().nth(1) == Some(name));
        assert!(found, "{name} in\n{lines}");
    }
    let worst = if lines.contains("missing ") {
        2
    } else if lines.contains("degraded ") {
        1
    } else {
        0
    };
    assert_eq!(output.status.code(), Some(worst), "{lines}");
    let refused = adit(&["check", "demo"]);
    assert_eq!(refused.status.code(), Some(2), "1 is a host that will do");
    assert!(text(&refused.stderr).contains("write server or agent"));
    let warned = adit(&["check", "server", "--nonsense"]);
    assert_eq!(warned.status.code(), Some(2));
    assert!(
        text(&warned.stdout).contains("--nonsense"),
        "{}",
        text(&warned.stdout)
    );
}
