//! The plan of the transparent frontend: which connections to capture, and where else they may arrive.

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use ipnet::IpNet;

use super::netns::NetnsPlan;
use super::rule_file::RuleFile;
use crate::address::BindAddress;
use crate::error::{ConfigError, bail};
use crate::limits;

/// Connections to a network, on one port or on all.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RedirectTarget {
    /// The network, with zero bits after its prefix.
    pub network: IpNet,
    /// `None`: all ports.
    pub port: Option<u16>,
}

impl fmt::Display for RedirectTarget {
    /// As written in flags and files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = self.network.prefix_len() == self.network.max_prefix_len();
        match (self.network, self.port) {
            (network, None) if one => write!(f, "{}", network.addr()),
            (network, None) => write!(f, "{network}"),
            (network, Some(port)) if one => SocketAddr::new(network.addr(), port).fmt(f),
            (IpNet::V4(network), Some(port)) => write!(f, "{network}:{port}"),
            (IpNet::V6(network), Some(port)) => write!(f, "[{network}]:{port}"),
        }
    }
}

/// What happens to captured calls when no listener takes them, because the server has ended or listens elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnFailure {
    /// They go to their original destination.
    #[default]
    Open,
    /// They are denied, even after this process has ended.
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

/// How to treat a captured process that connects to the agent port of its server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AgentCalls {
    /// As an agent: none of its later calls are redirected, since captured agents would cause a loop.
    #[default]
    Exempt,
    /// As before: this call goes to the server directly, and later calls are still redirected. So a process cannot leave the
    /// redirect.
    Captured,
}

impl std::str::FromStr for AgentCalls {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "exempt" => Ok(Self::Exempt),
            "captured" => Ok(Self::Captured),
            _ => Err(format!("{text:?} is not known: write exempt or captured")),
        }
    }
}

/// What the redirect captures.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RedirectPlan {
    /// Captured targets from flags; a file may add more.
    pub targets: Vec<RedirectTarget>,
    /// Exclusions from the targets.
    pub excluded: Vec<RedirectTarget>,
    /// The captured processes: those of this cgroup and of the cgroups below it.
    pub cgroup: PathBuf,
    /// What happens without a listener.
    pub on_failure: OnFailure,
    /// How to treat processes that connect to the agent port.
    pub agents: AgentCalls,
    /// A file with more targets and exclusions, reloaded when it changes.
    pub file: Option<PathBuf>,
    /// Other network namespaces in which to capture.
    pub netns: Option<NetnsPlan>,
}

impl RedirectPlan {
    /// This plan with the rules of a file added.
    ///
    /// # Errors
    /// Too many rules, or a target that is also excluded.
    pub fn with(&self, file: RuleFile) -> Result<Self, ConfigError> {
        let mut all = self.clone();
        all.targets.extend(file.targets);
        all.excluded.extend(file.excluded);
        all.check()?;
        Ok(all)
    }

    /// The target that captures a call to an address, ignoring exclusions. Chosen as in the kernel: the longest prefix, and of
    /// equal prefixes the one with the port.
    #[must_use]
    pub fn target_of(&self, address: SocketAddr) -> Option<&RedirectTarget> {
        let ip = address.ip().to_canonical();
        let fits = |target: &&RedirectTarget| {
            target.network.contains(&ip) && target.port.is_none_or(|port| port == address.port())
        };
        let fitting = self.targets.iter().filter(fits);
        fitting.max_by_key(|target| (target.network.prefix_len(), target.port.is_some()))
    }

    fn check(&self) -> Result<(), ConfigError> {
        let rules = self.targets.len() + self.excluded.len();
        if rules > limits::REDIRECT_RULES_MAX {
            let max = limits::REDIRECT_RULES_MAX;
            bail!(
                "{rules} values of --redirect and --redirect-exclude are too many: at most {max}"
            );
        }
        let excluded: HashSet<&RedirectTarget> = self.excluded.iter().collect();
        if let Some(both) = self.targets.iter().find(|target| excluded.contains(target)) {
            bail!("--redirect and --redirect-exclude both name {both}: drop one");
        }
        Ok(())
    }
}

/// Connections whose destination is known from Adit's eBPF programs or from the operator's packet filter.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TransparentPlan {
    /// Captured by eBPF programs; `None`: off.
    pub redirect: Option<RedirectPlan>,
    /// Listener for connections redirected by the operator's packet filter; `None`: off.
    pub bind: Option<BindAddress>,
}

impl TransparentPlan {
    /// Whether any client may connect this way.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.redirect.is_some() || self.bind.is_some()
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        self.redirect.as_ref().map_or(Ok(()), RedirectPlan::check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_matches_the_same_target_as_in_the_kernel() {
        let targets = [
            "0.0.0.0/0",
            "10.0.0.0/8",
            "10.0.0.0/8:443",
            "10.1.0.0/16",
            "[fd00::/8]:53",
            "fd00::7",
        ];
        let plan = RedirectPlan {
            targets: targets.iter().map(|text| text.parse().unwrap()).collect(),
            excluded: Vec::new(),
            cgroup: PathBuf::new(),
            on_failure: OnFailure::Open,
            agents: AgentCalls::Exempt,
            file: None,
            netns: None,
        };
        for (address, expected) in [
            ("10.2.0.1:80", Some("10.0.0.0/8")),
            ("10.2.0.1:443", Some("10.0.0.0/8:443")),
            ("10.1.0.1:443", Some("10.1.0.0/16")),
            ("[::ffff:10.1.0.1]:1", Some("10.1.0.0/16")),
            ("192.0.2.1:1", Some("0.0.0.0/0")),
            ("[fd00::1]:53", Some("[fd00::/8]:53")),
            ("[fd00::1]:54", None),
            ("[fd00::7]:54", Some("fd00::7")),
        ] {
            let found = plan.target_of(address.parse().unwrap());
            let found = found.map(ToString::to_string);
            assert_eq!(found.as_deref(), expected, "{address}");
        }
    }
}
