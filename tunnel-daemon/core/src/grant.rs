//! Grants: which certificate may claim which agent id and identifiers.
//!
//! A grant is a comma list of `key=value`. `cn`, `dns` and `uri` name a certificate, all of them must match; `id`,
//! `host`, `ipv4`, `ipv6`, `cidr` and `default-route` say what it may claim. `*` stands for any text that is
//! not empty, and `{*}` in a claim for the text that the certificate's `*` stood for. What is allowed adds up over
//! all grants that name a certificate; what none of them allows is refused.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::ids::AgentId;
use crate::target::Host;
use crate::text::Excerpt;
use crate::wire::identifiers::Identifiers;

/// What stands in a claim for the text that the certificate's `*` stood for.
const CAPTURED: &str = "{*}";

/// The names of a verified certificate.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// First common name of the subject.
    pub common_name: Option<&'a str>,
    /// Subject alternative names, prefixed by their kind: `dns:`, `uri:`. Other kinds are passed over.
    pub alternative: &'a [String],
}

/// All grants of a server; without any, agents claim what they like.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Grants(Vec<Grant>);

/// Why an entry is no grant. Says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{entry:?}: {flaw}")]
pub struct GrantError {
    entry: String,
    flaw: Flaw,
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
enum Flaw {
    #[error("{0:?} is not KEY=VALUE; write such as cn=node-1,id=node-1,host=node-1.example")]
    NotPair(String),
    #[error(
        "unknown key {0:?}: cn, dns and uri name a certificate; id, host, ipv4, ipv6, cidr and default-route what it may claim"
    )]
    UnknownKey(String),
    #[error("{0} has no value; * stands for any")]
    Empty(&'static str),
    #[error("{0} has more than one *; write several grants")]
    Stars(&'static str),
    #[error("{{*}} in a name of the certificate; write * there and {{*}} in a claim")]
    CaptureInName,
    #[error("{{*}} needs exactly one * among cn, dns and uri, to say what it stands for")]
    Capture,
    #[error("{key}={value} is no {key} address or network; write such as {example}")]
    Net {
        key: &'static str,
        value: String,
        example: &'static str,
    },
    #[error("host={0} is an address; write ipv4= or ipv6=")]
    HostIsAddress(String),
    #[error("default-route={0} is not true; leave it out to grant none")]
    DefaultRoute(String),
    #[error("names no certificate; add cn=, dns= or uri=")]
    NoName,
    #[error("grants nothing; add id=, and the identifiers that may be claimed")]
    NoClaim,
}

/// What an agent claimed and was not granted; the text of the refusal, up to the certificate's name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotGranted {
    /// No grant names the certificate.
    #[error("nothing is granted")]
    Stranger,
    /// The agent id.
    #[error("agent id {:?} is not granted", Excerpt(.0).to_string())]
    Id(String),
    /// An identifier.
    #[error("agent identifier {kind}={} is not granted", Excerpt(.value))]
    Identifier {
        /// As the agent wrote it.
        kind: &'static str,
        /// As the agent wrote it.
        value: String,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Grant {
    who: Vec<(NameKind, Pattern)>,
    claims: Vec<Claim>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NameKind {
    Common,
    Dns,
    Uri,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Claim {
    Id(Pattern),
    Host(Pattern),
    /// Addresses, whichever identifier they are claimed by.
    Addresses(IpNet),
    /// Networks within this one.
    Network(IpNet),
    DefaultRoute,
}

/// A text, with at most one `*`: before it and behind it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Pattern {
    start: String,
    end: Option<String>,
}

impl Pattern {
    fn parse(key: &'static str, text: &str) -> Result<Self, Flaw> {
        if text.is_empty() {
            return Err(Flaw::Empty(key));
        }
        // The star of a {*} is none.
        let plain = text.replace(CAPTURED, "\u{0}");
        let mut parts = plain.split('*').map(|part| part.replace('\u{0}', CAPTURED));
        let (start, end) = (parts.next().unwrap_or_default(), parts.next());
        if parts.next().is_some() {
            return Err(Flaw::Stars(key));
        }
        Ok(Self { start, end })
    }

    fn captures(&self) -> bool {
        self.start.contains(CAPTURED)
            || self
                .end
                .as_ref()
                .is_some_and(|text| text.contains(CAPTURED))
    }

    /// What the star stands for in `text`; empty when there is none and the texts are equal.
    fn match_text<'a>(&self, text: &'a str) -> Option<&'a str> {
        let rest = text.strip_prefix(self.start.as_str())?;
        match &self.end {
            None => rest.is_empty().then_some(""),
            Some(end) => rest
                .strip_suffix(end.as_str())
                .filter(|star| !star.is_empty()),
        }
    }

    /// With `{*}` replaced. A `*` in the replacement is an ordinary character.
    fn with(&self, captured: &str) -> Self {
        Self {
            start: self.start.replace(CAPTURED, captured),
            end: self
                .end
                .as_ref()
                .map(|text| text.replace(CAPTURED, captured)),
        }
    }

    fn to_lowercase(&self) -> Self {
        Self {
            start: self.start.to_ascii_lowercase(),
            end: self.end.as_ref().map(|text| text.to_ascii_lowercase()),
        }
    }
}

impl Grants {
    /// Reads the values of `--agent-grant`.
    ///
    /// # Errors
    /// The first entry that is none, with what to write instead.
    pub fn parse<S: AsRef<str>>(entries: &[S]) -> Result<Self, GrantError> {
        let grants = entries.iter().map(|entry| {
            let entry = entry.as_ref();
            Grant::parse(entry).map_err(|flaw| GrantError {
                entry: Excerpt(entry).to_string(),
                flaw,
            })
        });
        Ok(Self(grants.collect::<Result<_, _>>()?))
    }

    /// Whether no grant was given, so that agents claim what they like.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the holder of a certificate may be this agent. Without any grant everybody may.
    ///
    /// # Errors
    /// The first claim that no grant covers.
    pub fn check(
        &self,
        holder: Option<Names<'_>>,
        agent: &AgentId,
        identifiers: &Identifiers,
    ) -> Result<(), NotGranted> {
        if self.is_empty() {
            return Ok(());
        }
        let holder = holder.ok_or(NotGranted::Stranger)?;
        let allowed = Allowed::of(&self.0, holder).ok_or(NotGranted::Stranger)?;
        if !allowed.id(agent.as_str()) {
            return Err(NotGranted::Id(agent.as_str().to_owned()));
        }
        let refused = |kind, value: &str| NotGranted::Identifier {
            kind,
            value: value.to_owned(),
        };
        // The registry makes no difference between the first three: an address is one under any of them.
        for (kind, values) in [
            ("ipv4", &identifiers.ipv4),
            ("ipv6", &identifiers.ipv6),
            ("host", &identifiers.host),
        ] {
            if let Some(value) = values.iter().find(|value| !allowed.host(value)) {
                return Err(refused(kind, value));
            }
        }
        if let Some(value) = identifiers
            .cidr
            .iter()
            .find(|value| !allowed.network(value))
        {
            return Err(refused("cidr", value));
        }
        if identifiers.default_route && !allowed.default_route() {
            return Err(refused("default-route", "true"));
        }
        Ok(())
    }
}

impl Grant {
    fn parse(entry: &str) -> Result<Self, Flaw> {
        let mut grant = Self {
            who: Vec::new(),
            claims: Vec::new(),
        };
        for pair in entry.split(',') {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| Flaw::NotPair(Excerpt(pair).to_string()))?;
            grant.take(key.trim(), value.trim())?;
        }
        if grant.who.is_empty() {
            return Err(Flaw::NoName);
        }
        if grant.claims.is_empty() {
            return Err(Flaw::NoClaim);
        }
        if grant.who.iter().any(|(_, pattern)| pattern.captures()) {
            return Err(Flaw::CaptureInName);
        }
        let stars = grant
            .who
            .iter()
            .filter(|(_, name)| name.end.is_some())
            .count();
        let captures = grant
            .claims
            .iter()
            .any(|claim| matches!(claim, Claim::Id(text) | Claim::Host(text) if text.captures()));
        if captures && stars != 1 {
            return Err(Flaw::Capture);
        }
        Ok(grant)
    }

    fn take(&mut self, key: &str, value: &str) -> Result<(), Flaw> {
        match key {
            "cn" => self
                .who
                .push((NameKind::Common, Pattern::parse("cn", value)?)),
            "dns" => {
                let name = Pattern::parse("dns", value)?.to_lowercase();
                self.who.push((NameKind::Dns, name));
            }
            "uri" => self
                .who
                .push((NameKind::Uri, Pattern::parse("uri", value)?)),
            "id" => self.claims.push(Claim::Id(Pattern::parse("id", value)?)),
            "host" => {
                if let Host::Ip(_) = Host::parse(value) {
                    return Err(Flaw::HostIsAddress(value.to_owned()));
                }
                self.claims
                    .push(Claim::Host(Pattern::parse("host", value)?));
            }
            "ipv4" => self
                .claims
                .push(Claim::Addresses(net("ipv4", value, "10.1.0.0/16")?)),
            "ipv6" => self
                .claims
                .push(Claim::Addresses(net("ipv6", value, "fd00::/64")?)),
            "cidr" => self
                .claims
                .push(Claim::Network(net("cidr", value, "10.1.0.0/16")?)),
            "default-route" if value == "true" => self.claims.push(Claim::DefaultRoute),
            "default-route" => return Err(Flaw::DefaultRoute(Excerpt(value).to_string())),
            other => return Err(Flaw::UnknownKey(Excerpt(other).to_string())),
        }
        Ok(())
    }

    /// What `*` stands for, once for each name of the certificate that fits; `None` if the grant does not name it.
    fn captures(&self, holder: Names<'_>) -> Option<Vec<String>> {
        let mut captured = vec![String::new()];
        for (kind, pattern) in &self.who {
            let found: Vec<String> = match kind {
                NameKind::Common => holder
                    .common_name
                    .into_iter()
                    .filter_map(|name| pattern.match_text(name))
                    .map(str::to_owned)
                    .collect(),
                NameKind::Dns => alternative(holder, "dns:")
                    .filter_map(|name| {
                        pattern
                            .match_text(&name.to_ascii_lowercase())
                            .map(str::to_owned)
                    })
                    .collect(),
                NameKind::Uri => alternative(holder, "uri:")
                    .filter_map(|name| pattern.match_text(name))
                    .map(str::to_owned)
                    .collect(),
            };
            if found.is_empty() {
                return None;
            }
            if pattern.end.is_some() {
                captured = found;
            }
        }
        Some(captured)
    }
}

fn alternative<'a>(
    holder: Names<'a>,
    prefix: &'static str,
) -> impl Iterator<Item = &'a str> + use<'a> {
    holder
        .alternative
        .iter()
        .filter_map(move |name| name.strip_prefix(prefix))
}

/// An address is a network of its own; a network must be of the key's family.
fn net(key: &'static str, value: &str, example: &'static str) -> Result<IpNet, Flaw> {
    let read = value
        .parse::<IpNet>()
        .or_else(|_no_network| value.parse::<IpAddr>().map(IpNet::from));
    match (key, read) {
        ("ipv4", Ok(net @ IpNet::V4(_))) | ("ipv6", Ok(net @ IpNet::V6(_))) | ("cidr", Ok(net)) => {
            Ok(net.trunc())
        }
        _ => Err(Flaw::Net {
            key,
            value: Excerpt(value).to_string(),
            example,
        }),
    }
}

/// The grants that name one certificate, each with what its `*` stands for.
struct Allowed<'a>(Vec<(&'a Grant, Vec<String>)>);

impl<'a> Allowed<'a> {
    fn of(grants: &'a [Grant], holder: Names<'_>) -> Option<Self> {
        let named = grants
            .iter()
            .filter_map(|grant| Some((grant, grant.captures(holder)?)))
            .collect::<Vec<_>>();
        (!named.is_empty()).then_some(Self(named))
    }

    fn any(&self, covers: impl Fn(&Claim, &str) -> bool) -> bool {
        self.0.iter().any(|(grant, captured)| {
            grant
                .claims
                .iter()
                .any(|claim| captured.iter().any(|star| covers(claim, star)))
        })
    }

    fn id(&self, id: &str) -> bool {
        self.any(|claim, star| {
            matches!(claim, Claim::Id(text) if text.with(star).match_text(id).is_some())
        })
    }

    fn host(&self, value: &str) -> bool {
        match Host::parse(value) {
            Host::Ip(ip) => {
                self.any(|claim, _star| matches!(claim, Claim::Addresses(net) if net.contains(&ip)))
            }
            Host::Name(name) => self.any(|claim, star| {
                matches!(claim, Claim::Host(text)
                    if text.with(star).to_lowercase().match_text(&name).is_some())
            }),
        }
    }

    fn network(&self, value: &str) -> bool {
        value.parse::<IpNet>().is_ok_and(|claimed| {
            self.any(|claim, _star| matches!(claim, Claim::Network(net) if net.contains(&claimed)))
        })
    }

    fn default_route(&self) -> bool {
        self.any(|claim, _star| *claim == Claim::DefaultRoute)
    }
}

#[cfg(test)]
mod tests;
