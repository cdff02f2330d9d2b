//! curl, an independent client, through an HTTP-CONNECT frontend on TCP with mutual TLS. Also the curl commands of the demo,
//! run as printed.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use adit_net::tasks::Tasks;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::lane_processes::nightly;
use super::tunnels::{V4, on_tcp};
use crate::support::blocking;
use crate::support::process::KillOnDrop;
use crate::support::skip::{finds_program, has_program};
use crate::support::targets;
use crate::support::world::World;

/// Size of the page: several reads, and more than one flow-control window.
pub(super) const PAGE_BYTES: usize = 3_000_000;
/// Time limit of curl and of each command of the demo.
const SECONDS: &str = "120";
/// Environment variables that configure proxies or curl.
const VARIABLES: [&str; 8] = [
    "http_proxy",
    "https_proxy",
    "HTTPS_PROXY",
    "all_proxy",
    "ALL_PROXY",
    "no_proxy",
    "NO_PROXY",
    "CURL_HOME",
];

/// Runs a program with a time limit and without the proxy variables of this environment.
pub(super) fn run(program: &str, args: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args([SECONDS, program]).args(args);
    for variable in VARIABLES {
        command.env_remove(variable);
    }
    let output = command.stdin(Stdio::null()).output();
    output.expect("timeout(1) is there")
}

/// A web server with one page.
pub(super) async fn page() -> (u16, Tasks) {
    targets::serve(|mut stream| async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let answer =
            format!("HTTP/1.1 200 OK\r\nContent-Length: {PAGE_BYTES}\r\nConnection: close\r\n\r\n");
        stream.write_all(answer.as_bytes()).await?;
        stream.write_all(&targets::pattern(0, PAGE_BYTES)).await?;
        stream.shutdown().await
    })
    .await
}

/// The flags that make curl a client of the world's TCP frontend, with this certificate if any.
fn through(world: &World, client: Option<&str>) -> Vec<String> {
    let files = &world.files;
    let mut flags = vec![
        "--silent".to_owned(),
        "--show-error".to_owned(),
        "--fail".to_owned(),
        "--proxytunnel".to_owned(),
        format!("--proxy=https://{}", world.server().frontends[0]),
        format!("--proxy-cacert={}", files.ca_file().display()),
    ];
    if let Some(name) = client {
        flags.push(format!("--proxy-cert={}", files.cert(name).display()));
        flags.push(format!("--proxy-key={}", files.key(name).display()));
    }
    // curl takes the value of a long option as a separate argument.
    let pairs = flags.iter().flat_map(|flag| flag.splitn(2, '='));
    pairs.map(str::to_owned).collect()
}

/// SOCKS5, with names resolved by curl or by the agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_fetches_a_page_by_socks5_and_socks5h() {
    if !has_program("curl", "curl_fetches_a_page_by_socks5_and_socks5h") {
        return;
    }
    let (port, _page) = page().await;
    let flags = [
        "--frontend=socks5=tcp:127.0.0.1:0",
        "--insecure-plaintext-frontend",
    ];
    let (world, _agent) = World::linked(&flags, &[]).await;
    let frontend = world.server().frontends[0];
    for scheme in ["socks5", "socks5h"] {
        let (proxy, url) = (
            format!("{scheme}://{frontend}"),
            format!("http://localhost:{port}/"),
        );
        let fetched = run(
            "curl",
            &[
                "--silent",
                "--show-error",
                "--fail",
                "-4",
                "--proxy",
                &proxy,
                &url,
            ],
        );
        let errors = String::from_utf8_lossy(&fetched.stderr);
        assert_eq!(fetched.status.code(), Some(0), "{scheme}: {errors}");
        assert!(
            fetched.stdout == targets::pattern(0, PAGE_BYTES),
            "{scheme}"
        );
    }
    // curl has words for each reply.
    let (_held, closed) = targets::closed_port();
    let (proxy, url) = (format!("socks5h://{frontend}"), format!("http://{closed}/"));
    let refused = run(
        "curl",
        &["--silent", "--show-error", "--proxy", &proxy, &url],
    );
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(errors.contains("(5)"), "{errors}");
}

fn curl(flags: &[String], url: &str) -> Output {
    let mut args: Vec<&str> = flags.iter().map(String::as_str).collect();
    args.push(url);
    run("curl", &args)
}

/// Upstream (tunnels): CONNECT and a GET work over a unix socket, and over TCP with mutual TLS.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_fetches_a_page_through_a_frontend_over_mutual_tls() {
    if !has_program(
        "curl",
        "curl_fetches_a_page_through_a_frontend_over_mutual_tls",
    ) {
        return;
    }
    let (port, _page) = page().await;
    let (world, _agent) = on_tcp("http-connect", V4).await;
    let url = format!("http://127.0.0.1:{port}/");
    let fetched = curl(&through(&world, Some("client")), &url);
    let errors = String::from_utf8_lossy(&fetched.stderr);
    assert_eq!(fetched.status.code(), Some(0), "{errors}");
    assert!(
        fetched.stdout == targets::pattern(0, PAGE_BYTES),
        "another page"
    );

    // The target port is closed, so curl gets the proxy's 502 instead of a page.
    let (_held, closed) = targets::closed_port();
    let refused = curl(
        &through(&world, Some("client")),
        &format!("http://{closed}/"),
    );
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && errors.contains("502"),
        "{errors}"
    );

    let stranger = curl(&through(&world, None), &url);
    assert!(!stranger.status.success(), "no certificate");
    assert!(stranger.stdout.is_empty());
}

/// A demo that runs until dropped.
struct Demo {
    _child: KillOnDrop,
    out: PathBuf,
    _outer: tempfile::TempDir,
}

impl Demo {
    /// Starts the demo and waits for its guide.
    fn start() -> Self {
        let outer = tempfile::Builder::new()
            .prefix("adit-")
            .tempdir()
            .expect("a temporary folder");
        let out = outer.path().join("out");
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        command
            .args(["demo", "--plain", "--dir"])
            .arg(outer.path().join("demo"))
            .stdin(Stdio::null())
            .stdout(File::create(&out).expect("a file"))
            .stderr(Stdio::null());
        let demo = Self {
            _child: KillOnDrop(command.spawn().expect("the demo starts")),
            out,
            _outer: outer,
        };
        blocking::until("the guide", Duration::from_secs(120), || {
            demo.printed()
                .contains("--egress-selector-config-file=")
                .then_some(())
        });
        demo
    }

    fn printed(&self) -> String {
        fs::read_to_string(&self.out).unwrap_or_default()
    }
}

/// Description and command of each entry of the guide, with continuation lines.
fn guide(printed: &str) -> Vec<(String, String)> {
    let lines = printed
        .lines()
        .skip_while(|line| !line.starts_with("Try in a second terminal"))
        .skip(1)
        .map_while(|line| line.strip_prefix("  "));
    let mut commands: Vec<(String, String)> = Vec::new();
    for line in lines {
        if let Some(about) = line.strip_prefix("# ") {
            commands.push((about.to_owned(), String::new()));
        } else if let Some((_about, command)) = commands.last_mut() {
            command.push_str(line);
            command.push('\n');
        }
    }
    commands
}

#[test]
fn commands_that_the_demo_prints_work_as_printed() {
    if !has_program("curl", "commands_that_the_demo_prints_work_as_printed") {
        return;
    }
    let demo = Demo::start();
    let commands = guide(&demo.printed());
    let mut tried = 0;
    for (about, command) in &commands {
        if !command.starts_with("curl") {
            continue;
        }
        // Nightly runs use the printed command. A test build takes too long for 1 GB.
        let short = command.replace("/bulk/1000000000", "/bulk/10000000");
        let output = run("sh", &["-c", nightly(command.as_str(), &short)]);
        let (out, errors) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        if about.contains("502 instead of a tunnel") {
            assert!(!output.status.success(), "{about}");
            assert!(errors.contains("502"), "{about}: {errors}");
        } else {
            assert_eq!(output.status.code(), Some(0), "{about}: {errors}");
        }
        if about.contains("counts") {
            assert!(out.contains("adit_tunnels_opened_total"), "{about}: {out}");
        }
        tried += 1;
    }
    assert_eq!(tried, 4, "{commands:?}");
    assert!(!demo.printed().contains("WRONG"), "{}", demo.printed());
    assert_shows_tunnels(&commands);
}

/// Runs the printed `adit top` with `--once`, which needs no terminal.
fn assert_shows_tunnels(commands: &[(String, String)]) {
    let top = commands
        .iter()
        .find(|(_, command)| command.starts_with("adit top"));
    let (_, command) = top.expect("it is printed");
    let args: Vec<&str> = command
        .split_whitespace()
        .skip(1)
        .chain(["--once"])
        .collect();
    let output = run(env!("CARGO_BIN_EXE_adit"), &args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
}

/// Clients of HTTP/2 that know nothing of gRPC, on kube-apiserver's socket: each request is answered, and a thousand at once do no harm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_that_speak_http2_are_answered() {
    let test = "strangers_that_speak_http2_are_answered";
    if !has_program("curl", test) {
        return;
    }
    let world = World::start(&[]).await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let socket = world.grpc().display().to_string();
    let ask = |more: &[&str], path: &str| {
        let url = format!("http://socket{path}");
        let mut args = vec!["--silent", "--show-error", "--http2-prior-knowledge"];
        args.extend(["--unix-socket", &socket, "--include", "--request", "POST"]);
        args.extend(more);
        args.push(&url);
        let output = run("curl", &args);
        let text = String::from_utf8_lossy(&output.stdout).to_lowercase();
        assert!(
            output.status.success(),
            "{text} {}",
            String::from_utf8_lossy(&output.stderr)
        );
        text
    };
    let plain = ask(&[], "/ProxyService/Proxy");
    assert!(plain.starts_with("http/2 415"), "{plain}");
    let of_grpc = ["--header", "content-type: application/grpc"];
    let unknown = ask(&of_grpc, "/Other/Method");
    assert!(unknown.contains("grpc-status: 12"), "{unknown}");
    assert!(
        unknown.contains("unknown method /other/method"),
        "{unknown}"
    );
    // An empty call ends in order, a body that is no message does not.
    let empty = ask(
        &[&of_grpc[..], &["--data-binary", ""]].concat(),
        "/ProxyService/Proxy",
    );
    assert!(empty.contains("grpc-status: 0"), "{empty}");
    let cut = ask(
        &[&of_grpc[..], &["--data-binary", "cut"]].concat(),
        "/ProxyService/Proxy",
    );
    assert!(cut.contains("grpc-status: 13"), "{cut}");
    // A header list of more frames than one.
    let long = format!("x-long: {}", "v".repeat(60_000));
    let long = ask(&["--header", &long], "/");
    assert!(long.starts_with("http/2 415"), "{long}");
    if finds_program("h2load", test) {
        // A message without bytes.
        let body = world.dir.path().join("body");
        fs::write(&body, [0; 5]).expect("the directory is there");
        let body = format!("--data={}", body.display());
        let url = "http://127.0.0.1/ProxyService/Proxy";
        let base = format!("--base-uri=unix:{socket}");
        let load = [
            "-n",
            "20000",
            "-c",
            "10",
            "-m",
            "100",
            "-H",
            "content-type: application/grpc",
        ];
        let output = run("h2load", &[&load[..], &[&base, &body, url]].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("20000 succeeded, 0 failed"), "{text}");
    }
    world.assert_serves(&targets::local_echo().await.0).await;
}
