//! kubectl commands through the tunnel, with both protocols of the API server and each kind of agent credentials.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Stdio};
use std::time::Instant;

use serde_json::json;

use crate::cluster::{Cluster, Mode, Proof};
use crate::namespace::{BODY, Node};
use crate::ports;
use crate::wait::{secs, until};

const MIB: usize = 1 << 20;
/// Bytes through an exec, and of a copied file.
const BULK: usize = 64 * MIB;

const TUNNELS: &str = "konnectivity_network_proxy_server_established_connections";
/// Connections that the API server may keep: two each to a kubelet, a pod, a Service, an aggregated API and a webhook. The
/// second of each comes from concurrent requests.
const KEPT: f64 = 10.0;

/// Runs a step and prints its duration.
fn step(what: &str, work: impl FnOnce()) {
    let began = Instant::now();
    work();
    println!("MEASURED {what}: {:.2} s", began.elapsed().as_secs_f64());
}

/// Kills the child when dropped.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// kubectl in the background, with its stdin and stdout.
pub(crate) fn begin(cluster: &Cluster, args: &[&str]) -> Running {
    let child = cluster
        .kubectl_command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn();
    Running(child.expect("kubectl starts"))
}

/// Runs kubectl with this input, and returns its raw output.
fn feed(cluster: &Cluster, args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut running = begin(cluster, args);
    let mut stdin = running.0.stdin.take().expect("it has one");
    let mut stdout = running.0.stdout.take().expect("it has one");
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(input).expect("it reads"));
        let mut output = Vec::new();
        stdout.read_to_end(&mut output).expect("it writes");
        output
    });
    let status = running.0.wait().expect("it ends");
    assert!(status.success(), "kubectl {args:?}: {status}");
    output
}

fn logs(cluster: &Cluster) {
    let log = cluster.kubectl(&["logs", "pod-1", "-c", "main"], None);
    assert_eq!(log.lines().count(), 1000);
    assert!(log.ends_with("line 1000"), "{log}");
}

/// Lines arrive as soon as they are written.
fn followed_logs(cluster: &Cluster) {
    let mut running = begin(cluster, &["logs", "-f", "--tail=1", "pod-1", "-c", "main"]);
    let mut lines = BufReader::new(running.0.stdout.take().expect("it has one")).lines();
    for number in 1000..1010 {
        let line = lines.next().expect("a line").expect("a line");
        assert_eq!(line, format!("line {number}"));
    }
}

fn exec(cluster: &Cluster) {
    let run = |args: &[&str], input: &str| {
        let all = [&["exec", "-i", "pod-1", "-c", "main", "--"], args].concat();
        String::from_utf8(feed(cluster, &all, input.as_bytes())).expect("text")
    };
    assert_eq!(run(&["cat"], "a line\n"), "a line\n");
    // The pod uses the node's network.
    let addresses = run(&["ip", "-brief", "address"], "");
    assert!(addresses.contains("10.77.0.1/32"), "{addresses}");
    let exit = ["exec", "pod-1", "-c", "main", "--", "sh", "-c", "exit 7"];
    let failed = cluster.try_kubectl(&exit, None).expect_err("a status");
    assert!(failed.contains("exit code 7"), "{failed}");
}

/// `script` provides the terminal.
fn exec_on_a_terminal(cluster: &Cluster) {
    let kubectl = cluster.kubectl_command(&[
        "exec",
        "-it",
        "pod-1",
        "-c",
        "main",
        "--",
        "sh",
        "-c",
        // kubectl sends the terminal size concurrently with the start, so it may arrive later.
        "tty; n=0; while [ \"$(stty size)\" = \"0 0\" ] && [ $n -lt 2000 ]; do n=$((n + 1)); done; stty size",
    ]);
    let words: Vec<String> = std::iter::once(kubectl.get_program())
        .chain(kubectl.get_args())
        .map(|word| format!("'{}'", word.to_str().expect("text")))
        .collect();
    let line = format!("stty rows 33 cols 77; {}", words.join(" "));
    let output = std::process::Command::new("script")
        .args(["-q", "-e", "-c", &line, "/dev/null"])
        .stdin(Stdio::piped())
        .output()
        .expect("script starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("/dev/pts/"), "{text}");
    assert!(text.contains("33 77"), "{text}");
}

/// A pattern that shows lost or duplicated bytes.
fn bytes(period: u8) -> Vec<u8> {
    (0..period).cycle().take(BULK).collect()
}

/// Sends bulk data through `cat` and compares the output.
fn bulk(cluster: &Cluster) {
    let input = bytes(251);
    let cat = ["exec", "-i", "pod-1", "-c", "main", "--", "cat"];
    let output = feed(cluster, &cat, &input);
    assert!(output == input, "{} bytes came back", output.len());
}

fn copy(cluster: &Cluster) {
    let from = cluster.path("copied");
    let input = bytes(241);
    std::fs::write(&from, &input).expect("a file");
    let to = cluster.path("arrived");
    let target = format!("pod-1:{}", to.display());
    let from = from.display().to_string();
    cluster.kubectl(&["cp", &from, &target, "-c", "main"], None);
    assert!(std::fs::read(&to).expect("a copy") == input);
    let back = cluster.path("back");
    let here = back.display().to_string();
    cluster.kubectl(&["cp", &target, &here, "-c", "main"], None);
    assert!(std::fs::read(&back).expect("a copy") == input);
}

fn port_forward(cluster: &Cluster) {
    let port = ports::free();
    let ports = format!("{port}:8080");
    let _running = begin(cluster, &["port-forward", "pod-1", &ports]);
    let answer = until("a forwarded port", secs(20), || {
        crate::server::ask(port, "/").ok()
    });
    assert_eq!(answer, format!("{BODY}10.77.0.1"));
    for _request in 0..20 {
        assert_eq!(crate::server::ask(port, "/").ok(), Some(answer.clone()));
    }
}

fn attach(cluster: &Cluster) {
    let mut running = begin(cluster, &["attach", "-i", "pod-1", "-c", "main"]);
    let mut stdin = running.0.stdin.take().expect("it has one");
    let mut lines = BufReader::new(running.0.stdout.take().expect("it has one")).lines();
    let mut next = || lines.next().expect("a line").expect("a line");
    // Skips messages of kubectl itself.
    while next() != "attached" {}
    stdin.write_all(b"hello\n").expect("it reads");
    assert_eq!(next(), "hello");
}

fn proxies(cluster: &Cluster) {
    let raw = |path: &str| cluster.kubectl(&["get", "--raw", path], None);
    assert_eq!(raw("/api/v1/nodes/node-1/proxy/healthz"), "ok");
    for to in ["services/http:web:80", "pods/http:pod-1:8080"] {
        let answer = raw(&format!("/api/v1/namespaces/default/{to}/proxy/"));
        assert_eq!(answer, format!("{BODY}10.77.0.1"));
    }
}

fn aggregated(cluster: &Cluster) {
    until("an available aggregated API", secs(60), || {
        let path = "/apis/tunnel.adit.invalid/v1/places";
        let places = cluster.try_kubectl(&["get", "--raw", path], None).ok()?;
        places.contains("10.77.0.1").then_some(())
    });
}

fn webhook(cluster: &Cluster) {
    cluster.create(&cluster.webhook("kubectl"));
    let labelled = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kubectl", "labels": {"asks": "kubectl"}}});
    cluster.create(&labelled);
    let one = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one", "namespace": "kubectl"}});
    // The API server takes up to a second to notice a new webhook.
    until("an object that the webhook allows", secs(20), || {
        cluster.try_kubectl(&["create", "-f", "-"], Some(&one)).ok()
    });
}

/// Name of a step, and its function.
pub(crate) type Step = (&'static str, fn(&Cluster));

pub(crate) fn steps() -> [Step; 11] {
    [
        ("logs", logs),
        ("logs -f", followed_logs),
        ("exec", exec),
        ("exec on a terminal", exec_on_a_terminal),
        ("64 MiB through exec and back", bulk),
        ("cp of 64 MiB there and back", copy),
        ("port-forward", port_forward),
        ("attach", attach),
        ("proxies to node, Service and pod", proxies),
        ("aggregated API", aggregated),
        ("webhook", webhook),
    ]
}

fn kubectl_works(mode: Mode, proof: Proof, test: &str) {
    let Some(cluster) = Cluster::of(test, mode) else {
        return;
    };
    let server = cluster.server_with("proxy-server", proof, &[]);
    let node = Node::start(&cluster, 0);
    let _agent = cluster.agent_on(&node, &server, proof);
    server.links(1.0);
    for (what, work) in steps() {
        step(&format!("{mode:?}, {proof:?}: {what}"), || work(&cluster));
    }
    // The API server keeps some connections for later requests.
    until("streams leave no tunnels behind", secs(20), || {
        (server.value(TUNNELS)? <= KEPT).then_some(())
    });
}

#[test]
fn kubectl_works_by_grpc_with_tokens() {
    kubectl_works(Mode::Grpc, Proof::Token, "grpc, tokens");
}

#[test]
fn kubectl_works_by_grpc_with_certificates() {
    kubectl_works(Mode::Grpc, Proof::Certificate, "grpc, certificates");
}

#[test]
fn kubectl_works_by_grpc_with_tokens_and_certificates() {
    kubectl_works(Mode::Grpc, Proof::Both, "grpc, both");
}

#[test]
fn kubectl_works_by_http_connect_with_tokens() {
    kubectl_works(Mode::HttpConnect, Proof::Token, "http-connect, tokens");
}

#[test]
fn kubectl_works_by_http_connect_with_certificates() {
    kubectl_works(
        Mode::HttpConnect,
        Proof::Certificate,
        "http-connect, certificates",
    );
}

#[test]
fn kubectl_works_by_http_connect_with_tokens_and_certificates() {
    kubectl_works(Mode::HttpConnect, Proof::Both, "http-connect, both");
}

/// The API server as a node sees it, by proxies of each kind: requests, a long answer, and streams both ways.
#[test]
fn kubectl_works_by_a_proxy_url_of_each_kind() {
    let Some(cluster) = Cluster::of("proxy-url", Mode::Grpc) else {
        return;
    };
    let [http, socks] = [(); 2].map(|()| ports::free());
    let flags = [
        format!("--frontend=http-proxy=tcp:127.0.0.1:{http}"),
        format!("--frontend=socks5=tcp:127.0.0.1:{socks}"),
        "--insecure-plaintext-frontend".to_owned(),
    ];
    let server = cluster.native_server_at([(); 3].map(|()| ports::free()), &flags);
    let node = Node::start(&cluster, 0);
    let _agent = cluster.agent_on(&node, &server, Proof::Token);
    server.links(1.0);
    for (name, proxy) in [
        ("by-http", format!("http://127.0.0.1:{http}")),
        ("by-socks5", format!("socks5://127.0.0.1:{socks}")),
    ] {
        let access = cluster.administrator_by(name, &proxy).display().to_string();
        let access = ["--kubeconfig", &*access];
        let version = cluster.kubectl(&[&access, &["get", "--raw", "/version"][..]].concat(), None);
        assert!(version.contains("gitVersion"), "{name}: {version}");
        let log = cluster.kubectl(
            &[&access, &["logs", "pod-1", "-c", "main"][..]].concat(),
            None,
        );
        assert_eq!(log.lines().count(), 1000, "{name}");
        let sent = bytes(251);
        let echoed = feed(
            &cluster,
            &[
                &access,
                &["exec", "-i", "pod-1", "-c", "main", "--", "cat"][..],
            ]
            .concat(),
            &sent,
        );
        assert!(echoed == sent, "{name}: {} bytes", echoed.len());
    }
}
