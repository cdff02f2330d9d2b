//! Idle lanes of all links: polled every second and pinged at times, so that lanes of a lost agent are closed.

use std::sync::Arc;
use std::time::Duration;

use adit_server::router::Router;

/// Time between two polls of a lane.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Polls from one ping to the next.
const PING_EVERY_POLLS: u64 = 30;
/// Links polled before this task yields: a link takes some microseconds, and a server may have ten thousand links.
const LINKS_PER_TURN: usize = 64;

/// Polls and pings for as long as the server runs.
pub(crate) async fn keep(router: Arc<Router>) {
    for poll in 1_u64.. {
        poll_all(&router, poll.is_multiple_of(PING_EVERY_POLLS)).await;
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// Polls the idle lanes of all links once, and pings them.
pub(super) async fn poll_all(router: &Router, ping: bool) {
    let links = router.links().into_iter();
    for (at, lanes) in links.filter_map(|link| link.lanes).enumerate() {
        if at > 0 && at.is_multiple_of(LINKS_PER_TURN) {
            tokio::task::yield_now().await;
        }
        lanes.poll_idle().await;
        lanes.announce_warm();
        if ping {
            lanes.ping_idle().await;
        }
    }
}
