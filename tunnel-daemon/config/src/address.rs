//! Addresses of listeners and of servers: host and port as typed, checked but not resolved.

use std::fmt;
use std::net::IpAddr;

/// The host part of a listening address.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum BindHost {
    /// Every interface, both families where the host has them (Go's empty host).
    Any,
    /// One address.
    Ip(IpAddr),
    /// A name, resolved when the listener is opened.
    Name(String),
}

/// A TCP address to listen on. Port 0 lets the kernel choose.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct BindAddress {
    /// Host part.
    pub host: BindHost,
    /// TCP port.
    pub port: u16,
}

/// One `--proxy-server-host` entry.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ServerAddress {
    /// A name or address, resolved at each connect (A and AAAA).
    Host {
        /// Without brackets; also the TLS server name.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// `srv:NAME`: targets and ports come from the SRV records of `NAME`.
    Srv {
        /// The full record name, such as `_konnectivity._tcp.example.com`.
        name: String,
    },
}

impl BindAddress {
    /// From the two flags that upstream uses; an IPv6 address may have brackets.
    ///
    /// # Errors
    /// A sentence that names an invalid host.
    pub fn new(host: &str, port: u16) -> Result<Self, String> {
        let host = match host {
            "" => BindHost::Any,
            text => match unbracketed(text).parse() {
                Ok(ip) => BindHost::Ip(ip),
                Err(_not_an_address) if is_host_name(text) => BindHost::Name(text.to_owned()),
                Err(_not_an_address) => {
                    return Err(format!("{text:?} is neither an IP address nor a host name"));
                }
            },
        };
        Ok(Self { host, port })
    }

    /// Reads `HOST:PORT`, `[V6]:PORT` or `:PORT`.
    ///
    /// # Errors
    /// A sentence that names the text and the expected form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (host, port) = text
            .rsplit_once(':')
            .ok_or_else(|| format!("{text:?} has no port: write HOST:PORT"))?;
        if host.contains(':') && !host.starts_with('[') {
            return Err(format!(
                "{text:?}: write an IPv6 address in brackets, [ADDRESS]:PORT"
            ));
        }
        let port = port
            .parse()
            .map_err(|_not_a_port| format!("{port:?} in {text:?} is not a port (0 to 65535)"))?;
        Self::new(host, port)
    }

    /// Whether only this host can connect to the address.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        match &self.host {
            BindHost::Any => false,
            BindHost::Ip(ip) => ip.is_loopback(),
            BindHost::Name(name) => name == "localhost",
        }
    }
}

impl fmt::Display for BindAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            BindHost::Any => write!(f, ":{}", self.port),
            BindHost::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]:{}", self.port),
            BindHost::Ip(IpAddr::V4(ip)) => write!(f, "{ip}:{}", self.port),
            BindHost::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl ServerAddress {
    /// Reads one entry: `HOST`, `HOST:PORT`, an IPv6 address bare or in brackets, or `srv:NAME`.
    ///
    /// # Errors
    /// A sentence that names the entry.
    pub fn parse(text: &str, default_port: u16) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix("srv:") {
            return match is_host_name(name) {
                true => Ok(Self::Srv {
                    name: name.to_owned(),
                }),
                false => Err(format!("{text:?}: {name:?} is not a record name")),
            };
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if host.starts_with('[') || !host.contains(':') => {
                match port.parse() {
                    Ok(port) if port > 0 => (host, port),
                    // `[::1]` without a port: the colon was inside the brackets.
                    _ if text.ends_with(']') => (text, default_port),
                    _ => return Err(format!("{port:?} in {text:?} is not a port (1 to 65535)")),
                }
            }
            _ => (text, default_port),
        };
        let host = unbracketed(host);
        if host.parse::<IpAddr>().is_err() && !is_host_name(host) {
            return Err(format!("{host:?} is neither an IP address nor a host name"));
        }
        Ok(Self::Host {
            host: host.to_owned(),
            port,
        })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Host { host, port } => write!(f, "{host}:{port}"),
            Self::Srv { name } => write!(f, "srv:{name}"),
        }
    }
}

fn unbracketed(text: &str) -> &str {
    text.strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(text)
}

/// Loose on purpose, since resolvers accept more than DNS does: rejects only what no resolver can take.
pub(crate) fn is_host_name(text: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && text.len() <= 253 && text.chars().all(legal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bind_addresses_are_read_and_shown_in_one_spelling() {
        for (text, shown) in [
            ("127.0.0.1:8131", "127.0.0.1:8131"),
            ("[::1]:0", "[::1]:0"),
            (":8091", ":8091"),
            ("localhost:1", "localhost:1"),
        ] {
            assert_eq!(BindAddress::parse(text).unwrap().to_string(), shown);
        }
        let [bare, bracketed] = ["::1", "[::1]"].map(|host| BindAddress::new(host, 5).unwrap());
        assert_eq!(bare, bracketed);
        assert_eq!(BindAddress::new("", 5).unwrap().host, BindHost::Any);
    }

    #[test]
    fn bind_address_errors_quote_the_text() {
        for text in [
            "",
            "8131",
            "::1:80",
            "127.0.0.1:",
            "127.0.0.1:65536",
            "a b:1",
            "127.0.0.1:-1",
            "[::1:80",
        ] {
            let error = BindAddress::parse(text).unwrap_err();
            assert!(error.contains('"'), "{text:?}: {error}");
        }
    }

    #[test]
    fn server_addresses_take_hosts_ports_and_srv_names() {
        let host = |host: &str, port| ServerAddress::Host {
            host: host.to_owned(),
            port,
        };
        let name = "_k._tcp.example".to_owned();
        for (text, address) in [
            ("127.0.0.1", host("127.0.0.1", 8091)),
            ("a.example:443", host("a.example", 443)),
            ("::1", host("::1", 8091)),
            ("[::1]", host("::1", 8091)),
            ("[::1]:9", host("::1", 9)),
            ("srv:_k._tcp.example", ServerAddress::Srv { name }),
        ] {
            let parsed = ServerAddress::parse(text, 8091).unwrap();
            assert_eq!(parsed, address);
            let again = ServerAddress::parse(&parsed.to_string(), 1).unwrap();
            assert_eq!(again, address);
        }
        for text in ["", "a b", "a:0", "a:x", "srv:", "http://a", "[::1", "a:"] {
            assert!(ServerAddress::parse(text, 8091).is_err(), "{text:?}");
        }
    }
}
