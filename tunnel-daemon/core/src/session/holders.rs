//! Which peer has to give when the process holds more than it may, over all links without credit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What one link holds, as it last said: all bytes whenever some come, those that nobody takes each second while bytes wait.
#[derive(Debug)]
pub(super) struct Holder {
    peer: Arc<str>,
    unread: AtomicU64,
    held: AtomicU64,
    is_asked: AtomicBool,
}

impl Holder {
    /// Bytes for readers that take none, and all bytes.
    pub(super) fn publish(&self, unread: u64, held: u64) {
        self.unread.store(unread, Relaxed);
        self.publish_held(held);
    }

    /// All bytes.
    pub(super) fn publish_held(&self, held: u64) {
        self.held.store(held, Relaxed);
    }

    /// Whether another link has asked this one to give.
    pub(super) fn take_question(&self) -> bool {
        self.is_asked.swap(false, Relaxed)
    }

    /// Readers that take nothing come first: memory that others use comes free by itself.
    fn weight(&self) -> (u64, u64) {
        (self.unread.load(Relaxed), self.held.load(Relaxed))
    }
}

/// The links of a process that hold bytes for peers which cannot be told to wait.
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

    /// Whether `own` is the heaviest link of the peer that holds most. If not, that link is asked to give.
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
            // Of equal ones the asking link gives, so that one does.
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
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
