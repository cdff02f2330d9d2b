//! kTLS raw lanes: tunnels without frames that the kernel encrypts. Hosts without kernel TLS skip the tests that need it.
//! `cargo xtask vm` runs them.

mod keys;
mod refused;

use std::time::Duration;

use adit::agent::RunningAgent;
use adit_config::tls_policy::TlsPolicy;
use adit_relay::{Pair, PairEnd, Preference, Relay, RelayConfig, probe};
use adit_testkit::certificates::ThrowawayFiles;
use adit_tls::handshake::{accept_tls, connect_tls};
use adit_tls::reload::Reloadable;
use adit_tls::stream::{ByteStream, PeerAddr, Socket};
use adit_tls::tls::{Alpn, ClientTls, ServerTls};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use super::plaintext_lanes::{cancels_a_dial, fails_dials, is_reset_by_its_target, over, tapped};
use crate::support::connect::hears;
use crate::support::lanes::{BUSY, HITS, IDLE, value};
use crate::support::skip::{skip, skip_unprivileged};
use crate::support::wait::{until, within};
use crate::support::ways::engine_is_possible;
use crate::support::world::{World, echo, sample};
use crate::support::{connect, targets};

/// Limit of a handshake.
const DEADLINE: Duration = Duration::from_secs(10);

const KTLS: &str = "--lane-security=ktls";
const FRAMED: &str = "adit_tunnels_opened_total{path=\"lane\"}";
const PIPED: &str = "adit_tunnels_opened_total{path=\"ktls-lane\"}";

/// Whether this host has kernel TLS.
fn has_kernel_tls() -> bool {
    adit_relay::probe_kernel_tls().is_ok()
}

/// As [`has_kernel_tls`]. Without it, reports `test` as skipped.
fn is_possible(test: &str) -> bool {
    if !has_kernel_tls() {
        assert!(
            std::env::var_os("ADIT_NEEDS_KTLS").is_none(),
            "{test}: kernel TLS is not available on this host"
        );
        // The table of kernels reads this line.
        skip(test, "kernel TLS is not available on this host");
    }
    has_kernel_tls()
}

/// A server and an agent that both want kernel TLS.
async fn both(flags: &[&str]) -> (World, RunningAgent) {
    let flags = [&[KTLS], flags].concat();
    World::warm(&flags, &flags).await
}

/// The flag at one end or at both, on hosts with and without kernel TLS. The tap sees no plaintext.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_are_encrypted_with_the_flag_at_either_or_both_ends() {
    const MARK: &[u8] = b"nobody on the way may read this";
    let (target, _echo) = targets::local_echo().await;
    for (server_flags, agent_flags) in [
        (&[KTLS][..], &[][..]),
        (&[], &[KTLS]),
        (&[KTLS], &["--lane-security=plaintext"]),
        (&[KTLS], &[KTLS]),
    ] {
        let (world, _agent, tap) = tapped(server_flags, agent_flags).await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo(&mut stream, MARK).await;
        connect::echo_to_the_end(&mut stream, &targets::pattern(0, 300_000)).await;
        let piped = server_flags == agent_flags && has_kernel_tls();
        assert_eq!(value(&world, PIPED), f64::from(u8::from(piped)));
        let mut tunnel = world.tunnel(&target).await;
        echo(&mut tunnel, MARK).await;
        assert_eq!(value(&world, HITS), 2.0);
        assert!(!tap.has_seen(MARK));
    }
}

/// Without kernel TLS the flag has no effect: tunnels have frames.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_kernel_tls_tunnels_use_frames() {
    let (world, _agent) = both(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, b"either way").await;
    let (piped, framed) = (value(&world, PIPED), value(&world, FRAMED));
    if has_kernel_tls() {
        assert_eq!((piped, framed), (1.0, 0.0));
    } else {
        assert_eq!((piped, framed), (0.0, 1.0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_arrive_whole_with_either_engine() {
    if !is_possible("bytes_arrive_whole_with_either_engine") {
        return;
    }
    for engine in ["epoll", "io-uring"] {
        if !engine_is_possible(engine, "bytes_arrive_whole_with_either_engine") {
            continue;
        }
        let (world, agent) = both(&[&format!("--relay-engine={engine}")]).await;
        let (target, _echo) = targets::local_echo().await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo(&mut stream, b"small").await;
        let sent = targets::pattern(0, 6_000_000);
        connect::echo_to_the_end(&mut stream, &sent).await;
        over(&world, 1.0).await;
        assert_eq!((value(&world, HITS), value(&world, PIPED)), (1.0, 1.0));
        let moved =
            ["copy", "splice"].map(|mover| format!("adit_relay_bytes_total{{mover=\"{mover}\"}}"));
        let here: f64 = moved.iter().map(|name| value(&world, name)).sum();
        let expected = 2.0 * (sent.len() + 5) as f64;
        assert_eq!(here, expected);
        until("the agent has counted as much", || {
            let agents = agent.metrics.scrape().text();
            moved
                .iter()
                .flat_map(|name| sample(&agents, name))
                .sum::<f64>()
                == expected
        })
        .await;
        world.ended("clean", 1.0).await;
    }
}

/// The keys move to the kernel while client and target may already have sent. No byte is lost at any position.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_bytes_of_either_side_arrive() {
    if !is_possible("first_bytes_of_either_side_arrive") {
        return;
    }
    let (world, _agent) = both(&[]).await;
    let (echo, _echo) = targets::echo().await;
    for round in 1..=24 {
        let welcome: Vec<u8> = targets::pattern(0, 1 + 977 * round);
        let (port, _target) = targets::server_first(welcome.clone().leak()).await;
        until("enough lanes", || value(&world, IDLE) >= 3.0).await;
        let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
        hears(&mut stream, &welcome).await;
        drop(stream);
        until("enough lanes", || value(&world, IDLE) >= 3.0).await;
        let mut request = connect::head(&format!("127.0.0.1:{echo}"));
        let early = targets::pattern(7, 1 + 463 * round);
        request.extend_from_slice(&early);
        let mut answer = connect::request(&world.connect(), &request).await;
        hears(&mut answer.stream, &early).await;
    }
    world.server_metric(BUSY, 0.0).await;
    assert!(value(&world, PIPED) > 0.0);
    world.assert_no_lane_lost();
}

/// Concurrent dials, on raw lanes that are used up and on framed lanes that return.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_dials_succeeds() {
    const TUNNELS: usize = 100;
    if !is_possible("a_burst_of_dials_succeeds") {
        return;
    }
    let (world, _agent) = both(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    let streams = connect::burst(&world.connect(), &target, TUNNELS).await;
    drop(streams);
    world.server_metric(BUSY, 0.0).await;
    assert!(value(&world, PIPED) > 0.0);
    world.assert_no_lane_lost();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_dials_keep_their_lane_and_a_cancelled_dial_closes_it() {
    if !is_possible("failed_dials_keep_their_lane_and_a_cancelled_dial_closes_it") {
        return;
    }
    let (world, _agent) = both(&[]).await;
    fails_dials(&world).await;
    cancels_a_dial(&world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_reset_is_counted_as_target_reset() {
    if !is_possible("a_target_reset_is_counted_as_target_reset") {
        return;
    }
    let (world, _agent) = both(&[]).await;
    is_reset_by_its_target(&world).await;
}

/// Both ends of a new TLS connection set up like a lane. The exchanged greeting ensures that no session ticket follows.
async fn session() -> (ByteStream, ByteStream) {
    const PROTOCOL: &str = "records/1";
    let files = ThrowawayFiles::create(&["localhost".to_owned()]).expect("made");
    let server = Reloadable::load(ServerTls {
        cert: files.cert("server"),
        key: files.key("server"),
        client_ca: Some(files.ca_file()),
        client_crl: None,
        client_may_be_anonymous: false,
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc::<&str>(&[]).with_records(PROTOCOL),
    });
    let client = Reloadable::load(ClientTls {
        crl: None,
        ca: files.ca_file(),
        identity: Some((files.cert("agent"), files.key("agent"))),
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc::<&str>(&[]).records_beside(PROTOCOL),
    });
    let (server, client) = (server.expect("loaded"), client.expect("loaded"));
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("bound");
    let address = listener.local_addr().expect("bound");
    let peer = PeerAddr::Tcp(address);
    let accept = async {
        let (socket, _peer) = listener.accept().await.expect("accepted");
        accept_tls(Socket::Tcp(socket), peer, &server, DEADLINE).await
    };
    let connect = async {
        let socket = Socket::Tcp(TcpStream::connect(address).await.expect("connected"));
        let name = ServerName::try_from("localhost").expect("a name");
        connect_tls(socket, peer, &client, name, None, DEADLINE).await
    };
    let (server, client) = tokio::join!(accept, connect);
    let (mut server, mut client) = (server.expect("greeted"), client.expect("greeted"));
    let mut five = [0; 5];
    server.write_all(b"hello").await.expect("taken");
    server.flush().await.expect("taken");
    client.read_exact(&mut five).await.expect("sent");
    client.write_all(b"hello").await.expect("taken");
    client.flush().await.expect("taken");
    server.read_exact(&mut five).await.expect("sent");
    (server, client)
}

/// Kernel TLS interoperates with rustls in both directions, including close_notify. The peer of a running raw lane may stay
/// with rustls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::disallowed_methods, reason = "a test on a runtime of its own")]
async fn the_peer_of_a_running_ktls_lane_may_stay_with_rustls() {
    if !is_possible("the_peer_of_a_running_ktls_lane_may_stay_with_rustls") {
        return;
    }
    for (engine, kernel_is_server) in [
        (Preference::Epoll, true),
        (Preference::Epoll, false),
        (Preference::IoUring, true),
        (Preference::IoUring, false),
    ] {
        let choice = match probe(engine) {
            Ok(choice) => choice,
            Err(error) => {
                skip_unprivileged("a pipe beside rustls", error);
                continue;
            }
        };
        let (server, client) = session().await;
        let (ours, mut peer) = if kernel_is_server {
            (server, client)
        } else {
            (client, server)
        };
        let ByteStream::Tls(ours) = ours else {
            panic!("no TLS")
        };
        let mut records = ours.into_records().expect("a session of ours");
        let tls = records.start_kernel_tls().expect("kernel TLS");
        let lane = records.into_tcp().expect("TCP").into_std().expect("let go");
        let (a, target) = UnixStream::pair().expect("made");
        let (from_target, mut to_target) = target.into_split();
        let a = a.into_std().expect("let go");
        let relay = Relay::start(&RelayConfig::new(choice)).expect("runs");
        let (done, outcome) = tokio::sync::oneshot::channel();
        let pair = Pair {
            tls: Some(tls),
            ..Pair::new(a.into(), lane.into())
        };
        let tell = Box::new(|outcome| drop(done.send(outcome)));
        let _submitted = relay.handle().submit(pair, tell).expect("taken");
        let (up, down) = (
            targets::pattern(1, 3_000_000),
            targets::pattern(2, 2_000_000),
        );
        let mut from_target = from_target;
        let (mut got_up, mut got_down) = (Vec::new(), Vec::new());
        // Each end sends close_notify while the other end still sends.
        let (mut peer_reads, mut peer_writes) = tokio::io::split(&mut peer);
        within("both directions", async {
            tokio::join!(
                async {
                    to_target.write_all(&up).await.expect("taken");
                    to_target.shutdown().await.expect("open");
                },
                async {
                    peer_writes.write_all(&down).await.expect("taken");
                    peer_writes.shutdown().await.expect("open");
                },
                async { peer_reads.read_to_end(&mut got_up).await.expect("in order") },
                async { from_target.read_to_end(&mut got_down).await.expect("open") },
            )
        })
        .await;
        assert!(got_up == up && got_down == down);
        let outcome = within("the end", outcome).await.expect("told");
        assert!(matches!(outcome.end, PairEnd::Finished), "{outcome:?}");
        assert_eq!(
            (outcome.to_b.bytes, outcome.to_a.bytes),
            (3_000_000, 2_000_000)
        );
        tokio::task::spawn_blocking(move || relay.stop(Duration::ZERO))
            .await
            .expect("it stops");
    }
}
