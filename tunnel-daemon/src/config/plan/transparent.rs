//! The plan of connections that arrive without a dialect: which are captured, and where else they may come in.

use std::path::PathBuf;

use ipnet::IpNet;

use crate::config::address::BindAddress;
use crate::config::error::ConfigError;
use crate::config::limits;

/// Calls to a network, on one port or on all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RedirectTarget {
    /// The network, without bits behind its prefix.
    pub network: IpNet,
    /// `None`: all.
    pub port: Option<u16>,
}

/// What becomes of captured calls when nothing takes them, because the server is gone or listens elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnFailure {
    /// They go where they go.
    #[default]
    Open,
    /// They are denied, also after this process has ended.
    Closed,
}

impl std::str::FromStr for OnFailure {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "open" => Ok(Self::Open),
            "closed" => Ok(Self::Closed),
            _ => Err(format!("{text:?} is not known: write open or closed")),
        }
    }
}

/// What the redirect captures.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RedirectPlan {
    /// Captured; at least one.
    pub targets: Vec<RedirectTarget>,
    /// Left alone inside of them.
    pub excluded: Vec<RedirectTarget>,
    /// Processes of this cgroup and those below it.
    pub cgroup: PathBuf,
    /// Without a listener.
    pub on_failure: OnFailure,
}

/// Connections whose destination somebody else knows: our programs in the kernel, or the operator's packet filter.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TransparentPlan {
    /// Captured by eBPF programs; `None` is off.
    pub redirect: Option<RedirectPlan>,
    /// Sent here by rules of the operator's packet filter; `None` is off.
    pub bind: Option<BindAddress>,
}

impl TransparentPlan {
    /// Whether any client comes in this way.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.redirect.is_some() || self.bind.is_some()
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Some(redirect) = &self.redirect else {
            return Ok(());
        };
        let rules = redirect.targets.len() + redirect.excluded.len();
        if rules > limits::REDIRECT_RULES_MAX {
            let max = limits::REDIRECT_RULES_MAX;
            return Err(ConfigError::new(format!(
                "{rules} values of --redirect and --redirect-exclude are too many: at most {max}"
            )));
        }
        if let Some(both) = redirect
            .targets
            .iter()
            .find(|target| redirect.excluded.contains(target))
        {
            let port = both
                .port
                .map_or_else(String::new, |port| format!(":{port}"));
            return Err(ConfigError::new(format!(
                "--redirect and --redirect-exclude both name {}{port}: drop one",
                both.network
            )));
        }
        Ok(())
    }
}
