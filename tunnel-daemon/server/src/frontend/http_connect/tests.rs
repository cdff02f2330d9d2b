//! Tests of CONNECT heads that never end, on paused time, and of answers that the client does not read.

use std::time::Duration;

use adit_core::ids::{AgentId, ConnId, LinkId};
use tokio::io::{AsyncReadExt as _, duplex};
use tokio::time::Instant;

use super::*;
use crate::frontend::client_limits::Unanswered;
use crate::frontend::establish::{Client, OpenClient};
use crate::frontend::events::{ClientAccess, ClientTunnel};
use crate::router::OpenTunnel;
use adit_telemetry::labels::Path;
use adit_tunnel::{Carrier, Channel, DirtyList, Endpoint};

/// How long a client that sends one byte a second keeps its connection.
async fn kept(plan: ConnectPlan) -> Duration {
    let context = FrontendContext::for_tests();
    let (mut client, server) = duplex(64);
    let started = Instant::now();
    let serving = async {
        establish::run(establishing(server, PeerAddr::Unix, context, plan)).await;
        started.elapsed()
    };
    let trickling = async {
        client.write_all(b"CONNECT a:1 HTTP/1.1\r\nX: ").await?;
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            client.write_all(b"x").await?;
        }
        #[expect(unreachable_code, reason = "names the type of the errors above")]
        std::io::Result::Ok(())
    };
    let (kept, _cut) = tokio::join!(serving, trickling);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    assert!(answer.is_empty(), "upstream says nothing: {answer:?}");
    kept
}

/// Limit (times): CONNECT head | 60 s
#[tokio::test(start_paused = true)]
async fn a_slow_head_is_cut_after_sixty_seconds() {
    assert_eq!(kept(ConnectPlan::default()).await, Duration::from_secs(60));
}

#[tokio::test(start_paused = true)]
async fn the_configured_head_timeout_is_used() {
    let plan = ConnectPlan {
        head_timeout: Duration::from_secs(7),
        ..ConnectPlan::default()
    };
    assert_eq!(kept(plan).await, Duration::from_secs(7));
}

#[tokio::test]
async fn answer_that_cannot_be_written_is_counted_as_send_rsp() {
    let context = FrontendContext::for_tests();
    let (_channel, mut client, endpoint) = opened(&context);
    assert_eq!(client.answer(connect::ESTABLISHED).await, None);
    drop(endpoint);
    drop(client);
    let text = context.metrics.scrape().text();
    for line in [
        "konnectivity_network_proxy_server_dial_failure_count{reason=\"send_rsp\"} 1",
        "konnectivity_network_proxy_server_established_connections 0",
        "adit_tunnels_closed_total{reason=\"client_gone\"} 1",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line} in {text}");
    }
}

/// A tunnel that has just opened, for a client that has already left.
fn opened(
    context: &Arc<FrontendContext>,
) -> (Arc<Channel>, Client<tokio::io::DuplexStream>, Endpoint) {
    let (endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
    let open = OpenTunnel {
        carrier: endpoint,
        conn: ConnId(1),
        link: LinkId(1),
        agent: AgentId::new("a"),
        principal: None,
        via: None,
    };
    let mut tunnel = ClientTunnel::new(context, ClientDialect::HttpConnect);
    tunnel.dialing("a.test:1", &ClientAccess::default());
    tunnel.opened(&open, Path::Link);
    let (io, gone) = duplex(1024);
    drop(gone);
    let client = Client {
        io,
        early: BytesMut::new(),
        tunnel,
        counted: Some(context.metrics.http_connections.guard()),
    };
    (channel, client, open.carrier)
}

/// The state that a tunnel keeps while it lives. A wrapper around such a future easily doubles it.
#[test]
fn the_state_of_a_connection_stays_small() {
    let context = FrontendContext::for_tests();
    let (_client, server) = duplex(64);
    let (_channel, client, endpoint) = opened(&context);
    let bytes = size_of_val(&client.copy_bidirectional(endpoint));
    assert!(bytes <= 648, "{bytes} bytes for a tunnel of http-connect");
    let (_channel, client, endpoint) = opened(&context);
    let carrier = Carrier::Endpoint(endpoint);
    let bytes = size_of_val(&OpenClient { carrier, client }.answering(b""));
    assert!(
        bytes <= 900,
        "{bytes} bytes for a client that has sent nothing"
    );
    let plan = ConnectPlan::default();
    let opening = establishing(server, PeerAddr::Unix, Arc::clone(&context), plan);
    let serving = establish::run(opening);
    let bytes = size_of_val(&serving);
    assert!(bytes <= 56, "{bytes} bytes around it");
    let (_client, server) = duplex(64);
    let admission = ClientAccess::default();
    let serving = crate::frontend::grpc::serve_io(server, context, admission, Duration::MAX);
    let bytes = size_of_val(&serving);
    assert!(bytes <= 648, "{bytes} bytes for grpc");
}

/// Serves a client while the early bytes of other clients use up the shared budget. Returns whether all of `sends` was
/// taken, and the answer. A dial over the link is never answered.
async fn beside_many(is_linked: bool, sends: &[u8]) -> (bool, Vec<u8>) {
    let context = FrontendContext::for_tests();
    let agent = crate::router::LinkInfo {
        agent: AgentId::new("a"),
        identifiers: adit_core::wire::identifiers::Identifiers::default(),
        identity: adit_tls::agent_identity::AgentIdentity::Unverified,
        credit: true,
        version: adit_core::wire::metadata::PeerVersion::default(),
        address: PeerAddr::Unix,
        dials: Arc::default(),
    };
    let _link = is_linked.then(|| context.router.register(agent, 1, None).unwrap());
    let mut others = Unanswered::new(&context.limits);
    others.count(2 * adit_config::limits::UNANSWERED_BYTES_MAX);
    let (mut client, server) = duplex(1024);
    let opening = establishing(server, PeerAddr::Unix, context, ConnectPlan::default());
    let serving = establish::run(opening);
    let talking = async {
        let sent = tokio::time::timeout(Duration::from_secs(10), client.write_all(sends)).await;
        let mut answer = vec![0; 64];
        let read = tokio::time::timeout(Duration::from_secs(10), client.read(&mut answer)).await;
        answer.truncate(read.ok().and_then(Result::ok).unwrap_or_default());
        (sent.is_ok(), answer)
    };
    tokio::select! {
        biased;
        result = talking => result,
        () = async { serving.await; std::future::pending().await } => unreachable!("pending"),
    }
}

/// Limit (memory): Early bytes of `http-connect`, `socks5` and captured clients before their tunnels open
#[tokio::test(start_paused = true)]
async fn long_heads_of_many_clients_share_a_budget_and_then_get_a_431() {
    let long = [b"CONNECT a:1 HTTP/1.1\r\nX: ", &[b'x'; 20_000][..]].concat();
    let (_sent, answer) = beside_many(false, &long).await;
    assert!(answer.starts_with(b"HTTP/1.1 431 "), "{answer:?}");
    let short = b"CONNECT a:1 HTTP/1.1\r\n\r\n";
    let (_sent, answer) = beside_many(false, short).await;
    assert!(answer.starts_with(b"HTTP/1.1 5"), "{answer:?}");
}

/// Limit (memory): Early bytes of `http-connect`, `socks5` and captured clients before their tunnels open
#[tokio::test(start_paused = true)]
async fn early_bytes_of_many_clients_share_a_budget_and_then_stay_unread() {
    let head = &b"CONNECT a:1 HTTP/1.1\r\n\r\n"[..];
    let (sent, _answer) = beside_many(true, &[head, &[7; 10_000]].concat()).await;
    assert!(sent, "the free part is read");
    let (sent, answer) = beside_many(true, &[head, &[7; 40_000]].concat()).await;
    assert!(!sent && answer.is_empty(), "{answer:?}");
}
