//! A timer that runs out where nothing moves.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// When the bytes in flight are first counted, by a system call: most timers are stopped sooner.
const COUNTED_AFTER: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Default)]
pub(super) struct ProgressTimer {
    timer: Option<Pin<Box<Sleep>>>,
    /// Bytes moved since the timer was set.
    moved: bool,
    /// Bytes in flight at the last count since the timer was set: fewer mean progress.
    on_the_way: Option<usize>,
}

impl ProgressTimer {
    pub(super) fn moved(&mut self) {
        self.moved = true;
    }

    /// The next check starts a new time.
    pub(super) fn stop(&mut self) {
        self.timer = None;
    }

    /// Whether nothing has moved for `limit`; if not, the timer wakes the task to check again. `on_the_way`: bytes in flight now.
    pub(super) fn has_run_out(
        &mut self,
        cx: &mut Context<'_>,
        limit: Duration,
        on_the_way: impl Fn() -> usize,
    ) -> bool {
        let first = limit.min(COUNTED_AFTER);
        let timer = self.timer.get_or_insert_with(|| {
            self.moved = false;
            self.on_the_way = None;
            Box::pin(tokio::time::sleep(first))
        });
        while let Poll::Ready(()) = timer.as_mut().poll(cx) {
            let now = on_the_way();
            let Some(before) = self.on_the_way.replace(now) else {
                timer.as_mut().reset(Instant::now() + (limit - first));
                continue;
            };
            self.moved |= now < before;
            if !std::mem::take(&mut self.moved) {
                self.timer = None;
                return true;
            }
            timer.as_mut().reset(Instant::now() + limit);
        }
        false
    }
}
