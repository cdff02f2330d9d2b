//! A customer's proxies, which stand behind the tunnel: the HTTP proxy of a hosted control plane reaches other hosts through them.

use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::grant::TargetDenied;
use adit_core::text::Excerpt;
use adit_proxy::connect::{NoTunnel, open_tunnel};
use adit_proxy::http::Parent;
use http::HeaderValue;

use super::routes::Reached;
use adit_config::plan::{CustomerProxies, HttpProxy};
use adit_config::tls_policy::TlsPolicy;
use adit_kube::no_proxy::is_excepted;
use adit_tls::nested::{Nested, SystemTrust};
use adit_tls::tls::server_name;

/// Time for a proxy's part of TLS, and for its answer to CONNECT, each.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct Customer {
    plan: CustomerProxies,
    /// What TLS to them trusts; `None` without such a proxy.
    trust: Option<SystemTrust>,
}

impl Customer {
    /// Reads the certificates that are trusted, if there is need of them. Blocks.
    ///
    /// # Errors
    /// None can be used.
    pub(super) fn new(plan: &CustomerProxies, policy: &TlsPolicy) -> anyhow::Result<Self> {
        let speaks_tls = [&plan.http, &plan.https]
            .into_iter()
            .flatten()
            .any(|proxy| proxy.is_tls);
        let trust = speaks_tls.then(|| SystemTrust::load(policy, plan.bundle.as_deref()));
        Ok(Self {
            plan: plan.clone(),
            trust: trust.transpose()?,
        })
    }

    /// The proxy for a host; `alone` as for a tunnel.
    pub(super) fn of(&self, host: &str, port: u16, alone: bool) -> Option<&HttpProxy> {
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
    /// The proxy cannot be reached, or TLS to it fails or takes too long.
    pub(super) async fn secured(
        &self,
        proxy: &HttpProxy,
        reaching: impl Future<Output = Result<Reached, DialFailure>>,
    ) -> Result<Reached, DialFailure> {
        let Reached { stream, early, by } = reaching.await?;
        if !early.is_empty() {
            return Err(failed(proxy, &"it speaks before it is asked"));
        }
        let stream = match (&self.trust, proxy.is_tls) {
            (Some(trust), true) => {
                let name = server_name(&proxy.host).map_err(|error| failed(proxy, &error))?;
                let secured = in_time(proxy, trust.connect(name, stream)).await?;
                Box::new(secured.map_err(|error| failed(proxy, &error))?) as Box<dyn Nested>
            }
            _ => stream,
        };
        Ok(Reached { stream, early, by })
    }

    /// A tunnel through the proxy to `target`, an authority.
    ///
    /// # Errors
    /// The proxy cannot be reached, TLS to it fails, or it refuses or gives no answer.
    pub(super) async fn tunnel(
        &self,
        proxy: &HttpProxy,
        target: &str,
        reaching: impl Future<Output = Result<Reached, DialFailure>>,
    ) -> Result<Reached, DialFailure> {
        let mut reached = self.secured(proxy, reaching).await?;
        let authorization = proxy.authorization();
        let opening = open_tunnel(&mut reached.stream, target, authorization.as_deref());
        match in_time(proxy, opening).await? {
            Ok(early) => Ok(Reached { early, ..reached }),
            Err(NoTunnel::Refused {
                status: 403, body, ..
            }) => {
                let text = failed(proxy, &Excerpt(&body)).to_string();
                Err(DialFailure::Denied(Box::new(TargetDenied::quoted(&text))))
            }
            Err(error) => Err(failed(proxy, &error)),
        }
    }
}

/// What comes of waiting for the proxy, which may never answer.
async fn in_time<T>(proxy: &HttpProxy, waiting: impl Future<Output = T>) -> Result<T, DialFailure> {
    let waited = tokio::time::timeout(ANSWER_WITHIN, waiting).await;
    waited.map_err(|_elapsed| failed(proxy, &"it gives no answer: i/o timeout"))
}

/// A failure at the proxy, whose words are cut and escaped.
fn failed(proxy: &HttpProxy, error: &dyn std::fmt::Display) -> DialFailure {
    let HttpProxy { host, port, .. } = proxy;
    let error = error.to_string();
    DialFailure::Target(format!("proxy {host}:{port}: {}", Excerpt(&error)))
}

#[cfg(test)]
mod tests {
    use adit_core::ids::AgentId;
    use adit_testkit::certificates::ThrowawayFiles;
    use adit_tls::stream::{ByteStream, PeerAddr, Socket};
    use bytes::Bytes;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_proxy_that_never_answers_fails_the_dial() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let files = ThrowawayFiles::create(&["server".to_owned()]).unwrap();
        for scheme in ["http", "https"] {
            let proxy = HttpProxy::parse(&format!("{scheme}://{address}")).unwrap();
            let plan = CustomerProxies {
                https: Some(proxy.clone()),
                bundle: Some(files.ca_file()),
                ..CustomerProxies::default()
            };
            let customer = Customer::new(&plan, &TlsPolicy::default()).unwrap();
            let reaching = async {
                let tcp = TcpStream::connect(address).await.unwrap();
                Ok(Reached {
                    stream: Box::new(ByteStream::Plain(Socket::Tcp(tcp), PeerAddr::Tcp(address))),
                    early: Bytes::new(),
                    by: AgentId::new("server"),
                })
            };
            let dialled = customer.tunnel(&proxy, "idp.example:443", reaching).await;
            let failure = dialled.map(|_reached| ()).unwrap_err().to_string();
            let told = format!("proxy {address}: it gives no answer: i/o timeout");
            assert_eq!(failure, told, "{scheme}");
        }
    }
}
