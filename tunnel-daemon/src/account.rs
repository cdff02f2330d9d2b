//! Accounting in the kernel: starts it, and reports its state and the reason.

use crate::ebpf;
use crate::status::model::AccountStatus;
use adit_config::plan::{AccountMode, AccountPlan};
use adit_net::accounts::Accounts;
use adit_net::tasks::Tasks;
use adit_telemetry::AditMetrics;

/// State where the plan asks for accounting and this host does not allow it.
const UNAVAILABLE: &str = "unavailable";

/// Starts accounting, if the plan asks for it and the host allows it. Returns the accounts and their state.
///
/// A failure does not keep the process from starting: it is logged once.
pub(super) fn start(
    plan: AccountPlan,
    metrics: &AditMetrics,
    services: &Tasks,
) -> (Accounts, AccountStatus) {
    let status = |state: &str, reason| AccountStatus {
        state: state.to_owned(),
        reason,
    };
    if plan.mode == AccountMode::Off {
        return (Accounts::off(), status("off", None));
    }
    match ebpf::account(plan, metrics, services) {
        Ok((accounts, program)) => {
            tracing::info!(program, "the kernel accounts for connections");
            let reason = format!("eBPF program {program}");
            (accounts, status("on", Some(reason)))
        }
        Err(error) => {
            if plan.mode == AccountMode::On {
                tracing::warn!(%error, "the kernel does not account for connections");
            } else {
                tracing::info!(%error, "the kernel does not account for connections");
            }
            let reason = error.to_string();
            (Accounts::off(), status(UNAVAILABLE, Some(reason)))
        }
    }
}

/// The line of `/readyz?verbose` about accounting.
pub(super) fn line(status: &AccountStatus) -> String {
    let is_missing = status.state == UNAVAILABLE;
    let sign = if is_missing { '-' } else { '+' };
    let colon = status.reason.as_ref().map_or("", |_reason| ": ");
    let reason = status.reason.as_deref().unwrap_or_default();
    format!("[{sign}]account {}{colon}{reason}\n", status.state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unavailable_accounting_is_marked_with_a_minus() {
        let line_of = |state: &str, reason: Option<&str>| {
            line(&AccountStatus {
                state: state.to_owned(),
                reason: reason.map(str::to_owned),
            })
        };
        assert_eq!(line_of("off", None), "[+]account off\n");
        let on = line_of("on", Some("eBPF program 7"));
        assert_eq!(on, "[+]account on: eBPF program 7\n");
        let unavailable = line_of(UNAVAILABLE, Some("no"));
        assert_eq!(unavailable, "[-]account unavailable: no\n");
    }
}
