//! Idle lanes to be closed: for descriptors that other uses need, or because their agent closed them.

use std::sync::Arc;
use std::task::{Context, Waker};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{LanePool, Waiting};
use adit_telemetry::labels::LaneCloseReason;

/// Lanes polled in one system call: some tens of microseconds.
const GLANCE_LANES: usize = 256;

/// Polls without waiting.
const AT_ONCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

impl LanePool {
    /// Bound lanes, including those with a tunnel.
    #[must_use]
    pub fn lanes(&self) -> usize {
        let free = self.slots.available_permits();
        self.settings.lanes_max.saturating_sub(free)
    }

    /// Lanes that wait for a tunnel.
    #[must_use]
    pub fn idle_lanes(&self) -> usize {
        self.lock().lanes.len()
    }

    /// Closes up to `lanes` idle lanes, the longest idle first; returns how many. Each agent gets DRAIN, so that it does not
    /// count the lane as lost.
    pub fn give_up(&self, lanes: usize) -> usize {
        let mut idle = self.lock();
        let count = lanes.min(idle.lanes.len());
        let closing: Vec<Waiting> = idle.lanes.drain(..count).collect();
        drop(idle);
        for Waiting { mut lane, .. } in closing {
            lane.end().drain();
            // A lane that cannot be written now is closed all the same.
            let _flushed = lane.poll_flush(&mut Context::from_waker(Waker::noop()));
            self.closed(LaneCloseReason::Descriptors);
        }
        count
    }

    /// Reads idle lanes with input, and closes those that their agents closed or lost. No other task reads idle lanes, and one
    /// system call checks hundreds. Call it every second.
    pub async fn poll_idle(self: &Arc<Self>) {
        let mut from = 0;
        loop {
            // Outside the task's cooperative budget, as in `ping_idle`.
            let looked = tokio::task::unconstrained(async { self.glance_from(from) }).await;
            let Some(kept) = looked else { return };
            from += kept;
            tokio::task::yield_now().await;
        }
    }

    /// Checks lanes from index `from` on; returns how many of them had no input, or `None` at the end.
    fn glance_from(self: &Arc<Self>, from: usize) -> Option<usize> {
        let mut idle = self.lock();
        let to = idle.lanes.len().min(from + GLANCE_LANES);
        let speaks = speaking(idle.lanes.get(from..to)?)?;
        let mut speaks = speaks.into_iter();
        let speaking: Vec<Waiting> = idle
            .lanes
            .extract_if(from..to, |_waiting| speaks.next() == Some(true))
            .collect();
        drop(idle);
        let kept = to - from - speaking.len();
        let alive: Vec<Waiting> = speaking
            .into_iter()
            .filter_map(|waiting| self.usable(waiting))
            .collect();
        self.put_back(alive);
        // Lanes put back are at the end of the list; stopping after the first incomplete batch keeps them from being checked
        // for ever.
        (to - from == GLANCE_LANES && kept > 0).then_some(kept)
    }
}

/// Which lanes have input, EOF or an error; `None` without lanes or when the system call failed.
fn speaking(lanes: &[Waiting]) -> Option<Vec<bool>> {
    let flags = PollFlags::IN | PollFlags::RDHUP;
    let mut asked: Vec<PollFd<'_>> = lanes
        .iter()
        .filter_map(|waiting| Some(PollFd::new(waiting.lane.tcp()?, flags)))
        .collect();
    if asked.is_empty() || asked.len() != lanes.len() {
        return None;
    }
    poll(&mut asked, Some(&AT_ONCE)).ok()?;
    Some(
        asked
            .iter()
            .map(|asked| !asked.revents().is_empty())
            .collect(),
    )
}
