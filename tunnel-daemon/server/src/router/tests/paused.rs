//! Tests of sockets that are not read, because their tunnel takes no more bytes. A peer that left behind unread bytes is
//! detected, and a live peer is left alone. On paused time.

use std::io::{self, Write as _};
use std::net::{Shutdown, TcpListener};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream as StdUnixStream;

use socket2::SockRef;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout};

use adit_core::session::QUEUE_MAX_BYTES;

use super::*;
use adit_net::peer::{self, Peer};
use adit_telemetry::labels::EndReason;
use adit_tls::stream::{ByteStream, PeerAddr, Socket};

const UNREAD: &[u8] = b"unread";
/// Longer than two check intervals.
const A_WHILE: Duration = Duration::from_secs(11);

/// A socket and its peer, which has sent unread bytes.
async fn tcp() -> (TcpStream, std::net::TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await;
    let (mut far, _address) = listener.accept().unwrap();
    far.write_all(UNREAD).unwrap();
    (near.unwrap(), far)
}

/// The same on a Unix socket.
fn unix() -> (ByteStream, StdUnixStream) {
    let (near, mut far) = StdUnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    far.write_all(UNREAD).unwrap();
    let near = Socket::Unix(UnixStream::from_std(near).unwrap());
    (ByteStream::Plain(near, PeerAddr::Unix), far)
}

/// An endpoint, and as many bytes as it takes before any is read.
fn full_endpoint() -> (Endpoint, Arc<Channel>, Bytes) {
    let (endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
    (endpoint, channel, Bytes::from(vec![0; QUEUE_MAX_BYTES]))
}

fn reset(far: std::net::TcpStream) {
    let set = SockRef::from(&far).set_linger(Some(Duration::ZERO));
    set.unwrap();
}

/// Waits in real time: the peer's FIN or RST may still be in flight.
fn until(near: &TcpStream, expected: Peer) {
    let start = std::time::Instant::now();
    while peer::state(near.as_fd()) != expected {
        assert!(start.elapsed() < Duration::from_secs(30), "{expected:?}");
        std::thread::yield_now();
    }
}

/// Limit (times): A client or target that broke off while its bytes are stuck | given up after 30 s without progress
#[tokio::test(start_paused = true)]
async fn a_reset_behind_stuck_bytes_ends_the_tunnel_after_thirty_seconds() {
    let (mut near, far) = tcp().await;
    reset(far);
    until(&near, Peer::Failed);
    let (mut endpoint, _channel, first) = full_endpoint();
    let since = Instant::now();
    let outcome = copy_bidirectional(&mut near, &mut endpoint, first).await;
    match &outcome.end {
        CopyEnd::ReadFailed(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        other => panic!("{other:?}"),
    }
    assert_eq!(since.elapsed().as_secs(), 30);
    assert_eq!(outcome.reason_at_target(), EndReason::TargetReset);
}

/// A tunnel that takes bytes now and then still gets the peer's unread bytes.
///
/// Limit (times): A client or target that broke off while its bytes are stuck
#[tokio::test(start_paused = true)]
async fn bytes_of_a_reset_peer_are_delivered_to_a_slow_reader() {
    let (mut near, far) = tcp().await;
    reset(far);
    until(&near, Peer::Failed);
    let (mut endpoint, channel, first) = full_endpoint();
    let mut copying = Box::pin(copy_bidirectional(&mut near, &mut endpoint, first));
    let paused = timeout(Duration::from_secs(29), &mut copying).await;
    assert!(paused.is_err(), "{paused:?}");
    let taken = channel.take_up().unwrap().len();
    channel.release_up(taken, 1);
    let end = copying.await.end;
    assert_eq!(channel.take_up().as_deref(), Some(UNREAD));
    assert!(matches!(end, CopyEnd::ReadFailed(_)), "{end:?}");
}

/// Limit (times): A half-closed and silent tunnel
#[tokio::test(start_paused = true)]
async fn a_fin_behind_stuck_bytes_makes_the_tunnel_half_closed() {
    let (mut near, far) = tcp().await;
    far.shutdown(Shutdown::Write).unwrap();
    until(&near, Peer::Silent);
    let (mut endpoint, channel, first) = full_endpoint();
    let over = timeout(A_WHILE, copy_bidirectional(&mut near, &mut endpoint, first)).await;
    assert!(over.is_err(), "{over:?}");
    assert_eq!(channel.endpoint_flags(), ENDPOINT_END_WAITS);
}

/// The peer may have closed cleanly, with earlier bytes still unread.
#[tokio::test(start_paused = true)]
async fn a_closed_unix_peer_makes_the_tunnel_half_closed() {
    let (mut near, far) = unix();
    drop(far);
    let (mut endpoint, channel, first) = full_endpoint();
    let over = timeout(
        2 * A_WHILE,
        copy_bidirectional(&mut near, &mut endpoint, first),
    )
    .await;
    assert!(over.is_err(), "{over:?}");
    assert_eq!(channel.endpoint_flags(), ENDPOINT_END_WAITS);
}

/// A write detects that the peer is gone and consumes the socket error, so a later check sees none.
#[tokio::test(start_paused = true)]
async fn a_failed_write_to_a_closed_peer_ends_the_tunnel() {
    let (mut near, far) = unix();
    drop(far);
    let (mut endpoint, channel, first) = full_endpoint();
    channel.deliver(Bytes::from_static(b"for nobody"));
    let since = Instant::now();
    let end = copy_bidirectional(&mut near, &mut endpoint, first)
        .await
        .end;
    assert!(matches!(end, CopyEnd::WriteFailed(_)), "{end:?}");
    assert_eq!(since.elapsed().as_secs(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_stays_open_and_its_bytes_arrive() {
    let (mut near, _far) = tcp().await;
    let (mut endpoint, channel, first) = full_endpoint();
    let mut copying = Box::pin(copy_bidirectional(&mut near, &mut endpoint, first));
    let paused = timeout(Duration::from_secs(3600), &mut copying).await;
    assert!(paused.is_err(), "{paused:?}");
    assert_eq!(channel.endpoint_flags(), 0);
    let taken = channel.take_up().unwrap().len();
    channel.release_up(taken, 1);
    let on = timeout(A_WHILE, &mut copying).await;
    assert!(on.is_err(), "{on:?}");
    assert_eq!(channel.take_up().as_deref(), Some(UNREAD));
}
