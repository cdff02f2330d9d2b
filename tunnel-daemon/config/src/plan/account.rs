//! The plan of kernel accounting.

use std::str::FromStr;

use crate::limits;
use crate::units::number;

/// When to account in the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AccountMode {
    /// Never.
    #[default]
    Off,
    /// Where the host allows it.
    Auto,
    /// Always; if the host does not allow it, the program warns and starts without it.
    On,
}

impl FromStr for AccountMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            _ => Err(format!("{text:?} is not known: write off, auto or on")),
        }
    }
}

/// Kernel accounting of connections.
#[derive(clap::Args, Clone, Copy, PartialEq, Eq, Debug, Default)]
#[command(next_help_heading = "Accounting")]
pub struct AccountPlan {
    /// Count bytes, round-trip time and retransmissions of connections in the kernel by eBPF: off, auto (where the host
    /// allows it) or on (warn if it does not)
    #[arg(long = "account", value_name = "MODE", default_value = "off")]
    pub mode: AccountMode,
    /// Label sets (role, agent, destination class) with series of their own; further ones are counted as other. Raise it for
    /// many agents, within what the metrics store can take
    #[arg(long = "account-series-max", value_name = "N", default_value_t = limits::ACCOUNT_SERIES,
          value_parser = number(0..=limits::ACCOUNT_SERIES_MAX))]
    pub series_max: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_account_modes_list_the_known_ones() {
        assert_eq!("off".parse(), Ok(AccountMode::Off));
        assert_eq!("auto".parse(), Ok(AccountMode::Auto));
        assert_eq!("on".parse(), Ok(AccountMode::On));
        for text in ["", "ON", "true"] {
            let error = text.parse::<AccountMode>().unwrap_err();
            assert!(error.contains("off, auto or on"), "{error}");
        }
    }
}
