//! SOCKS5 (RFC 1928) with user names and passwords (RFC 1929): parsers of the client's messages, and every answer.
//!
//! Each parser reads one message from the start of what the client has sent and not been taken yet, so that clients may send
//! all messages, and payload behind them, without waiting for answers. A message has at most [`MESSAGE_LEN_MAX`] octets.

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::failure::{DialFailure, TargetFailure};
use crate::target::is_host_name;

/// Octets of the longest message of a client: a user name and a password of 255 octets each.
pub const MESSAGE_LEN_MAX: usize = 3 + 255 + 255;

const VERSION: u8 = 5;
const VERSION_OF_SOCKS4: u8 = 4;
const VERSION_OF_PASSWORDS: u8 = 1;
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// A message that is complete, and how many octets it has.
pub type Parsed<T> = Result<Option<(T, usize)>, Rejection>;

/// How a client proves who it is; the number of the method.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Method {
    /// Not at all.
    None = 0,
    /// By user name and password.
    Password = 2,
}

/// A client's user name and password. Its debug text has neither.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Credentials<'a> {
    /// As sent, 0 to 255 octets.
    pub user: &'a [u8],
    /// As sent, 0 to 255 octets.
    pub password: &'a [u8],
}

/// Why a client is not served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Rejection {
    /// The first octet is that of SOCKS4 or SOCKS4a.
    #[error(
        "the client speaks SOCKS4, and SOCKS5 is served: write socks5h:// as the scheme of the proxy"
    )]
    Socks4,
    /// The first octet is a letter, as in HTTP.
    #[error(
        "the client speaks HTTP, and SOCKS5 is served: write socks5h:// as the scheme of the proxy"
    )]
    Http,
    /// A version that is not known here.
    #[error("the client does not speak SOCKS5")]
    Version,
    /// The client offers no method that is accepted here.
    #[error("the client offers no accepted way to authenticate")]
    NoMethod,
    /// BIND, UDP ASSOCIATE or an unknown command.
    #[error("only CONNECT is served, no BIND and no UDP ASSOCIATE")]
    Command,
    /// An unknown type of address.
    #[error("unknown type of address")]
    AddressType,
    /// The name is not a host name.
    #[error("the target is neither an address nor a host name")]
    Name,
}

/// The `REP` field of a reply (RFC 1928, section 6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Reply {
    /// The tunnel is open.
    Succeeded = 0,
    /// Any failure without a code of its own.
    GeneralFailure = 1,
    /// The target is not allowed.
    NotAllowed = 2,
    /// The target's network cannot be reached.
    NetworkUnreachable = 3,
    /// The target cannot be reached, or its name has no address.
    HostUnreachable = 4,
    /// The target refuses the connection.
    ConnectionRefused = 5,
    /// The target did not answer in time. The text of RFC 1928 is "TTL expired"; clients show a time-out.
    TtlExpired = 6,
    /// The command is not served.
    CommandNotSupported = 7,
    /// The type of address is not known.
    AddressTypeNotSupported = 8,
}

impl fmt::Debug for Credentials<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

/// Parses the greeting: the version, and the methods that the client offers, among them `wanted`.
///
/// # Errors
/// The client speaks another protocol, or does not offer `wanted`.
pub fn greeting(bytes: &[u8], wanted: Method) -> Parsed<()> {
    match bytes.first() {
        None | Some(&VERSION) => (),
        Some(&VERSION_OF_SOCKS4) => return Err(Rejection::Socks4),
        Some(letter) if letter.is_ascii_uppercase() => return Err(Rejection::Http),
        Some(_other) => return Err(Rejection::Version),
    }
    let Some((methods, len)) = counted(bytes, 1) else {
        return Ok(None);
    };
    if !methods.contains(&(wanted as u8)) {
        return Err(Rejection::NoMethod);
    }
    Ok(Some(((), len)))
}

/// Parses user name and password.
///
/// # Errors
/// Another version of that message.
pub fn credentials(bytes: &[u8]) -> Parsed<Credentials<'_>> {
    if bytes
        .first()
        .is_some_and(|&version| version != VERSION_OF_PASSWORDS)
    {
        return Err(Rejection::Version);
    }
    let both = counted(bytes, 1).and_then(|(user, at)| {
        let (password, len) = counted(bytes, at)?;
        Some((Credentials { user, password }, len))
    });
    Ok(both)
}

/// Parses the request and returns the target as `host:port`; an IPv6 address has brackets.
///
/// An address that is sent as a name is taken as that address. A name is otherwise a host name: letters, digits, hyphens,
/// underscores and dots, so that no target can read like another.
///
/// # Errors
/// A command other than CONNECT, or a target that is none.
pub fn request(bytes: &[u8]) -> Parsed<String> {
    if bytes.first().is_some_and(|&version| version != VERSION) {
        return Err(Rejection::Version);
    }
    if bytes.get(1).is_some_and(|&command| command != CONNECT) {
        return Err(Rejection::Command);
    }
    let Some(kind) = bytes.get(3) else {
        return Ok(None);
    };
    let host = match *kind {
        IPV4 => fixed::<4>(bytes).map(|octets| (IpAddr::V4(Ipv4Addr::from(octets)).into(), 8)),
        IPV6 => fixed::<16>(bytes).map(|octets| (IpAddr::V6(Ipv6Addr::from(octets)).into(), 20)),
        NAME => match counted(bytes, 4) {
            Some((name, len)) => Some((Target::of_name(name).ok_or(Rejection::Name)?, len)),
            None => None,
        },
        _unknown => return Err(Rejection::AddressType),
    };
    let Some((host, at)) = host else {
        return Ok(None);
    };
    let Some(&[high, low]) = bytes.get(at..at + 2) else {
        return Ok(None);
    };
    Ok(Some((host.with(u16::from_be_bytes([high, low])), at + 2)))
}

/// The host of a request.
enum Target<'a> {
    Ip(IpAddr),
    Name(&'a str),
}

impl From<IpAddr> for Target<'_> {
    fn from(ip: IpAddr) -> Self {
        Self::Ip(ip)
    }
}

impl<'a> Target<'a> {
    fn of_name(octets: &'a [u8]) -> Option<Self> {
        let name = std::str::from_utf8(octets).ok()?;
        if let Ok(ip) = name.parse() {
            return Some(Self::Ip(ip));
        }
        is_host_name(name).then_some(Self::Name(name))
    }

    fn with(&self, port: u16) -> String {
        match self {
            Self::Ip(ip) => SocketAddr::new(*ip, port).to_string(),
            Self::Name(name) => format!("{name}:{port}"),
        }
    }
}

/// The octets that the octet at `at` counts, and where they end.
fn counted(bytes: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let end = at + 1 + usize::from(*bytes.get(at)?);
    Some((bytes.get(at + 1..end)?, end))
}

/// The octets of an address of fixed length in a request.
fn fixed<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    bytes.get(4..)?.first_chunk().copied()
}

impl Method {
    /// The answer to a greeting.
    #[must_use]
    pub fn answer(self) -> [u8; 2] {
        [VERSION, self as u8]
    }
}

/// The answer to user name and password; after a refusal the connection is closed.
#[must_use]
pub fn verdict(is_right: bool) -> [u8; 2] {
    [VERSION_OF_PASSWORDS, u8::from(!is_right)]
}

impl Reply {
    /// The whole reply. The address in it is all zeros: the client has no use for one, and the agent's is nobody's business.
    #[must_use]
    pub const fn octets(self) -> [u8; 10] {
        [VERSION, self as u8, 0, IPV4, 0, 0, 0, 0, 0, 0]
    }

    /// The reply to a failed dial.
    #[must_use]
    pub fn of_failure(failure: &DialFailure) -> Self {
        match failure {
            DialFailure::Denied(_) => Self::NotAllowed,
            DialFailure::TimedOut | DialFailure::SendTimedOut => Self::TtlExpired,
            DialFailure::Target(text) => Self::of_answer(text),
            DialFailure::NoAgent
            | DialFailure::LinkLost
            | DialFailure::LinkBusy
            | DialFailure::TooManyPending { .. }
            | DialFailure::TooLong
            | DialFailure::Closed
            | DialFailure::ShuttingDown
            | DialFailure::NoMemory
            | DialFailure::NoDescriptors
            | DialFailure::NoServer(_) => Self::GeneralFailure,
        }
    }

    fn of_answer(text: &str) -> Self {
        match TargetFailure::of(text) {
            TargetFailure::Denied => Self::NotAllowed,
            TargetFailure::Refused => Self::ConnectionRefused,
            TargetFailure::NetworkUnreachable => Self::NetworkUnreachable,
            TargetFailure::HostUnreachable | TargetFailure::NoSuchHost | TargetFailure::Lookup => {
                Self::HostUnreachable
            }
            TargetFailure::TimedOut | TargetFailure::LookupTimedOut => Self::TtlExpired,
            TargetFailure::Overload
            | TargetFailure::Stopping
            | TargetFailure::Connect
            | TargetFailure::Other => Self::GeneralFailure,
        }
    }
}

impl Rejection {
    /// All octets to write before the connection is closed; none for a client whose protocol is not known.
    #[must_use]
    pub fn answer(self) -> &'static [u8] {
        const COMMAND: [u8; 10] = Reply::CommandNotSupported.octets();
        const ADDRESS_TYPE: [u8; 10] = Reply::AddressTypeNotSupported.octets();
        const NAME: [u8; 10] = Reply::GeneralFailure.octets();
        match self {
            // SOCKS4: request rejected.
            Self::Socks4 => &[0, 91, 0, 0, 0, 0, 0, 0],
            Self::Http => {
                b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n\
                this port speaks SOCKS5, not HTTP: write socks5h:// in place of http:// as the scheme of the proxy\n"
            }
            Self::Version => &[],
            Self::NoMethod => &[VERSION, 255],
            Self::Command => &COMMAND,
            Self::AddressType => &ADDRESS_TYPE,
            Self::Name => &NAME,
        }
    }
}

/// For the fuzz target and the test that replays its corpus. The first octet chooses the method and how the rest is cut.
///
/// # Panics
///
/// When the outcome depends on how the input is cut, a message exceeds the longest one, or a target cannot be parsed again.
#[doc(hidden)]
pub fn fuzz_entry(data: &[u8]) {
    let [how, sent @ ..] = data else { return };
    let wanted = if how & 1 == 0 {
        Method::None
    } else {
        Method::Password
    };
    let step = usize::from(how >> 1) + 1;
    let whole = conversation(sent, wanted, sent.len().max(1));
    assert_eq!(
        whole,
        conversation(sent, wanted, step),
        "the outcome depends on how the input is cut"
    );
    if let Ok(Some(target)) = whole {
        let parsed = crate::target::Target::parse(&target);
        let (host, port) = target.rsplit_once(':').unwrap_or_default();
        assert!(
            parsed.is_ok_and(|parsed| parsed.port.to_string() == port),
            "{target}"
        );
        assert!(host.len() <= 254, "{target}");
    }
}

/// Parses all messages, with `step` octets more each time.
fn conversation(sent: &[u8], wanted: Method, step: usize) -> Result<Option<String>, Rejection> {
    let (mut at, mut end, mut stage) = (0, 0, 0);
    loop {
        let bytes = sent.get(at..end).unwrap_or_default();
        let taken = match stage {
            0 => greeting(bytes, wanted)?.map(|((), len)| len),
            1 if wanted == Method::Password => credentials(bytes)?.map(|(_both, len)| len),
            1 => Some(0),
            _ => match request(bytes)? {
                Some((target, _len)) => return Ok(Some(target)),
                None => None,
            },
        };
        match taken {
            Some(len) => (at, stage) = (at + len, stage + 1),
            None if end == sent.len() => {
                assert!(bytes.len() < MESSAGE_LEN_MAX, "a message without an end");
                return Ok(None);
            }
            None => end = sent.len().min(end + step),
        }
    }
}
