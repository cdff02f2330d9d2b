//! Client rules: which targets a server's clients may ask for.
//!
//! A rule is a target, with the names of a certificate before it: `cn=prometheus,10.0.0.0/8:9100`. `cn`, `dns` and `uri` are as
//! in grants; all of them must match. A rule without names holds for every client. What is allowed adds up over all rules that
//! hold for a client. Without any rule a client may ask for everything.
//!
//! A target is judged as it is asked for: a name by rules that are names, an address by rules that are networks. The server
//! resolves nothing, since names belong to the network of the agent.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use super::{Flaw, Holder, NameKind, Names, Pattern, key_value, names_of};
use crate::destination::{DestinationList, Why};
use crate::target::{Host, Target};
use crate::text::Excerpt;

/// Networks that a client may name, as agents know them. Others, such as `unix`, have targets that no rule describes.
const NETWORKS: [&str; 3] = ["tcp", "tcp4", "tcp6"];

/// All client rules of a server.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ClientRules {
    rules: Vec<Rule>,
    /// Of clients without a certificate; `None`: there are no rules.
    anonymous: Option<Arc<ClientTargets>>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Rule {
    who: Vec<(NameKind, Pattern)>,
    target: DestinationList,
}

/// Why an entry is no rule. Says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{entry:?}: {flaw}")]
pub struct ClientRuleError {
    entry: String,
    flaw: Flaw,
}

/// What one client may ask for.
#[derive(PartialEq, Eq, Debug)]
pub struct ClientTargets {
    /// As a denial names it.
    client: String,
    targets: DestinationList,
}

/// A target that a client may not ask for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetDenied {
    /// As it was asked for, in a safe spelling.
    target: String,
    client: String,
    why: NotAllowed,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum NotAllowed {
    NotListed,
    Guarded,
    /// What is wrong with the target.
    Unreadable(String),
    /// The network, which is not TCP.
    Network(String),
}

impl ClientRules {
    /// Reads the values of `--client-allow-target`.
    ///
    /// # Errors
    /// The first entry that is no rule, with what to write instead.
    pub fn parse<S: AsRef<str>>(entries: &[S]) -> Result<Self, ClientRuleError> {
        let rules = entries.iter().map(|entry| {
            let entry = entry.as_ref();
            Rule::parse(entry).map_err(|flaw| ClientRuleError {
                entry: Excerpt(entry).to_string(),
                flaw,
            })
        });
        let rules: Vec<Rule> = rules.collect::<Result<_, _>>()?;
        let anonymous = (!rules.is_empty()).then(|| {
            let open = rules.iter().filter(|rule| rule.who.is_empty());
            Arc::new(ClientTargets {
                client: "a client without a certificate".to_owned(),
                targets: DestinationList::joined(open.map(|rule| &rule.target)),
            })
        });
        Ok(Self { rules, anonymous })
    }

    /// Whether some rule holds for certificates only.
    #[must_use]
    pub fn name_certificates(&self) -> bool {
        self.rules.iter().any(|rule| !rule.who.is_empty())
    }

    /// What a client may ask for that has shown this certificate, or none; `None`: everything.
    #[must_use]
    pub fn of_client(&self, certificate: Option<Names<'_>>) -> Option<Arc<ClientTargets>> {
        let anonymous = self.anonymous.as_ref()?;
        let Some(names) = certificate else {
            return Some(Arc::clone(anonymous));
        };
        let holding = self.rules.iter().filter(|rule| rule.holds_for(names));
        Some(Arc::new(ClientTargets {
            client: describe(names),
            targets: DestinationList::joined(holding.map(|rule| &rule.target)),
        }))
    }
}

impl Rule {
    fn parse(entry: &str) -> Result<Self, Flaw> {
        let (names, target) = match entry.rsplit_once(',') {
            Some((names, target)) => (Some(names), target.trim()),
            None => (None, entry),
        };
        let name = |pair| {
            let (key, value) = key_value(pair)?;
            NameKind::of_certificate(key, value)
                .unwrap_or_else(|| Err(Flaw::NotOfCertificate(Excerpt(pair).to_string())))
        };
        let names = names.into_iter().flat_map(|names| names.split(','));
        Ok(Self {
            who: names.map(name).collect::<Result<_, _>>()?,
            target: DestinationList::of_pattern(target).map_err(Flaw::Target)?,
        })
    }

    fn holds_for(&self, certificate: Names<'_>) -> bool {
        self.who.iter().all(|(kind, pattern)| {
            let names = names_of(Holder::Certificate(certificate), *kind);
            names.iter().any(|name| pattern.match_text(name).is_some())
        })
    }
}

fn describe(certificate: Names<'_>) -> String {
    match (certificate.common_name, certificate.alternative.first()) {
        (Some(name), _) => format!("client CN={}", Excerpt(name)),
        (None, Some(name)) => format!("client {}", Excerpt(name)),
        (None, None) => "a client whose certificate has no name".to_owned(),
    }
}

impl ClientTargets {
    /// May this client ask for `address` on `network`, both as it wrote them?
    ///
    /// # Errors
    /// [`TargetDenied`]; also for what cannot be read, since an agent might read it in another way.
    pub fn check(&self, network: &str, address: &str) -> Result<(), TargetDenied> {
        let denied = |target, why| TargetDenied {
            target,
            client: self.client.clone(),
            why,
        };
        let target = Target::parse(address).map_err(|flaw| {
            let why = NotAllowed::Unreadable(flaw.to_string());
            denied(Excerpt(address).to_string(), why)
        })?;
        if !NETWORKS.contains(&network) {
            let network = Excerpt(network).to_string();
            return Err(denied(target.to_string(), NotAllowed::Network(network)));
        }
        let checked = match &target.host {
            Host::Ip(ip) => self.targets.check(SocketAddr::new(*ip, target.port), None),
            Host::Name(name) => self.targets.check_name(name, target.port),
        };
        checked.map_err(|refused| {
            let why = match refused.why {
                Why::Guarded => NotAllowed::Guarded,
                Why::NotListed | Why::OwnListener => NotAllowed::NotListed,
            };
            denied(target.to_string(), why)
        })
    }
}

impl std::error::Error for TargetDenied {}

impl fmt::Display for TargetDenied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            target,
            client,
            why,
        } = self;
        let flag = "--client-allow-target of the server";
        match why {
            NotAllowed::NotListed => write!(
                f,
                "target {target} is denied: no {flag} allows it to {client}"
            ),
            NotAllowed::Guarded => write!(
                f,
                "target {target} is denied: no {flag} names this metadata or link-local address for {client}"
            ),
            NotAllowed::Unreadable(flaw) => {
                write!(
                    f,
                    "target {target} is denied: {flag} needs host:port, and {flaw}"
                )
            }
            NotAllowed::Network(network) => {
                write!(
                    f,
                    "target {target} is denied: {flag} allows TCP, not {network:?}"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests;
