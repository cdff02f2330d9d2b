//! Names of the ways a server chooses an agent, in the order of `--proxy-strategies` (compat 7).

use crate::error::ConfigError;

/// One entry of `--proxy-strategies`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StrategyKind {
    /// Any agent, at random.
    Default,
    /// An agent that names the destination host among its identifiers.
    DestHost,
    /// An agent that says it is a default route.
    DefaultRoute,
    /// The agent with the longest matching prefix among its `cidr` identifiers; not in upstream.
    DestCidr,
}

impl StrategyKind {
    /// Every name, as flags and metrics spell them.
    pub const ALL: [Self; 4] = [
        Self::Default,
        Self::DestHost,
        Self::DefaultRoute,
        Self::DestCidr,
    ];

    /// The name in flags and metric labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::DestHost => "destHost",
            Self::DefaultRoute => "defaultRoute",
            Self::DestCidr => "destCIDR",
        }
    }

    /// Reads an ordered comma list: empty items are skipped, repeats kept, names are case-sensitive.
    ///
    /// # Errors
    /// An unknown name, or nothing left, in upstream's words.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, ConfigError> {
        let list: Vec<Self> = text
            .split(',')
            .filter(|item| !item.is_empty())
            .map(Self::parse)
            .collect::<Result<_, _>>()?;
        if list.is_empty() {
            return Err(ConfigError::new("proxy strategies cannot be empty"));
        }
        Ok(list)
    }

    fn parse(name: &str) -> Result<Self, ConfigError> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| ConfigError::new(format!("unknown proxy strategy: {name}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_repeats_are_kept_and_empty_items_skipped() {
        use StrategyKind::{Default, DefaultRoute, DestCidr, DestHost};
        let list =
            StrategyKind::parse_list("destHost,,defaultRoute,default,destHost,destCIDR,").unwrap();
        assert_eq!(list, [DestHost, DefaultRoute, Default, DestHost, DestCidr]);
    }

    #[test]
    fn unknown_names_and_empty_lists_are_refused_in_upstreams_words() {
        for (text, message) in [
            ("default,X", "unknown proxy strategy: X"),
            ("Default", "unknown proxy strategy: Default"),
            (" default", "unknown proxy strategy:  default"),
            ("", "proxy strategies cannot be empty"),
            (",", "proxy strategies cannot be empty"),
        ] {
            assert_eq!(
                StrategyKind::parse_list(text).unwrap_err().message(),
                message
            );
        }
    }
}
