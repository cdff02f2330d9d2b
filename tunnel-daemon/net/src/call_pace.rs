//! Rate limit of one connection's calls. A client may cancel a call as soon as it has made it. Such a call costs the client
//! next to nothing, and does not count against the limit of concurrent calls.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// Time between two calls that a connection may make in the long run.
const CALL_EVERY: Duration = Duration::from_micros(100);
/// The same for calls that are cancelled before the server takes them.
const CANCELLED_CALL_EVERY: Duration = Duration::from_millis(1);
/// Burst that a connection may be ahead: 4,096 cancelled calls, or 40,960 others.
const AHEAD_MAX: Duration = Duration::from_millis(4096);

/// The rate limit of one connection. Costs nothing between calls.
#[derive(Debug)]
pub(super) struct CallPace {
    /// When the calls so far would all have been due at the allowed rate.
    due: Instant,
    /// While it runs, no call begins.
    pause: Option<Pin<Box<Sleep>>>,
}

impl CallPace {
    pub(super) fn new() -> Self {
        Self {
            due: Instant::now(),
            pause: None,
        }
    }

    /// Counts one more call.
    pub(super) fn count(&mut self, is_cancelled: bool) {
        let now = Instant::now();
        let every = if is_cancelled {
            CANCELLED_CALL_EVERY
        } else {
            CALL_EVERY
        };
        // Not further ahead than twice that, so that a pause ends.
        self.due = (self.due.max(now) + every).min(now + 2 * AHEAD_MAX);
        if self.due > now + AHEAD_MAX {
            let until = self.due - AHEAD_MAX;
            match &mut self.pause {
                Some(pause) => pause.as_mut().reset(until),
                None => self.pause = Some(Box::pin(sleep_until(until))),
            }
        }
    }

    /// Whether calls are to wait; the task is woken when the pause ends.
    pub(super) fn is_paused(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(pause) = &mut self.pause else {
            return false;
        };
        match pause.as_mut().poll(cx) {
            Poll::Pending => true,
            Poll::Ready(()) => {
                self.pause = None;
                false
            }
        }
    }
}
