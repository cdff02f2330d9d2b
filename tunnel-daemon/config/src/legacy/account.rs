//! Our flags for accounting in the kernel, taken beside those of upstream's programs.

use super::pflag::{Flag, Slot};
use super::server_check::fail;
use crate::error::ConfigError;
use crate::limits;
use crate::plan::AccountPlan;

/// As typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AccountOptions {
    pub(super) account: String,
    pub(super) series_max: i64,
}

impl Default for AccountOptions {
    fn default() -> Self {
        Self {
            account: "off".to_owned(),
            series_max: i64::from(limits::ACCOUNT_SERIES),
        }
    }
}

impl AccountOptions {
    pub(super) fn flags(&mut self) -> [Flag<'_>; 2] {
        [
            Flag::new(
                "account",
                Slot::Text(&mut self.account),
                "count bytes, round-trip time and retransmissions of connections in the kernel by eBPF: off, auto or on",
            ),
            Flag::new(
                "account-series-max",
                Slot::Int(&mut self.series_max),
                "sets of labels that accounting makes series for",
            ),
        ]
    }

    /// Checks and maps.
    pub(super) fn plan(&self) -> Result<AccountPlan, ConfigError> {
        let max = limits::ACCOUNT_SERIES_MAX;
        let series_max = match u32::try_from(self.series_max) {
            Ok(sets) if sets <= max => sets,
            _ => {
                let value = self.series_max;
                return fail(format!(
                    "--account-series-max {value} must be between 0 and {max}"
                ));
            }
        };
        let mode = self.account.parse();
        Ok(AccountPlan {
            mode: mode.map_err(|why| ConfigError::new(format!("--account: {why}")))?,
            series_max,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::AccountMode;

    #[test]
    fn values_out_of_range_name_the_flag() {
        let plan = |account: &str, series_max| {
            let account = account.to_owned();
            AccountOptions {
                account,
                series_max,
            }
            .plan()
        };
        let expected = AccountPlan {
            mode: AccountMode::On,
            series_max: 0,
        };
        assert_eq!(plan("on", 0).unwrap(), expected);
        for (account, series_max, flag) in [
            ("maybe", 1, "--account:"),
            ("on", -1, "--account-series-max"),
            ("on", 10_001, "--account-series-max"),
        ] {
            let error = plan(account, series_max).unwrap_err().to_string();
            assert!(error.contains(flag), "{error}");
        }
        assert_eq!(
            AccountOptions::default().plan().unwrap().mode,
            AccountMode::Off
        );
    }
}
