//! `adit demo` as a user runs it: the built binary, real sockets.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use adit_relay::{Engine, Preference, probe};
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
/// Tunnels that each check of a frontend opens.
const TUNNELS: [(&str, u64); 6] = [
    ("web page", 1),
    ("download", 1),
    ("upload", 1),
    ("answers", 1),
    ("new tunnels", 50),
    ("path", 2),
];
const ON_LINK: &str = "on the link, copied by tokio";

/// The demo's report on the tunnels of a frontend.
struct Told<'a> {
    /// Check, number of tunnels, and their path.
    ways: Vec<(&'a str, u64, &'a str)>,
    /// The sums of the server's counters.
    moved_by: &'a str,
}

impl<'a> Told<'a> {
    fn of(text: &'a str, frontend: &str) -> Self {
        let lines = text.lines().skip_while(|line| !line.starts_with(frontend));
        let lines = lines.skip(1).take_while(|line| line.starts_with("  "));
        let checks = lines.map(|line| {
            let line = line.trim_start().strip_prefix("ok").expect("all is well");
            line.trim_start().split_once(": ").expect("a check")
        });
        let (mut ways, mut moved_by) = (Vec::new(), "");
        for (check, detail) in checks {
            if check == "moved by" {
                moved_by = detail;
                continue;
            }
            ways.extend(detail.split("; ").skip(1).map(|way| {
                let counted = way
                    .split_once(' ')
                    .and_then(|(count, way)| Some((count.parse::<u64>().ok()?, way)));
                let (count, way) = counted.unwrap_or((1, way));
                (check, count, way)
            }));
        }
        let told = Self { ways, moved_by };
        for (check, tunnels) in TUNNELS {
            let found = told.sum(|(of, _)| of == check);
            assert_eq!(found, tunnels, "{frontend}: {check} in\n{text}");
        }
        let all = TUNNELS.iter().map(|(_, tunnels)| tunnels).sum::<u64>();
        assert_eq!(told.sum(|_| true), all, "no other tunnels in\n{text}");
        told
    }

    /// Number of tunnels for which `is` holds, by check and path.
    fn sum(&self, is: impl Fn((&str, &str)) -> bool) -> u64 {
        let some = self
            .ways
            .iter()
            .filter(|(check, _, way)| is((*check, *way)));
        some.map(|(_, tunnels, _)| tunnels).sum()
    }

    fn went(&self, way: &str) -> u64 {
        self.sum(|(_, went)| went == way)
    }

    /// Path of the only tunnel of a check.
    fn only(&self, check: &str) -> &'a str {
        let mut of_check = self.ways.iter().filter(|(of, ..)| *of == check);
        let &(_, _, way) = of_check.next().expect("a tunnel");
        way
    }

    /// Checks that all tunnels were framed, on such a lane or on the link, and that the counters agree with the report.
    fn are_framed(&self, on_lane: &str) {
        let (lane, link) = (self.went(on_lane), self.went(ON_LINK));
        assert_eq!(lane + link, self.sum(|_| true), "{:?}", self.ways);
        let counted = format!("{lane} tunnels on lanes, {link} on the link, copied by their tasks");
        assert_eq!(self.moved_by, counted);
    }
}

#[test]
fn demo_once_checks_every_frontend_and_leaves_nothing_behind() {
    let (_outer, dir) = place();
    let output = demo(&dir)
        .arg("--once")
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}\n{errors}");
    for frontend in FRONTENDS {
        assert!(text.contains(frontend), "{text}");
        Told::of(&text, frontend).are_framed("on a TLS lane, TLS copy by tokio");
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
        ("stalled readers", 1),
        ("links", 1),
        ("leftovers", 1),
    ] {
        let found = text.matches(&format!("  ok    {step}: ")).count();
        assert_eq!(found, frontends, "{step} in\n{text}");
    }
    assert!(text.contains("connect: connection refused"), "{text}");
    // The values depend on the machine's load, so the test only checks that the medians exist.
    let medians = text.lines().find(|line| line.contains("stalled readers: "));
    let medians = medians.expect("a line");
    assert!(
        medians.contains("ms alone, ") && medians.contains("beside 4 clients"),
        "{medians}"
    );
    assert!(
        text.contains("bytes     192.00 MiB down, 192.00 MiB up\n"),
        "{text}"
    );
    assert!(text.contains("result    all 27 checks right in "), "{text}");
    assert!(!text.contains('\x1b'), "a pipe gets no colours: {text}");
    assert_eq!(errors, "", "nothing to complain about");
    assert!(!dir.exists(), "the folder is gone");
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
        .args(["--once", "--redirect"])
        .env("http_proxy", "http://127.0.0.1:9");
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    let mut lines = text.lines();
    let curl = lines.find(|line| line.starts_with("  ok    plain curl: "));
    let curl = curl.unwrap_or_else(|| panic!("no curl in\n{text}"));
    let [on_lane, on_link] = ["1 tunnel on lanes, 0", "0 tunnels on lanes, 1"]
        .map(|sums| curl.ends_with(&format!("; {sums} on the link, copied by their tasks")));
    assert!(on_lane || on_link, "{curl}");
    assert!(text.contains("result    all 28 checks right in "), "{text}");
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
        .args(["--once", "--lane-security=plaintext"])
        .output()
        .expect("the demo runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!(output.status.code(), Some(0), "{text}");
    let relayed = text.lines().filter(|line| line.contains(" on raw lanes, "));
    let relayed: Vec<&str> = relayed.collect();
    // Tunnels of the other frontends are framed, or their clients use TLS.
    let [line] = relayed[..] else {
        panic!("one frontend: {relayed:?}")
    };

    let [grpc, plain, tls] = FRONTENDS.map(|frontend| Told::of(&text, frontend));
    for framed in [grpc, tls] {
        framed.are_framed("on a lane in clear text, copied by tokio");
    }
    let engine = match probe(Preference::Auto).expect("it always finds one").engine {
        Engine::Epoll => "epoll",
        Engine::IoUring => "io_uring",
    };
    let [copied, spliced] = ["copied", "spliced"]
        .map(|mover| format!("on a raw lane in clear text, {mover} by {engine}"));
    assert_eq!(plain.only("answers"), copied, "too little for a pipe");
    let bulk = ["download", "upload"].map(|check| plain.only(check));
    assert!(
        bulk.iter().all(|way| *way == copied || *way == spliced),
        "{bulk:?}"
    );
    let raw = plain.went(&copied) + plain.went(&spliced);
    let counted = format!("; {raw} on raw lanes, relayed with {engine}: ");
    assert!(plain.moved_by.contains(&counted), "{}", plain.moved_by);
    let is_spliced = bulk.contains(&spliced.as_str());
    assert!(!is_spliced || line.contains("MiB spliced"), "{line}");
    is_spliced
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
    assert!(text.contains("curl --proxytunnel"), "{text}");
    let live = text.lines().find(|line| line.starts_with("live "));
    let live = live.expect("a summary");
    // The paths that the checks used, with the component that moved their bytes.
    let (_, ways) = live.split_once(" 0 wrong; ").expect("nothing wrong");
    assert!(
        !ways.starts_with("0 tunnels on lanes, ") && ways.contains(" tunnels on lanes, "),
        "{live}"
    );
    assert!(
        ways.ends_with(" on the link, copied by their tasks"),
        "{live}"
    );
    let egress = std::fs::read_to_string(dir.join("egress.yaml")).expect("a file");
    assert!(
        egress
            .contains("apiVersion: apiserver.k8s.io/v1beta1\nkind: EgressSelectorConfiguration\n"),
        "{egress}"
    );
    let socket = dir.join("grpc.sock");
    assert!(socket.exists());
    assert!(
        egress.contains(socket.to_str().expect("a path in UTF-8")),
        "{egress}"
    );

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
    assert!(
        errors.contains("not empty: give a new or empty folder"),
        "{errors}"
    );
    assert!(outer.path().join("precious").exists());
}
