//! Tests of calls without a dial, on paused time.

use std::future::poll_fn;
use std::time::Duration;

use adit_core::ids::{ConnId, DialId};
use adit_core::wire::decode::Decoder;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::{Packet, Received};
use bytes::Buf as _;
use h2::client::{ResponseFuture, SendRequest};
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
    let serving = serve_io(near, context, admission, Duration::from_secs(3600));
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
                let (response, mut send) = call(&mut requests).await;
                let started = Instant::now();
                if let Some(packet) = nonsense {
                    send.send_data(message(packet), false).expect("room");
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

fn message(packet: Packet) -> bytes::Bytes {
    let mut message = MessageBuf::packet(packet);
    message.copy_to_bytes(message.remaining())
}

/// Dials in a new call, and returns its number, the error of the dial and the status of the call.
async fn refused(requests: &mut SendRequest<bytes::Bytes>) -> (u32, String, String) {
    let (response, mut send) = call(requests).await;
    let dial = Packet::DialReq {
        dial: DialId(7),
        protocol: "tcp".into(),
        address: "10.0.0.1:80".into(),
        window: 0,
    };
    let number = send.stream_id().as_u32();
    send.send_data(message(dial), false).expect("room");
    let mut body = response.await.expect("an answer").into_body();
    let mut decoder = Decoder::default();
    while let Some(Ok(data)) = body.data().await {
        decoder.push(data);
        if let Ok(Some(Received::Packet(Packet::DialRsp { error, .. }))) = decoder.next() {
            send.send_data(bytes::Bytes::new(), true).ok();
            let trailers = body.trailers().await.ok().flatten().expect("trailers");
            let status = trailers["grpc-status"].to_str().expect("digits");
            return (number, error, status.to_owned());
        }
    }
    panic!("no answer");
}

async fn call(
    requests: &mut SendRequest<bytes::Bytes>,
) -> (ResponseFuture, h2::SendStream<bytes::Bytes>) {
    poll_fn(|cx| requests.poll_ready(cx)).await.expect("HTTP/2");
    let request = Request::post("http://a/ProxyService/Proxy")
        .header("content-type", "application/grpc")
        .body(())
        .expect("a request");
    requests.send_request(request, false).expect("room")
}

/// It is told in Konnectivity's terms, and the call ends. Others go on.
///
/// Limit (peers): Calls on one HTTP/2 connection of a client | 4,096; the dials of 64 further ones are answered with an error, those of all connections 1,024
#[tokio::test]
async fn a_call_beyond_the_limit_is_told_that_there_is_no_room() {
    let (near, far) = tokio::io::duplex(1 << 20);
    let (context, admission) = (FrontendContext::for_tests(), ClientAccess::default());
    let serving = serve_io(near, context, admission, Duration::from_secs(3600));
    let client = async {
        let handshake = h2::client::handshake(far).await;
        let (mut requests, connection) = handshake.expect("HTTP/2");
        let calls = async {
            let (_, error, status) = refused(&mut requests).await;
            assert_eq!((&*error, &*status), ("No agent available", "0"));
            let mut open = Vec::new();
            for _call in 0..CLIENT_STREAMS_MAX {
                open.push(call(&mut requests).await);
            }
            let (_, error, status) = refused(&mut requests).await;
            let no_room = "server is short of memory for tunnels";
            assert_eq!((&*error, &*status), (no_room, "8"));
            drop(open.pop());
            let mut again = refused(&mut requests).await;
            while again.1 == no_room {
                again = refused(&mut requests).await;
            }
            assert_eq!(again.1, "No agent available");
        };
        tokio::select! {
            () = calls => (),
            over = connection => panic!("{over:?}"),
        }
    };
    tokio::select! {
        () = client => (),
        () = serving => panic!("the connection ended"),
    }
}
