//! Many concurrent streams, requests with a deadline, and paused readers.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{Cluster, Mode, Proof, flag, programs};
use crate::kubectl::{begin, steps};
use crate::namespace::Node;
use crate::process::Process;
use crate::server::Server;
use crate::wait::{secs, until};

const EXECS: usize = 200;
const WEBHOOKS_A_SECOND: u32 = 50;
const WEBHOOKS: usize = 500;
/// How long readers pause: longer than the API server's client library waits for a reader.
const PAUSED: Duration = Duration::from_secs(15);

struct World {
    _agent: Process,
    _node: Node,
    server: Server,
    cluster: Cluster,
}

fn world(mode: Mode, test: &str) -> Option<World> {
    let cluster = Cluster::start(programs(test)?, mode);
    let server = cluster.server("proxy-server", &[]);
    let node = Node::start(&cluster, 0);
    let agent = cluster.agent_on(&node, &server, Proof::Token);
    server.links(1.0);
    Some(World {
        _agent: agent,
        _node: node,
        server,
        cluster,
    })
}

/// Opens `count` execs at the same time, and panics unless each has answered. Returns the slowest answer's seconds.
fn execs(cluster: &Cluster, count: usize) -> f64 {
    let output = Command::new(cluster.program("execs"))
        .arg(flag("kubeconfig", cluster.kubeconfig("admin")))
        .args(["--pod=pod-1", "--container=main"])
        .arg(format!("--count={count}"))
        .output()
        .expect("execs starts");
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(told["answered"], count, "{told}");
    told["slowest_seconds"].as_f64().expect("a number")
}

fn two_hundred_execs_at_once(mode: Mode, test: &str) {
    let Some(world) = world(mode, test) else {
        return;
    };
    let slowest = execs(&world.cluster, EXECS);
    println!("MEASURED {mode:?}: {EXECS} execs at once: the slowest answered after {slowest:.2} s");
}

#[test]
fn two_hundred_concurrent_execs_succeed_by_grpc() {
    two_hundred_execs_at_once(Mode::Grpc, "200 execs");
}

#[test]
fn two_hundred_concurrent_execs_succeed_by_http_connect() {
    two_hundred_execs_at_once(Mode::HttpConnect, "200 execs");
}

/// Creates an object through a unix socket that leads to the API server. Returns the status line.
fn make(socket: &Path, path: &str, object: &Value) -> std::io::Result<String> {
    let body = object.to_string();
    let mut stream = UnixStream::connect(socket)?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.lines().next().unwrap_or_default().to_owned())
}

/// Creates objects at a fixed rate. Each creation calls a webhook that must answer within a second.
fn webhooks_have_a_second(mode: Mode, test: &str) {
    let Some(world) = world(mode, test) else {
        return;
    };
    let cluster = &world.cluster;
    cluster.create(&cluster.webhook("crowd"));
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "crowd", "labels": {"asks": "crowd"}}});
    cluster.create(&namespace);
    let socket = cluster.path("api.sock");
    let flag = format!("--unix-socket={}", socket.display());
    let _proxy = begin(cluster, &["proxy", &flag]);
    let path = "/api/v1/namespaces/crowd/configmaps";
    let object =
        |name: String| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
    until("an object that the webhook allows", secs(20), || {
        let status = make(&socket, path, &object("first".to_owned())).ok()?;
        status.contains(" 201 ").then_some(())
    });
    let began = Instant::now();
    let mut took: Vec<Duration> = std::thread::scope(|scope| {
        let makers: Vec<_> = (0..WEBHOOKS)
            .map(|number| {
                let due = Duration::from_secs(1) / WEBHOOKS_A_SECOND
                    * u32::try_from(number).expect("few");
                std::thread::sleep(due.saturating_sub(began.elapsed()));
                let (socket, object) = (&socket, object(format!("object-{number}")));
                scope.spawn(move || {
                    let began = Instant::now();
                    let status = make(socket, path, &object).expect("an answer");
                    assert!(status.contains(" 201 "), "object {number}: {status}");
                    began.elapsed()
                })
            })
            .collect();
        makers
            .into_iter()
            .map(|maker| maker.join().expect("each is allowed"))
            .collect()
    });
    took.sort_unstable();
    let series = "konnectivity_network_proxy_server_established_connections";
    let asked = world.server.value(series);
    println!(
        "MEASURED {mode:?}: {WEBHOOKS} objects at {WEBHOOKS_A_SECOND} a second, each allowed by a webhook: p50 {:?}, p99 {:?}, \
         slowest {:?}; {asked:?} tunnels at the end",
        took[WEBHOOKS / 2],
        took[WEBHOOKS * 99 / 100],
        took[WEBHOOKS - 1]
    );
}

#[test]
fn webhooks_answer_within_a_second_at_50_requests_a_second_by_grpc() {
    webhooks_have_a_second(Mode::Grpc, "webhooks");
}

#[test]
fn webhooks_answer_within_a_second_at_50_requests_a_second_by_http_connect() {
    webhooks_have_a_second(Mode::HttpConnect, "webhooks");
}

/// Pauses the readers of a log and of an exec while other requests run. Returns whether each of the two was cut.
fn paused_readers(mode: Mode, test: &str) -> Option<[bool; 2]> {
    let world = world(mode, test)?;
    let cluster = &world.cluster;
    let mut log = begin(cluster, &["logs", "-f", "pod-1", "-c", "flood"]);
    let counts = "i=0; while echo number $i; do i=$((i+1)); done";
    let count = ["exec", "pod-1", "-c", "main", "--", "sh", "-c", counts];
    let mut exec = begin(cluster, &count);
    let mut readers = [&mut log, &mut exec].map(|running| {
        let stdout = running.0.stdout.take().expect("it has one");
        BufReader::new(stdout).lines()
    });
    for reader in &mut readers {
        reader.next().expect("a line").expect("a line");
    }
    let paused = Instant::now();
    for (what, work) in steps() {
        let began = Instant::now();
        work(cluster);
        let took = began.elapsed().as_secs_f64();
        println!("MEASURED {mode:?}: {what} beside a paused log and a paused exec: {took:.2} s");
    }
    execs(cluster, 20);
    std::thread::sleep(PAUSED.saturating_sub(paused.elapsed()));
    // Both continue where they stopped, line by line. They send more than any buffer on the path holds.
    let starts = [("line", 2), ("number", 1)];
    let cut = std::array::from_fn(|which| {
        let (word, first) = starts[which];
        for number in first..first + 5_000_000 {
            let expected = format!("{word} {number}");
            let line = match readers[which].next() {
                Some(Ok(line)) if line == expected => continue,
                Some(Ok(line)) => line,
                Some(Err(_)) | None => return true,
            };
            // The last line may be cut off.
            assert!(expected.starts_with(&line), "{line} for {expected}");
            assert!(readers[which].next().is_none(), "more behind {line}");
            return true;
        }
        false
    });
    Some(cut)
}

/// The API server's client library closes a gRPC tunnel whose reader takes no bytes for ten seconds. Other tunnels are
/// unaffected.
#[test]
fn a_paused_log_and_exec_affect_no_other_tunnel_by_grpc() {
    if let Some(cut) = paused_readers(Mode::Grpc, "paused readers") {
        println!("MEASURED Grpc: log and exec cut after a pause of {PAUSED:?}: {cut:?}");
    }
}

#[test]
fn a_paused_log_and_exec_affect_no_other_tunnel_and_stay_open_by_http_connect() {
    if let Some(cut) = paused_readers(Mode::HttpConnect, "paused readers") {
        assert_eq!(cut, [false, false]);
    }
}
