//! Tests of the load tool in its roles, as the harness starts them: real processes, real sockets.
#![expect(
    clippy::unwrap_used,
    reason = "a test: a panic is its way to fail, helpers included"
)]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use adit::server::{self, RunningServer};
use adit_config::parse;
use serde::Deserialize;
use tokio::runtime::Runtime;

/// No step of these tests takes as long.
const LIMIT: Duration = Duration::from_secs(30);

type Addresses = BTreeMap<String, String>;

/// A role process that serves until its input closes.
struct Serving {
    child: Child,
    addresses: Addresses,
}

#[derive(Deserialize)]
struct Outcome {
    values: BTreeMap<String, f64>,
}

fn load() -> Command {
    Command::new(env!("CARGO_BIN_EXE_adit-load"))
}

fn serve(args: &[String]) -> Serving {
    let mut child = load()
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let stdout = child.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    let addresses = serde_json::from_str(&line).unwrap();
    Serving { child, addresses }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Runs a plan by TCP; the process under load is this one.
fn run(targets: &Addresses, control: &str, plan: &str) -> BTreeMap<String, f64> {
    let process = format!("load={}", std::process::id());
    let more = ["--way=tcp", "--process", &process];
    try_run(targets, control, plan, &more).unwrap()
}

/// Runs a plan with additional flags. The error is what the tool writes to stderr.
fn try_run(
    targets: &Addresses,
    control: &str,
    plan: &str,
    more: &[&str],
) -> Result<BTreeMap<String, f64>, String> {
    let output = load()
        .args(["run", "--control", control, "--plan", plan])
        .args(["--targets", &serde_json::to_string(targets).unwrap()])
        .args(more)
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let outcome: Outcome = serde_json::from_slice(&output.stdout).unwrap();
    Ok(outcome.values)
}

/// A folder with certificates of the load tool.
fn certificates() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let written = load().arg("certs").arg(folder.path()).status().unwrap();
    assert!(written.success());
    folder
}

fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "{what} within {LIMIT:?}");
        thread::yield_now();
    }
}

#[test]
fn every_measurement_of_a_plan_gives_its_numbers() {
    let target = serve(&["target".to_owned()]);
    let plan = r#"{"seconds": 0.3, "streams": [2], "connections": [2], "rates": [200],
                   "burst_connections": 2, "rate_connections": 2, "dialers": [2], "idle": [4], "mixed_streams": 2}"#;
    let values = run(&target.addresses, &target.addresses["control"], plan);
    for name in [
        "idle_4_load_kib",
        "idle_4_kernel_kib",
        "cold_2_per_s",
        "warm_2_dial_p50_us",
        "echo_2_p50_us",
        "echo_2_per_s",
        "paced_200_p99_us",
        "dials_2_per_s",
        "down_2_gbit_s",
        "up_2_cpu_s_per_gib",
        "mixed_echo_p50_us",
        "isolation_p50_ratio",
    ] {
        assert!(values.contains_key(name), "{name} in {values:?}");
    }
    assert_eq!(values["paced_200_unanswered"], 0.0);
    assert_eq!(values["isolation_completed"], 1.0);
}

/// A server in this process, with an HTTP CONNECT frontend at `s.sock` in `folder`; `proof` holds the flags for agent
/// authentication.
fn server(folder: &Path, proof: &[String]) -> (Runtime, RunningServer) {
    let at = |name: &str| folder.join(name).display().to_string();
    let args = [
        "adit".to_owned(),
        "server".to_owned(),
        format!("--frontend=http-connect=unix:{}", at("s.sock")),
        format!("--cluster-cert={}", at("server.pem")),
        format!("--cluster-key={}", at("server.key")),
        "--agent-bind-address=127.0.0.1".to_owned(),
        "--agent-port=0".to_owned(),
        "--health-bind-address=127.0.0.1".to_owned(),
        "--health-port=0".to_owned(),
        "--admin-port=off".to_owned(),
        "--admin-socket=off".to_owned(),
    ];
    let args = args.into_iter().chain(proof.iter().cloned());
    let parsed = parse(args.map(Into::into), &|_name: &str| None);
    let parsed = parsed.map_err(|error| error.message().to_owned()).unwrap();
    let adit_config::Command::Server(plan) = parsed.command else {
        panic!("these are flags of a server");
    };
    let runtime = Runtime::new().unwrap();
    let server = runtime.block_on(server::start(&plan)).unwrap();
    (runtime, server)
}

#[test]
fn load_agents_connect_with_lanes_and_serve_dials() {
    const AGENTS: usize = 40;
    let target = serve(&["target".to_owned()]);
    let folder = certificates();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (runtime, server) = server(
        folder.path(),
        &[format!("--cluster-ca-cert={}", at("ca.pem"))],
    );
    let plan = format!(
        r#"{{"seconds": 0.05, "measurements": ["agents"], "agents": [2, {AGENTS}], "agents_seconds": 0.5}}"#
    );
    let process = format!("server={}", std::process::id());
    let agents = server.agents.to_string();
    let (certs, frontend) = (at(""), at("s.sock"));
    let more = ["--way=http-connect", "--agents", &agents];
    let more = [&more[..], &["--certs", &certs, "--frontend", &frontend]].concat();
    let more = [&more[..], &["--process", &process]].concat();
    let control = &target.addresses["control"];
    let values = try_run(&target.addresses, control, &plan, &more).unwrap();
    for count in [2, AGENTS] {
        for what in ["server_kib", "server_mib", "idle_cpu_percent"] {
            let name = format!("agents_{count}_{what}");
            assert!(values.contains_key(&name), "{name} in {values:?}");
        }
    }
    // The server has no agents except those of the load tool.
    assert!(values[&format!("agents_{AGENTS}_dial_p50_us")] > 0.0);
    let text = server.metrics.scrape().text();
    let lanes: f64 = text
        .lines()
        .filter(|line| {
            line.starts_with("adit_lanes{") || line.starts_with("adit_lanes_closed_total{")
        })
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum();
    assert!(lanes >= 2.0 * AGENTS as f64);
    runtime.block_on(server.stop(Some(Duration::ZERO)));
}

#[test]
fn load_agents_with_tokens_pass_the_load_tools_reviews() {
    let target = serve(&["target".to_owned()]);
    let folder = certificates();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let _reviews = serve(&["reviews".to_owned(), at("")]);
    let flags = [
        "--agent-namespace=kube-system".to_owned(),
        "--agent-service-account=konnectivity-agent".to_owned(),
        "--authentication-audience=system:konnectivity-server".to_owned(),
        format!("--kubeconfig={}", at("kubeconfig")),
    ];
    let (runtime, server) = server(folder.path(), &flags);
    let (agents, certs) = (server.agents.to_string(), at(""));
    let more = ["--way=tcp", "--tokens", "--agents", &agents, "--certs"];
    let more = [&more[..], &[&certs]].concat();
    let plan = r#"{"measurements": ["links"], "agents": [40]}"#;
    let control = &target.addresses["control"];
    let values = try_run(&target.addresses, control, plan, &more).unwrap();
    assert!(values["links_40_per_s"] > 0.0);
    let text = server.metrics.scrape().text();
    let reviews = "adit_token_reviews_total{result=\"ok\"} 40";
    assert!(text.lines().any(|line| line == reviews), "{text}");
    runtime.block_on(server.stop(Some(Duration::ZERO)));
}

#[test]
fn agents_without_a_port_are_an_error() {
    let target = serve(&["target".to_owned()]);
    let process = format!("server={}", std::process::id());
    let more = ["--way=tcp", "--process", &process];
    let plan = r#"{"measurements": ["agents"], "agents": [1]}"#;
    let control = &target.addresses["control"];
    let said = try_run(&target.addresses, control, plan, &more).unwrap_err();
    assert!(said.contains("--agents"), "{said}");
}

/// An echo target that counts connections and request bytes.
struct Counting {
    address: String,
    counts: Arc<[AtomicU64; 2]>,
}

impl Counting {
    fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let counts = Arc::new([const { AtomicU64::new(0) }; 2]);
        let counted = Arc::clone(&counts);
        thread::spawn(move || {
            for stream in listener.incoming() {
                counted[0].fetch_add(1, SeqCst);
                let (mut stream, counted) = (stream.unwrap(), Arc::clone(&counted));
                thread::spawn(move || {
                    let mut bytes = [0; 1024];
                    while let Ok(length @ 1..) = stream.read(&mut bytes) {
                        counted[1].fetch_add(length as u64, SeqCst);
                        stream.write_all(&bytes[..length]).unwrap();
                    }
                });
            }
        });
        Self { address, counts }
    }

    /// Counts since the previous call.
    fn take(&self) -> [u64; 2] {
        self.counts.each_ref().map(|count| count.swap(0, SeqCst))
    }
}

#[test]
fn operations_are_done_as_often_as_the_plan_says() {
    const QUESTION: u64 = 64;
    let target = serve(&["target".to_owned()]);
    let control = &target.addresses["control"];
    let echo = Counting::start();
    let mut addresses = target.addresses.clone();
    addresses.insert("echo".to_owned(), echo.address.clone());
    for (operation, connections, times, at_echo) in [
        ("echo", 1, 7, [1, 7 * QUESTION]),
        ("echo", 4, 40, [4, 40 * QUESTION]),
        ("dial", 1, 3, [3, 3 * QUESTION]),
        ("down", 1, 2, [0, 0]),
        ("up", 1, 2, [0, 0]),
    ] {
        let plan = format!(
            r#"{{"measurements": ["counted"], "counted":
                {{"operation": "{operation}", "connections": {connections}, "times": {times}}}}}"#
        );
        let values = run(&addresses, control, &plan);
        assert_eq!(values["counted_times"], f64::from(times), "{operation}");
        assert_eq!(echo.take(), at_echo, "{operation}");
    }
    // Only uploads end at this target: two of 1 MiB, without the line that announces them.
    let mut sink = BufReader::new(TcpStream::connect(control).unwrap());
    sink.get_mut().write_all(b"received\n").unwrap();
    let mut received = String::new();
    sink.read_line(&mut received).unwrap();
    assert_eq!(received.trim(), (2 << 20).to_string());
}

#[test]
fn bare_relay_forwards_both_directions_to_the_targets() {
    let target = serve(&["target".to_owned()]);
    let targets = serde_json::to_string(&target.addresses).unwrap();
    // This engine needs a kernel and sandbox that allow io_uring.
    let has_ring = adit_relay::probe(adit_relay::Preference::IoUring).is_ok();
    if !has_ring {
        let must = std::env::var_os("CI").is_some() && rustix::process::geteuid().is_root();
        assert!(!must, "no io_uring here");
        // Written to stderr directly, because the test harness captures `eprintln!`.
        writeln!(
            std::io::stderr(),
            "SKIPPED io-uring and tokio-uring: no io_uring here"
        )
        .ok();
    }
    let engines: &[&str] = if has_ring {
        &["auto", "epoll", "io-uring", "tokio-uring"]
    } else {
        &["auto", "epoll"]
    };
    for engine in engines {
        let relay = serve(&[
            "relay".to_owned(),
            format!("--targets={targets}"),
            format!("--engine={engine}"),
        ]);
        let plan = r#"{"seconds": 0.05, "measurements": ["bulk", "echo", "dials"], "streams": [1],
                       "connections": [1], "dialers": [1]}"#;
        let values = run(&relay.addresses, &target.addresses["control"], plan);
        let [up, down, echo] = ["up_1_gbit_s", "down_1_gbit_s", "echo_1_p50_us"];
        assert!(values[up] > 0.0 && values[down] > 0.0, "{engine}");
        assert!(values[echo] > 0.0, "{engine}");
    }
}

#[test]
fn upload_without_a_receiver_is_an_error() {
    let [target, other] = [(); 2].map(|()| serve(&["target".to_owned()]));
    // The count is requested from a target that receives nothing.
    let plan = r#"{"seconds": 0.05, "measurements": ["bulk"], "streams": [1]}"#;
    let control = &other.addresses["control"];
    let said = try_run(&target.addresses, control, plan, &["--way=tcp"]).unwrap_err();
    assert!(said.contains("not a byte arrived"), "{said}");
}

#[test]
fn targets_exit_when_their_stdin_closes() {
    let mut target = serve(&["target".to_owned()]);
    drop(target.child.stdin.take());
    assert!(target.child.wait().unwrap().success());
}

#[test]
fn tied_program_ends_with_its_parent() {
    let script = format!(
        "{} tie --parent $$ -- sleep 600 & echo $!",
        env!("CARGO_BIN_EXE_adit-load")
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .stderr(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut parent = output;
    BufReader::new(parent.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    parent.wait().unwrap();
    let path = format!("/proc/{}/cmdline", line.trim());
    until("the tied program ends", || {
        // A zombie that has not been reaped has an empty command line.
        std::fs::read(Path::new(&path)).is_ok_and(|text| text.is_empty())
            || !Path::new(&path).exists()
    });
}
