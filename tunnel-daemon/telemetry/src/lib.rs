//! Logs, metrics and per-tunnel guards.
//!
//! Owns every series name, label and log format. Knows nothing of sockets, sessions or HTTP: it makes the text of a scrape, and
//! other packages serve it.
#![deny(unsafe_code)]

pub mod access;
mod agent_dials;
pub mod debug;
mod dial_counts;
pub mod exposition;
mod failed_dials;
pub mod families;
#[cfg(test)]
#[path = "../../generated_page.rs"]
mod generated_page;
pub mod guard;
pub mod labels;
pub mod log;
mod logfmt;
pub mod masked;
pub mod metrics_account;
pub mod metrics_adit;
pub mod metrics_agent;
pub mod metrics_lease;
pub mod metrics_redirect;
pub mod metrics_review;
pub mod metrics_server;
pub mod packets;
mod peers;
pub mod rate;
mod sink;
#[cfg(test)]
mod tests;
pub mod tunnels;
mod versions;

/// Version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// First digits of the commit that the program was built from, or `unknown`.
pub const COMMIT: &str = {
    let recorded = env!("ADIT_COMMIT");
    if recorded.is_empty() {
        "unknown"
    } else {
        recorded
    }
};

pub use access::{AccessLog, AccessOutcome, TunnelFlow, TunnelRecord, cut};
pub use agent_dials::{AgentDialCounts, AgentDials};
pub use debug::DebugLog;
pub use dial_counts::DialCounts;
pub use exposition::Scrape;
pub use failed_dials::FailedDial;
pub use guard::GaugeGuard;
pub use log::{LogError, LogGuard, LogOptions};
pub use masked::Masked;
pub use metrics_account::{AccountCounts, AccountMetrics, AccountSeries, OpenRtt, TENANT};
pub use metrics_adit::{AditMetrics, CountedTunnel};
pub use metrics_agent::AgentMetrics;
pub use metrics_redirect::RedirectMetrics;
pub use metrics_server::{OpenTunnel, ServerMetrics};
pub use packets::PacketCounter;
pub use peers::PeerSeries;
pub use tunnels::{LiveTunnel, OpenTunnels, TunnelEntry, TunnelFacts, TunnelSide};
