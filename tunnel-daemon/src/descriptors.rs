//! The budget of file descriptors: lanes never take the descriptors that clients and targets need.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Semaphore;

use adit_host::descriptors::Descriptors;
use adit_net::tasks::Tasks;
use adit_server::router::Router;
use adit_tunnel::LanePool;

/// Descriptors kept for listeners, links, logs and the like.
const RESERVED: u64 = 512;
/// A server's idle lanes close at once when the server gives them up.
const CLOSED_AFTER: Duration = Duration::ZERO;
/// An agent's idle lanes close once its server has polled them, which it does every second.
pub(super) const DRAINED_AFTER: Duration = Duration::from_secs(3);
/// A tunnel on a lane needs two descriptors at each end, a tunnel on the link one. Lanes get a third of the descriptors, so
/// that as many tunnels again find room on the link.
const LANES_DIVISOR: u64 = 3;

/// Raises the soft limit of descriptors to the hard limit, as Go programs do: the soft limit exists for programs that still
/// use select(2).
pub(super) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// Lanes this process may have at once.
pub(super) fn lanes_max() -> usize {
    lanes_of(getrlimit(Resource::Nofile).current)
}

fn lanes_of(descriptors: Option<u64>) -> usize {
    let free = descriptors.map_or(u64::MAX, |limit| limit.saturating_sub(RESERVED));
    usize::try_from(free / LANES_DIVISOR)
        .unwrap_or(usize::MAX)
        .min(Semaphore::MAX_PERMITS)
}

/// Closes idle lanes of a server when descriptors run low.
pub(super) fn close_idle_lanes(
    services: &Tasks,
    descriptors: &Arc<Descriptors>,
    router: &Arc<Router>,
) {
    let (counted, pools) = (Arc::clone(descriptors), Arc::clone(router));
    let giving_up = counted.run(CLOSED_AFTER, move |lanes| {
        give_up_lanes(&pools, lanes);
    });
    services.spawn_always("descriptors", giving_up);
}

/// Closes idle lanes of each link, in proportion to its number of idle lanes.
fn give_up_lanes(router: &Router, lanes: usize) {
    let pools: Vec<Arc<LanePool>> = router
        .links()
        .into_iter()
        .filter_map(|link| link.lanes)
        .collect();
    let idle: Vec<usize> = pools.iter().map(|pool| pool.idle_lanes()).collect();
    let all = idle.iter().sum::<usize>().max(1);
    let lanes = lanes.min(all);
    let closed: usize = std::iter::zip(&pools, &idle)
        .map(|(pool, idle)| pool.give_up((idle * lanes).div_ceil(all)))
        .sum();
    if closed > 0 {
        tracing::info!(
            lanes = closed,
            "idle lanes closed: file descriptors run low"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit (peers): Lanes of a process | a third of its file descriptors, less 512
    #[test]
    fn lanes_get_a_third_of_the_descriptors() {
        assert_eq!(lanes_of(Some(20_000)), 6496);
        assert_eq!(lanes_of(Some(256)), 0);
        assert_eq!(lanes_of(None), Semaphore::MAX_PERMITS);
    }
}
