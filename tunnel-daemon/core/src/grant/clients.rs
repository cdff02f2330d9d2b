//! Client rules: which targets a server's clients may ask for.
//!
//! A rule is a target, optionally preceded by names of a certificate: `cn=prometheus,10.0.0.0/8:9100`. `cn`, `dns` and `uri`
//! are as in grants; all of them must match. A rule without names applies to every client. A client may ask for every target
//! that one of its rules allows. Without rules, and with the word `all`, a client may ask for every target; with the word
//! `none` for no target.
//!
//! `peer` names the certificate of another server, by its common name or a DNS name: such a rule holds for dials that this server
//! forwards, and rules with other names do not, since the other server alone knows its clients.
//!
//! A target is checked as the client wrote it: a name against names, an address against networks. The server does not
//! resolve names, because they belong to the agent's network.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use super::{Flaw, Holder, NameKind, Names, Pattern, key_value, names_of};
use crate::destination::{DestinationList, Extent, Why, extent};
use crate::target::{Host, Target};
use crate::text::Excerpt;

/// Networks that a client may ask for. Rules cannot describe targets of other networks, such as `unix`.
const NETWORKS: [&str; 3] = ["tcp", "tcp4", "tcp6"];

/// All client rules of a server.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ClientRules {
    rules: Vec<Rule>,
    /// Targets of clients without a certificate; `None`: every client may ask for every target.
    anonymous: Option<Arc<ClientTargets>>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Rule {
    who: Vec<(NameKind, Pattern)>,
    target: DestinationList,
}

/// Why an entry is not a valid rule, and what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{entry:?}: {flaw}")]
pub struct ClientRuleError {
    entry: String,
    flaw: Flaw,
}

/// The targets that one client may ask for.
#[derive(PartialEq, Eq, Debug)]
pub struct ClientTargets {
    /// The client's name in denials.
    client: String,
    targets: DestinationList,
}

/// A target that a client may not ask for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetDenied {
    /// The target as the client asked for it, escaped and shortened.
    target: String,
    client: String,
    why: NotAllowed,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum NotAllowed {
    NotListed,
    Guarded,
    /// Why the target cannot be parsed.
    Unreadable(String),
    /// A network other than TCP.
    Network(String),
    /// Another server's whole text.
    Quoted(String),
}

impl TargetDenied {
    /// A denial by another server, in its words.
    #[must_use]
    pub fn quoted(text: &str) -> Self {
        Self {
            target: String::new(),
            client: String::new(),
            why: NotAllowed::Quoted(Excerpt(text).to_string()),
        }
    }
}

impl ClientRules {
    /// Reads the values of `--client-allow-target`.
    ///
    /// # Errors
    /// The first invalid entry, with what to write instead.
    pub fn parse<S: AsRef<str>>(entries: &[S]) -> Result<Self, ClientRuleError> {
        let wrong = |entry: &str, flaw| ClientRuleError {
            entry: Excerpt(entry).to_string(),
            flaw,
        };
        let word = extent(entries).map_err(|word| wrong(word, Flaw::NotAlone))?;
        if entries.is_empty() || word == Some(Extent::All) {
            return Ok(Self::default());
        }
        let entries = entries.iter().filter(|_| word.is_none());
        let rules = entries.map(|entry| {
            let entry = entry.as_ref();
            Rule::parse(entry).map_err(|flaw| wrong(entry, flaw))
        });
        let rules: Vec<Rule> = rules.collect::<Result<_, _>>()?;
        let open = rules.iter().filter(|rule| rule.who.is_empty());
        let anonymous = Arc::new(ClientTargets {
            client: "a client without a certificate".to_owned(),
            targets: DestinationList::joined(open.map(|rule| &rule.target)),
        });
        Ok(Self {
            rules,
            anonymous: Some(anonymous),
        })
    }

    /// Whether some rule names a certificate.
    #[must_use]
    pub fn name_certificates(&self) -> bool {
        let of_client = |(kind, _): &(NameKind, Pattern)| *kind != NameKind::Peer;
        let mut rules = self.rules.iter();
        rules.any(|rule| rule.who.iter().any(of_client))
    }

    /// The targets of a client with this certificate, or without one. `None`: every target.
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

impl ClientRules {
    /// The targets for which another server with this certificate may forward dials. `None`: every target.
    #[must_use]
    pub fn of_peer(&self, certificate: Names<'_>) -> Option<Arc<ClientTargets>> {
        self.anonymous.as_ref()?;
        let holding = self
            .rules
            .iter()
            .filter(|rule| rule.holds_for_peer(certificate));
        Some(Arc::new(ClientTargets {
            client: format!("dials of the server {}", describe(certificate)),
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
            if key == "peer" {
                return Ok((NameKind::Peer, Pattern::parse("peer", value)?));
            }
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

    fn holds_for_peer(&self, certificate: Names<'_>) -> bool {
        let kinds = [NameKind::Common, NameKind::Dns];
        self.who.iter().all(|(kind, pattern)| {
            let mut names = kinds
                .into_iter()
                .flat_map(|kind| names_of(Holder::Certificate(certificate), kind));
            *kind == NameKind::Peer && names.any(|name| pattern.match_text(&name).is_some())
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
    /// Checks whether this client may ask for `address` on `network`, both as the client wrote them.
    ///
    /// # Errors
    /// [`TargetDenied`]; also if the address cannot be parsed, since an agent might parse it differently.
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
            NotAllowed::Quoted(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests;
