//! Idle lanes that are not to be kept: given up for others that need descriptors, or by their agent.

use std::sync::Arc;
use std::task::{Context, Waker};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{LanePool, Waiting};
use adit_telemetry::labels::LaneEnd;

/// Lanes asked about in one call: some tens of microseconds.
const GLANCE_LANES: usize = 256;

/// Asks and does not wait.
const AT_ONCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

impl LanePool {
    /// Lanes bound now, those with a tunnel included.
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

    /// Closes up to so many idle lanes, those first that waited longest; returns how many. Their agent is told, so that it
    /// does not take them for lost.
    pub fn give_up(&self, lanes: usize) -> usize {
        let mut idle = self.lock();
        let count = lanes.min(idle.lanes.len());
        let closing: Vec<Waiting> = idle.lanes.drain(..count).collect();
        drop(idle);
        for Waiting { mut lane, .. } in closing {
            lane.end().drain();
            // One that takes nothing now is closed all the same.
            let _flushed = lane.poll_flush(&mut Context::from_waker(Waker::noop()));
            self.settings.metrics.lane_closed(LaneEnd::Descriptors);
        }
        count
    }

    /// Reads idle lanes whose agents said something, and closes those that they gave up or lost. No task waits for an idle
    /// lane, so nobody else notices; and one system call tells for hundreds. Call it every second.
    pub async fn poll_idle(self: &Arc<Self>) {
        let mut from = 0;
        loop {
            // Without the budget of a task, as in a sweep.
            let looked = tokio::task::unconstrained(async { self.glance_from(from) }).await;
            let Some(kept) = looked else { return };
            from += kept;
            tokio::task::yield_now().await;
        }
    }

    /// Looks at some lanes from there on; how many of them said nothing, or `None` at the end.
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
        // Those put back are the last ones now, and are not to be looked at for ever.
        (to - from == GLANCE_LANES && kept > 0).then_some(kept)
    }
}

/// Which lanes have something to be read, an end or an error included; `None` without lanes or an answer.
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
