//! Tests of calls without a dial, on paused time.

use std::time::Duration;

use adit_core::ids::ConnId;
use adit_core::registry::Registry;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::Packet;
use bytes::Buf as _;
use http::Request;
use tokio::time::{Instant, timeout};

use super::*;
use crate::router::DialLimits;
use adit_config::limits::CALL_IDLE_TIMEOUT;
use adit_host::descriptors::Descriptors;
use adit_telemetry::{AccessLog, ServerMetrics};

fn context() -> FrontendContext {
    let metrics = ServerMetrics::new(&["default"]);
    let suppressed = metrics.adit().access_events_suppressed();
    FrontendContext {
        metrics,
        access: Arc::new(AccessLog::new(1, suppressed)),
        relay: None,
        descriptors: Arc::new(Descriptors::unlimited()),
        accounts: adit_net::accounts::Accounts::off(),
        limits: Arc::default(),
    }
}

/// A message without effect keeps no call open, neither before a dial nor after a tunnel.
///
/// Limit (times): A gRPC call without a dial or tunnel | ends after 60 s with `DEADLINE_EXCEEDED`
#[tokio::test(start_paused = true)]
async fn a_call_without_a_dial_ends_after_sixty_seconds() {
    let limits = DialLimits {
        pending_max: 1,
        timeout: None,
        dead_after: Duration::from_secs(8),
    };
    let router = Router::new(Registry::new("default".parse().unwrap()), limits);
    let (near, far) = tokio::io::duplex(1 << 16);
    let tasks = Tasks::new(10);
    let never = CancellationToken::new();
    let keepalive = Duration::from_secs(3600);
    let serving = serve(
        near,
        router,
        context(),
        ClientAccess::default(),
        keepalive,
        tasks,
        never,
    );
    let client = async {
        let handshake = h2::client::handshake(far).await;
        let (mut requests, connection) = handshake.expect("HTTP/2");
        let calls = async {
            for nonsense in [
                None,
                Some(Packet::CloseReq { conn: ConnId(5) }),
                // The tunnel does not exist: nothing more is done for this client.
                Some(Packet::Data {
                    conn: ConnId(5),
                    bytes: "x".into(),
                }),
            ] {
                let request = Request::post("http://a/ProxyService/Proxy")
                    .header("content-type", "application/grpc")
                    .body(())
                    .expect("a request");
                let (response, mut send) = requests.send_request(request, false).expect("room");
                let started = Instant::now();
                if let Some(packet) = nonsense {
                    let mut message = MessageBuf::packet(packet);
                    let length = message.remaining();
                    let bytes = message.copy_to_bytes(length);
                    send.send_data(bytes, false).expect("room");
                }
                let response = response.await.expect("an answer");
                let status = response.headers().get("grpc-status").cloned();
                let mut body = response.into_body();
                while let Some(Ok(_answer)) = body.data().await {}
                let trailers = body.trailers().await.ok().flatten();
                let status = status.or_else(|| trailers?.get("grpc-status").cloned());
                assert_eq!(status.expect("a status"), "4");
                assert_eq!(started.elapsed().as_secs(), CALL_IDLE_TIMEOUT.as_secs());
            }
        };
        tokio::select! {
            () = calls => (),
            over = connection => panic!("{over:?}"),
        }
    };
    let done = async { tokio::join!(serving, client) };
    let end = timeout(10 * CALL_IDLE_TIMEOUT, done).await;
    assert!(end.is_ok(), "the calls do not end");
}
