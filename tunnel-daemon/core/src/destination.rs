//! Destination lists: which addresses an agent or a server may dial.
//!
//! The dialling process checks each resolved address just before it connects, so a name cannot reach an address that
//! the list does not cover. Cloud metadata and link-local addresses are refused even by an open list, unless an entry
//! names them: a tunnel must not hand out a node's credentials.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::text::Excerpt;

/// Ranges that only an entry within them allows: link-local of both families, and other addresses where clouds serve
/// metadata or credentials. No pod or host network contains these other addresses. Metadata addresses that such
/// networks may contain, as 100.100.100.200, are left to lists.
const METADATA: [IpNet; 7] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16)),
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0),
        10,
    )),
    // EC2, EKS Pod Identity.
    one([0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x254]),
    one([0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x23]),
    // Google.
    one([0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x254]),
    // Oracle, and its Classic.
    one([0xfd00, 0x00c1, 0, 0, 0, 0, 0xa9fe, 0xa9fe]),
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(192, 0, 0, 192), 32)),
];

/// A single address.
const fn one([a, b, c, d, e, f, g, h]: [u16; 8]) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(a, b, c, d, e, f, g, h),
        128,
    ))
}

/// Guarded in a server's list as well: an entry must name the loopback address of the dialling host.
const LOOPBACK: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128)),
];

/// NAT64's well-known prefix: the last 32 bits are the IPv4 address that will be reached.
const NAT64: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);

/// NAT64's prefix for local use (RFC 8215), from which each network chooses its own prefix.
const NAT64_LOCAL: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48);

/// Byte offsets of the IPv4 address embedded in an IPv6 address, for prefixes of 96, 64, 56 and 48 bits (RFC 6052). The
/// well-known prefix has 96 bits, so its offsets are first.
const EMBEDDED: [[usize; 4]; 4] = [
    [12, 13, 14, 15],
    [9, 10, 11, 12],
    [7, 9, 10, 11],
    [6, 7, 9, 10],
];

/// The address a connect to `ip` reaches: IPv4-mapped is IPv4, and unspecified is this machine.
#[must_use]
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V4(v4) if v4.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(v6) if v6.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        canonical => canonical,
    }
}

/// The agent's list, as denials name it.
const ALLOW_TARGET: &str = "--allow-target of the agent";
/// The server's list for tunnels of agents.
const ALLOWED_DESTINATION: &str = "--allowed-destination of the server";
/// The server's list for its clients, whose denials have a text of their own.
const CLIENT_ALLOW_TARGET: &str = "--client-allow-target of the server";

/// Which addresses may be dialled. Cheap to check (a few comparisons per entry), immutable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DestinationList {
    /// The flag that gave the list.
    flag: &'static str,
    /// Everything but the guarded ranges is allowed.
    is_open: bool,
    entries: Vec<DestinationEntry>,
    /// Each entry in its shortest spelling. Reported for every dial, so formatted once.
    classes: Vec<String>,
    guarded: Vec<IpNet>,
}

impl DestinationList {
    /// Allows every address except the metadata and link-local ranges; used when no list is given.
    #[must_use]
    pub fn open() -> Self {
        Self {
            is_open: true,
            ..Self::listed(ALLOW_TARGET, Vec::new(), METADATA.to_vec())
        }
    }

    /// An agent's `--allow-target` list of `CIDR|host[:port]`, or the word `all` or `none`; no entry at all means
    /// [`Self::open`].
    ///
    /// # Errors
    /// The first entry that cannot be parsed.
    pub fn allow_targets<S: AsRef<str>>(entries: &[S]) -> Result<Self, EntryError> {
        let word = extent(entries).map_err(|word| EntryError::new(word, EntryFlaw::NotAlone))?;
        if entries.is_empty() || word == Some(Extent::All) {
            return Ok(Self::open());
        }
        let entries = entries.iter().filter(|_| word.is_none());
        let entries = entries.map(|e| e.as_ref().parse());
        Ok(Self::listed(
            ALLOW_TARGET,
            entries.collect::<Result<_, _>>()?,
            METADATA.to_vec(),
        ))
    }

    /// A server's `--allowed-destination` list: every entry has a port, no entry at all and the word `none` allow nothing,
    /// and loopback addresses must be named like the metadata ranges. The caller refuses the server's own listeners,
    /// because only the caller knows them.
    ///
    /// # Errors
    /// The first entry that cannot be parsed or has no port; there is no word for all destinations.
    pub fn allowed_destinations<S: AsRef<str>>(entries: &[S]) -> Result<Self, EntryError> {
        let strict = |text: &S| {
            let entry: DestinationEntry = text.as_ref().parse()?;
            match entry.port {
                Some(_) => Ok(entry),
                None => Err(EntryError::new(text.as_ref(), EntryFlaw::PortNeeded)),
            }
        };
        let is_none = extent(entries) == Ok(Some(Extent::None));
        let entries = entries.iter().filter(|_| !is_none).map(strict);
        let entries = entries.collect::<Result<_, _>>()?;
        let guarded = METADATA.iter().chain(&LOOPBACK).copied().collect();
        Ok(Self::listed(ALLOWED_DESTINATION, entries, guarded))
    }

    /// A list of one entry, which may also be `*` (every target) or `*.SUFFIX` (every name below it), with or without a port.
    ///
    /// # Errors
    /// The entry cannot be parsed.
    pub(crate) fn of_pattern(entry: &str) -> Result<Self, EntryError> {
        let entries = vec![parse_pattern(entry)?];
        Ok(Self::listed(
            CLIENT_ALLOW_TARGET,
            entries,
            METADATA.to_vec(),
        ))
    }

    /// The union of these lists; without lists nothing is allowed.
    pub(crate) fn joined<'a>(lists: impl Iterator<Item = &'a Self>) -> Self {
        let entries = lists.flat_map(|list| list.entries.iter().cloned());
        Self::listed(CLIENT_ALLOW_TARGET, entries.collect(), METADATA.to_vec())
    }

    fn listed(flag: &'static str, entries: Vec<DestinationEntry>, guarded: Vec<IpNet>) -> Self {
        Self {
            flag,
            is_open: false,
            classes: entries.iter().map(ToString::to_string).collect(),
            entries,
            guarded,
        }
    }

    /// Whether the dialling process should resolve `name`: an entry could cover some address of it.
    ///
    /// # Errors
    /// [`Denied`], whatever the addresses are.
    pub fn check_lookup(&self, name: &str, port: u16) -> Result<(), Denied> {
        self.check_unresolved(name, port, |place| matches!(place, EntryHost::Net(_)))
    }

    /// Whether `name` may be asked for. Only names and patterns can cover `name`: it is not resolved here.
    ///
    /// # Errors
    /// [`Denied`] with the reason.
    pub(crate) fn check_name(&self, name: &str, port: u16) -> Result<(), Denied> {
        self.check_unresolved(name, port, |_place| false)
    }

    /// Whether an entry names `name`, which a proxy resolves. No network and no open list permits that.
    ///
    /// # Errors
    /// [`Denied`] with the reason.
    pub fn check_named(&self, name: &str, port: u16) -> Result<(), Denied> {
        let mut entries = self.entries.iter();
        if entries.any(|entry| entry.takes_port(port) && entry.place.covers(None, Some(name))) {
            return Ok(());
        }
        Err(self.unlisted(name, port))
    }

    fn check_unresolved(
        &self,
        name: &str,
        port: u16,
        may_cover: impl Fn(&EntryHost) -> bool,
    ) -> Result<(), Denied> {
        let covers = |entry: &DestinationEntry| {
            let place = &entry.place;
            entry.takes_port(port) && (may_cover(place) || place.covers(None, Some(name)))
        };
        if self.is_open || self.entries.iter().any(covers) {
            return Ok(());
        }
        Err(self.unlisted(name, port))
    }

    fn unlisted(&self, name: &str, port: u16) -> Denied {
        Denied {
            flag: Some(self.flag),
            ..Denied::name(name, port, Why::NotListed)
        }
    }

    /// Whether a connect to `addr` is allowed. `addr` is a literal address or, with `name`, a result of resolving that name.
    ///
    /// # Errors
    /// [`Denied`] with the reason and the remedy.
    pub fn check(&self, addr: SocketAddr, name: Option<&str>) -> Result<(), Denied> {
        let ip = canonical_ip(addr.ip());
        let denied = |why| {
            Err(Denied {
                flag: Some(self.flag),
                ip: Some(ip),
                port: addr.port(),
                name: name.map(str::to_owned),
                why,
            })
        };
        if let Some(guarded) = self.guarded.iter().find(|range| reaches(range, ip)) {
            let named = |e: &DestinationEntry| e.covers_within(ip, addr.port(), guarded);
            return if self.entries.iter().any(named) {
                Ok(())
            } else {
                denied(Why::Guarded)
            };
        }
        let covered = || self.entries.iter().any(|e| e.covers(ip, addr.port(), name));
        if self.is_open || covered() {
            Ok(())
        } else {
            denied(Why::NotListed)
        }
    }

    /// The first entry that covers `addr`, in its shortest spelling; `None` when none does, as with an open list.
    #[must_use]
    pub fn class(&self, addr: SocketAddr, name: Option<&str>) -> Option<&str> {
        let ip = canonical_ip(addr.ip());
        let mut each = self.entries.iter().zip(&self.classes);
        let covering = each.find(|(entry, _class)| entry.covers(ip, addr.port(), name));
        covering.map(|(_entry, class)| class.as_str())
    }
}

/// A list of permissions that is one word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extent {
    /// `all`: as without the list.
    All,
    /// `none`: nothing is permitted.
    None,
}

/// The word that a list of permissions consists of, if it is one. A host of such a name is written with a final dot.
///
/// # Errors
/// The word, beside other entries.
pub(crate) fn extent<S: AsRef<str>>(entries: &[S]) -> Result<Option<Extent>, &str> {
    let word = |entry: &S| match entry.as_ref() {
        "all" => Some(Extent::All),
        "none" => Some(Extent::None),
        _ => None,
    };
    match (entries.iter().find(|entry| word(entry).is_some()), entries) {
        (None, _) => Ok(None),
        (Some(entry), [_]) => Ok(word(entry)),
        (Some(entry), _) => Err(entry.as_ref()),
    }
}

/// Whether `ip` is in `range`, directly or through NAT64.
fn reaches(range: &IpNet, ip: IpAddr) -> bool {
    range.contains(&ip) || embedded_v4(ip).any(|v4| range.contains(&v4))
}

/// The IPv4 addresses to which a NAT64 translator may map `ip`. The local-use prefix allows several prefix lengths, so it has
/// several candidates.
fn embedded_v4(ip: IpAddr) -> impl Iterator<Item = IpAddr> {
    let (places, bytes) = match ip {
        IpAddr::V6(v6) if NAT64.contains(&v6) => (1, v6.octets()),
        IpAddr::V6(v6) if NAT64_LOCAL.contains(&v6) => (EMBEDDED.len(), v6.octets()),
        IpAddr::V6(_) | IpAddr::V4(_) => (0, [0; 16]),
    };
    let places = EMBEDDED.into_iter().take(places);
    places.map(move |place| IpAddr::from(place.map(|at| bytes[at])))
}

/// One line of a list: a network, a name or a pattern, with an optional port.
#[derive(Clone, PartialEq, Eq, Debug)]
struct DestinationEntry {
    place: EntryHost,
    port: Option<u16>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum EntryHost {
    Net(IpNet),
    /// ASCII lower case, without the final dot.
    Name(String),
    /// Names with at least one label before this suffix. The suffix is normalised as in [`Self::Name`].
    Below(String),
    /// Every address and every name.
    Any,
}

impl EntryHost {
    /// Whether the place covers the address or the name. Unknown ones are `None`.
    fn covers(&self, ip: Option<IpAddr>, name: Option<&str>) -> bool {
        match self {
            Self::Net(net) => ip.is_some_and(|ip| net.contains(&ip)),
            Self::Name(own) => name.is_some_and(|asked| absolute(asked).eq_ignore_ascii_case(own)),
            Self::Below(suffix) => name.is_some_and(|asked| is_below(asked, suffix)),
            Self::Any => true,
        }
    }
}

/// Whether `name` is a DNS name that ends in `.SUFFIX`. Other texts never match, because programs parse them differently.
fn is_below(name: &str, suffix: &str) -> bool {
    parse_name(name).is_ok_and(|name| {
        let above = name.strip_suffix(suffix);
        above.is_some_and(|above| above.len() > 1 && above.ends_with('.'))
    })
}

impl DestinationEntry {
    fn takes_port(&self, port: u16) -> bool {
        self.port.is_none_or(|own| own == port)
    }

    fn covers(&self, ip: IpAddr, port: u16, name: Option<&str>) -> bool {
        self.takes_port(port) && self.place.covers(Some(ip), name)
    }

    /// Whether this entry covers `ip` by a network within the guarded range. Names and wider networks do not.
    fn covers_within(&self, ip: IpAddr, port: u16, guarded: &IpNet) -> bool {
        let EntryHost::Net(net) = &self.place else {
            return false;
        };
        // Embedded IPv4 addresses of a network lie within the range if those of its first and last address do.
        let mut ends = embedded_v4(net.network()).zip(embedded_v4(net.broadcast()));
        let narrow = guarded.contains(net)
            || ends.any(|(first, last)| guarded.contains(&first) && guarded.contains(&last));
        self.takes_port(port) && narrow && net.contains(&ip)
    }
}

impl fmt::Display for DestinationEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            EntryHost::Net(IpNet::V6(net)) if self.port.is_some() => write!(f, "[{net}]")?,
            EntryHost::Net(net) => write!(f, "{net}")?,
            EntryHost::Name(name) => f.write_str(name)?,
            EntryHost::Below(suffix) => write!(f, "*.{suffix}")?,
            EntryHost::Any => f.write_str("*")?,
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

fn absolute(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

impl FromStr for DestinationEntry {
    type Err = EntryError;

    fn from_str(text: &str) -> Result<Self, EntryError> {
        let fail = |flaw| EntryError::new(text, flaw);
        if text.trim() != text || text.is_empty() {
            return Err(fail(EntryFlaw::Blank));
        }
        if let Some((ip, rest)) = text.split_once('/') {
            return parse_net(ip, rest).map_err(fail);
        }
        // A bare IPv6 address contains colons, so it is parsed before a port is split off.
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Ok(Self {
                place: EntryHost::Net(canonical_ip(ip).into()),
                port: None,
            });
        }
        if let Some(inside) = text.strip_prefix('[') {
            let (ip, rest) = inside
                .split_once(']')
                .ok_or_else(|| fail(EntryFlaw::Bracket))?;
            let ip: Ipv6Addr = ip.parse().map_err(|_bad| fail(EntryFlaw::Address))?;
            let port = optional_port(rest).map_err(fail)?;
            return Ok(Self {
                place: EntryHost::Net(canonical_ip(ip.into()).into()),
                port,
            });
        }
        let (host, port) = match text.split_once(':') {
            Some((host, port)) => (host, Some(parse_port(port).map_err(fail)?)),
            None => (text, None),
        };
        let place = match host.parse::<Ipv4Addr>() {
            Ok(ip) => EntryHost::Net(canonical_ip(ip.into()).into()),
            Err(_) => EntryHost::Name(parse_name(host).map_err(fail)?),
        };
        Ok(Self { place, port })
    }
}

/// An entry, or `*`, `*.SUFFIX`, `*:PORT`, `*.SUFFIX:PORT`.
fn parse_pattern(text: &str) -> Result<DestinationEntry, EntryError> {
    let Some(rest) = text.strip_prefix('*') else {
        return text.parse();
    };
    let fail = |flaw| EntryError::new(text, flaw);
    let (suffix, port) = match rest.split_once(':') {
        Some((suffix, port)) => (suffix, Some(parse_port(port).map_err(fail)?)),
        None => (rest, None),
    };
    let place = match suffix.strip_prefix('.') {
        Some(suffix) => EntryHost::Below(parse_name(suffix).map_err(fail)?),
        None if suffix.is_empty() => EntryHost::Any,
        None => return Err(fail(EntryFlaw::Star)),
    };
    Ok(DestinationEntry { place, port })
}

/// `10.0.0.0` `8`, `10.0.0.0` `8:443`, `[fd00::` `8]:443`, `[fd00::]` `8:443`: the two sides of the slash.
fn parse_net(ip: &str, rest: &str) -> Result<DestinationEntry, EntryFlaw> {
    let opened = ip.strip_prefix('[');
    let ip = opened.map_or(ip, |inside| inside.strip_suffix(']').unwrap_or(inside));
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (prefix, after) = rest.split_at(digits);
    let after = if opened.is_some() {
        after.strip_prefix(']').unwrap_or(after)
    } else {
        after
    };
    let ip: IpAddr = ip.parse().map_err(|_bad| EntryFlaw::Address)?;
    let prefix: u8 = prefix.parse().map_err(|_bad| EntryFlaw::Prefix)?;
    let net = IpNet::new(ip, prefix)
        .map_err(|_too_long| EntryFlaw::Prefix)?
        .trunc();
    Ok(DestinationEntry {
        place: EntryHost::Net(canonical_net(net)),
        port: optional_port(after)?,
    })
}

/// IPv4-mapped addresses are compared as IPv4, so an IPv4-mapped network becomes IPv4 too.
#[must_use]
pub fn canonical_net(net: IpNet) -> IpNet {
    match net {
        IpNet::V6(v6) => match (v6.addr().to_ipv4_mapped(), v6.prefix_len().checked_sub(96)) {
            (Some(v4), Some(prefix)) => Ipv4Net::new(v4, prefix).map_or(net, IpNet::V4),
            _ => net,
        },
        IpNet::V4(_) => net,
    }
}

fn optional_port(after_host: &str) -> Result<Option<u16>, EntryFlaw> {
    match after_host.strip_prefix(':') {
        Some(port) => parse_port(port).map(Some),
        None if after_host.is_empty() => Ok(None),
        None => Err(EntryFlaw::Trailing),
    }
}

fn parse_port(text: &str) -> Result<u16, EntryFlaw> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    text.parse()
        .ok()
        .filter(|port| digits && *port != 0)
        .ok_or(EntryFlaw::Port)
}

/// Names hold letters, digits, `-`, `_` and dots. A last label of digits is a mistyped IPv4 address.
fn parse_name(text: &str) -> Result<String, EntryFlaw> {
    let name = absolute(text);
    let label_ok = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    let last_is_number = name
        .rsplit('.')
        .next()
        .is_some_and(|label| label.bytes().all(|b| b.is_ascii_digit()));
    if name.len() > 253 || last_is_number || !name.split('.').all(label_ok) {
        return Err(EntryFlaw::Address);
    }
    Ok(name.to_ascii_lowercase())
}

/// An invalid entry of a destination list.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("destination \"{entry}\": {flaw}")]
pub struct EntryError {
    /// Excerpt of the entry.
    pub entry: String,
    /// What is wrong with the entry.
    pub flaw: EntryFlaw,
}

impl EntryError {
    fn new(entry: &str, flaw: EntryFlaw) -> Self {
        Self {
            entry: Excerpt(entry).to_string(),
            flaw,
        }
    }
}

/// What is wrong with an entry, and how to write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EntryFlaw {
    /// Empty, or surrounded by blanks.
    #[error("is empty or has blanks around it; write CIDR, address or name, and :port if wanted")]
    Blank,
    /// Not an address, network or name.
    #[error(
        "is no address, CIDR or DNS name; write 10.0.0.0/8, 10.0.0.1:443, [fd00::1]:443 or name:443"
    )]
    Address,
    /// The prefix length is not a number, or too long.
    #[error("has a bad prefix length; use 0 to 32 for IPv4, 0 to 128 for IPv6")]
    Prefix,
    /// `[` without `]`.
    #[error("lacks its closing bracket; write [fd00::1]:443")]
    Bracket,
    /// Text between the host and the port.
    #[error("has text behind the host that is no :port")]
    Trailing,
    /// The port is not a number from 1 to 65535.
    #[error("has a bad port; use 1 to 65535")]
    Port,
    /// A `*` that is neither alone nor the first label.
    #[error("has a * for a part of a label; write * for every target, or *.example.org")]
    Star,
    /// `all` or `none` beside other entries.
    #[error(
        "stands alone; leave the other entries out, or write a host of this name with a final dot"
    )]
    NotAlone,
    /// The entry needs a port.
    #[error("needs a port; write 10.0.0.0/8:443, [fd00::1]:443 or name:443")]
    PortNeeded,
}

/// An address that this process may not dial.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Denied {
    /// The flag with the list, and whose; `None`: no flag allows the address.
    pub flag: Option<&'static str>,
    /// The canonical address; `None` for a name that was not looked up.
    pub ip: Option<IpAddr>,
    /// The port asked for.
    pub port: u16,
    /// The name that was resolved to the address, if any.
    pub name: Option<String>,
    /// Why the address is denied.
    pub why: Why,
}

/// Why an address is denied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// No entry of the list covers the address.
    NotListed,
    /// The address is in a guarded range, and no entry within that range covers it.
    Guarded,
    /// The dialling process listens on the address.
    OwnListener,
}

impl Denied {
    /// Denies a name before it is resolved.
    #[must_use]
    pub fn name(name: &str, port: u16, why: Why) -> Self {
        Self {
            flag: None,
            ip: None,
            port,
            name: Some(name.to_owned()),
            why,
        }
    }
}

impl std::error::Error for Denied {}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.port;
        if let Some(flag) = self.flag {
            write!(f, "{flag}: ")?;
        }
        match (self.ip, &self.name) {
            (Some(ip), None) => write!(f, "destination {}", SocketAddr::new(ip, port))?,
            (Some(ip), Some(name)) => {
                let address = SocketAddr::new(ip, port);
                write!(f, "destination {address} (of {})", Excerpt(name))?;
            }
            (None, name) => {
                let name = name.as_deref().unwrap_or_default();
                write!(f, "destination {}:{port}", Excerpt(name))?;
            }
        }
        f.write_str(self.why.text())
    }
}

impl Why {
    fn text(self) -> &'static str {
        match self {
            Self::NotListed => " is not on the list of allowed destinations",
            Self::Guarded => {
                " is a metadata, link-local or loopback address that no list entry names"
            }
            Self::OwnListener => " is where this process itself listens",
        }
    }
}

/// Whether an agent's error text is a [`Denied`]. Such a text is about the agent's list, not about the target.
#[must_use]
pub fn is_denial(text: &str) -> bool {
    let all = [Why::NotListed, Why::Guarded, Why::OwnListener];
    all.iter().any(|why| text.ends_with(why.text()))
}

#[cfg(test)]
mod tests;
