//! How fast the agent of a link answers dials.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::{HEDGE_AFTER_MAX, HEDGE_AFTER_MEDIANS, HEDGE_AFTER_MIN};
use crate::session::Moment;

/// Number of answers in the median.
const SAMPLES: usize = 15;

/// Answer times of the dials on one link, shared by all dials of the link. Each update is atomic by itself; a median that is
/// off by one sample does no harm.
#[derive(Debug, Default)]
pub struct AnswerTimes {
    /// Since when a dial is unanswered: microseconds after the epoch, plus 1. 0: no dial is unanswered.
    unanswered: AtomicU64,
    /// The latest answer times in microseconds, plus 1. 0: no answer yet.
    samples: [AtomicU64; SAMPLES],
    next: AtomicUsize,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).map_or(u64::MAX, |micros| micros.saturating_add(1))
}

impl AnswerTimes {
    /// A dial is sent.
    pub fn sent(&self, now: Moment) {
        // Only the first unanswered dial counts.
        let _earlier = self
            .unanswered
            .compare_exchange(0, micros(now.0), Relaxed, Relaxed);
    }

    /// The agent answered a dial with success or failure, so the agent is not silent.
    pub fn answered(&self, asked: Moment, now: Moment) {
        self.heard();
        let at = self.next.fetch_add(1, Relaxed) % SAMPLES;
        if let Some(sample) = self.samples.get(at) {
            sample.store(micros(now.since(asked)), Relaxed);
        }
    }

    /// The agent answered a cancelled dial.
    pub fn heard(&self) {
        self.unanswered.store(0, Relaxed);
    }

    /// When a dial sent at `asked` may be hedged: after 10 times the median answer time, clamped to 200 ms to 2 s. The time
    /// counts from the link's first unanswered dial, including dials that clients gave up. The dial itself waits at least 200
    /// ms.
    #[must_use]
    pub fn hedge_at(&self, asked: Moment) -> Moment {
        let unanswered = match self.unanswered.load(Relaxed) {
            0 => asked,
            since => Moment(Duration::from_micros(since - 1)),
        };
        let due = unanswered.after(self.hedge_after());
        due.max(asked.after(HEDGE_AFTER_MIN))
    }

    fn hedge_after(&self) -> Duration {
        let mut samples = [0; SAMPLES];
        let mut count = 0;
        for (sample, known) in samples.iter_mut().zip(&self.samples) {
            *sample = known.load(Relaxed);
            count += usize::from(*sample > 0);
        }
        if count == 0 {
            return HEDGE_AFTER_MAX;
        }
        // Missing samples are 0 and sort first.
        samples.sort_unstable();
        let median = samples.get(SAMPLES - count + count / 2).copied();
        let median = Duration::from_micros(median.unwrap_or(u64::MAX));
        median
            .saturating_mul(HEDGE_AFTER_MEDIANS)
            .clamp(HEDGE_AFTER_MIN, HEDGE_AFTER_MAX)
    }
}
