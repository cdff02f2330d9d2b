//! Series of the transparent frontend: state of the redirect, calls it saw, connections it refused.

use adit_ebpf_abi::CALL_OUTCOMES;
use prometheus::{IntCounter, IntCounterVec, IntGauge};

use super::families::{Counters, Gauges, Registrar};
use super::labels::{RedirectRefusal, RedirectState};

/// Handles, all at zero from the start.
pub struct RedirectMetrics {
    state: Gauges<RedirectState>,
    rules: IntGauge,
    calls: IntCounterVec,
    refused: Counters<RedirectRefusal>,
}

impl RedirectMetrics {
    pub(super) fn register(families: &Registrar<'_>) -> Self {
        let metrics = Self {
            state: families.gauges_from_zero(
                "redirect_state",
                "1 for what the redirect by eBPF is: off, active, or missing something; the log and /readyz?verbose say what",
                "state",
            ),
            rules: families.gauge("redirect_rules", "Rules in the kernel, exclusions included"),
            calls: families.counter_vec(
                "redirect_calls_total",
                "Calls of connect in the captured cgroup, by what became of them",
                &["outcome"],
            ),
            refused: families.counters_from_zero(
                "redirect_refused_total",
                "Connections to a transparent listener that were closed, by reason",
                "reason",
            ),
        };
        for (_, name) in CALL_OUTCOMES {
            metrics.calls.with_label_values(&[name]).inc_by(0);
        }
        metrics.set_state(RedirectState::Off);
        metrics
    }

    /// What the redirect is now.
    pub fn set_state(&self, state: RedirectState) {
        for other in [
            RedirectState::Off,
            RedirectState::Active,
            RedirectState::Missing,
        ] {
            self.state.of(other).set(i64::from(other == state));
        }
    }

    /// Rules in force.
    pub fn set_rules(&self, count: usize) {
        self.rules.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Calls since the programs were loaded, which is once in the life of this process.
    pub fn set_calls(&self, outcome: &'static str, calls: u64) {
        let counter: IntCounter = self.calls.with_label_values(&[outcome]);
        counter.inc_by(calls.saturating_sub(counter.get()));
    }

    /// A connection was closed.
    pub fn refused(&self, why: RedirectRefusal) {
        self.refused.of(why).inc();
    }
}
