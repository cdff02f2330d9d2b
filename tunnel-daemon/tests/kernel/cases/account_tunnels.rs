//! Accounting in server and agent: what the kernel counts is what the engines count, and without the rights all works, too.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use adit::app::{agent, server};
use adit::config::{Command as Parsed, parse};
use adit::ebpf::account::Options;
use adit::net::selfsigned::ThrowawayFiles;
use adit::telemetry::Scrape;
use aya::programs::loaded_programs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::accounting::{Accounting, bytes, lines, of, sample};
use crate::support::privilege::{ready, skip};
use crate::support::wait::until;

const TARGETS: &str = r#"agent="agent-1",destination_class="127.0.0.0/8""#;
const AGENT: &str = r#"agent="agent-1",destination_class="""#;
const ANSWER: usize = "HTTP/1.1 200 Connection Established\r\n\r\n".len();

/// A server with a plaintext frontend on TCP, and one agent.
struct World {
    server: server::RunningServer,
    agent: agent::RunningAgent,
    _files: ThrowawayFiles,
}

impl World {
    async fn start(lanes: &str) -> Self {
        let files = ThrowawayFiles::create(&["127.0.0.1".to_owned()]).unwrap();
        let file = |flag: &str, path: std::path::PathBuf| format!("--{flag}={}", path.display());
        let server = [
            "--frontend=http-connect=tcp:127.0.0.1:0".to_owned(),
            "--insecure-plaintext-frontend".to_owned(),
            file("cluster-cert", files.cert("server")),
            file("cluster-key", files.key("server")),
            file("cluster-ca-cert", files.ca_file().to_path_buf()),
            "--agent-bind-address=127.0.0.1".to_owned(),
            "--agent-port=0".to_owned(),
            "--health-bind-address=127.0.0.1".to_owned(),
            "--health-port=0".to_owned(),
            "--admin-port=off".to_owned(),
            format!("--lanes-per-link={lanes}"),
            "--account=on".to_owned(),
        ];
        let Parsed::Server(plan) = command("server", &server) else {
            panic!("no server");
        };
        let server = server::start(&plan).await.unwrap();
        let agent = [
            format!("--proxy-server-host={}", server.agents),
            file("ca-cert", files.ca_file().to_path_buf()),
            file("agent-cert", files.cert("agent")),
            file("agent-key", files.key("agent")),
            "--agent-id=agent-1".to_owned(),
            "--allow-target=127.0.0.0/8".to_owned(),
            "--health-server-host=127.0.0.1".to_owned(),
            "--health-server-port=0".to_owned(),
            "--admin-server-port=off".to_owned(),
            "--account=on".to_owned(),
        ];
        let Parsed::Agent(plan) = command("agent", &agent) else {
            panic!("no agent");
        };
        let agent = agent::start(&plan).await.unwrap();
        let linked = || server.links() == 1;
        until("a link", linked, String::new).await;
        Self {
            server,
            agent,
            _files: files,
        }
    }

    /// An open tunnel, and the bytes of its request.
    async fn open(&self, target: &str) -> (TcpStream, usize) {
        let mut stream = TcpStream::connect(self.server.frontends[0]).await.unwrap();
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = [0; ANSWER];
        stream.read_exact(&mut answer).await.unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{answer:?}");
        (stream, request.len())
    }
}

fn command(role: &str, flags: &[String]) -> Parsed {
    let args = ["adit", role].map(str::to_owned);
    let args = args.iter().chain(flags).map(std::ffi::OsString::from);
    parse(args, &|_name| None).unwrap().command
}

/// Sends `bytes` and closes that direction before or behind the other end's close.
async fn half(socket: &mut TcpStream, bytes: usize, first: bool) -> usize {
    let mut received = Vec::new();
    let block = vec![5; bytes];
    if first {
        let (mut read, mut write) = socket.split();
        let sending = async {
            write.write_all(&block).await.unwrap();
            write.shutdown().await.unwrap();
        };
        let (_sent, read) = tokio::join!(sending, read.read_to_end(&mut received));
        return read.unwrap();
    }
    let read = socket.read_to_end(&mut received).await.unwrap();
    socket.write_all(&block).await.unwrap();
    socket.shutdown().await.unwrap();
    read
}

/// Many tunnels of odd sizes; what they were expected to move.
async fn drive(world: &World, tunnels: usize) -> (u64, u64, u64) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    let (mut to_target, mut to_client, mut heads) = (0, 0, 0);
    for tunnel in 0..tunnels {
        let (up, down) = (random(600_000), random(600_000));
        let client_first = tunnel % 2 == 0;
        let (client, accepted) = tokio::join!(world.open(&target), listener.accept());
        let ((mut client, head), mut accepted) = (client, accepted.unwrap().0);
        let (at_client, at_target) = tokio::join!(
            half(&mut client, up, client_first),
            half(&mut accepted, down, !client_first)
        );
        assert_eq!((at_client, at_target), (down, up));
        to_target += up as u64;
        to_client += down as u64;
        heads += head as u64;
    }
    (to_target, to_client, heads)
}

fn random(below: usize) -> usize {
    rand::random_range(0..below)
}

async fn the_kernel_counts_what_the_engines_count(lanes: &str) {
    const TUNNELS: usize = 24;
    let world = World::start(lanes).await;
    let (to_target, to_client, heads) = drive(&world, TUNNELS).await;
    let (server, agent) = (world.server.metrics.scrape(), world.agent.metrics.scrape());
    let count = Some(TUNNELS as u64);
    let done = || {
        of(&agent, "connections_total", TARGETS, "", "target") == count
            && of(&server, "connections_total", AGENT, "", "client") == count
            && engine(&server, "to_client") == Some(to_client)
    };
    until("ends", done, || lines(&agent) + &lines(&server)).await;
    assert_eq!(engine(&server, "to_target"), Some(to_target));
    assert_eq!(bytes(&agent, TARGETS, "target"), (to_target, to_client));
    // Of clients, the request and its answer are payload, too.
    let answers = (ANSWER * TUNNELS) as u64;
    let client = bytes(&server, AGENT, "client");
    assert_eq!(client, (to_client + answers, to_target + heads));
    // Links and lanes carry other bytes than tunnels: they are there, and go on.
    let role = if lanes == "0" { "link" } else { "lane" };
    let carried = || {
        [&agent, &server].iter().all(|scrape| {
            of(scrape, "bytes_total", AGENT, "sent", role) > Some(0)
                && of(scrape, "bytes_total", AGENT, "received", role) > Some(0)
        })
    };
    until("bytes of links and lanes", carried, || {
        lines(&agent) + &lines(&server)
    })
    .await;
    for scrape in [&agent, &server] {
        assert_eq!(sample(scrape, "adit_ebpf_account_attached"), Some(1));
        let lost = sample(
            scrape,
            r#"adit_ebpf_account_lost_total{reason="ring_full"}"#,
        );
        assert_eq!(lost, Some(0));
    }
    world.agent.stop().await;
    world.server.stop(Some(std::time::Duration::ZERO)).await;
}

fn engine(scrape: &Scrape, direction: &str) -> Option<u64> {
    sample(
        scrape,
        &format!(r#"adit_tunnel_bytes_total{{direction="{direction}"}}"#),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_lanes_the_kernel_counts_what_the_engines_count() {
    if ready("accounting for tunnels on lanes") {
        the_kernel_counts_what_the_engines_count("64").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_the_link_the_kernel_counts_what_the_engines_count() {
    if ready("accounting for tunnels on the link") {
        the_kernel_counts_what_the_engines_count("0").await;
    }
}

/// A test of this binary as a process of its own.
fn child(test: &str, edit: impl FnOnce(&mut Command)) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    edit(&mut command);
    command.spawn().unwrap()
}

/// What a child prints behind `key`.
fn said(child: &mut Child, key: &str) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut values = lines.map_while(Result::ok);
    let found = values.find_map(|line| line.split_once(key).map(|(_, value)| value.to_owned()));
    found.unwrap_or_else(|| panic!("the child never said {key}"))
}

#[tokio::test]
async fn a_killed_process_leaves_no_program_behind() {
    if !ready("the end of programs") {
        return;
    }
    let mut child = child("cases::account_tunnels::child_that_accounts", |_command| ());
    let program: u32 = said(&mut child, "program ").parse().unwrap();
    let loaded = || {
        let mut all = loaded_programs().filter_map(Result::ok);
        all.any(|info| info.id() == program)
    };
    assert!(loaded());
    child.kill().unwrap();
    child.wait().unwrap();
    until("the end of a program", || !loaded(), String::new).await;
}

#[tokio::test]
#[ignore = "run by a_killed_process_leaves_no_program_behind"]
async fn child_that_accounts() {
    let accounting = Accounting::start(Options::with_series_max(1));
    println!("program {}", accounting.accounts.program().unwrap());
    // Until the pipe breaks.
    let _line = std::io::stdin().lines().next();
}

#[tokio::test]
async fn without_the_rights_all_starts_and_says_why() {
    use std::os::unix::process::CommandExt as _;
    if !rustix::process::geteuid().is_root() {
        return skip("starting without rights", "only root can give them up");
    }
    const NOBODY: u32 = 65_534;
    let mut child = child("cases::account_tunnels::child_without_rights", |command| {
        command.uid(NOBODY).gid(NOBODY);
    });
    let why = said(&mut child, "readyz ");
    assert!(child.wait().unwrap().success());
    assert!(
        why.contains("[+]account unavailable: ") && why.contains("CAP_BPF"),
        "{why}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by without_the_rights_all_starts_and_says_why"]
async fn child_without_rights() {
    let world = World::start("4").await;
    let (to_target, to_client, _heads) = drive(&world, 2).await;
    assert!(to_target + to_client > 0);
    for health in [world.server.health, world.agent.health] {
        let mut probe = TcpStream::connect(health.unwrap()).await.unwrap();
        let request = b"GET /readyz?verbose HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        probe.write_all(request).await.unwrap();
        let mut answer = String::new();
        probe.read_to_string(&mut answer).await.unwrap();
        println!("readyz {}", answer.replace(['\r', '\n'], " "));
    }
    let attached = sample(&world.server.metrics.scrape(), "adit_ebpf_account_attached");
    assert_eq!(attached, Some(0));
}
