//! Tests of endpoints that outlive their link, on paused time. Bytes received before a close stay available until 30 s
//! pass without progress.

use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::*;

/// Longer than any awaited step takes.
const FOR_EVER: Duration = Duration::from_secs(3600);
/// More than a target's socket takes unread, and less than the window of a tunnel.
const BYTES: usize = 200_000;
/// Bytes that the target's socket takes unread.
const UNREAD_BYTES: usize = 64 * 1024;

impl World {
    /// Ends the link after ten seconds.
    async fn lose_link(&self) {
        sleep(Duration::from_secs(10)).await;
        self.agent.send(Command::Stop).await.unwrap();
        self.agent.closed().await;
    }
}

/// The endpoint's link has ended by then.
///
/// Limit (times): Remaining bytes of a closed tunnel without progress
#[tokio::test(start_paused = true)]
async fn a_stalled_client_is_cut_thirty_seconds_after_its_target_closed() {
    let mut world = world(false, Isolation::default()).await;
    let (mut endpoint, mut target) = world.open().await;
    target.write_all(&pattern(50_000)).await.unwrap();
    drop(target);
    let (mut stuck, _never_read) = duplex(100);
    let start = Instant::now();
    let copying = timeout(
        FOR_EVER,
        copy_bidirectional(&mut stuck, &mut endpoint, Bytes::new()),
    );
    let (outcome, ()) = tokio::join!(copying, world.lose_link());
    let outcome = outcome.expect("it is cut");
    assert!(
        matches!(outcome.end, CopyEnd::Tunnel(TunnelEnd::LingerExpired)),
        "{outcome:?}"
    );
    assert_eq!(outcome.to_socket, 100);
    assert_eq!(start.elapsed().as_secs(), 30);
    world.idle().await;
}

/// A client that takes a hundred bytes every 15 s, for minutes, and then the rest.
async fn a_slow_client(loses_link: bool) {
    let mut world = world(false, Isolation::default()).await;
    let (mut endpoint, mut target) = world.open().await;
    let sent = pattern(50_000);
    target.write_all(&sent).await.unwrap();
    drop(target);
    let (mut ours, mut client) = duplex(100);
    let reading = async {
        if loses_link {
            world.lose_link().await;
        }
        let mut got = Vec::new();
        for _piece in 0..20 {
            sleep(Duration::from_secs(15)).await;
            let mut some = [0; 100];
            client.read_exact(&mut some).await.unwrap();
            got.extend_from_slice(&some);
        }
        client.read_to_end(&mut got).await.unwrap();
        got
    };
    let copying = timeout(
        FOR_EVER,
        copy_bidirectional(&mut ours, &mut endpoint, Bytes::new()),
    );
    let (outcome, got) = tokio::join!(copying, reading);
    let outcome = outcome.expect("it is over");
    assert!(
        matches!(
            outcome.end,
            CopyEnd::Tunnel(TunnelEnd::Closed { ref error }) if error.is_empty()
        ),
        "{outcome:?}"
    );
    assert!(got == sent, "{} bytes", got.len());
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_gets_all_bytes_of_a_closed_tunnel() {
    a_slow_client(false).await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_gets_all_bytes_of_a_closed_tunnel_without_the_link() {
    a_slow_client(true).await;
}

/// At the other end, after a client's close: its target has as long.
///
/// Limit (times): Remaining bytes of a closed tunnel without progress
#[tokio::test(start_paused = true)]
async fn a_target_can_read_bytes_of_a_closed_client_for_thirty_seconds() {
    for (reads_after, hears) in [(25, BYTES), (35, UNREAD_BYTES)] {
        let mut world = world(true, Isolation::default()).await;
        let (mut endpoint, mut target) = world.open().await;
        let start = Instant::now();
        let sent = pattern(BYTES);
        endpoint.send(Bytes::from(sent.clone()));
        endpoint.close();
        world.lose_link().await;
        sleep_until(start + Duration::from_secs(reads_after)).await;
        let mut heard = Vec::new();
        timeout(FOR_EVER, target.read_to_end(&mut heard))
            .await
            .expect("an end")
            .unwrap();
        assert!(heard == sent[..hears], "{} bytes", heard.len());
    }
}

/// Packets that an endpoint sends after the end of its link are never read. The endpoint must not keep the link's dirty
/// list alive.
#[tokio::test]
async fn endpoints_outliving_their_link_free_its_dirty_list() {
    let mut world = world(true, Isolation::default()).await;
    let (first, _target) = world.open().await;
    let (mut second, _other) = world.open().await;
    world.agent.send(Command::Stop).await.unwrap();
    assert_eq!(ended(&mut second).await, TunnelEnd::LinkLost);
    second.send(Bytes::from_static(b"too late"));
    drop(second);
    drop(first);
    let over = async {
        while world.dirty_list.strong_count() > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(10), over)
        .await
        .expect("the link's dirty list goes with its last endpoint");
}
