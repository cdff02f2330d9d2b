//! The last bytes of a tunnel reach their reader, even if that reader sends bytes that are never read. A kernel that closes
//! a socket with unread input discards undelivered output.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use adit_relay::unacknowledged_bytes;
use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

use crate::support::clients::{Io, Kind};
use crate::support::connect::end;
use crate::support::lanes::ended;
use crate::support::raw::Connection;
use crate::support::targets::{self, Sum, pattern};
use crate::support::wait::{until_still, within};
use crate::support::world::{World, agent_metric, endpoints_left};

/// More than a kernel buffers for a peer that does not read, and less than it takes from a writer.
const BYTES: usize = 1_300_000;
/// Size of one write of bytes that are never read.
const BLOCK_BYTES: usize = 64 * 1024;
/// Connection id of a Go agent's tunnel.
const CONN: i64 = 5;

/// The target sends all the time and reads only after the tunnel has ended.
///
/// Upstream (tunnels): An upload before an immediate close reaches the target completely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_before_a_close_reaches_a_target_with_unread_output() {
    for lanes in [true, false] {
        let (world, agent) = Kind::Unix.world(lanes).await;
        let (said, listen) = (Arc::new(AtomicU64::new(0)), Arc::new(Notify::new()));
        let (reports, mut heard) = mpsc::channel(1);
        let (counted, told) = (Arc::clone(&said), Arc::clone(&listen));
        let (port, _target) = targets::serve(move |stream| {
            let (counted, told) = (Arc::clone(&counted), Arc::clone(&told));
            let reports = reports.clone();
            async move {
                let (mut read, mut write) = stream.into_split();
                let speaking = async {
                    let block = vec![7; BLOCK_BYTES];
                    while let Ok(count) = write.write(&block).await {
                        counted.fetch_add(count as u64, Relaxed);
                    }
                };
                let listening = async {
                    told.notified().await;
                    let (mut sum, mut block) = (Sum::default(), vec![0; BLOCK_BYTES]);
                    loop {
                        match read.read(&mut block).await {
                            Ok(0) => break,
                            Ok(count) => sum.add(&block[..count]),
                            Err(_reset) => {
                                sum.clean = false;
                                break;
                            }
                        }
                    }
                    let _test_over = reports.send(sum).await;
                };
                tokio::join!(speaking, listening);
                Ok(())
            }
        })
        .await;

        let mut tunnel = world.tunnel(&format!("127.0.0.1:{port}")).await;
        until_still("its words fill the tunnel", || said.load(Relaxed)).await;
        let bytes = pattern(0, BYTES);
        let upload = tunnel.write(Bytes::from(bytes.clone()));
        within("the upload", upload).await.expect("it is taken");
        let over = async {
            // The tunnel ends before the target's connection does.
            agent_metric(&agent, &ended("clean"), 1.0).await;
            listen.notify_one();
        };
        let (confirmed, ()) = tokio::join!(tunnel.close(), over);
        confirmed.expect("a confirmed close");
        let sum = within("the target's report", heard.recv()).await;
        assert_eq!(sum, Some(Sum::of(&bytes)), "lanes: {lanes}");
        endpoints_left(&agent, 0).await;
    }
}

/// What a client that keeps sending reads, and how its read ends. It begins to read after `later`.
async fn heard_by_a_speaker(
    stream: Box<dyn Io>,
    later: impl Future<Output = ()>,
) -> (Vec<u8>, Result<(), ErrorKind>) {
    let (mut read, mut write) = tokio::io::split(stream);
    let mut speaking = JoinSet::new();
    speaking.spawn(async move {
        let block = vec![7; BLOCK_BYTES];
        while write.write_all(&block).await.is_ok() {}
    });
    later.await;
    end(&mut read).await
}

/// Go agents have no half-close: the target's FIN ends the tunnel, even if the client has more to send.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_bytes_of_a_go_agents_target_reach_a_client_that_keeps_sending() {
    for kind in Kind::ALL {
        let world = World::start(kind.flags()).await;
        let (_connection, mut link) = Connection::linked(&world, "stub", "").await;
        let open = kind.open(&world, "target.test:80");
        let (stream, _) = tokio::join!(open, link.answer(CONN));
        let bytes = pattern(0, BYTES);
        let last = async {
            for block in bytes.chunks(32 * 1024) {
                link.data(CONN, block.to_vec());
            }
            link.confirm_close(CONN);
            // A unix socket buffers less, so the tunnel of a client that does not read cannot end yet.
            if kind != Kind::Unix {
                world.ended("clean", 1.0).await;
            }
        };
        let (all, end) = heard_by_a_speaker(stream, last).await;
        assert!(all == bytes, "{kind:?}: {} bytes, {end:?}", all.len());
        assert_eq!(end, Ok(()), "{kind:?}");
        world.ended("clean", 1.0).await;
    }
}

/// Between Adit ends the target's FIN is at first a half-close. Soon afterwards this target closes, which breaks only the
/// client's direction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_bytes_of_a_target_that_closes_reach_a_client_that_keeps_sending() {
    let (port, _target) = targets::serve(|mut stream| async move {
        stream.write_all(&pattern(0, BYTES)).await?;
        stream.shutdown().await?;
        // Waits until all bytes are acknowledged. Otherwise the target's own kernel would discard them.
        let mut block = vec![0; BLOCK_BYTES];
        while unacknowledged_bytes(&stream)? > 0 {
            let _dropped = stream.read(&mut block).await?;
        }
        // With an unread byte the close sends RST at once. Without one the agent's kernel may wait for a window that never
        // opens.
        stream.peek(&mut block).await?;
        Ok(())
    })
    .await;
    let target = format!("127.0.0.1:{port}");
    for kind in Kind::ALL {
        for lanes in [true, false] {
            let (world, _agent) = kind.world(lanes).await;
            let stream = kind.open(&world, &target).await;
            let last = async {
                if kind != Kind::Unix {
                    world.ended("target_reset", 1.0).await;
                }
            };
            let (all, end) = heard_by_a_speaker(stream, last).await;
            let what = format!("{kind:?}, lanes: {lanes}: {} bytes, {end:?}", all.len());
            assert!(all == pattern(0, BYTES), "{what}");
            // On the link the close may replace an unsent half-close, and carries a text. After a write has met the reset,
            // read returns EOF, which is a truncated TLS session.
            let cut_off = [ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof].map(Err);
            assert!(end.is_ok() || (cut_off.contains(&end) && !lanes), "{what}");
            world.ended("target_reset", 1.0).await;
        }
    }
}
