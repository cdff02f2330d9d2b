//! The path to servers through an HTTP proxy, which HTTPS_PROXY names (RFC 9110, section 9.3.6).

use std::sync::Arc;

use adit_config::address::ServerAddress;
use adit_config::plan::{ForwardProxy, HttpProxy};
use adit_config::tls_policy::TlsPolicy;
use adit_core::session::ProcessBudget;
use adit_kube::no_proxy::is_excepted;
use adit_net::happy_eyeballs::Race;
use adit_net::resolve::{self, servers_of_host};
use adit_net::self_sockets::OwnSockets;
use adit_tls::stream::{PeerAddr, Socket};
use adit_tls::tls::TlsError;
use tokio::net::TcpStream;

use super::{ConnectorError, Purpose, ServerConnector};
use crate::proxy_tunnels::{ProxyTunnels, peer_of};

/// Which servers are reached through which proxy.
pub struct ForwardProxies {
    settings: ForwardProxy,
    /// Or why the proxy cannot be used.
    tunnels: Result<ProxyTunnels, TlsError>,
}

impl ForwardProxies {
    /// Reads what TLS to the proxy trusts, if it is needed. Blocks. What cannot be read is an error of the connects that need it.
    #[must_use]
    pub fn new(
        settings: &ForwardProxy,
        policy: &TlsPolicy,
        budget: &Arc<ProcessBudget>,
        own_sockets: &OwnSockets,
    ) -> Self {
        let url = settings.https_proxy.as_deref();
        let proxy = url.and_then(|url| HttpProxy::parse(url).ok());
        let uses_tls = proxy.is_some_and(|proxy| uses_tls(settings, &proxy));
        if uses_tls && settings.is_clear {
            tracing::info!(
                "HTTPS_PROXY has a password: TLS to the proxy, where upstream would send it in clear"
            );
        }
        let trust = (policy, settings.ca_cert.as_deref());
        Self {
            settings: settings.clone(),
            tunnels: ProxyTunnels::new("HTTPS_PROXY", uses_tls, trust, (budget, own_sockets)),
        }
    }

    /// Every server is reached directly.
    #[must_use]
    pub fn none() -> Self {
        let budget = Arc::new(ProcessBudget::new(0));
        Self::new(
            &ForwardProxy::default(),
            &TlsPolicy::default(),
            &budget,
            &OwnSockets::off(),
        )
    }

    /// The proxy for this server, unless an exception names the server; or what is wrong with its URL.
    pub(super) fn of(&self, host: &str, port: u16) -> Option<Result<HttpProxy, &'static str>> {
        let proxy = self.settings.https_proxy.as_deref()?;
        let exceptions = self.settings.no_proxy.as_deref().unwrap_or_default();
        (!is_excepted(host, port, exceptions)).then(|| HttpProxy::parse(proxy))
    }

    /// In words for users: ` through the proxy HOST:PORT`, or nothing.
    #[must_use]
    pub fn path_to(&self, server: &ServerAddress) -> String {
        match server {
            ServerAddress::Host { host, port } => match self.of(host, *port) {
                Some(Ok(proxy)) => format!(" through the proxy {}", proxy.authority()),
                Some(Err(_)) | None => String::new(),
            },
            ServerAddress::Srv { .. } => String::new(),
        }
    }
}

/// grpc-go ignores the scheme `https`. A password is never sent in clear to a proxy of that scheme.
fn uses_tls(settings: &ForwardProxy, proxy: &HttpProxy) -> bool {
    proxy.is_tls && !(settings.is_clear && proxy.user.is_none())
}

impl ServerConnector {
    /// Connects to the first of a name's addresses that accepts; else returns the last error.
    async fn any_of(&self, host: &str, port: u16, purpose: Purpose) -> Result<TcpStream, String> {
        let draw = |below| rand::random_range(0..below);
        let found = servers_of_host(&*self.resolver, host, port, draw).await;
        let found = found.map_err(|error| error.to_string())?;
        let attempt = |server: resolve::ServerAddress| self.dial(server.addr, purpose);
        let mut race = Race::new(found, attempt);
        let mut failure = "the proxy's name has no address".to_owned();
        while let Some((_server, dialled)) = race.next().await {
            match dialled {
                Ok(tcp) => return Ok(tcp),
                Err(error) => failure = error.to_string(),
            }
        }
        Err(failure)
    }

    /// Connects to `target` through a proxy. Returns what TLS to the server runs over, and the proxy's address.
    pub(super) async fn through(
        &self,
        proxy: &HttpProxy,
        target: &str,
        purpose: Purpose,
    ) -> Result<(Socket, PeerAddr), ConnectorError> {
        let reaching = self.reach_through(proxy, target, purpose).await;
        reaching.map_err(|answer| ConnectorError::Proxy {
            proxy: proxy.authority(),
            target: target.to_owned(),
            answer,
        })
    }

    async fn reach_through(
        &self,
        proxy: &HttpProxy,
        target: &str,
        purpose: Purpose,
    ) -> Result<(Socket, PeerAddr), String> {
        let tcp = self.any_of(&proxy.host, proxy.port, purpose).await?;
        let peer = peer_of(&tcp)?;
        let tunnels = self.proxies.tunnels.as_ref().map_err(ToString::to_string)?;
        let socket = tunnels.open(tcp, proxy, target, false).await?;
        Ok((socket, peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_through_a_proxy_is_named_without_its_password() {
        let settings = ForwardProxy {
            https_proxy: Some("http://us:s3cret@[fd00::1]:3128".to_owned()),
            no_proxy: Some("near.test".to_owned()),
            ..ForwardProxy::default()
        };
        let budget = Arc::new(ProcessBudget::new(1 << 20));
        let proxies = ForwardProxies::new(
            &settings,
            &TlsPolicy::default(),
            &budget,
            &OwnSockets::off(),
        );
        for (host, path) in [
            ("far.test", " through the proxy [fd00::1]:3128"),
            ("near.test", ""),
        ] {
            let (host, port) = (host.to_owned(), 8091);
            assert_eq!(proxies.path_to(&ServerAddress::Host { host, port }), path);
        }
    }

    /// Upstream (configuration): HTTPS_PROXY of the scheme https is spoken to in clear, but never with a password
    #[test]
    fn a_password_gets_to_a_proxy_of_the_scheme_https_by_tls_alone() {
        for (is_clear, url, by_tls) in [
            (false, "https://a", true),
            (false, "http://u:p@a", false),
            (true, "https://a", false),
            (true, "https://u:p@a", true),
            (true, "http://u:p@a", false),
        ] {
            let settings = ForwardProxy {
                is_clear,
                ..ForwardProxy::default()
            };
            let proxy = HttpProxy::parse(url).unwrap();
            assert_eq!(uses_tls(&settings, &proxy), by_tls, "{is_clear} {url}");
        }
    }
}
