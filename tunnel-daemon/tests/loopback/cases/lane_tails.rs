//! Bytes of an ended tunnel that are still on its lane, and the next dial.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::support::lanes::{BUSY, HITS, IDLE, MISSES, value};
use crate::support::targets::Sum;
use crate::support::wait::within;
use crate::support::world::World;
use crate::support::{connect, targets};

/// Both ends have half-closed, and the target reads slowly. The next dial neither cuts the bytes in flight nor waits for
/// them.
///
/// Limit (isolation): A dial while its lane still carries the last bytes of a tunnel | uses another lane; those bytes
/// arrive
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_dial_neither_waits_for_nor_cuts_the_last_bytes_of_a_tunnel() {
    // More than the target's socket buffers hold, less than those of the lane.
    const BYTES: usize = 1_000_000;
    let (world, _agent) = World::linked(&["--lanes-per-link=1"], &[]).await;
    world.server_metric(IDLE, 1.0).await;
    let (listener, port) = targets::with_small_window();
    let (echo, _target) = targets::echo().await;
    let (slow, echo) = (format!("127.0.0.1:{port}"), format!("127.0.0.1:{echo}"));

    let socket = world.connect();
    let (mut client, accepted) = tokio::join!(connect::open(&socket, &slow), listener.accept());
    let mut target = accepted.expect("a connection").0;
    target.shutdown().await.expect("it says so first");
    assert_eq!(within("its end", client.read(&mut [0])).await.ok(), Some(0));
    let sent = targets::pattern(0, BYTES);
    within("an upload", client.write_all(&sent))
        .await
        .expect("the tunnel takes it");
    client.shutdown().await.expect("its own end");
    world.ended("clean", 1.0).await;

    for _tunnel in 0..3 {
        let mut next = connect::open(&socket, &echo).await;
        connect::echo(&mut next, b"at once").await;
    }
    assert_eq!(
        [HITS, MISSES].map(|series| value(&world, series)),
        [1.0, 3.0]
    );
    assert_eq!([IDLE, BUSY].map(|series| value(&world, series)), [0.0, 1.0]);
    let mut received = Vec::new();
    within("the upload", target.read_to_end(&mut received))
        .await
        .expect("a clean end");
    assert_eq!(Sum::of(&received), Sum::of(&sent));

    world.server_metric(IDLE, 1.0).await;
    let mut last = connect::open(&socket, &echo).await;
    connect::echo(&mut last, b"on the lane again").await;
    assert_eq!(value(&world, HITS), 2.0);
}
