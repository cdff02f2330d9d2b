//! Flags of accounting in the kernel, the same on server and agent.

use crate::limits;
use crate::plan::{AccountMode, AccountPlan};

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Accounting")]
pub(super) struct AccountFlags {
    /// Count bytes, round-trip time and retransmissions of connections in the kernel by eBPF: off, auto (where the host
    /// allows it) or on (warn if it does not)
    #[arg(long, value_name = "MODE", default_value = "off")]
    account: AccountMode,
    /// Sets of labels (role, agent, destination class) that accounting makes series for; what is more is counted as other
    #[arg(long, value_name = "N", default_value_t = limits::ACCOUNT_SERIES, value_parser = clap::value_parser!(u32).range(..=i64::from(limits::ACCOUNT_SERIES_MAX)))]
    account_series_max: u32,
}

impl AccountFlags {
    pub(super) fn plan(&self) -> AccountPlan {
        AccountPlan {
            mode: self.account,
            series_max: self.account_series_max,
        }
    }
}
