//! Grants: which certificate or service account may claim which agent id and identifiers.
//!
//! A grant is a comma-separated list of `key=value`. `cn`, `dns` and `uri` name a certificate; `serviceaccount` names the
//! account of a token, `node` the node that the token is bound to. All names of a grant must match. `id`, `host`, `ipv4`,
//! `ipv6`, `cidr`, `default-route` and `zone` say what may be claimed. `*` matches any text that is not empty. In a claim `{*}`
//! is the text that the name's `*` matched, and `{node}` is the token's node. A holder may claim what any grant that names it
//! allows; other claims are refused. An agent with a certificate and a token is checked as each holder separately: their grants
//! do not add up. `all` in place of grants lets agents claim anything, `none` nothing.

mod clients;
mod deny;
mod flaw;
mod pattern;

use std::net::IpAddr;

use ipnet::IpNet;

pub use self::clients::{ClientRuleError, ClientRules, ClientTargets, TargetDenied};
pub use self::deny::{DenyError, DenyList};
use self::flaw::Flaw;
use self::pattern::{CAPTURED, NODE, Pattern, Stands};
use crate::destination::{Extent, extent};
use crate::ids::AgentId;
use crate::target::Host;
use crate::text::Excerpt;
use crate::wire::identifiers::Identifiers;

/// The names of a verified certificate.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// First common name of the subject.
    pub common_name: Option<&'a str>,
    /// Subject alternative names, prefixed by their kind: `dns:`, `uri:`. Other kinds are ignored.
    pub alternative: &'a [String],
}

/// The account of a verified token.
#[derive(Clone, Copy, Debug)]
pub struct Account<'a> {
    /// Namespace of the service account.
    pub namespace: &'a str,
    /// Name of the service account.
    pub name: &'a str,
    /// The node that the token is bound to, if any.
    pub node: Option<&'a str>,
    /// UID of the pod that the token is bound to, if any.
    pub pod: Option<&'a str>,
}

/// An identity that an agent has proved.
#[derive(Clone, Copy, Debug)]
pub enum Holder<'a> {
    /// The holder of a client certificate.
    Certificate(Names<'a>),
    /// The service account of a token.
    ServiceAccount(Account<'a>),
}

/// All grants of a server; `None`: agents may claim anything.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Grants(Option<Vec<Grant>>);

/// Why an entry is not a valid grant, and what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{entry:?}: {flaw}")]
pub struct GrantError {
    entry: String,
    flaw: Flaw,
}

/// A claim that was not granted; its text is that of the refusal, without the agent's name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotGranted {
    /// No grant names the agent.
    #[error("nothing is granted")]
    Stranger,
    /// The agent id.
    #[error("agent id {:?} is not granted", Excerpt(.0).to_string())]
    Id(String),
    /// An identifier.
    #[error("agent identifier {kind}={} is not granted", Excerpt(.value))]
    Identifier {
        /// As sent by the agent.
        kind: &'static str,
        /// As sent by the agent.
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
    Account,
    Node,
    /// Another server; in rules for clients only.
    Peer,
}

impl NameKind {
    fn is_of_token(self) -> bool {
        match self {
            Self::Common | Self::Dns | Self::Uri | Self::Peer => false,
            Self::Account | Self::Node => true,
        }
    }

    /// A name that a certificate must have; `None` if `key` is not a certificate key.
    fn of_certificate(key: &str, value: &str) -> Option<Result<(Self, Pattern), Flaw>> {
        let (key, kind) = match key {
            "cn" => ("cn", Self::Common),
            "dns" => ("dns", Self::Dns),
            "uri" => ("uri", Self::Uri),
            _ => return None,
        };
        Some(Pattern::parse(key, value).map(|pattern| match kind {
            Self::Dns => (kind, pattern.to_lowercase()),
            _ => (kind, pattern),
        }))
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Claim {
    Id(Pattern),
    Host(Pattern),
    /// Addresses, claimed as `ipv4`, `ipv6` or `host`.
    Addresses(IpNet),
    /// Networks within this one.
    Network(IpNet),
    DefaultRoute,
    Zone(Pattern),
}

impl Grants {
    /// Reads the values of `--agent-grant`. Without one, agents may claim anything.
    ///
    /// # Errors
    /// The first invalid entry, with what to write instead.
    pub fn parse<S: AsRef<str>>(entries: &[S]) -> Result<Self, GrantError> {
        let wrong = |entry: &str, flaw| GrantError {
            entry: Excerpt(entry).to_string(),
            flaw,
        };
        let word = extent(entries).map_err(|word| wrong(word, Flaw::NotAlone))?;
        if entries.is_empty() || word == Some(Extent::All) {
            return Ok(Self(None));
        }
        let entries = entries.iter().filter(|_| word.is_none());
        let grants = entries.map(|entry| {
            let entry = entry.as_ref();
            Grant::parse(entry).map_err(|flaw| wrong(entry, flaw))
        });
        Ok(Self(Some(grants.collect::<Result<_, _>>()?)))
    }

    /// Whether agents may claim anything.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.is_none()
    }

    /// Checks that one of these holders alone may claim this agent id and these identifiers. Without grants every claim
    /// is allowed.
    ///
    /// # Errors
    /// The first claim that no grant covers, for the first holder that a grant names.
    pub fn check(
        &self,
        holders: &[Holder<'_>],
        agent: &AgentId,
        identifiers: &Identifiers,
    ) -> Result<(), NotGranted> {
        let Some(grants) = &self.0 else {
            return Ok(());
        };
        let mut refused = NotGranted::Stranger;
        for holder in holders {
            match check_holder(grants, *holder, agent, identifiers) {
                Ok(()) => return Ok(()),
                Err(why) if refused == NotGranted::Stranger => refused = why,
                Err(_other) => (),
            }
        }
        Err(refused)
    }
}

fn check_holder(
    grants: &[Grant],
    holder: Holder<'_>,
    agent: &AgentId,
    identifiers: &Identifiers,
) -> Result<(), NotGranted> {
    let allowed = Allowed::of(grants, holder).ok_or(NotGranted::Stranger)?;
    if !allowed.id(agent.as_str()) {
        return Err(NotGranted::Id(agent.as_str().to_owned()));
    }
    let refused = |kind, value: &str| NotGranted::Identifier {
        kind,
        value: value.to_owned(),
    };
    // The registry treats these three kinds alike: each may hold an address.
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
    let zone = identifiers.zone.as_deref();
    if let Some(zone) = zone.filter(|zone| !allowed.zone(zone)) {
        return Err(refused("zone", zone));
    }
    Ok(())
}

impl Grant {
    fn parse(entry: &str) -> Result<Self, Flaw> {
        let mut grant = Self {
            who: Vec::new(),
            claims: Vec::new(),
        };
        for pair in entry.split(',') {
            let (key, value) = key_value(pair)?;
            // `serviceaccount=NAMESPACE/NAME:id={node}`: the values of these keys contain no colon.
            match value.split_once(':') {
                Some((name, claim)) if matches!(key, "serviceaccount" | "node") => {
                    grant.take(key, name)?;
                    let (key, value) = key_value(claim)?;
                    grant.take(key, value)?;
                }
                _ => grant.take(key, value)?,
            }
        }
        if grant.who.is_empty() {
            return Err(Flaw::NoName);
        }
        if grant.claims.is_empty() {
            return Err(Flaw::NoClaim);
        }
        let names = |braces| grant.who.iter().any(|(_, pattern)| pattern.has(braces));
        if names(CAPTURED) || names(NODE) {
            return Err(Flaw::CaptureInName);
        }
        let of_token = grant
            .who
            .iter()
            .filter(|(kind, _)| kind.is_of_token())
            .count();
        if of_token > 0 && of_token < grant.who.len() {
            return Err(Flaw::TwoKinds);
        }
        let stars = grant
            .who
            .iter()
            .filter(|(_, name)| name.end.is_some())
            .count();
        let claims = |braces| {
            let has = |claim: &Claim| matches!(claim, Claim::Id(text) | Claim::Host(text) | Claim::Zone(text) if text.has(braces));
            grant.claims.iter().any(has)
        };
        if claims(CAPTURED) && stars != 1 {
            return Err(Flaw::Capture);
        }
        if claims(NODE) && of_token == 0 {
            return Err(Flaw::NodeOfCertificate);
        }
        Ok(grant)
    }

    fn take(&mut self, key: &str, value: &str) -> Result<(), Flaw> {
        if let Some(name) = NameKind::of_certificate(key, value) {
            self.who.push(name?);
            return Ok(());
        }
        match key {
            "serviceaccount" => {
                let (namespace, name) = value.split_once('/').unwrap_or_default();
                if namespace.is_empty() || name.is_empty() || name.contains('/') {
                    return Err(Flaw::NotAnAccount(Excerpt(value).to_string()));
                }
                let account = Pattern::parse("serviceaccount", value)?;
                self.who.push((NameKind::Account, account));
            }
            "node" => self
                .who
                .push((NameKind::Node, Pattern::parse("node", value)?)),
            "id" => self.claims.push(Claim::Id(Pattern::parse("id", value)?)),
            "host" => {
                if let Host::Ip(_) = Host::parse(value) {
                    return Err(Flaw::HostIsAddress(value.to_owned()));
                }
                let absolute = value.strip_suffix('.').filter(|name| !name.is_empty());
                let name = Pattern::parse("host", absolute.unwrap_or(value))?;
                self.claims.push(Claim::Host(name));
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
            "zone" => self
                .claims
                .push(Claim::Zone(Pattern::parse("zone", value)?)),
            "default-route" if value == "true" => self.claims.push(Claim::DefaultRoute),
            "default-route" => return Err(Flaw::DefaultRoute(Excerpt(value).to_string())),
            other => return Err(Flaw::UnknownKey(Excerpt(other).to_string())),
        }
        Ok(())
    }

    /// The values of the braces, one set for each matching name of the holder; `None` if the grant does not name the holder.
    fn captures(&self, holder: Holder<'_>) -> Option<Vec<Stands>> {
        let mut captured = vec![String::new()];
        for (kind, pattern) in &self.who {
            let names = names_of(holder, *kind);
            let found = names.iter().filter_map(|name| pattern.match_text(name));
            let found: Vec<String> = found.map(str::to_owned).collect();
            if found.is_empty() {
                return None;
            }
            if pattern.end.is_some() {
                captured = found;
            }
        }
        let node = match holder {
            Holder::Certificate(_) => None,
            Holder::ServiceAccount(account) => account.node,
        };
        let stands = |star| Stands {
            star,
            node: node.map(str::to_owned),
        };
        Some(captured.into_iter().map(stands).collect())
    }
}

fn key_value(pair: &str) -> Result<(&str, &str), Flaw> {
    let (key, value) = pair
        .split_once('=')
        .ok_or_else(|| Flaw::NotPair(Excerpt(pair).to_string()))?;
    Ok((key.trim(), value.trim()))
}

/// The names of one kind that a holder has.
fn names_of(holder: Holder<'_>, kind: NameKind) -> Vec<String> {
    match (holder, kind) {
        (Holder::Certificate(names), NameKind::Common) => {
            names.common_name.map(str::to_owned).into_iter().collect()
        }
        (Holder::Certificate(names), NameKind::Dns) => alternative(names, "dns:")
            .map(str::to_ascii_lowercase)
            .collect(),
        (Holder::Certificate(names), NameKind::Uri) => {
            alternative(names, "uri:").map(str::to_owned).collect()
        }
        (Holder::ServiceAccount(account), NameKind::Account) => {
            vec![format!("{}/{}", account.namespace, account.name)]
        }
        (Holder::ServiceAccount(account), NameKind::Node) => {
            account.node.map(str::to_owned).into_iter().collect()
        }
        (_, NameKind::Peer)
        | (Holder::Certificate(_), NameKind::Account | NameKind::Node)
        | (Holder::ServiceAccount(_), NameKind::Common | NameKind::Dns | NameKind::Uri) => {
            Vec::new()
        }
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

/// Parses a network; an address is a network of one address. `ipv4` and `ipv6` require their family.
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

/// The grants that name one holder, each with the values of its braces.
struct Allowed<'a>(Vec<(&'a Grant, Vec<Stands>)>);

impl<'a> Allowed<'a> {
    fn of(grants: &'a [Grant], holder: Holder<'_>) -> Option<Self> {
        let named = grants
            .iter()
            .filter_map(|grant| Some((grant, grant.captures(holder)?)))
            .collect::<Vec<_>>();
        (!named.is_empty()).then_some(Self(named))
    }

    fn any(&self, covers: impl Fn(&Claim, &Stands) -> bool) -> bool {
        self.0.iter().any(|(grant, captured)| {
            grant
                .claims
                .iter()
                .any(|claim| captured.iter().any(|stands| covers(claim, stands)))
        })
    }

    fn id(&self, id: &str) -> bool {
        self.any(|claim, stands| {
            matches!(claim, Claim::Id(text)
                if text.with(stands).is_some_and(|text| text.match_text(id).is_some()))
        })
    }

    fn host(&self, value: &str) -> bool {
        match Host::parse(value).without_final_dot() {
            Host::Ip(ip) => {
                self.any(|claim, _| matches!(claim, Claim::Addresses(net) if net.contains(&ip)))
            }
            Host::Name(name) => self.any(|claim, stands| {
                let matches = |text: Pattern| text.to_lowercase().match_text(&name).is_some();
                matches!(claim, Claim::Host(text) if text.with(stands).is_some_and(matches))
            }),
        }
    }

    fn network(&self, value: &str) -> bool {
        value.parse::<IpNet>().is_ok_and(|claimed| {
            self.any(|claim, _| matches!(claim, Claim::Network(net) if net.contains(&claimed)))
        })
    }

    fn zone(&self, zone: &str) -> bool {
        self.any(|claim, stands| {
            matches!(claim, Claim::Zone(text)
                if text.with(stands).is_some_and(|text| text.match_text(zone).is_some()))
        })
    }

    fn default_route(&self) -> bool {
        self.any(|claim, _| *claim == Claim::DefaultRoute)
    }
}

#[cfg(test)]
mod tests;
