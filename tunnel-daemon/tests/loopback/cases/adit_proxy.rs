//! `adit proxy`: SOCKS5 and HTTP clients beside it reach targets through servers elsewhere.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use adit::agent::RunningAgent;
use adit::proxy::{self, RunningProxy};
use adit::server::{self, RunningServer};
use adit::status::Socket;
use adit::status::model::Status;
use adit_testkit::args;
use adit_testkit::http::{self, Answer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::support::connect::read_head;
use crate::support::socks5::{ask, echo, hello};
use crate::support::tls;
use crate::support::wait::{until, within};
use crate::support::world::{World, proxy_plan, scraped, server_plan};
use crate::support::{ports, targets};

/// A frontend of a server for proxies.
const FOR_PROXIES: [&str; 4] = [
    "--frontend=http-connect=tcp:127.0.0.1:0",
    "--server-cert={certs}/server.crt",
    "--server-key={certs}/server.key",
    "--server-ca-cert={certs}/ca.crt",
];

async fn linked(flags: &[&str], of_agent: &[&str]) -> (World, RunningAgent) {
    World::linked(&[&FOR_PROXIES, flags].concat(), of_agent).await
}

/// A proxy with both frontends, of these servers.
async fn start(world: &World, servers: &[SocketAddr], flags: &[&str]) -> RunningProxy {
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    let mut args = args::proxy(&world.files, &servers.join(","));
    let has_socket = |flag: &&str| flag.starts_with("--admin-socket=");
    args.retain(|arg| !(arg == "--admin-socket=off" && flags.iter().any(has_socket)));
    args.push("--frontend=socks5=tcp:127.0.0.1:0".to_owned());
    args.push("--frontend=http-proxy=tcp:127.0.0.1:0".to_owned());
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let plan = proxy_plan(&args).expect("flags are right");
    proxy::start(&plan).await.expect("the proxy starts")
}

async fn beside(world: &World, flags: &[&str]) -> RunningProxy {
    start(world, &[world.server().frontends[0]], flags).await
}

async fn socks(proxy: &RunningProxy) -> TcpStream {
    TcpStream::connect(proxy.frontends[0])
        .await
        .expect("it listens")
}

/// Opens a tunnel by SOCKS5; returns its code.
async fn dial(proxy: &RunningProxy, host: &str, port: u16) -> (TcpStream, u8) {
    let mut io = socks(proxy).await;
    let code = ask(&mut io, &hello(host, port)).await;
    (io, code)
}

/// Sends a request to the HTTP proxy and returns the head of the answer.
async fn request(proxy: &RunningProxy, line: &str) -> (TcpStream, String) {
    let mut io = TcpStream::connect(proxy.frontends[1])
        .await
        .expect("it listens");
    let text = format!("{line} HTTP/1.1\r\nHost: a\r\n\r\n");
    io.write_all(text.as_bytes()).await.expect("it is taken");
    let head = read_head(&mut io).await;
    (io, head)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_dialects_carry_bytes_both_ways_through_a_server() {
    let (port, _target) = targets::echo().await;
    let (first, _first) = targets::server_first(b"220 ready\r\n").await;
    let (world, _agent) = linked(&[], &[]).await;
    let socket = world.dir.path().join("socks.sock");
    let flag = format!("--frontend=socks5=unix:{}", socket.display());
    let proxy = beside(&world, &[&flag]).await;
    for host in ["127.0.0.1", "localhost"] {
        let (mut io, code) = dial(&proxy, host, port).await;
        assert_eq!(code, 0, "{host}");
        echo(&mut io, 3_000_000).await;
    }
    let mut io = UnixStream::connect(&socket).await.expect("it listens");
    assert_eq!(ask(&mut io, &hello("127.0.0.1", port)).await, 0);
    echo(&mut io, 3_000_000).await;

    let (mut io, head) = request(&proxy, &format!("CONNECT 127.0.0.1:{port}")).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    echo(&mut io, 3_000_000).await;
    let (mut io, code) = dial(&proxy, "127.0.0.1", first).await;
    assert_eq!(code, 0);
    let mut greeting = [0; 11];
    within("the greeting", io.read_exact(&mut greeting))
        .await
        .unwrap();
    assert_eq!(&greeting, b"220 ready\r\n");

    let (web, _web) = targets::serve(|mut stream| async move {
        read_head(&mut stream).await;
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npage")
            .await
    })
    .await;
    let (mut io, head) = request(&proxy, &format!("GET http://127.0.0.1:{web}/")).await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    let mut page = [0; 4];
    within("a body", io.read_exact(&mut page)).await.unwrap();
    assert_eq!(&page, b"page");
    let opened = "adit_tunnels_opened_total{path=\"server\"}";
    scraped(&proxy.metrics.scrape(), opened, 6.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn causes_are_told_apart_two_hops_away() {
    let (port, _target) = targets::echo().await;
    let (_held, closed) = targets::closed_port();
    let closed = closed.port();
    let rules = [
        "--client-allow-target=127.0.0.0/29",
        "--client-allow-target=*.invalid",
    ];
    let world = World::start(&[&FOR_PROXIES[..], &rules].concat()).await;
    let proxy = beside(
        &world,
        &[
            "--client-allow-target=127.0.0.0/28",
            "--client-allow-target=*.invalid",
        ],
    )
    .await;
    let (_io, code) = dial(&proxy, "127.0.0.1", port).await;
    assert_eq!(code, 1, "no agent");
    let allowed = [
        "--allow-target=127.0.0.1",
        "--allow-target=no-such-name.invalid",
    ];
    let _agent = world.agent("agent-1", &allowed).await;
    world.links(1).await;
    for (host, port, code, status, error) in [
        ("127.0.0.1", port, 0, "200 ", ""),
        ("127.0.0.1", closed, 5, "502 ", "connection_refused"),
        // The agent, the server and the proxy itself have a list.
        ("127.0.0.2", port, 2, "403 ", "destination_ip_prohibited"),
        ("127.0.0.9", port, 2, "403 ", "http_request_denied"),
        ("127.0.0.17", port, 2, "403 ", "http_request_denied"),
        ("no-such-name.invalid", 80, 4, "502 ", "dns_error"),
    ] {
        let (_io, told) = dial(&proxy, host, port).await;
        assert_eq!(told, code, "{host}:{port}");
        let (_io, head) = request(&proxy, &format!("CONNECT {host}:{port}")).await;
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status}")),
            "{host}: {head}"
        );
        assert!(head.contains(error), "{host}: {head}");
    }
}

/// What cuts a tunnel short at one end looks so at the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_is_no_end_of_file_and_a_half_close_is_one_way() {
    let (cut, _cut) = targets::serve(|mut stream| async move {
        stream.read_u8().await?;
        stream.write_all(b"half of").await?;
        adit_tunnel::reset_on_close(&stream);
        Ok(())
    })
    .await;
    let (summing, _summing, mut sums) = targets::summing().await;
    let (world, _agent) = linked(&[], &[]).await;
    let proxy = beside(&world, &[]).await;
    let (mut io, _code) = dial(&proxy, "127.0.0.1", cut).await;
    io.write_all(b"x").await.unwrap();
    let mut received = Vec::new();
    let end = within("the end", io.read_to_end(&mut received)).await;
    assert!(end.is_err(), "{received:?}");

    let sent = targets::pattern(0, 1_000_000);
    let (mut io, _code) = dial(&proxy, "127.0.0.1", summing).await;
    io.write_all(&sent).await.unwrap();
    io.shutdown().await.unwrap();
    let mut answer = Vec::new();
    within("the answer", io.read_to_end(&mut answer))
        .await
        .unwrap();
    assert!(!answer.is_empty());
    let seen = within("a sum", sums.recv()).await.unwrap();
    assert_eq!(seen.bytes, sent.len() as u64);

    // A client that resets.
    let (mut io, _code) = dial(&proxy, "127.0.0.1", summing).await;
    io.write_all(b"x").await.unwrap();
    until("the target has it", || {
        world.server().metrics.adit().open_tunnels().all().len() == 1
    })
    .await;
    adit_tunnel::reset_on_close(&io);
    drop(io);
    let seen = within("a sum", sums.recv()).await.unwrap();
    assert!(!seen.clean, "{seen:?}");
    until("no tunnel is left", || {
        proxy.metrics.adit().open_tunnels().all().is_empty()
    })
    .await;
}

fn readiness(proxy: &RunningProxy, path: &'static str) -> Answer {
    let health = proxy.health.expect("a port");
    http::get(health, path).expect("an answer")
}

/// Another server of the same files, whose frontend for proxies has this port.
async fn server_at(world: &World, suffix: &str, port: u16) -> RunningServer {
    let args = world.other_args("0", suffix);
    let at = format!("--frontend=http-connect=tcp:127.0.0.1:{port}");
    let args: Vec<String> = args
        .into_iter()
        .map(|arg| arg.replace(FOR_PROXIES[0], &at))
        .collect();
    let plan = server_plan(&args).expect("flags are right");
    server::start(&plan).await.expect("the server starts")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_goes_to_a_server_that_answers_and_has_an_agent() {
    let (port, _target) = targets::echo().await;
    let (world, _agent) = linked(&[], &[]).await;
    let without_agents = server_at(&world, "-b.sock", 0).await;
    let (_held, nobody) = targets::closed_port();
    // It takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let servers = [
        nobody,
        silent.local_addr().unwrap(),
        without_agents.frontends[0],
        world.server().frontends[0],
    ];
    let proxy = start(&world, &servers, &["--dial-timeout=25s"]).await;
    for _dial in 0..8 {
        let (mut io, code) = dial(&proxy, "127.0.0.1", port).await;
        assert_eq!(code, 0);
        echo(&mut io, 1000).await;
    }
    let ready = readiness(&proxy, "/readyz?verbose");
    assert_eq!(ready.status, 200, "{}", ready.text);
    assert!(
        ready.text.contains(&format!("[+]server {}", servers[3])),
        "{}",
        ready.text
    );

    // The last word is an answer, whatever the others fail by.
    world.server().leave(Some(Duration::ZERO)).await;
    let (_io, code) = dial(&proxy, "127.0.0.1", port).await;
    assert_eq!(code, 1);
}

/// Takes TLS connections, and neither reads nor writes.
async fn hang(listener: TcpListener, acceptor: TlsAcceptor) -> io::Result<Infallible> {
    let mut connections = Vec::new();
    loop {
        let (tcp, _peer) = listener.accept().await?;
        connections.push(acceptor.accept(tcp).await?);
    }
}

/// Its TLS is alive, so that only its silence shows.
///
/// It may have dialled, so that no other server is asked in its place. Later dials go to others.
///
/// Limit (times): Server of `adit proxy` that takes no connection, while another one can be asked | half of the time left of
/// `--dial-timeout`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_answers_no_request_costs_one_dial() {
    let (port, _target) = targets::echo().await;
    let (world, _agent) = linked(&[], &[]).await;
    let hung = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = hung.local_addr().unwrap();
    let mut hangs = JoinSet::new();
    hangs.spawn(hang(hung, tls::acceptor(&world, "server")));
    let servers = [at, world.server().frontends[0]];
    let flags = ["--dial-timeout=8s", "--spare-connections=0"];
    let proxy = start(&world, &servers, &flags).await;
    let is_marked = || {
        let ready = readiness(&proxy, "/readyz?verbose");
        assert_eq!(ready.status, 200, "slow targets look so: {}", ready.text);
        ready.text.contains(&format!("[-]server {at}: "))
    };
    let (mut failed, mut dials) = (0, 0);
    while dials < 40 && !is_marked() {
        let (mut io, code) = dial(&proxy, "127.0.0.1", port).await;
        if code == 0 {
            echo(&mut io, 1000).await;
        } else {
            failed += 1;
        }
        dials += 1;
    }
    assert!(is_marked(), "after {dials} dials");
    assert_eq!(failed, 1);
    for _dial in 0..8 {
        let started = Instant::now();
        assert_eq!(dial(&proxy, "127.0.0.1", port).await.1, 0);
        assert!(started.elapsed() < Duration::from_secs(4));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_without_an_answer_is_pending_in_the_status() {
    let host = targets::silent_host();
    let silent: SocketAddr = host.address.parse().expect("an address");
    let (world, _agent) = linked(&[], &[]).await;
    let socket = world.dir.path().join("proxy-admin.sock");
    let flag = format!("--admin-socket={}", socket.display());
    let proxy = beside(&world, &[&flag, "--pending-dials=1"]).await;
    let pending = || {
        let status = Socket::new(&socket).ask::<Status>("/v1/status");
        status.expect("an answer").pending_dials
    };
    assert_eq!(pending(), Some(0));
    let mut first = socks(&proxy).await;
    let request = hello("127.0.0.1", silent.port());
    first.write_all(&request).await.unwrap();
    until("it is pending", || pending() == Some(1)).await;
    let (_io, code) = dial(&proxy, "127.0.0.1", silent.port()).await;
    assert_eq!(code, 1, "one is the limit");
    until("the agent has given up", || pending() == Some(0)).await;
}

/// Connections that wait for a dial do not outlive their server unnoticed, and a server that comes back is found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_restarts_costs_no_dial_behind_its_start() {
    let (port, _target) = targets::echo().await;
    let (world, _agent) = linked(&[], &[]).await;
    // No outgoing connection takes it while the server is away.
    let held = server_at(&world, "-b.sock", ports::free()).await;
    let at = held.frontends[0];
    let agent = world.agent_of(held.agents.port(), "agent-2", &[]).await;
    until("its agent", || held.links() == 1).await;
    let proxy = start(&world, &[at], &[]).await;
    for _dial in 0..6 {
        assert_eq!(dial(&proxy, "127.0.0.1", port).await.1, 0);
    }
    within("its end", held.stop(Some(Duration::ZERO))).await;
    agent.stop().await;
    let (_io, code) = dial(&proxy, "127.0.0.1", port).await;
    assert_eq!(code, 1, "nobody is there");
    let ready = readiness(&proxy, "/readyz");
    assert_eq!(ready.status, 500, "{}", ready.text);

    let again = server_at(&world, "-b.sock", at.port()).await;
    let _agent = world.agent_of(again.agents.port(), "agent-2", &[]).await;
    until("its agent", || again.links() == 1).await;
    let (mut io, code) = dial(&proxy, "127.0.0.1", port).await;
    assert_eq!(code, 0);
    echo(&mut io, 1000).await;
}

/// Tunnels end with the proxy, as resets; those that finish within the grace do so in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_that_leaves_lets_tunnels_finish_and_cuts_the_rest() {
    let (port, _target) = targets::echo().await;
    let (world, _agent) = linked(&[], &[]).await;
    let proxy = beside(&world, &[]).await;
    let (mut finishes, _code) = dial(&proxy, "127.0.0.1", port).await;
    let (mut stays, _code) = dial(&proxy, "127.0.0.1", port).await;
    stays.write_all(b"x").await.unwrap();
    within("an echo", stays.read_u8()).await.unwrap();
    let leaving = async {
        proxy.leave(Some(Duration::from_secs(1))).await;
        proxy.cut(Duration::from_secs(1)).await;
    };
    let client = async {
        until("it leaves", || {
            std::net::TcpStream::connect(proxy.frontends[0]).is_err()
        })
        .await;
        echo(&mut finishes, 1000).await;
        let end = within("its end", stays.read_u8()).await.unwrap_err();
        assert_ne!(end.kind(), io::ErrorKind::UnexpectedEof, "{end}");
    };
    tokio::join!(leaving, client);
    until("the server has none", || {
        world
            .server()
            .metrics
            .adit()
            .open_tunnels()
            .all()
            .is_empty()
    })
    .await;
}
