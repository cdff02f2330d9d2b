//! Series of the transparent frontend: state of the redirect, calls seen, connections refused.

use adit_ebpf_abi::CALL_OUTCOMES;
use prometheus::{IntCounter, IntCounterVec};

use crate::families::{Counters, Gauge, Gauges, Registrar, families};
use crate::labels::{
    Label as _, NetnsHelperState, NetnsState, RedirectRefusal, RedirectState, ReloadResult,
};

families! {
    /// Handles, all at zero from the start.
    pub struct RedirectMetrics(families) {
        /// State of the eBPF redirect: 1 for the current state. The log and /readyz?verbose name the missing requirement
        state: Gauges<RedirectState> = families.gauges_from_zero("redirect_state", "state"),
        /// Redirect rules in the kernel, including exclusions
        rules: Gauge = families.gauge("redirect_rules"),
        /// Reloads of the redirect rule file, by result
        reloads: Counters<ReloadResult> = families.counters_from_zero("redirect_reloads_total", "result"),
        /// State of the helper that opens listeners in other network namespaces: 1 for the current state
        helper: Gauges<NetnsHelperState> = families.gauges_from_zero("redirect_netns_helper", "state"),
        /// Other network namespaces of captured processes, by state of their listener
        namespaces: Gauges<NetnsState> = families.gauges_from_zero("redirect_namespaces", "state"),
        /// Calls of connect(2) in the captured cgroup, by outcome: redirected, no_rule, excluded, exempt, no_listener, listener_gone, not_stored, not_tcp or
        /// denied
        calls: IntCounterVec = families.counter_vec("redirect_calls_total", &["outcome"]),
        /// Connections to a transparent listener that were refused and closed, by reason
        refused: Counters<RedirectRefusal> = families.counters_from_zero("redirect_refused_total", "reason"),
    }
}

impl RedirectMetrics {
    pub(super) fn register(families: &Registrar<'_>) -> Self {
        let metrics = Self::declare(families);
        for (_, name) in CALL_OUTCOMES {
            metrics.calls.with_label_values(&[name]).inc_by(0);
        }
        metrics.set_state(RedirectState::Off);
        metrics.set_helper(NetnsHelperState::Off);
        metrics
    }

    /// Sets the state of the redirect.
    pub fn set_state(&self, state: RedirectState) {
        for other in RedirectState::ALL {
            self.state.of(*other).set(i64::from(*other == state));
        }
    }

    /// Sets the state of the helper.
    pub fn set_helper(&self, state: NetnsHelperState) {
        for other in NetnsHelperState::ALL {
            self.helper.of(*other).set(i64::from(*other == state));
        }
    }

    /// Sets the calls since the programs were loaded, once per process.
    pub fn set_calls(&self, outcome: &'static str, calls: u64) {
        let counter: IntCounter = self.calls.with_label_values(&[outcome]);
        counter.inc_by(calls.saturating_sub(counter.get()));
    }
}
