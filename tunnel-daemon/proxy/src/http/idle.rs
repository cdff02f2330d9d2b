//! Connections to targets that wait for their next request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::client::conn::http1::SendRequest;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::exchange::ToTarget;

/// How long a connection waits for its next request.
const IDLE: Duration = Duration::from_secs(30);
/// How often those that have waited too long are looked for.
const SWEEP: Duration = Duration::from_secs(5);
/// Connections that wait, of all targets and of one.
const ALL_MAX: usize = 512;
const TARGET_MAX: usize = 8;

/// Connections that wait, by target. Every client that may ask for a target may get one.
pub(super) struct Idle {
    state: Mutex<State>,
    leaving: CancellationToken,
}

#[derive(Default)]
struct State {
    by_target: HashMap<String, Vec<(SendRequest<ToTarget>, Instant)>>,
    count: usize,
    is_swept: bool,
}

impl Idle {
    /// After `leaving` no connection waits.
    pub(super) fn new(leaving: CancellationToken) -> Self {
        Self {
            state: Mutex::default(),
            leaving,
        }
    }

    /// The connection to this target that waits for the shortest time.
    pub(super) fn take(&self, target: &str) -> Option<SendRequest<ToTarget>> {
        let mut state = self.state();
        let State {
            by_target, count, ..
        } = &mut *state;
        let waiting = by_target.get_mut(target)?;
        let found = std::iter::from_fn(|| waiting.pop().inspect(|_| *count -= 1))
            .find(|(sender, since)| !sender.is_closed() && since.elapsed() < IDLE);
        if waiting.is_empty() {
            by_target.remove(target);
        }
        found.map(|(sender, _since)| sender)
    }

    /// Keeps a connection for the next request. The future, if there is one, has to be run: it ends what nobody takes.
    pub(super) fn put(
        self: &Arc<Self>,
        target: String,
        sender: SendRequest<ToTarget>,
    ) -> Option<impl Future<Output = ()> + Send + 'static + use<>> {
        let mut state = self.state();
        if sender.is_closed() || state.count >= ALL_MAX || self.leaving.is_cancelled() {
            return None;
        }
        let waiting = state.by_target.entry(target).or_default();
        if waiting.len() >= TARGET_MAX {
            return None;
        }
        waiting.push((sender, Instant::now()));
        state.count += 1;
        let sweep = !std::mem::replace(&mut state.is_swept, true);
        drop(state);
        sweep.then(|| Arc::clone(self).sweep())
    }

    async fn sweep(self: Arc<Self>) {
        loop {
            let left = self
                .leaving
                .run_until_cancelled(tokio::time::sleep(SWEEP))
                .await
                .is_none();
            let mut state = self.state();
            state.by_target.retain(|_target, waiting| {
                waiting.retain(|(sender, since)| {
                    !left && !sender.is_closed() && since.elapsed() < IDLE
                });
                !waiting.is_empty()
            });
            state.count = state.by_target.values().map(Vec::len).sum();
            if state.count == 0 {
                state.is_swept = false;
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
