//! HTTP proxies between a command line's process and its targets: whether this host can connect to them. Asks them for no target.

use std::path::Path;

use tokio::runtime::Builder;
use tokio::time::timeout;

use super::egress::{Failure, tcp};
use super::line::{missing, ok};
use crate::status::model::Capability;
use adit_config::limits;
use adit_config::plan::{AgentPlan, HttpProxy, ProxyPlan};
use adit_config::tls_policy::TlsPolicy;
use adit_host::blocking::start_runtime;
use adit_net::resolve::SystemResolver;
use adit_tls::cause::TlsCause;
use adit_tls::nested::SystemTrust;
use adit_tls::stream::ByteStream;
use adit_tls::tls::server_name;

const TCP_REMEDY: &str = "start the proxy, or correct its URL; a firewall may be between";
const TLS_REMEDY: &str = "correct the URL, or give the CA of the proxy's certificate";

/// The proxy of an agent's targets; tried if `connect`.
///
/// # Errors
/// The runtime or the resolver could not be created.
pub(super) fn of_agent(plan: &AgentPlan, connect: bool) -> anyhow::Result<Vec<Capability>> {
    let Some(proxy) = &plan.target_proxy else {
        return Ok(Vec::new());
    };
    let ca_cert = plan.forward_proxy.ca_cert.as_deref();
    let line = hop("targets are reached", proxy, ca_cert, connect)?;
    Ok(vec![line.named("target-proxy")])
}

/// The proxies of a sidecar: that of its environment, tried if `connect`, and those behind the tunnel.
///
/// # Errors
/// As [`of_agent`].
pub(super) fn of_proxy(plan: &ProxyPlan, connect: bool) -> anyhow::Result<Vec<Capability>> {
    let mut lines = Vec::new();
    match plan.direct.https_proxy() {
        Ok(None) => (),
        Ok(Some(proxy)) => lines.push(hop("cloud APIs are reached", &proxy, None, connect)?),
        Err(why) => lines.push(missing(why, "correct the environment")),
    }
    let customer = [
        ("requests", &plan.customer.http),
        ("CONNECT", &plan.customer.https),
    ];
    for (what, proxy) in customer {
        if let Some(proxy) = proxy {
            let at = proxy.authority();
            let text =
                format!("for {what} the tunnel leads to the proxy {at}; only a client tries it");
            lines.push(ok(text).info());
        }
    }
    let named = lines.into_iter().map(|line| line.named("target-proxy"));
    Ok(named.collect())
}

fn hop(
    what: &str,
    proxy: &HttpProxy,
    ca_cert: Option<&Path>,
    connect: bool,
) -> anyhow::Result<Capability> {
    let at = proxy.authority();
    if !connect {
        return Ok(ok(format!("{what} through the proxy {at}; --connect tries it")).info());
    }
    let runtime = start_runtime(&mut Builder::new_current_thread(), 0, |_error| ())?;
    runtime.block_on(async {
        let resolver = SystemResolver::new()?;
        let limit = limits::LINK_CONNECT_TIMEOUT;
        let reached = timeout(limit, reach(&resolver, proxy, ca_cert)).await;
        let reached = reached.unwrap_or_else(|_elapsed| {
            let why = format!("no answer within {} s", limit.as_secs());
            Err((why, "check the address and the network path"))
        });
        Ok(match reached {
            Ok(()) => ok(format!(
                "{what} through the proxy {at}, which takes connections"
            )),
            Err((why, remedy)) => missing(format!("{what} through the proxy {at}: {why}"), remedy),
        })
    })
}

async fn reach(
    resolver: &SystemResolver,
    proxy: &HttpProxy,
    ca_cert: Option<&Path>,
) -> Result<(), Failure> {
    let connected = tcp(resolver, &proxy.host, proxy.port).await;
    let (socket, peer) = connected.map_err(|(why, _of_a_server)| (why, TCP_REMEDY))?;
    if !proxy.is_tls {
        return Ok(());
    }
    let failed = |why: String| (why, TLS_REMEDY);
    let trust = SystemTrust::load(&TlsPolicy::default(), ca_cert);
    let trust = trust.map_err(|error| failed(error.to_string()))?;
    let name = server_name(&proxy.host).map_err(|error| failed(error.to_string()))?;
    let connected = trust.connect(name, ByteStream::Plain(socket, peer)).await;
    let cause = |error| failed(format!("TLS: {}", TlsCause::of_handshake(&error)));
    connected.map(drop).map_err(cause)
}
