//! Series of the transparent frontend: state of the redirect, calls seen, connections refused.

use adit_ebpf_abi::CALL_OUTCOMES;
use prometheus::{IntCounter, IntCounterVec, IntGauge};

use crate::families::{Counters, Gauges, Registrar};
use crate::labels::{
    Label as _, NetnsHelperState, NetnsState, RedirectRefusal, RedirectState, ReloadResult,
};

/// Handles, all at zero from the start.
pub struct RedirectMetrics {
    state: Gauges<RedirectState>,
    rules: IntGauge,
    reloads: Counters<ReloadResult>,
    helper: Gauges<NetnsHelperState>,
    namespaces: Gauges<NetnsState>,
    calls: IntCounterVec,
    refused: Counters<RedirectRefusal>,
}

impl RedirectMetrics {
    pub(super) fn register(families: &Registrar<'_>) -> Self {
        let metrics = Self {
            state: families.gauges_from_zero(
                "redirect_state",
                "State of the eBPF redirect: 1 for the current state. The log and /readyz?verbose name the missing requirement",
                "state",
            ),
            rules: families.gauge("redirect_rules", "Redirect rules in the kernel, including exclusions"),
            reloads: families.counters_from_zero(
                "redirect_reloads_total",
                "Reloads of the redirect rule file, by result",
                "result",
            ),
            helper: families.gauges_from_zero(
                "redirect_netns_helper",
                "State of the helper that opens listeners in other network namespaces: 1 for the current state",
                "state",
            ),
            namespaces: families.gauges_from_zero(
                "redirect_namespaces",
                "Other network namespaces of captured processes, by state of their listener",
                "state",
            ),
            calls: families.counter_vec(
                "redirect_calls_total",
                "Calls of connect(2) in the captured cgroup, by outcome: redirected, no_rule, excluded, exempt, no_listener, listener_gone, not_stored, not_tcp or denied",
                &["outcome"],
            ),
            refused: families.counters_from_zero(
                "redirect_refused_total",
                "Connections to a transparent listener that were refused and closed, by reason",
                "reason",
            ),
        };
        for (_, name) in CALL_OUTCOMES {
            metrics.calls.with_label_values(&[name]).inc_by(0);
        }
        metrics.set_state(RedirectState::Off);
        metrics.set_helper(NetnsHelperState::Off);
        metrics
    }

    /// Sets the state of the redirect.
    pub fn set_state(&self, state: RedirectState) {
        for other in [
            RedirectState::Off,
            RedirectState::Active,
            RedirectState::Missing,
        ] {
            self.state.of(other).set(i64::from(other == state));
        }
    }

    /// Sets the number of active rules.
    pub fn set_rules(&self, count: usize) {
        self.rules.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The rule file was reloaded.
    pub fn reloaded(&self, result: ReloadResult) {
        self.reloads.of(result).inc();
    }

    /// Sets the state of the helper.
    pub fn set_helper(&self, state: NetnsHelperState) {
        for other in NetnsHelperState::ALL {
            self.helper.of(*other).set(i64::from(*other == state));
        }
    }

    /// Sets the number of other network namespaces in this state.
    pub fn set_namespaces(&self, state: NetnsState, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.namespaces.of(state).set(count);
    }

    /// Sets the calls since the programs were loaded, once per process.
    pub fn set_calls(&self, outcome: &'static str, calls: u64) {
        let counter: IntCounter = self.calls.with_label_values(&[outcome]);
        counter.inc_by(calls.saturating_sub(counter.get()));
    }

    /// A connection was closed.
    pub fn refused(&self, why: RedirectRefusal) {
        self.refused.of(why).inc();
    }
}
