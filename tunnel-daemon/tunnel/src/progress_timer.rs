//! A timer that runs out where nothing moves.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// When the bytes in flight are first counted, by a system call: most timers are stopped sooner. What moves until then is not seen
/// unless [`ProgressTimer::moved`] tells of it.
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
        let first = COUNTED_AFTER.min(limit / 2);
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

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    /// When a timer of 10 s runs out, with so many bytes in flight at each count, of which the last one is repeated.
    async fn runs_out_after(counts: &[usize]) -> Duration {
        let (start, mut timer) = (Instant::now(), ProgressTimer::default());
        let asked = std::cell::Cell::new(0);
        std::future::poll_fn(|cx| {
            let count = || {
                let at = asked.replace(asked.get() + 1);
                counts
                    .get(at)
                    .or_else(|| counts.last())
                    .copied()
                    .unwrap_or(0)
            };
            if timer.has_run_out(cx, LIMIT, count) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_that_the_peer_takes_are_progress() {
        assert_eq!(runs_out_after(&[0]).await, LIMIT);
        assert_eq!(runs_out_after(&[7]).await, LIMIT);
        assert_eq!(runs_out_after(&[9, 8, 7]).await, 3 * LIMIT);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_told_is_progress_once() {
        let (start, mut timer) = (Instant::now(), ProgressTimer::default());
        std::future::poll_fn(|cx| {
            let is_new = timer.timer.is_none();
            if timer.has_run_out(cx, LIMIT, || 0) {
                return Poll::Ready(());
            }
            if is_new {
                timer.moved();
            }
            Poll::Pending
        })
        .await;
        assert_eq!(start.elapsed(), 2 * LIMIT);
    }
}
