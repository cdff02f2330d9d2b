//! Logs and counts failed dials: once per dial, at the end where the dial failed.

use std::fmt;

use prometheus::IntCounter;

use crate::access::{agent_or_via, cut};
use crate::families::{Counters, Registrar, families};
use crate::labels::{DialReason, DialStage, Label as _, Path};
use crate::rate::EventLimit;

/// Target of these lines, for filters.
const TARGET: &str = "adit::dial";
/// Limit on lines per second, on average.
const LINES_PER_SECOND: u32 = 10;
/// Limit on lines at once.
const LINES_BURST: u32 = 50;

/// A failed dial.
#[derive(Clone, Copy, Debug)]
pub struct FailedDial<'a> {
    /// host:port as the client asked for it. A peer's text: truncated and escaped here.
    pub destination: &'a str,
    /// Why it failed.
    pub reason: DialReason,
    /// How far the dial had come.
    pub stage: DialStage,
    /// The full error text. May be a peer's text: truncated and escaped here.
    pub error: &'a str,
    /// The agent that dialled or was meant to; `None` if no agent was asked.
    pub agent: Option<&'a str>,
    /// What that agent has proved.
    pub principal: Option<&'a str>,
    /// The path of the request; `None` if no agent was sent one.
    pub path: Option<Path>,
}

/// Counts failed dials and logs them, up to a limit of lines per second.
pub(super) struct FailedDials {
    limit: EventLimit,
    families: DialFamilies,
}

families! {
    struct DialFamilies(families) {
        /// Failed dials that were counted but not logged because of the rate limit
        suppressed: IntCounter = families.counter("dial_failures_suppressed_total"),
        /// Failed dials, by reason; excludes dials cancelled by the client
        failures: Counters<DialReason> = families.counters_from_zero("dial_failures_total", "reason"),
    }
}

impl FailedDials {
    pub(super) fn register(families: &Registrar<'_>) -> Self {
        let families = DialFamilies::declare(families);
        let suppressed = families.suppressed.clone();
        Self {
            limit: EventLimit::new(LINES_PER_SECOND, LINES_BURST, suppressed),
            families,
        }
    }

    /// Counts and logs one failed dial. The line reports how many were not logged before it.
    pub(super) fn record(&self, dial: &FailedDial<'_>) {
        self.families.failures.count(dial.reason);
        if !tracing::enabled!(target: TARGET, tracing::Level::WARN) {
            return;
        }
        let Some(suppressed) = self.limit.admit() else {
            return;
        };
        let (agent, via) = agent_or_via(dial.agent, dial.path);
        tracing::warn!(
            target: TARGET,
            destination = cut(dial.destination),
            reason = dial.reason.as_str(),
            stage = dial.stage.as_str(),
            error = cut(dial.error),
            agent = agent.map(cut),
            via = via.map(cut),
            principal = dial.principal.map(cut),
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
