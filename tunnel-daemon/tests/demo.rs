//! `adit demo` as a user runs it: the built binary, real sockets.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

fn demo(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
    command.args(["demo", "--plain", "--dir"]).arg(dir);
    // Variables of a test run, which the demo would name.
    for (name, _value) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ADIT_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// A temporary folder, and a path in it that is short enough for socket names. The demo creates and removes the folder at
/// the path.
fn place() -> (tempfile::TempDir, PathBuf) {
    let outer = tempfile::Builder::new()
        .prefix("adit-")
        .tempdir()
        .expect("a temporary folder");
    let dir = outer.path().join("demo");
    (outer, dir)
}

const FRONTENDS: [&str; 3] = [
    "gRPC on a unix socket",
    "HTTP CONNECT on a unix socket",
    "HTTP CONNECT over mTLS",
];
/// Tunnels that the checks of a frontend open.
const TUNNELS: u64 = 56;

/// The counts of "moved by" of a frontend, by their texts.
fn moved_by<'a>(text: &'a str, frontend: &str) -> HashMap<&'a str, u64> {
    let lines = text.lines().skip_while(|line| !line.starts_with(frontend));
    let mut lines = lines.skip(1).take_while(|line| line.starts_with("  "));
    let counts = lines.find_map(|line| line.strip_prefix("  ok    moved by: "));
    let counts = counts.unwrap_or_else(|| panic!("no counts of {frontend} in\n{text}"));
    let count = |part: &'a str| {
        let (count, what) = part.split_once(' ').expect("a count");
        (what, count.parse().expect("a number"))
    };
    counts.split(", ").map(count).collect()
}

/// Asserts that all tunnels were framed, on lanes or on the link.
fn are_framed(text: &str, frontend: &str) {
    let counts = moved_by(text, frontend);
    let known = |what: &&&str| ["on lanes", "on the link"].contains(*what);
    assert_eq!(counts.keys().filter(known).count(), counts.len(), "{text}");
    assert_eq!(counts.values().sum::<u64>(), TUNNELS, "{text}");
}

#[test]
fn demo_once_checks_every_frontend_and_leaves_nothing_behind() {
    let (_outer, dir) = place();
    let output = demo(&dir)
        .args(["--once", "--verbose"])
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}\n{errors}");
    for frontend in FRONTENDS {
        assert!(text.contains(frontend), "{text}");
        are_framed(&text, frontend);
    }
    for (step, frontends) in [
        ("web page", 3),
        ("download", 3),
        ("upload", 3),
        ("answers", 3),
        ("new tunnels", 3),
        ("refused target", 3),
        ("path", 3),
        ("moved by", 3),
        ("links", 1),
        ("leftovers", 1),
    ] {
        let found = text.matches(&format!("  ok    {step}: ")).count();
        assert_eq!(found, frontends, "{step} in\n{text}");
    }
    assert!(text.contains("connect: connection refused"), "{text}");
    tells_its_story(&text);
    let bytes = "bytes     224 MiB down, 224 MiB up\n";
    assert!(text.contains(bytes), "{text}");
    assert!(text.contains("result    all 29 checks right in "), "{text}");
    assert!(!text.contains('\x1b'), "a pipe gets no colours: {text}");
    assert_eq!(errors, "", "nothing to complain about");
    assert!(!dir.exists(), "the folder is gone");
}

/// Asserts that each act has its result. The values depend on the machine's load.
fn tells_its_story(text: &str) {
    let none_failed = " of them through that agent: none failed";
    for (act, result) in [
        ("1  Four clients stop reading", " ms beside them: "),
        ("2  An agent is stopped", none_failed),
        ("3  Bytes both ways", " up: every byte compared"),
    ] {
        let mut lines = text.lines().skip_while(|line| !line.starts_with(act));
        let told = lines.nth(1).unwrap_or_default();
        assert!(told.contains(result), "{act} in\n{text}");
    }
}

#[test]
fn demo_without_details_has_the_story_and_the_result_of_all_checks() {
    let (_outer, dir) = place();
    let output = demo(&dir).arg("--once").output().expect("the demo runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!(output.status.code(), Some(0), "{text}");
    tells_its_story(&text);
    assert!(text.contains("result    all 29 checks right in "), "{text}");
    assert!(text.lines().count() <= 24, "{text}");
    let fits = text.lines().all(|line| line.chars().count() <= 80);
    assert!(fits, "{text}");
}

#[test]
fn demo_captures_a_plain_curl() {
    let caps = adit_redirect::caps::HostCaps::probe();
    let missing: Vec<&str> = [
        ("capabilities", &caps.capabilities),
        ("bpf", &caps.bpf),
        ("cgroup2", &caps.cgroup2),
    ]
    .into_iter()
    .filter(|(_, capability)| !capability.is_ready())
    .map(|(_, capability)| capability.reason())
    .collect();
    if !missing.is_empty() {
        let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
        let root = rustix::process::geteuid().is_root();
        assert!(!(ci && root), "must run in CI, but: {missing:?}");
        // Writes to the real standard error, because the harness captures the output of tests.
        writeln!(std::io::stderr(), "SKIPPED a plain curl: {missing:?}").ok();
        return;
    }
    let (_outer, dir) = place();
    let mut command = demo(&dir);
    // The tunnel must ignore a proxy of the environment.
    command
        .args(["--once", "--verbose", "--redirect"])
        .env("http_proxy", "http://127.0.0.1:9");
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    let mut lines = text.lines();
    let curl = lines.find(|line| line.starts_with("  ok    plain curl: "));
    let curl = curl.unwrap_or_else(|| panic!("no curl in\n{text}"));
    let is_counted =
        ["1 on lanes", "1 on the link"].map(|sums| curl.ends_with(&format!("; {sums}")));
    assert!(is_counted.contains(&true), "{curl}");
    assert!(text.contains("result    all 30 checks right in "), "{text}");
    let cgroup = text
        .lines()
        .find_map(|line| line.strip_prefix("redirect "))
        .unwrap();
    assert!(!Path::new(cgroup).exists(), "{cgroup} is gone");
}

#[test]
fn demo_on_plaintext_lanes_relays_without_frames() {
    /// A relay splices when the kernel delivers large pieces. On a busy machine a download may contain none.
    const RUNS: u32 = 5;
    let has_spliced = (0..RUNS).any(|_run| spliced_in_clear_text());
    assert!(has_spliced, "nothing spliced in {RUNS} runs");
}

/// Runs the demo on plaintext lanes, and returns whether a relay spliced any bytes.
fn spliced_in_clear_text() -> bool {
    let (_outer, dir) = place();
    let output = demo(&dir)
        .args(["--once", "--verbose", "--lane-security=plaintext"])
        .output()
        .expect("the demo runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!(output.status.code(), Some(0), "{text}");
    // Tunnels of the other frontends are framed, or their clients use TLS.
    let [grpc, plain, tls] = FRONTENDS;
    are_framed(&text, grpc);
    are_framed(&text, tls);
    let counts = moved_by(&text, plain);
    let count = |what| counts.get(what).copied().unwrap_or_default();
    let raw = count("on raw lanes");
    let tunnels = raw + count("on lanes") + count("on the link");
    assert!(raw > 0 && tunnels == TUNNELS, "{counts:?}");
    // The answers are too little for a pipe.
    assert!(count("bytes copied") > 0, "{counts:?}");
    count("bytes spliced") > 0
}

/// Kills the demo when dropped, also after a failed test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both calls fail if the demo has ended already.
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

#[test]
fn demo_runs_until_a_signal_and_cleans_up() {
    ends_with(Signal::TERM);
}

#[test]
fn demo_exits_on_sighup_and_cleans_up() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find(|line| line.starts_with("SigIgn:"));
    // As below `nohup`, where a demo ignores SIGHUP.
    if ignored.is_none_or(|mask| mask.ends_with(['1', '3', '5', '7', '9', 'b', 'd', 'f'])) {
        writeln!(std::io::stderr(), "SKIPPED SIGHUP: it is ignored here").ok();
        return;
    }
    ends_with(Signal::HUP);
}

fn ends_with(signal: Signal) {
    let (_outer, dir) = place();
    let mut running = Running(demo(&dir).spawn().expect("the demo starts"));
    let mut lines = BufReader::new(running.0.stdout.take().expect("a pipe"));
    let mut text = String::new();
    while !text.contains("live ") {
        let read = lines.read_line(&mut text).expect("text");
        assert_ne!(read, 0, "ended:\n{text}");
    }
    assert!(text.contains("curl --config"), "{text}");
    let live = text.lines().find(|line| line.starts_with("live "));
    let live = live.expect("a summary");
    assert!(live.ends_with(" 0 wrong"), "{live}");
    tells_its_story(&text);
    // Without the live line.
    let shown: Vec<&str> = text.lines().take_while(|line| *line != live).collect();
    assert!(shown.len() < 24, "{text}");
    let egress = std::fs::read_to_string(dir.join("egress.yaml")).expect("a file");
    let head = "apiVersion: apiserver.k8s.io/v1beta1\nkind: EgressSelectorConfiguration\n";
    let socket = dir.join("grpc.sock");
    assert!(socket.exists());
    for part in [head, socket.to_str().expect("a path in UTF-8")] {
        assert!(egress.contains(part), "{egress}");
    }

    let pid = Pid::from_child(&running.0);
    kill_process(pid, signal).expect("the demo runs");
    lines.read_to_string(&mut text).expect("text");
    let status = running.0.wait().expect("its end");
    assert_eq!(status.code(), Some(0), "{text}");
    assert!(text.contains("\nstopped: "), "{text}");
    assert!(!dir.exists(), "the folder is gone");
}

#[test]
fn non_empty_folder_is_refused_with_the_remedy() {
    let outer = tempfile::tempdir().unwrap();
    std::fs::write(outer.path().join("precious"), "text").unwrap();
    let output = demo(outer.path()).stderr(Stdio::piped()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let remedy = "not empty: give a new or empty folder";
    assert!(errors.contains(remedy), "{errors}");
    assert!(outer.path().join("precious").exists());
}
