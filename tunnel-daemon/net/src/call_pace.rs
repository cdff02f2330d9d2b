//! How fast calls of one connection are taken. A client may cancel a call as soon as it has made it, which costs it next to
//! nothing and is not in the number of calls it may have at once.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// In the long run a connection makes one call in this time.
const CALL_EVERY: Duration = Duration::from_micros(100);
/// The same, of calls that are cancelled before they are taken.
const CANCELLED_CALL_EVERY: Duration = Duration::from_millis(1);
/// How far a connection may be ahead of that: 4,096 cancelled calls, and 40,960 others.
const AHEAD_MAX: Duration = Duration::from_millis(4096);

/// Of one connection. Costs nothing but for each call.
#[derive(Debug)]
pub(super) struct CallPace {
    /// When the calls so far would all have been due.
    due: Instant,
    /// Until when nothing is read.
    pause: Option<Pin<Box<Sleep>>>,
}

impl CallPace {
    pub(super) fn new() -> Self {
        Self {
            due: Instant::now(),
            pause: None,
        }
    }

    /// One more call.
    pub(super) fn count(&mut self, is_cancelled: bool) {
        let now = Instant::now();
        let every = if is_cancelled {
            CANCELLED_CALL_EVERY
        } else {
            CALL_EVERY
        };
        self.due = self.due.max(now) + every;
        if self.due > now + AHEAD_MAX {
            let until = self.due - AHEAD_MAX;
            match &mut self.pause {
                Some(pause) => pause.as_mut().reset(until),
                None => self.pause = Some(Box::pin(sleep_until(until))),
            }
        }
    }

    /// Whether to read nothing for now; the task is woken when that is over.
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
