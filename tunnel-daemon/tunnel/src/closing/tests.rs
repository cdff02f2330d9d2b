//! Tests of the last bytes to peers that keep sending, or that do not read.

use std::io::ErrorKind;
use std::pin::pin;
use std::sync::Arc;

use adit_core::session::TunnelEnd;
use bytes::Bytes;
use futures_util::poll;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::time::timeout;

use super::*;
use crate::channel::ENDPOINT_FIN;
use crate::{CopyEnd, DirtyList, Endpoint, copy_bidirectional};
use adit_tls::stream::{ByteStream, PeerAddr, Socket};

/// More than the peer's kernel takes while its program does not read, and less than both kernels take together.
const BYTES: usize = 1_300_000;
/// Longer than any step of these tests takes.
const PATIENCE: Duration = Duration::from_secs(30);

fn pattern() -> Vec<u8> {
    (0..=250).cycle().take(BYTES).collect()
}

/// The socket under test and its peer.
async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let dial = TcpStream::connect(listener.local_addr().unwrap());
    let (ours, theirs) = tokio::join!(dial, listener.accept());
    (ours.unwrap(), theirs.unwrap().0)
}

#[tokio::test]
async fn last_bytes_and_then_eof_or_reset_reach_a_peer_that_keeps_sending() {
    for closing in [Closing::InOrder, Closing::CutOff] {
        let (mut ours, mut peer) = pair().await;
        let speech = vec![7; 30_000];
        timeout(PATIENCE, ours.write_all(&pattern()))
            .await
            .expect("the kernel takes it")
            .unwrap();
        peer.write_all(&speech).await.unwrap();
        let mut got = vec![0; BYTES];
        {
            let mut graceful = pin!(close_gracefully(&mut ours, closing));
            assert!(poll!(graceful.as_mut()).is_pending(), "nothing is read yet");
            peer.write_all(&speech).await.unwrap();
            // The peer itself closes nothing.
            let both = async { tokio::join!(graceful, peer.read_exact(&mut got)) };
            let ((), read) = timeout(PATIENCE, both).await.expect("all is delivered");
            read.unwrap();
        }
        drop(ours);
        assert!(got == pattern(), "{closing:?}");
        let end = timeout(PATIENCE, peer.read(&mut got))
            .await
            .expect("an end");
        let end = end.map_err(|error| error.kind());
        match closing {
            Closing::InOrder => assert_eq!(end, Ok(0)),
            _ => assert_eq!(end, Err(ErrorKind::ConnectionReset)),
        }
    }
}

#[tokio::test]
async fn a_socket_whose_bytes_are_delivered_is_closed_at_once() {
    let (mut ours, mut peer) = pair().await;
    // The socket option that the copy loop has set.
    reset_on_close(&ours);
    assert!(poll!(pin!(close_gracefully(&mut ours, Closing::InOrder))).is_ready());
    drop(ours);
    assert_eq!(peer.read(&mut [0; 1]).await.unwrap(), 0);
}

/// A reset drops unsent bytes, so that a truncated stream does not look complete.
#[tokio::test]
async fn a_reset_waits_for_nothing() {
    let (mut ours, mut peer) = pair().await;
    timeout(PATIENCE, ours.write_all(&pattern()))
        .await
        .expect("the kernel takes it")
        .unwrap();
    assert!(poll!(pin!(close_gracefully(&mut ours, Closing::Reset))).is_ready());
    drop(ours);
    let mut got = Vec::new();
    let read = timeout(PATIENCE, peer.read_to_end(&mut got)).await;
    let error = read.expect("an end").expect_err("no clean one");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_unix_peer_with_unread_bytes_sees_eof_after_an_orderly_close_else_a_reset() {
    let reset = Some(ErrorKind::ConnectionReset);
    for (closing, end) in [
        (Closing::InOrder, None),
        (Closing::CutOff, reset),
        (Closing::Reset, reset),
    ] {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let mut ours = ByteStream::Plain(Socket::Unix(ours), PeerAddr::Unix);
        ours.write_all(b"last").await.unwrap();
        peer.write_all(&[7; 100_000]).await.unwrap();
        timeout(PATIENCE, close_gracefully(&mut ours, closing))
            .await
            .expect("nothing to wait for");
        drop(ours);
        let mut got = Vec::new();
        let read = timeout(PATIENCE, peer.read_to_end(&mut got)).await;
        let seen = read.expect("an end").map_err(|error| error.kind()).err();
        assert_eq!((seen, &got[..]), (end, &b"last"[..]), "{closing:?}");
    }
}

/// Limit (times): Remaining bytes of a closed tunnel without progress
#[tokio::test(start_paused = true)]
async fn undelivered_bytes_are_dropped_after_thirty_seconds() {
    let (mut ours, _deaf) = pair().await;
    ours.write_all(&pattern()).await.unwrap();
    let begun = Instant::now();
    close_gracefully(&mut ours, Closing::InOrder).await;
    let waited = begun.elapsed();
    // The peer's kernel may have taken some bytes at first.
    let patience = limits::LINGER_TIMEOUT..=limits::LINGER_TIMEOUT * 2;
    assert!(patience.contains(&waited), "{waited:?}");
}

/// Otherwise the reader at the other end of the tunnel would take a truncated stream as complete.
#[tokio::test]
async fn a_reset_during_a_write_is_not_reported_as_fin() {
    let (mut ours, peer) = pair().await;
    reset_on_close(&peer);
    drop(peer);
    let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
    channel.deliver(Bytes::from_static(b"more"));
    let copied = timeout(
        PATIENCE,
        copy_bidirectional(&mut ours, &mut endpoint, Bytes::new()),
    )
    .await;
    let outcome = copied.expect("it is over");
    assert!(
        matches!(&outcome.end, CopyEnd::WriteFailed(error) if error.kind() == ErrorKind::ConnectionReset),
        "{outcome:?}"
    );
    assert_eq!(channel.endpoint_flags() & ENDPOINT_FIN, 0);
}

/// The target closes nothing, and reads on only once its answers are taken, although the client is gone.
#[tokio::test]
async fn a_target_that_answers_as_it_reads_gets_the_rest_of_a_closed_tunnel() {
    let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
    channel.deliver(Bytes::from(pattern()));
    channel.finish(TunnelEnd::PeerClosing);
    let (mut ours, target) = duplex(1024);
    let copied = async move {
        let outcome = copy_bidirectional(&mut ours, &mut endpoint, Bytes::new()).await;
        drop(ours);
        outcome
    };
    let (mut read, mut write) = tokio::io::split(target);
    let echo = async {
        let (mut heard, mut block) = (Vec::new(), [0; 512]);
        loop {
            match read.read(&mut block).await.unwrap() {
                0 => return heard,
                count => heard.extend_from_slice(&block[..count]),
            }
            // The last answers are not read.
            let _gone = write.write_all(&block).await;
        }
    };
    let both = async { tokio::join!(copied, echo) };
    let (outcome, heard) = timeout(PATIENCE, both).await.expect("neither waits");
    assert_eq!(outcome.closing(), Some(Closing::InOrder), "{outcome:?}");
    assert!(heard == pattern(), "{} bytes", heard.len());
}
