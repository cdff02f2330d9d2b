//! Tests of calls without a dial, on paused time.

use std::time::Duration;

use adit_core::ids::ConnId;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::Packet;
use bytes::Buf as _;
use http::Request;
use tokio::time::{Instant, timeout};

use super::*;
use adit_config::limits::CALL_IDLE_TIMEOUT;

/// A message without effect keeps no call open, neither before a dial nor after a tunnel.
///
/// Limit (times): A gRPC call without a dial or tunnel | ends after 60 s with `DEADLINE_EXCEEDED`
#[tokio::test(start_paused = true)]
async fn a_call_without_a_dial_ends_after_sixty_seconds() {
    let (near, far) = tokio::io::duplex(1 << 16);
    let (context, admission) = (FrontendContext::for_tests(), ClientAccess::default());
    let serving = serve(near, context, admission, Duration::from_secs(3600));
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
