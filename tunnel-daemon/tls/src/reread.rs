//! Reading files again at once, as SIGHUP asks for. Without it they are read again when they change, or after a while.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;

/// Whoever follows files in this process. Clones name the same.
#[derive(Clone, Debug, Default)]
pub struct Reread(Arc<Followers>);

#[derive(Debug, Default)]
struct Followers {
    asks: AtomicU64,
    waiting: Mutex<Vec<Weak<Notify>>>,
}

impl Reread {
    /// Asks all that follow files. One that is reading now reads once more.
    pub fn ask(&self) {
        self.0.asks.fetch_add(1, Relaxed);
        for follower in self.waiting().iter().filter_map(Weak::upgrade) {
            follower.notify_one();
        }
    }

    /// How often this was asked, for those that look only now and then.
    #[must_use]
    pub fn asks(&self) -> u64 {
        self.0.asks.load(Relaxed)
    }

    /// `asked` is notified at each [`Self::ask`], until it is dropped.
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
    async fn all_that_follow_are_asked_and_those_that_are_gone_are_forgotten() {
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
