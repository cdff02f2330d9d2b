//! Parts that use eBPF: the redirect of servers and agents, accounting, and probes of the host.
//!
//! A build without the cargo feature `ebpf` uses `no_ebpf.rs` instead.

mod capture;
pub(crate) mod check;
mod netns;
mod node;
mod origin;
mod rules;
mod table;
mod watch;

use std::sync::Arc;

use adit_account::Options;
use adit_config::NetnsHelperOptions;
use adit_config::plan::AccountPlan;
use adit_net::accounts::Accounts;
use adit_net::tasks::Tasks;
use adit_redirect::namespaces;
use adit_redirect::object::KernelError;
use adit_telemetry::AditMetrics;

pub(crate) use self::capture::Captured;
#[cfg(feature = "demo")]
pub(crate) use self::check::lacks;
pub(crate) use self::node::NodeRedirect;
pub(crate) use adit_redirect::caps::maps_need_capability;

/// Why this binary has no eBPF; `None`: it has.
pub(crate) const NOT_BUILT: Option<&str> = None;

/// Starts accounting; also returns the program's id.
///
/// # Errors
/// The host lacks a requirement of accounting.
pub(crate) fn account(
    plan: AccountPlan,
    metrics: &AditMetrics,
    services: &Tasks,
) -> Result<(Accounts, u32), KernelError> {
    let series_max = usize::try_from(plan.series_max).unwrap_or(usize::MAX);
    let options = Options::with_series_max(series_max);
    let (table, reader) = adit_account::start(options, metrics.account().clone())?;
    services.spawn_always("account", reader.run());
    let program = table.program().unwrap_or_default();
    Ok((Accounts::new(Arc::new(table)), program))
}

/// Runs the helper of a redirect in other network namespaces.
///
/// # Errors
/// Why the helper ends.
pub(crate) fn netns_helper(options: &NetnsHelperOptions) -> Result<(), String> {
    namespaces::helper::run(options)
}
