//! The log line of a failed dial, and its counter: one of each for a dial, at the end that saw it fail.

use std::fmt;

use crate::access::cut;
use crate::families::{Counters, Registrar};
use crate::labels::{DialReason, DialStage, Label as _, Path};
use crate::rate::EventLimit;

/// Target of these lines, for filters.
const TARGET: &str = "adit::dial";
/// Lines a second in the long run.
const LINES_PER_SECOND: u32 = 10;
/// Lines at once.
const LINES_BURST: u32 = 50;

/// A dial that failed.
#[derive(Clone, Copy, Debug)]
pub struct FailedDial<'a> {
    /// host:port as the client asked for it. A peer's text: cut and escaped here.
    pub destination: &'a str,
    /// Why it failed.
    pub reason: DialReason,
    /// How far it had come.
    pub stage: DialStage,
    /// The whole error, in words. May be a peer's text: cut and escaped here.
    pub error: &'a str,
    /// The agent that dialled or was to dial; `None` where no agent was asked.
    pub agent: Option<&'a str>,
    /// What the request travelled on; `None` where it was sent to no agent.
    pub path: Option<Path>,
}

/// Counts failed dials and logs them, a bounded number of lines a second.
pub(super) struct FailedDials {
    limit: EventLimit,
    failures: Counters<DialReason>,
}

impl FailedDials {
    pub(super) fn register(families: &Registrar<'_>) -> Self {
        let suppressed = families.counter(
            "dial_failures_suppressed_total",
            "Failed dials that were counted but not logged because of the rate limit",
        );
        Self {
            limit: EventLimit::new(LINES_PER_SECOND, LINES_BURST, suppressed),
            failures: families.counters_from_zero(
                "dial_failures_total",
                "Dials that failed, by reason; a dial that its client called off is no failure",
                "reason",
            ),
        }
    }

    /// Counts and logs one. The line says how many were not logged before it.
    pub(super) fn record(&self, dial: &FailedDial<'_>) {
        self.failures.of(dial.reason).inc();
        if !tracing::enabled!(target: TARGET, tracing::Level::WARN) {
            return;
        }
        let Some(suppressed) = self.limit.admit() else {
            return;
        };
        tracing::warn!(
            target: TARGET,
            destination = cut(dial.destination),
            reason = dial.reason.as_str(),
            stage = dial.stage.as_str(),
            error = cut(dial.error),
            agent = dial.agent.map(cut),
            path = dial.path.map(|path| path.as_str()),
            suppressed = (suppressed > 0).then_some(suppressed),
            "dial failed"
        );
    }
}

impl fmt::Debug for FailedDials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FailedDials")
    }
}
