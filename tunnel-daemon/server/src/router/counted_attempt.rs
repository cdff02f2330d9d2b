//! The counts of an agent's dials.

use adit_config::limits;
use adit_core::failure::DialFailure;
use adit_telemetry::AgentDials;
use adit_telemetry::labels::{AgentDial, DialReason};
use tokio::time::Instant;

/// Counts an attempt for its agent, once. An attempt that is given up, by the client or for another agent's answer, counts if the
/// agent had its time to answer.
pub(super) struct CountedAttempt<'a> {
    dials: &'a AgentDials,
    since: Instant,
    outcome: Option<AgentDial>,
}

impl<'a> CountedAttempt<'a> {
    pub(super) fn new(dials: &'a AgentDials) -> Self {
        Self {
            dials,
            since: Instant::now(),
            outcome: None,
        }
    }

    /// The agent answered, or the attempt failed otherwise.
    pub(super) fn ended(&mut self, failure: Option<&DialFailure>) {
        let refused = |failure| DialReason::of_failure(failure).0 == DialReason::Refused;
        self.outcome = Some(match failure {
            Some(failure) if !refused(failure) => AgentDial::Failed,
            _ if self.is_slow() => AgentDial::Slow,
            _ => AgentDial::Answered,
        });
    }

    fn is_slow(&self) -> bool {
        self.since.elapsed() > limits::SLOW_DIAL
    }
}

impl Drop for CountedAttempt<'_> {
    fn drop(&mut self) {
        let given_up = || self.is_slow().then_some(AgentDial::Slow);
        if let Some(outcome) = self.outcome.or_else(given_up) {
            self.dials.count(outcome);
        }
    }
}
