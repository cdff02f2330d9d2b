//! A customer's proxies, which stand behind the tunnel: the HTTP proxy of a hosted control plane reaches other hosts through them.

use adit_core::connect::failure_of;
use adit_core::failure::DialFailure;
use adit_core::ids::AgentId;
use adit_proxy::connect::{NoTunnel, open_tunnel};
use adit_proxy::http::Parent;
use bytes::Bytes;
use http::HeaderValue;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

use super::routes::Reached;
use adit_config::plan::{CustomerProxies, CustomerProxy};
use adit_config::tls_policy::TlsPolicy;
use adit_kube::no_proxy::is_excepted;
use adit_net::tasks::Tasks;
use adit_tls::nested::SystemTrust;
use adit_tls::stream::{ByteStream, PeerAddr, Socket};
use adit_tls::tls::server_name;

/// See the module.
pub(super) struct Customer {
    plan: CustomerProxies,
    /// What TLS to them trusts; `None` without such a proxy.
    trust: Option<SystemTrust>,
    /// Carries bytes between TLS and tunnel.
    tasks: Tasks,
}

impl Customer {
    /// Reads the certificates that are trusted, if there is need of them. Blocks.
    ///
    /// # Errors
    /// None can be used.
    pub(super) fn new(
        plan: &CustomerProxies,
        policy: &TlsPolicy,
        tasks: Tasks,
    ) -> anyhow::Result<Self> {
        let speaks_tls = [&plan.http, &plan.https]
            .into_iter()
            .flatten()
            .any(|proxy| proxy.is_tls);
        let trust = speaks_tls.then(|| SystemTrust::load(policy, plan.bundle.as_deref()));
        Ok(Self {
            plan: plan.clone(),
            trust: trust.transpose()?,
            tasks,
        })
    }

    /// The proxy for a host; `alone` as for a tunnel.
    pub(super) fn of(&self, host: &str, port: u16, alone: bool) -> Option<&CustomerProxy> {
        let proxy = if alone {
            &self.plan.https
        } else {
            &self.plan.http
        };
        let proxy = proxy.as_ref()?;
        (!is_excepted(host, port, &self.plan.no_proxy)).then_some(proxy)
    }

    /// What requests for a host are sent with, if they go to a proxy.
    pub(super) fn parent(&self, host: &str, port: u16) -> Option<Parent> {
        let proxy = self.of(host, port, false)?;
        let authorization = proxy.authorization().and_then(|value| {
            let mut value = HeaderValue::try_from(value).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Some(Parent { authorization })
    }

    /// A connection to the proxy, ready for a request.
    ///
    /// # Errors
    /// The proxy cannot be reached, or TLS to it fails.
    pub(super) async fn secured(
        &self,
        proxy: &CustomerProxy,
        reaching: impl Future<Output = Result<Reached, DialFailure>>,
    ) -> Result<Reached, DialFailure> {
        let reached = reaching.await?;
        if !proxy.is_tls {
            return Ok(reached);
        }
        let Reached { stream, early, by } = reached;
        let tls = self.handshake(proxy, stream, &early).await?;
        self.beside(tls, Bytes::new(), by)
    }

    /// A tunnel through the proxy to `target`, an authority.
    ///
    /// # Errors
    /// The proxy cannot be reached, TLS to it fails, or it refuses.
    pub(super) async fn tunnel(
        &self,
        proxy: &CustomerProxy,
        target: &str,
        reaching: impl Future<Output = Result<Reached, DialFailure>>,
    ) -> Result<Reached, DialFailure> {
        let Reached {
            mut stream,
            early,
            by,
        } = reaching.await?;
        let authorization = proxy.authorization();
        let refused = |error: NoTunnel| match error {
            NoTunnel::Refused { status, body } => quoted(proxy, failure_of(status, &body)),
            other => failed(proxy, &other),
        };
        if !proxy.is_tls {
            if !early.is_empty() {
                return Err(failed(proxy, &"it speaks before it is asked"));
            }
            let opening = open_tunnel(&mut stream, target, authorization.as_deref());
            let early = opening.await.map_err(refused)?.freeze();
            return Ok(Reached { stream, early, by });
        }
        let mut tls = self.handshake(proxy, stream, &early).await?;
        let opening = open_tunnel(&mut tls, target, authorization.as_deref());
        let early = opening.await.map_err(refused)?.freeze();
        self.beside(tls, early, by)
    }

    async fn handshake(
        &self,
        proxy: &CustomerProxy,
        stream: ByteStream,
        early: &[u8],
    ) -> Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<>, DialFailure> {
        let Some(trust) = &self.trust else {
            return Err(failed(proxy, &"no certificates are trusted"));
        };
        if !early.is_empty() {
            return Err(failed(proxy, &"it speaks before it is asked"));
        }
        let name = server_name(&proxy.host).map_err(|error| failed(proxy, &error))?;
        trust
            .connect(name, stream)
            .await
            .map_err(|error| failed(proxy, &error))
    }

    /// A socket whose bytes are those of a stream of another kind; a task carries them until one end is over.
    fn beside(
        &self,
        mut stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        early: Bytes,
        by: AgentId,
    ) -> Result<Reached, DialFailure> {
        let pair = UnixStream::pair();
        let (near, mut far) = pair.map_err(|error| DialFailure::Target(error.to_string()))?;
        let carrying = async move {
            if let Err(error) = tokio::io::copy_bidirectional(&mut stream, &mut far).await {
                tracing::debug!(%error, "a tunnel by a customer's proxy broke");
            }
        };
        let spawned = self.tasks.spawn("customer-proxy", carrying);
        spawned.map_err(|_overloaded| DialFailure::NoMemory)?;
        Ok(Reached {
            stream: ByteStream::Plain(Socket::Unix(near), PeerAddr::Unix),
            early,
            by,
        })
    }
}

fn failed(proxy: &CustomerProxy, error: &dyn std::fmt::Display) -> DialFailure {
    let CustomerProxy { host, port, .. } = proxy;
    DialFailure::Target(format!("proxy {host}:{port}: {error}"))
}

/// What the proxy says, with its name.
fn quoted(proxy: &CustomerProxy, failure: DialFailure) -> DialFailure {
    match failure {
        DialFailure::Target(text) => failed(proxy, &text),
        other => other,
    }
}
