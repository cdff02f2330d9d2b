//! Stream headers of the agent connection: agent id, identifiers, server id and count, bearer token.
//!
//! Headers are plain `(name, value)` pairs, independent of the HTTP library. Names are in lower case, as on the wire.
//! Unknown names are ignored.

#[doc(hidden)]
pub mod fuzz;

use std::fmt;

use super::identifiers::{Identifiers, IdentifiersError};
use super::lane_grant::LaneGrantHeaders;
pub use super::lane_grant::{LANE_SECRET_BYTES, LaneGrant};
pub use super::values::Values;
pub use super::version::PeerVersion;
use crate::ids::{AgentId, ServerId};
use crate::peer::GROUP_LEN_MAX;
use crate::text::Excerpt;

/// Request header: the agent's id, exactly one, may be empty.
pub const AGENT_ID: &str = "agentid";
/// Request header: the agent's identifiers, at most one.
pub const AGENT_IDENTIFIERS: &str = "agentidentifiers";
/// Longest agent id that a server accepts, bytes: four node names. The id is a metrics label and part of every report about a
/// link, so ids of header length would use up memory.
pub const AGENT_ID_LEN_MAX: usize = 1024;
/// Longest server id, bytes: an agent keeps an id for each link and each server address.
pub const SERVER_ID_LEN_MAX: usize = 1024;
/// Request header: `Bearer ` and a service account token.
pub const AUTHORIZATION: &str = "authorization";
/// Response header: the server's id.
pub const SERVER_ID: &str = "serverid";
/// Response header: how many servers an agent should be connected to.
pub const SERVER_COUNT: &str = "servercount";
/// Both ways: the sender supports WINDOW and FIN on the link. Unknown to Go peers.
pub const ADIT_LINK: &str = "adit-link";
/// Both ways: the sender supports lanes. Unknown to Go peers.
pub const ADIT_LANES: &str = "adit-lanes";
/// Both ways: the release of the sender's program. Unknown to Go peers.
pub const ADIT_VERSION: &str = "adit-version";

/// Response header: the server's zone. Unknown to Go peers.
pub const ADIT_ZONE: &str = "adit-zone";
/// Longest zone that an agent takes from a server, bytes: the longest value of a Kubernetes label has 63.
pub const ZONE_LEN_MAX: usize = 256;

/// Both ways: a server asks another one, or answers it. Between servers only.
pub const ADIT_PEER: &str = "adit-peer";
/// Both ways, between servers: the name of the installation.
pub const ADIT_PEER_GROUP: &str = "adit-peer-group";
/// Both ways, between servers: a number that a server draws when it starts.
pub const ADIT_PEER_INCARNATION: &str = "adit-peer-incarnation";
/// Response header, between servers: to how many servers the server tells agents to connect, if not to all.
pub const ADIT_PEER_AGENT_LINKS: &str = "adit-peer-agent-links";

/// What a server says of itself to another server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerHello {
    /// The name of the installation; servers of another one are refused.
    pub group: String,
    /// A number that the server drew when it started: two processes with one id differ in it.
    pub incarnation: u64,
    /// To how many servers it tells agents to connect now; `None`: to all.
    pub agent_links: Option<i64>,
}

impl PeerHello {
    fn push_to(&self, pairs: &mut Vec<(&'static str, String)>) {
        pairs.push((ADIT_PEER, "1".to_owned()));
        pairs.push((ADIT_PEER_GROUP, self.group.clone()));
        pairs.push((ADIT_PEER_INCARNATION, self.incarnation.to_string()));
        if let Some(links) = self.agent_links {
            pairs.push((ADIT_PEER_AGENT_LINKS, links.to_string()));
        }
    }
}

/// The headers of [`PeerHello`], as they come.
#[derive(Default)]
struct PeerHeaders {
    is_peer: bool,
    group: String,
    incarnation: Option<u64>,
    agent_links: Option<i64>,
}

impl PeerHeaders {
    fn note(&mut self, name: &str, value: &str) {
        match name {
            ADIT_PEER => self.is_peer = value == "1",
            ADIT_PEER_GROUP if value.len() <= GROUP_LEN_MAX => value.clone_into(&mut self.group),
            ADIT_PEER_INCARNATION => self.incarnation = value.parse().ok(),
            ADIT_PEER_AGENT_LINKS => self.agent_links = value.parse().ok(),
            _ => (),
        }
    }

    fn hello(self) -> Option<PeerHello> {
        let incarnation = self.incarnation.filter(|_| self.is_peer)?;
        Some(PeerHello {
            group: self.group,
            incarnation,
            agent_links: self.agent_links,
        })
    }
}

/// Extensions that are used only if both ends offer them. A missing header or a value other than `1` means "no".
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Extensions {
    /// [`ADIT_LINK`]: credit and half-close on the link.
    pub link: bool,
    /// [`ADIT_LANES`]: dedicated data connections.
    pub lanes: bool,
}

impl Extensions {
    /// The extensions that both ends offer.
    #[must_use]
    pub fn both(self, other: Self) -> Self {
        Self {
            link: self.link && other.link,
            lanes: self.lanes && other.lanes,
        }
    }

    fn note(&mut self, name: &str, value: &str) {
        match name {
            ADIT_LINK => self.link = value == "1",
            ADIT_LANES => self.lanes = value == "1",
            _ => (),
        }
    }

    fn push_to(self, pairs: &mut Vec<(&'static str, String)>) {
        for (offered, name) in [(self.link, ADIT_LINK), (self.lanes, ADIT_LANES)] {
            if offered {
                pairs.push((name, "1".to_owned()));
            }
        }
    }
}

/// An agent's request headers of `Connect`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AgentHello {
    /// The claimed id. Grants decide whether the agent may use the id.
    pub agent: AgentId,
    /// The claimed identifiers.
    pub identifiers: Identifiers,
    /// The agent's extensions of upstream's protocol.
    pub extensions: Extensions,
    /// The release of the peer's program.
    pub version: PeerVersion,
    /// The caller is a server that asks this one; its id is then a server's.
    pub peer: Option<PeerHello>,
    /// With `peer`: the zone of the caller.
    pub zone: Option<Box<str>>,
}

impl AgentHello {
    /// Parses the request headers of `Connect`, whose values may be any bytes.
    ///
    /// # Errors
    /// [`HelloError`]; send its text in the stream's status.
    pub fn from_headers<'a, V>(
        headers: impl IntoIterator<Item = (&'a str, &'a V)>,
    ) -> Result<Self, HelloError>
    where
        V: AsRef<[u8]> + ?Sized + 'a,
    {
        let (mut ids, mut sets, mut extensions) = (Vec::new(), Vec::new(), Extensions::default());
        let (mut version, mut peer) = (PeerVersion::default(), PeerHeaders::default());
        let mut zone = None;
        for (name, value) in headers {
            let value = value.as_ref();
            let text = ascii(value).unwrap_or_default();
            match name {
                ADIT_ZONE => zone = zone_of(text),
                AGENT_ID => ids.push(value),
                AGENT_IDENTIFIERS => sets.push(value),
                ADIT_VERSION => version = PeerVersion::parse(text),
                _ => {
                    extensions.note(name, text);
                    peer.note(name, text);
                }
            }
        }
        let &[id] = &ids[..] else {
            return Err(HelloError::AgentId(Values::of(&ids)));
        };
        let id = ascii(id).ok_or(HelloError::NotAscii("agent ID", "--agent-id"))?;
        if id.len() > AGENT_ID_LEN_MAX {
            return Err(HelloError::AgentIdLength(id.len()));
        }
        let identifiers = match sets[..] {
            [] => Identifiers::default(),
            [set] => {
                let not_ascii =
                    HelloError::NotAscii("set of agent identifiers", "--agent-identifiers");
                let set = ascii(set).ok_or(not_ascii)?;
                Identifiers::parse(set).map_err(HelloError::Unreadable)?
            }
            _ => return Err(HelloError::IdentifierSets(Values::of(&sets))),
        };
        Ok(Self {
            agent: AgentId::new(id),
            identifiers,
            extensions,
            version,
            peer: peer.hello(),
            zone,
        })
    }

    /// The headers to send. As in Go, the identifiers are sent even if empty.
    #[must_use]
    pub fn to_headers(&self) -> Vec<(&'static str, String)> {
        let mut pairs = vec![
            (AGENT_ID, self.agent.as_str().to_owned()),
            (AGENT_IDENTIFIERS, self.identifiers.encode()),
        ];
        self.extensions.push_to(&mut pairs);
        push_version(self.version, &mut pairs);
        if let Some(peer) = &self.peer {
            peer.push_to(&mut pairs);
        }
        if let Some(zone) = &self.zone {
            pairs.push((ADIT_ZONE, zone.to_string()));
        }
        pairs
    }
}

/// A header's text. gRPC metadata is ASCII; read as empty or with replacements, different ids would become one.
fn ascii(value: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(value).ok()?;
    text.is_ascii().then_some(text)
}

/// A zone that no server can have is none.
fn zone_of(text: &str) -> Option<Box<str>> {
    (1..=ZONE_LEN_MAX)
        .contains(&text.len())
        .then(|| text.into())
}

fn push_version(version: PeerVersion, pairs: &mut Vec<(&'static str, String)>) {
    if let Some(version) = version.as_str() {
        pairs.push((ADIT_VERSION, version.to_owned()));
    }
}

/// A server's response headers of `Connect`, sent before the first packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerHello {
    /// The server's id.
    pub server: ServerId,
    /// Number of servers, as received. The caller treats 0 or less as "not known".
    pub server_count: i64,
    /// The server's extensions of upstream's protocol.
    pub extensions: Extensions,
    /// The release of the peer's program.
    pub version: PeerVersion,
    /// The zone of the server: agents of the same zone prefer it for the tunnels that they open.
    pub zone: Option<Box<str>>,
    /// With [`Extensions::lanes`]: the permission to bind lanes to this link.
    pub lane_grant: Option<LaneGrant>,
    /// The server answers as a peer.
    pub peer: Option<PeerHello>,
}

impl ServerHello {
    /// Parses the response headers of `Connect`, whose values may be any bytes.
    ///
    /// # Errors
    /// [`HelloError`] if id or count are missing or repeated, the id is too long, or the count is not an integer.
    /// Without any known header the answer is most likely a refusal: check the stream's status first.
    pub fn from_headers<'a, V>(
        headers: impl IntoIterator<Item = (&'a str, &'a V)>,
    ) -> Result<Self, HelloError>
    where
        V: AsRef<[u8]> + ?Sized + 'a,
    {
        let (mut ids, mut counts, mut extensions) = (Vec::new(), Vec::new(), Extensions::default());
        let mut grant = LaneGrantHeaders::default();
        let (mut version, mut zone) = (PeerVersion::default(), None);
        let mut peer = PeerHeaders::default();
        for (name, value) in headers {
            let value = value.as_ref();
            let text = ascii(value).unwrap_or_default();
            match name {
                SERVER_ID => ids.push(value),
                SERVER_COUNT => counts.push(value),
                ADIT_ZONE => zone = zone_of(text),
                ADIT_VERSION => version = PeerVersion::parse(text),
                _ => {
                    extensions.note(name, text);
                    grant.note(name, text);
                    peer.note(name, text);
                }
            }
        }
        let lane_grant = grant.grant().filter(|_| extensions.lanes);
        let &[id] = &ids[..] else {
            return Err(HelloError::ServerId(Values::of(&ids)));
        };
        let id = ascii(id).ok_or(HelloError::NotAscii(
            "server ID",
            "the server's --server-id",
        ))?;
        if id.len() > SERVER_ID_LEN_MAX {
            return Err(HelloError::ServerIdLength(id.len()));
        }
        let &[count] = &counts[..] else {
            return Err(HelloError::ServerCounts(Values::of(&counts)));
        };
        let count = String::from_utf8_lossy(count);
        let server_count = count
            .parse()
            .map_err(|_bad| HelloError::ServerCount(Excerpt(&count).to_string()))?;
        Ok(Self {
            server: ServerId::new(id),
            server_count,
            extensions,
            version,
            zone,
            lane_grant,
            peer: peer.hello(),
        })
    }

    /// The headers to send at once, before any further authentication.
    #[must_use]
    pub fn to_headers(&self) -> Vec<(&'static str, String)> {
        let mut pairs = vec![
            (SERVER_ID, self.server.as_str().to_owned()),
            (SERVER_COUNT, self.server_count.to_string()),
        ];
        self.extensions.push_to(&mut pairs);
        push_version(self.version, &mut pairs);
        if let Some(zone) = &self.zone {
            pairs.push((ADIT_ZONE, zone.to_string()));
        }
        if let Some(grant) = &self.lane_grant {
            grant.push_to(&mut pairs);
        }
        if let Some(peer) = &self.peer {
            peer.push_to(&mut pairs);
        }
        pairs
    }
}

/// Why a peer's headers cannot be used. The texts begin as upstream's: operators search for them.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HelloError {
    /// No `agentid`, or several.
    #[error("expected one agent ID in the context, got {0}")]
    AgentId(Values),
    /// An id or set of identifiers that is not ASCII: what it is, and the flag that sets it.
    #[error("the {0} in the context is not ASCII, as gRPC metadata must be; check {1}")]
    NotAscii(&'static str, &'static str),
    /// An `agentid` of more than [`AGENT_ID_LEN_MAX`] bytes.
    #[error("the agent ID in the context has {0} bytes, more than {AGENT_ID_LEN_MAX}")]
    AgentIdLength(usize),
    /// Several `agentidentifiers`.
    #[error("expected at most one set of agent identifiers in the context, got {0}")]
    IdentifierSets(Values),
    /// The identifiers cannot be decoded.
    #[error("fail to parse agent identifiers: {0}")]
    Unreadable(#[source] IdentifiersError),
    /// No `serverid`, or several.
    #[error(
        "expected one server ID in the context, got {0}; is the address that of a proxy server's agent port?"
    )]
    ServerId(Values),
    /// A `serverid` of more than [`SERVER_ID_LEN_MAX`] bytes.
    #[error(
        "the server ID in the context has {0} bytes, more than {SERVER_ID_LEN_MAX}; give the server a shorter --server-id"
    )]
    ServerIdLength(usize),
    /// No `servercount`, or several.
    #[error("expected one server count in the context, got {0}")]
    ServerCounts(Values),
    /// The `servercount` is no integer.
    #[error("server count in the context is not an integer: \"{0}\"")]
    ServerCount(String),
}

/// A token as received; `Debug` does not show it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BearerToken<'a>(&'a str);

impl<'a> BearerToken<'a> {
    /// Extracts the token from the `authorization` values of a request.
    ///
    /// # Errors
    /// [`BearerError`] unless there is exactly one value with the prefix `Bearer `.
    pub fn from_headers(
        headers: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, BearerError> {
        let values: Vec<&str> = headers
            .into_iter()
            .filter_map(|(name, value)| (name == AUTHORIZATION).then_some(value))
            .collect();
        match values[..] {
            [] => Err(BearerError::Missing),
            [value] => value
                .strip_prefix("Bearer ")
                .map(Self)
                .ok_or(BearerError::NotBearer),
            _ => Err(BearerError::TooMany(values.len())),
        }
    }

    /// The token, for a token review only.
    #[must_use]
    pub fn reveal(self) -> &'a str {
        self.0
    }
}

impl fmt::Debug for BearerToken<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BearerToken(***)")
    }
}

/// Why a request carries no usable token. The texts are upstream's and never show a value.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BearerError {
    /// No `authorization` header.
    #[error("Authentication context was not found in metadata")]
    Missing,
    /// Several `authorization` headers.
    #[error("too many ({0}) tokens are received")]
    TooMany(usize),
    /// A scheme other than `Bearer `.
    #[error("received token does not have \"Bearer \" prefix")]
    NotBearer,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::LinkId;
    use zeroize::Zeroizing;

    fn text(result: Result<impl fmt::Debug, impl fmt::Display>) -> String {
        result.unwrap_err().to_string()
    }

    /// Upstream (agents): A missing, repeated or malformed agent id or identifier set is an error.
    #[test]
    fn an_agent_needs_exactly_one_id_and_at_most_one_set_of_identifiers() {
        let hello = AgentHello::from_headers([("agentid", ""), ("user-agent", "grpc-go")]).unwrap();
        assert_eq!(
            (hello.agent.as_str(), hello.identifiers),
            ("", Identifiers::default())
        );
        for (headers, error) in [
            (vec![], "expected one agent ID in the context, got []"),
            (
                vec![("agentid", "a"), ("agentid", "b")],
                "expected one agent ID in the context, got [a b]",
            ),
            (
                vec![
                    ("agentid", "a"),
                    ("agentidentifiers", "host=a"),
                    ("agentidentifiers", ""),
                ],
                "expected at most one set of agent identifiers in the context, got [host=a ]",
            ),
            (
                vec![("agentid", "a"), ("agentidentifiers", "host=a;")],
                "fail to parse agent identifiers: invalid semicolon separator in query; separate identifiers with &",
            ),
        ] {
            assert_eq!(text(AgentHello::from_headers(headers)), error);
        }
    }

    /// Read as empty, or with replaced bytes, they would be one id, and each agent would take the dials of the others.
    #[test]
    fn ids_that_are_not_ascii_are_refused_and_do_not_become_one_id() {
        for id in [&b"caf\xe9"[..], "café".as_bytes()] {
            let hello = AgentHello::from_headers([("agentid", id)]);
            assert_eq!(
                text(hello),
                "the agent ID in the context is not ASCII, as gRPC metadata must be; check --agent-id"
            );
            let hello = ServerHello::from_headers([("serverid", id), ("servercount", &b"1"[..])]);
            assert!(text(hello).ends_with("check the server's --server-id"));
        }
        let hello = [
            ("agentid", &b"a"[..]),
            ("agentidentifiers", &b"host=\xff"[..]),
        ];
        let hello = AgentHello::from_headers(hello);
        assert!(text(hello).ends_with("check --agent-identifiers"));
        let other = [("agentid", &b"a"[..]), ("x-other", &b"\xff"[..])];
        assert!(AgentHello::from_headers(other).is_ok());
    }

    /// Limit (sizes): Agent id | 1,024 bytes
    #[test]
    fn an_agent_id_is_no_longer_than_1024_bytes() {
        let longest = "x".repeat(AGENT_ID_LEN_MAX);
        let hello = AgentHello::from_headers([("agentid", &*longest)]).unwrap();
        assert_eq!(hello.agent.as_str(), longest);
        let longer = "x".repeat(AGENT_ID_LEN_MAX + 1);
        assert_eq!(
            text(AgentHello::from_headers([("agentid", &*longer)])),
            "the agent ID in the context has 1025 bytes, more than 1024"
        );
    }

    /// Limit (peers): Servers and links of an agent | 64 of each. A server id has at most 1,024 bytes
    #[test]
    fn a_server_id_is_no_longer_than_1024_bytes() {
        let hello = |id: &str| ServerHello::from_headers([("serverid", id), ("servercount", "1")]);
        assert!(hello(&"x".repeat(SERVER_ID_LEN_MAX)).is_ok());
        assert_eq!(
            hello(&"x".repeat(SERVER_ID_LEN_MAX + 1)),
            Err(HelloError::ServerIdLength(1025))
        );
    }

    #[test]
    fn hellos_round_trip_with_every_extension() {
        for (link, lanes) in [(false, false), (true, false), (false, true), (true, true)] {
            let extensions = Extensions { link, lanes };
            let identifiers = Identifiers::parse("ipv4=1.2.3.4&default-route=true").unwrap();
            let agent = AgentHello {
                agent: AgentId::new("a"),
                identifiers,
                extensions,
                version: PeerVersion::parse("1.2.3"),
                peer: None,
                zone: None,
            };
            let pairs = agent.to_headers();
            assert_eq!(AgentHello::from_headers(borrowed(&pairs)), Ok(agent));
            let server = ServerHello {
                server: ServerId::new("s"),
                server_count: 3,
                extensions,
                version: PeerVersion::parse("1.2.4"),
                zone: None,
                lane_grant: lanes.then(grant),
                peer: None,
            };
            let pairs = server.to_headers();
            assert_eq!(ServerHello::from_headers(borrowed(&pairs)), Ok(server));
        }
    }

    #[test]
    fn what_servers_say_of_themselves_to_each_other_round_trips() {
        for agent_links in [None, Some(2)] {
            let server = ServerHello {
                server: ServerId::new("s"),
                server_count: 3,
                extensions: Extensions::default(),
                version: PeerVersion::default(),
                zone: None,
                lane_grant: None,
                peer: Some(PeerHello {
                    group: "g".to_owned(),
                    incarnation: u64::MAX,
                    agent_links,
                }),
            };
            let pairs = server.to_headers();
            assert_eq!(ServerHello::from_headers(borrowed(&pairs)), Ok(server));
        }
    }

    fn grant() -> LaneGrant {
        LaneGrant {
            link: LinkId(u64::MAX),
            secret: Zeroizing::new(std::array::from_fn(|at| u8::try_from(at * 8).unwrap())),
            lanes_max: 4096,
        }
    }

    #[test]
    fn a_broken_lane_grant_is_none_and_the_secret_is_not_shown() {
        let server = ServerHello {
            server: ServerId::new("s"),
            server_count: 1,
            extensions: Extensions {
                link: true,
                lanes: true,
            },
            version: PeerVersion::default(),
            zone: None,
            lane_grant: Some(grant()),
            peer: None,
        };
        assert!(!format!("{server:?}").contains("secret"));
        for (name, value) in [
            ("adit-lanes", "0"),
            ("adit-lane-link", "-1"),
            ("adit-lane-max", ""),
            ("adit-lane-secret", "00"),
            ("adit-lane-secret", &"zz".repeat(32)),
            ("adit-lane-secret", &"\u{e9}".repeat(32)),
        ] {
            let mut pairs = server.to_headers();
            for pair in pairs.iter_mut().filter(|pair| pair.0 == name) {
                pair.1 = value.to_owned();
            }
            let read = ServerHello::from_headers(borrowed(&pairs)).unwrap();
            assert_eq!(read.lane_grant, None, "{name}: {value}");
        }
    }

    fn borrowed<'a>(
        pairs: &'a [(&'static str, String)],
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        pairs.iter().map(|(name, value)| (*name, value.as_str()))
    }

    #[test]
    fn a_servers_zone_is_told_and_one_that_is_empty_or_too_long_is_none() {
        let zone = |zone: &str| {
            let pairs = [("serverid", "s"), ("servercount", "1"), ("adit-zone", zone)];
            ServerHello::from_headers(pairs).unwrap()
        };
        let hello = zone("east-1");
        assert_eq!(hello.zone.as_deref(), Some("east-1"));
        let pairs = hello.to_headers();
        assert!(pairs.contains(&("adit-zone", "east-1".to_owned())));
        assert_eq!(ServerHello::from_headers(borrowed(&pairs)), Ok(hello));
        for none in ["", "\u{e9}", &"z".repeat(257)] {
            let hello = zone(none);
            assert_eq!(hello.zone, None, "{none}");
            assert!(
                hello
                    .to_headers()
                    .iter()
                    .all(|(name, _)| *name != "adit-zone")
            );
        }
    }

    #[test]
    fn an_extension_is_active_only_if_both_ends_send_1() {
        let headers = [("agentid", "a"), ("adit-link", "1"), ("adit-lanes", "2")];
        let offered = AgentHello::from_headers(headers).unwrap().extensions;
        assert_eq!(
            offered,
            Extensions {
                link: true,
                lanes: false
            }
        );
        assert_eq!(
            offered.both(Extensions {
                link: false,
                lanes: true
            }),
            Extensions::default()
        );
    }

    #[test]
    fn a_server_needs_one_id_and_one_integer_count() {
        for (headers, error) in [
            (
                vec![("servercount", "1")],
                "expected one server ID in the context, got []; is the address that of a proxy server's agent port?",
            ),
            (
                vec![("serverid", "s")],
                "expected one server count in the context, got []",
            ),
            (
                vec![
                    ("serverid", "s"),
                    ("servercount", "1"),
                    ("servercount", "2"),
                ],
                "expected one server count in the context, got [1 2]",
            ),
            (
                vec![("serverid", "s"), ("servercount", "1.5")],
                "server count in the context is not an integer: \"1.5\"",
            ),
        ] {
            assert_eq!(text(ServerHello::from_headers(headers)), error);
        }
    }

    #[test]
    fn a_list_of_many_values_is_cut() {
        let many = vec![("agentid", "x"); 100];
        assert_eq!(
            text(AgentHello::from_headers(many)),
            "expected one agent ID in the context, got [x x x x … 100 in all]"
        );
    }

    #[test]
    fn a_token_is_taken_from_exactly_one_bearer_value_and_stays_secret() {
        let token = BearerToken::from_headers([("authorization", "Bearer s3cret")]).unwrap();
        assert_eq!(token.reveal(), "s3cret");
        assert!(!format!("{token:?}").contains("s3cret"));
        for (headers, error) in [
            (
                vec![("auth", "Bearer x")],
                "Authentication context was not found in metadata",
            ),
            (
                vec![("authorization", "Bearer x"), ("authorization", "Bearer y")],
                "too many (2) tokens are received",
            ),
            (
                vec![("authorization", "bearer x")],
                "received token does not have \"Bearer \" prefix",
            ),
        ] {
            assert_eq!(text(BearerToken::from_headers(headers)), error);
        }
    }
}
