//! Strategies to find agents, and the operator's list of strategies.

use std::fmt;
use std::str::FromStr;

/// A strategy to find agents for a destination host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Strategy {
    /// Any agent.
    Default,
    /// Agents that claim exactly this host by an `ipv4`, `ipv6` or `host` identifier.
    DestHost,
    /// Agents that claim `default-route`.
    DefaultRoute,
    /// Agents with the longest `cidr` identifier that contains the address. Not in upstream.
    DestCidr,
}

impl Strategy {
    /// Every strategy, for metrics that exist from the process's start.
    pub const ALL: [Self; 4] = [
        Self::Default,
        Self::DestHost,
        Self::DefaultRoute,
        Self::DestCidr,
    ];

    /// The name on the command line and in the `proxy_strategy` label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::DestHost => "destHost",
            Self::DefaultRoute => "defaultRoute",
            Self::DestCidr => "destCIDR",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = StrategiesError;

    fn from_str(text: &str) -> Result<Self, StrategiesError> {
        let named = Self::ALL
            .into_iter()
            .find(|strategy| strategy.name() == text);
        named.ok_or_else(|| StrategiesError::Unknown(text.to_owned()))
    }
}

/// A list of strategies in the order they are tried; never empty, duplicates kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Strategies(Vec<Strategy>);

impl Strategies {
    /// The strategies in the order they are tried.
    pub fn iter(&self) -> impl Iterator<Item = Strategy> + '_ {
        self.0.iter().copied()
    }

    /// The first strategy, which decides readiness in compat mode.
    #[must_use]
    pub fn first(&self) -> Strategy {
        self.0.first().copied().unwrap_or(Strategy::Default)
    }

    /// Whether `strategy` is in the list.
    #[must_use]
    pub fn contains(&self, strategy: Strategy) -> bool {
        self.0.contains(&strategy)
    }
}

impl Default for Strategies {
    fn default() -> Self {
        Self(vec![Strategy::Default])
    }
}

impl FromStr for Strategies {
    type Err = StrategiesError;

    /// Reads a comma-separated list; empty items are skipped, names are case-sensitive.
    fn from_str(text: &str) -> Result<Self, StrategiesError> {
        let items = text.split(',').filter(|item| !item.is_empty());
        let list = items.map(str::parse).collect::<Result<Vec<_>, _>>()?;
        if list.is_empty() {
            Err(StrategiesError::Empty)
        } else {
            Ok(Self(list))
        }
    }
}

impl fmt::Display for Strategies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(Strategy::name).collect();
        f.write_str(&names.join(","))
    }
}

/// Why a list of strategies is refused. The first words are upstream's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StrategiesError {
    /// An unknown name.
    #[error("unknown proxy strategy: {0}")]
    Unknown(String),
    /// The list is empty.
    #[error("proxy strategies cannot be empty")]
    Empty,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Upstream (choice): Strategy lists keep order and repeats; unknown and empty ones are refused.
    #[test]
    fn a_list_keeps_order_and_duplicates_and_skips_empty_items() {
        let list: Strategies = ",destHost,,default,destCIDR,defaultRoute,default,"
            .parse()
            .unwrap();
        assert_eq!(
            list.to_string(),
            "destHost,default,destCIDR,defaultRoute,default"
        );
        assert_eq!(list.first(), Strategy::DestHost);
    }

    /// Upstream (choice): Strategy lists keep order and repeats; unknown and empty ones are refused.
    #[test]
    fn unknown_and_empty_lists_are_refused_in_upstreams_words() {
        let error = |text: &str| text.parse::<Strategies>().unwrap_err().to_string();
        assert_eq!(error("default,X"), "unknown proxy strategy: X");
        assert_eq!(error("Default"), "unknown proxy strategy: Default");
        assert_eq!(error(" default"), "unknown proxy strategy:  default");
        assert_eq!(error(""), "proxy strategies cannot be empty");
        assert_eq!(error(",,"), "proxy strategies cannot be empty");
    }
}
