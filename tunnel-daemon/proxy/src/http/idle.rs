//! Connections to targets that wait for the next request of one client. They end with the client's connection.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::exchange::Sender;

/// How long a connection waits for its next request.
const IDLE: Duration = Duration::from_secs(30);
/// Connections of a client that wait.
const WAITING_MAX: usize = 32;

/// Connections of a client that wait, the one that waits longest first. Of one client only: some targets know a client by its
/// connection.
#[derive(Default)]
pub(super) struct Idle(Mutex<Vec<Waiting>>);

struct Waiting {
    target: String,
    sender: Sender,
    since: Instant,
}

impl Idle {
    /// A connection to this target.
    pub(super) fn take(&self, target: &str) -> Option<Sender> {
        let mut waiting = self.waiting();
        let at = waiting.iter().rposition(|one| one.target == target)?;
        Some(waiting.remove(at).sender)
    }

    /// Keeps a connection for the next request.
    pub(super) fn put(&self, target: String, sender: Sender) {
        let mut waiting = self.waiting();
        if waiting.len() >= WAITING_MAX {
            waiting.remove(0);
        }
        waiting.push(Waiting {
            target,
            sender,
            since: Instant::now(),
        });
    }

    /// Ends those that have waited too long, or all.
    pub(super) fn sweep(&self, may_wait: bool) {
        let mut waiting = self.waiting();
        if !may_wait {
            waiting.clear();
        }
    }

    /// Those that have not waited too long.
    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting>> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|one| !one.sender.requests.is_closed() && one.since.elapsed() < IDLE);
        waiting
    }
}
