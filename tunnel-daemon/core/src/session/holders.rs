//! Chooses the peer that loses tunnels when the process exceeds its budget, over all links without credit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Held bytes of one link, as last published. The total is updated with each delivery, unread bytes every second while bytes
/// wait.
#[derive(Debug)]
pub(super) struct Holder {
    peer: Arc<str>,
    unread: AtomicU64,
    held: AtomicU64,
    is_asked: AtomicBool,
}

impl Holder {
    /// Publishes the bytes of readers that pause, and all held bytes.
    pub(super) fn publish(&self, unread: u64, held: u64) {
        self.unread.store(unread, Relaxed);
        self.publish_held(held);
    }

    /// Publishes all held bytes.
    pub(super) fn publish_held(&self, held: u64) {
        self.held.store(held, Relaxed);
    }

    /// Whether another link has asked this link to end tunnels.
    pub(super) fn take_question(&self) -> bool {
        self.is_asked.swap(false, Relaxed)
    }

    /// Bytes of readers that pause come first: other held bytes are freed as their readers read.
    fn weight(&self) -> (u64, u64) {
        (self.unread.load(Relaxed), self.held.load(Relaxed))
    }
}

/// The links of a process to peers without flow control.
#[derive(Debug, Default)]
pub(super) struct Holders(Mutex<Vec<Weak<Holder>>>);

impl Holders {
    pub(super) fn enter(&self, peer: Arc<str>) -> Arc<Holder> {
        let holder = Arc::new(Holder {
            peer,
            unread: AtomicU64::new(0),
            held: AtomicU64::new(0),
            is_asked: AtomicBool::new(false),
        });
        let mut all = self.locked();
        if all.len() == all.capacity() {
            all.retain(|other| other.strong_count() > 0);
        }
        all.push(Arc::downgrade(&holder));
        holder
    }

    /// Whether `own` is the heaviest link of the peer that holds most. If not, asks that link to end tunnels.
    pub(super) fn is_heaviest(&self, own: &Arc<Holder>) -> bool {
        let all: Vec<_> = self.locked().iter().filter_map(Weak::upgrade).collect();
        let mut peers: HashMap<&str, (u64, u64)> = HashMap::new();
        for holder in &all {
            let (unread, held) = holder.weight();
            let sum = peers.entry(&holder.peer).or_default();
            *sum = (sum.0 + unread, sum.1 + held);
        }
        let heaviest = all.iter().max_by_key(|holder| {
            let peer = peers.get(&*holder.peer).copied().unwrap_or_default();
            // On a tie the asking link is chosen, so that one link ends tunnels.
            (peer, holder.weight(), Arc::ptr_eq(holder, own))
        });
        match heaviest {
            Some(other) if !Arc::ptr_eq(other, own) => {
                other.is_asked.store(true, Relaxed);
                false
            }
            _ => true,
        }
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Weak<Holder>>> {
        // No code panics while holding the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
