//! Watches lanes in trouble: the endpoint's reader has stalled, or the link is gone. Such a lane is not read, so its task is
//! woken now and then to check whether the peer is gone. A lane that takes no more bytes is watched, too, since its endpoint
//! does not read its own socket then. All other lanes are left asleep.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio_util::sync::CancellationToken;

/// How often troubled lanes and the unread sockets of paused endpoints are checked.
pub(super) const EVERY: Duration = Duration::from_secs(5);

/// State that an endpoint on a lane shares with the watch.
#[derive(Debug)]
pub(super) struct Probe {
    waker: AtomicWaker,
    check: AtomicBool,
    stalled: AtomicBool,
    full: AtomicBool,
    gone: CancellationToken,
}

impl Probe {
    pub(super) fn register(&self, waker: &std::task::Waker) {
        self.waker.register(waker);
    }

    /// Whether the socket should be checked now; clears the request.
    pub(super) fn is_due(&self) -> bool {
        self.check.swap(false, Relaxed)
    }

    /// The endpoint's own socket or stream takes nothing, so the lane is not read.
    pub(super) fn set_stalled(&self, stalled: bool) {
        self.stalled.store(stalled, Relaxed);
    }

    /// The lane takes nothing, so the endpoint's own socket or stream is not read.
    pub(super) fn set_full(&self, full: bool) {
        self.full.store(full, Relaxed);
    }

    /// Whether the lane needs this check: it is not read, or its link is gone.
    pub(super) fn is_troubled(&self) -> bool {
        self.stalled.load(Relaxed) || self.gone.is_cancelled()
    }

    fn is_watched(&self) -> bool {
        self.is_troubled() || self.full.load(Relaxed)
    }
}

/// The endpoints on lanes of one process, and the lanes whose endpoints are gone.
#[derive(Debug, Default)]
pub struct LaneWatch {
    probes: Mutex<Vec<Weak<Probe>>>,
    shutting_down: AtomicBool,
    draining: Arc<AtomicUsize>,
}

/// Counts a draining lane until dropped.
#[derive(Debug)]
pub struct Settles(Arc<AtomicUsize>);

impl Drop for Settles {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl LaneWatch {
    /// Counts one more draining lane: its tunnel is over at this end, but bytes or its end are in flight.
    #[must_use]
    pub fn settles(&self) -> Settles {
        self.draining.fetch_add(1, Relaxed);
        Settles(Arc::clone(&self.draining))
    }

    /// Lanes that drain now; a process that ends waits for them.
    #[must_use]
    pub fn draining(&self) -> usize {
        self.draining.load(Relaxed)
    }

    /// Adds an endpoint on a lane; `gone` is cancelled when the lane's link is gone.
    pub(super) fn enter(&self, gone: CancellationToken) -> Arc<Probe> {
        let probe = Arc::new(Probe {
            waker: AtomicWaker::new(),
            check: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            full: AtomicBool::new(false),
            gone,
        });
        let mut probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner);
        if probes.len() == probes.capacity() {
            // Pruned whenever the list would grow, so it holds at most twice the live endpoints.
            probes.retain(|probe| probe.strong_count() > 0);
        }
        probes.push(Arc::downgrade(&probe));
        probe
    }

    /// Checks the lanes until dropped.
    pub async fn run(&self) {
        loop {
            tokio::time::sleep(EVERY).await;
            self.check();
        }
    }

    /// Ends all tunnels on lanes because this process ends.
    pub fn shut_down(&self) {
        self.shutting_down.store(true, Relaxed);
        self.check();
    }

    pub(super) fn is_shutting_down(&self) -> bool {
        self.shutting_down.load(Relaxed)
    }

    fn check(&self) {
        let all = self.is_shutting_down();
        let mut probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner);
        probes.retain(|probe| {
            let Some(probe) = probe.upgrade() else {
                return false;
            };
            if all || probe.is_watched() {
                probe.check.store(true, Relaxed);
                probe.waker.wake();
            }
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Relaxed);
        }
    }

    #[test]
    fn only_troubled_lanes_are_woken_and_dropped_ones_are_removed() {
        let watch = LaneWatch::default();
        let gone = CancellationToken::new();
        let probe = watch.enter(gone.clone());
        let woken = Arc::new(Woken::default());
        let is_woken = || {
            probe.register(&Waker::from(Arc::clone(&woken)));
            watch.check();
            (woken.0.swap(false, Relaxed), probe.is_due())
        };
        assert_eq!(is_woken(), (false, false));
        probe.set_stalled(true);
        assert_eq!(is_woken(), (true, true));
        probe.set_stalled(false);
        assert_eq!(is_woken(), (false, false));
        probe.set_full(true);
        assert_eq!(is_woken(), (true, true));
        assert!(!probe.is_troubled(), "the lane itself is written to");
        probe.set_full(false);
        assert_eq!(is_woken(), (false, false));
        gone.cancel();
        assert_eq!(is_woken(), (true, true));
        assert!(!probe.is_due(), "once");
        drop(probe);
        watch.check();
        assert!(watch.probes.lock().unwrap().is_empty());
    }

    /// Limit (memory): Entries of the idle check of tunnels on lanes | twice the open tunnels
    #[test]
    fn the_watch_list_does_not_grow_with_ended_tunnels() {
        let watch = LaneWatch::default();
        for _tunnel in 0..10_000 {
            drop(watch.enter(CancellationToken::new()));
        }
        assert!(watch.probes.lock().unwrap().len() < 10);
    }
}
