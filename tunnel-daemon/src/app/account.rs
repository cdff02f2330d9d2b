//! Accounting in the kernel: whether it is there, why not, and who reads its numbers.

use crate::config::plan::{AccountMode, AccountPlan};
use crate::ebpf::account::{self, Accounts, Options};
use crate::net::tasks::Tasks;
use crate::telemetry::AditMetrics;

/// Begins to account, if that is wanted and possible; what became of it, for `/readyz?verbose`.
///
/// Never a reason not to start: what is missing is said once.
pub(super) fn start(
    plan: AccountPlan,
    metrics: &AditMetrics,
    services: &Tasks,
) -> (Accounts, String) {
    if plan.mode == AccountMode::Off {
        return (Accounts::off(), "[+]account off\n".to_owned());
    }
    let series_max = usize::try_from(plan.series_max).unwrap_or(usize::MAX);
    let options = Options::with_series_max(series_max);
    match account::start(options, metrics.account().clone()) {
        Ok((accounts, reader)) => {
            services.spawn_always("account", reader.run());
            let program = accounts.program().unwrap_or_default();
            tracing::info!(program, "the kernel accounts for connections");
            (accounts, format!("[+]account on: eBPF program {program}\n"))
        }
        Err(error) => {
            if plan.mode == AccountMode::On {
                tracing::warn!(%error, "the kernel does not account for connections");
            } else {
                tracing::info!(%error, "the kernel does not account for connections");
            }
            (
                Accounts::off(),
                format!("[+]account unavailable: {error}\n"),
            )
        }
    }
}
