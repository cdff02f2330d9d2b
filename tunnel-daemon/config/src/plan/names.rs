//! The plan of a proxy's names and of the ways past its servers.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use adit_kube::access::Source;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ipnet::IpNet;

use super::parts::ForwardProxy;
use crate::error::{ConfigError, bail};

/// Port of name servers.
pub const DNS_PORT: u16 = 53;

/// Who resolves a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Resolver {
    /// The agent at the other end of the tunnel: the name goes there as it is.
    #[default]
    Agent,
    /// The guest cluster: its Services, then its DNS, through the tunnel.
    Guest,
    /// This host.
    Here,
}

impl Resolver {
    /// The resolver with this name in `--resolve`.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        match name {
            "agent" => Some(Self::Agent),
            "tunnel" => Some(Self::Guest),
            "here" => Some(Self::Here),
            _ => None,
        }
    }
}

/// The name servers of the cluster at the other end, asked over TCP through the tunnel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GuestDns {
    /// The Service with this namespace and name, port 53.
    Service(String, String),
    /// This address.
    Address(SocketAddr),
}

impl GuestDns {
    /// Reads an address, or a Service's `NAMESPACE/NAME`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Address(SocketAddr::new(address, DNS_PORT)));
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
                Ok(Self::Service(namespace.to_owned(), name.to_owned()))
            }
            _ => Err(format!(
                "{text:?} is no name server: write an address, with :PORT if it is not 53, or NAMESPACE/NAME of a Service such as kube-system/kube-dns"
            )),
        }
    }

    /// OpenShift's.
    pub(crate) fn of_openshift() -> Self {
        Self::Service("openshift-dns".to_owned(), "dns-default".to_owned())
    }
}

/// How the names that clients ask for become addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NamesPlan {
    /// Resolvers by the end of a name, without a leading dot; the longest one counts.
    pub suffixes: Vec<(String, Resolver)>,
    /// The resolver of all other names.
    pub resolver: Resolver,
    /// API of the cluster whose Services are known by name.
    pub services: Option<Source>,
    /// Its DNS.
    pub guest_dns: Option<GuestDns>,
    /// The resolver of names that the guest cluster is not asked for, or cannot be.
    pub unresolved: Resolver,
    /// This host resolves names that the guest cluster's DNS gives no answer for, and then connects directly for a while.
    pub falls_back: bool,
    /// IPv4 addresses are tried first.
    pub prefer_ipv4: bool,
}

impl NamesPlan {
    /// Parses `SUFFIX=WHERE`.
    pub(crate) fn suffix(text: &str) -> Result<(String, Resolver), String> {
        let (suffix, resolver) = text.split_once('=').unwrap_or((text, ""));
        let suffix = suffix.trim_matches('.').to_ascii_lowercase();
        let resolver = Resolver::of_name(resolver)
            .ok_or_else(|| format!("{text:?}: write SUFFIX=agent, SUFFIX=tunnel or SUFFIX=here"))?;
        Ok((suffix, resolver))
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let asks_guest = self
            .suffixes
            .iter()
            .any(|(_, resolver)| *resolver == Resolver::Guest);
        if asks_guest && self.services.is_none() && self.guest_dns.is_none() {
            bail!(
                "--resolve ...=tunnel needs --kubeconfig for Services, --guest-dns for other names, or both"
            );
        }
        if matches!(self.guest_dns, Some(GuestDns::Service(..))) && self.services.is_none() {
            bail!(
                "--guest-dns names a Service, whose address --kubeconfig gives access to: give both, or an address"
            );
        }
        Ok(())
    }
}

/// Connections past the servers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DirectPlan {
    /// The APIs of clouds are reached directly.
    pub cloud_apis: bool,
    /// Guarded networks that direct connections may reach all the same.
    pub allowed: Vec<IpNet>,
    /// Proxy for direct connections.
    pub proxy: ForwardProxy,
}

/// A proxy behind the tunnel. `Debug` hides user and password.
#[derive(Clone, PartialEq, Eq)]
pub struct CustomerProxy {
    /// TLS to the proxy.
    pub is_tls: bool,
    /// Name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// The URL names the port.
    pub names_port: bool,
    /// User and password.
    pub user: Option<(String, String)>,
}

/// Proxies behind the tunnel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CustomerProxies {
    /// For requests of `http://` URLs.
    pub http: Option<CustomerProxy>,
    /// For CONNECT.
    pub https: Option<CustomerProxy>,
    /// Hosts that need none.
    pub no_proxy: String,
    /// Certificates that are trusted in place of this system's, for TLS to these proxies.
    pub bundle: Option<PathBuf>,
}

impl CustomerProxies {
    /// Hosts of proxies whose URL names a port.
    #[must_use]
    pub fn hosts(&self) -> Vec<String> {
        let proxies = [&self.http, &self.https].into_iter().flatten();
        let named = proxies.filter(|proxy| proxy.names_port);
        named.map(|proxy| proxy.host.to_ascii_lowercase()).collect()
    }

    /// Each proxy comes with its flag.
    pub(crate) fn of_flags(
        (http_flag, http): (&str, &str),
        (https_flag, https): (&str, &str),
        no_proxy: &str,
        bundle: Option<PathBuf>,
    ) -> Result<Self, ConfigError> {
        let proxy = |flag, url: &str| match url {
            "" => Ok(None),
            url => CustomerProxy::parse(url)
                .map(Some)
                .map_err(|why| ConfigError::new(format!("{flag} {why}"))),
        };
        Ok(Self {
            http: proxy(http_flag, http)?,
            https: proxy(https_flag, https)?,
            no_proxy: no_proxy.to_owned(),
            bundle,
        })
    }
}

impl CustomerProxy {
    /// The value of `Proxy-Authorization` for it (RFC 7617).
    #[must_use]
    pub fn authorization(&self) -> Option<String> {
        let (name, password) = self.user.as_ref()?;
        let both = STANDARD.encode(format!("{name}:{password}"));
        Some(format!("Basic {both}"))
    }

    /// Reads a URL. Errors do not repeat it, since it may contain a password.
    ///
    /// # Errors
    /// What is wrong, and what to write.
    pub fn parse(url: &str) -> Result<Self, &'static str> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
        let is_tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err("has no usable scheme: write http://HOST:PORT or https://HOST:PORT"),
        };
        let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
        let (user, address) = match authority.rsplit_once('@') {
            Some((user, address)) => (Some(user), address),
            None => (None, authority),
        };
        let (host, port) = match address.strip_prefix('[') {
            Some(bracketed) => bracketed
                .split_once(']')
                .map(|(host, rest)| (host, rest.strip_prefix(':')))
                .ok_or("has an address without a closing bracket")?,
            None => match address.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (address, None),
            },
        };
        if host.is_empty() {
            return Err("names no host: write http://HOST:PORT");
        }
        let port = port.filter(|port| !port.is_empty());
        let number = port.map(str::parse::<u16>).transpose();
        let number = number.map_err(|_bad| "has a bad port: write 1 to 65535")?;
        let user = user
            .map(|user| {
                let (name, password) = user.split_once(':').unwrap_or((user, ""));
                Ok::<_, &'static str>((decoded(name)?, decoded(password)?))
            })
            .transpose()?;
        Ok(Self {
            is_tls,
            host: host.to_owned(),
            port: number.unwrap_or(if is_tls { 443 } else { 80 }),
            names_port: number.is_some(),
            user,
        })
    }
}

/// Decodes percent escapes.
fn decoded(text: &str) -> Result<String, &'static str> {
    const BAD: &str =
        "has a user or password with a bad percent escape: write %25 for a percent sign";
    let mut octets = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(octet) = rest.next() {
        let digit = |digit: Option<u8>| char::from(digit?).to_digit(16);
        octets.push(match octet {
            b'%' => {
                let (high, low) = (digit(rest.next()), digit(rest.next()));
                let both = high.zip(low).ok_or(BAD)?;
                u8::try_from(both.0 * 16 + both.1).map_err(|_large| BAD)?
            }
            octet => octet,
        });
    }
    String::from_utf8(octets).map_err(|_bad| BAD)
}

impl fmt::Debug for CustomerProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomerProxy")
            .field("is_tls", &self.is_tls)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("user", &self.user.as_ref().map(|_hidden| "***"))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_url_has_an_escaped_user_and_a_default_port() {
        let proxy = CustomerProxy::parse("https://us%40er:p%3Ass%25@proxy.example").unwrap();
        let user = ("us@er".to_owned(), "p:ss%".to_owned());
        assert_eq!(proxy.user, Some(user));
        assert!(proxy.is_tls && !proxy.names_port);
        assert_eq!((proxy.host.as_str(), proxy.port), ("proxy.example", 443));
        assert!(!format!("{proxy:?}").contains("us@er"));
        for (url, host, port) in [
            ("proxy:3128", "proxy", 3128),
            ("http://[fd00::1]:3128/", "fd00::1", 3128),
            ("http://10.0.0.1", "10.0.0.1", 80),
        ] {
            let proxy = CustomerProxy::parse(url).unwrap();
            assert_eq!(
                (proxy.host.as_str(), proxy.port, proxy.user),
                (host, port, None),
                "{url}"
            );
        }
        for url in [
            "socks5://a:1",
            "http://",
            "http://a:x",
            "http://u%zz@a:1",
            "http://[fd00::1:1",
        ] {
            let why = CustomerProxy::parse(url).unwrap_err();
            assert!(
                why.contains("write") || why.contains("bracket"),
                "{url}: {why}"
            );
        }
    }

    #[test]
    fn a_suffix_has_one_of_three_resolvers() {
        for (text, suffix, resolver) in [
            ("cluster.local=tunnel", "cluster.local", Resolver::Guest),
            (".Corp.example.=here", "corp.example", Resolver::Here),
            ("x=agent", "x", Resolver::Agent),
        ] {
            assert_eq!(
                NamesPlan::suffix(text),
                Ok((suffix.to_owned(), resolver)),
                "{text}"
            );
        }
        for text in ["cluster.local", "a=b", ""] {
            assert!(
                NamesPlan::suffix(text).unwrap_err().contains("=tunnel"),
                "{text}"
            );
        }
    }
}
