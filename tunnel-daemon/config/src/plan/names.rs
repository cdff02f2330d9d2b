//! The plan of a proxy's names and of the ways past its servers.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use adit_kube::access::Source;
use ipnet::IpNet;

use super::http_proxy::HttpProxy;
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

impl DirectPlan {
    /// The proxy of the environment for the APIs of clouds.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn https_proxy(&self) -> Result<Option<HttpProxy>, String> {
        let url = self.proxy.https_proxy.as_deref();
        let proxy = url.filter(|_| self.cloud_apis).map(HttpProxy::parse);
        let proxy = proxy
            .transpose()
            .map_err(|why| format!("HTTPS_PROXY {why}"))?;
        match proxy {
            Some(proxy) if proxy.is_tls => {
                Err("HTTPS_PROXY names a proxy that is spoken to by TLS: write http://".to_owned())
            }
            proxy => Ok(proxy),
        }
    }
}

/// Proxies behind the tunnel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CustomerProxies {
    /// For requests of `http://` URLs.
    pub http: Option<HttpProxy>,
    /// For CONNECT.
    pub https: Option<HttpProxy>,
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
            url => HttpProxy::parse(url)
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

#[cfg(test)]
mod tests {
    use super::*;

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
