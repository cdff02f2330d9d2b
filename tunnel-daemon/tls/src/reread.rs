//! Requests to read files again at once, as on SIGHUP. Otherwise files are read again when they change, or after a while.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;

/// The followers of files in this process. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Reread(Arc<Followers>);

#[derive(Debug, Default)]
struct Followers {
    asks: AtomicU64,
    waiting: Mutex<Vec<Weak<Notify>>>,
}

impl Reread {
    /// Notifies all followers. A follower that is reading reads once more.
    pub fn ask(&self) {
        self.0.asks.fetch_add(1, Relaxed);
        for follower in self.waiting().iter().filter_map(Weak::upgrade) {
            follower.notify_one();
        }
    }

    /// Number of requests so far, for followers that check only now and then.
    #[must_use]
    pub fn asks(&self) -> u64 {
        self.0.asks.load(Relaxed)
    }

    /// Notifies `asked` at each [`Self::ask`], until `asked` is dropped.
    pub fn tell(&self, asked: &Arc<Notify>) {
        let mut waiting = self.waiting();
        waiting.retain(|follower| follower.strong_count() > 0);
        waiting.push(Arc::downgrade(asked));
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Weak<Notify>>> {
        // Nothing panics while it is held.
        self.0
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reread_notifies_all_watchers_and_forgets_dropped_ones() {
        let reread = Reread::default();
        let (one, other) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        reread.clone().tell(&one);
        reread.tell(&other);
        reread.ask();
        one.notified().await;
        drop(other);
        let another = Arc::new(Notify::new());
        reread.tell(&another);
        assert_eq!(reread.waiting().len(), 2);
        reread.ask();
        one.notified().await;
        another.notified().await;
        assert_eq!(reread.asks(), 2);
    }
}
