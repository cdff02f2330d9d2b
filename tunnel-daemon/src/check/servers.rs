//! The servers of a command line: whether the agent or proxy could connect to them. Registers with none, asks none.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::runtime::Builder;

use super::line::{missing, ok};
use crate::agent::{agent_tls, client_tls};
use crate::status::model::Capability;
use adit_agent::connector::{ConnectorError, ForwardProxies, RecentServers, ServerConnector};
use adit_config::address::ServerAddress;
use adit_config::limits;
use adit_config::plan::{AgentPlan, ForwardProxy, ProxyPlan};
use adit_config::tls_policy::TlsPolicy;
use adit_core::ids::AgentId;
use adit_core::session::ProcessBudget;
use adit_host::blocking::start_runtime;
use adit_net::accounts::Accounts;
use adit_net::resolve::{Resolve, SystemResolver};
use adit_net::self_sockets::OwnSockets;
use adit_tls::reload::ReloadableClientTls;
use adit_tls::tls::{Alpn, TlsError};

const NAME: &str = "server";
/// Time for a refusal to arrive: with TLS 1.3 a server refuses a client certificate after the handshake.
const REFUSAL: Duration = Duration::from_secs(3);

/// One line for each server of an agent.
///
/// # Errors
/// The runtime or the resolver could not be created.
pub(super) fn of_agent(plan: &AgentPlan) -> anyhow::Result<Vec<Capability>> {
    let policy = TlsPolicy::default();
    reached(
        agent_tls(plan),
        (&plan.forward_proxy, &policy),
        &plan.servers,
    )
}

/// One line for each server of a proxy.
///
/// # Errors
/// As [`of_agent`].
pub(super) fn of_proxy(plan: &ProxyPlan) -> anyhow::Result<Vec<Capability>> {
    let tls = client_tls(&plan.server_tls, plan.tls.clone(), Alpn::http11());
    reached(tls, (&plan.forward_proxy, &plan.tls), &plan.servers)
}

fn reached(
    tls: Result<Arc<ReloadableClientTls>, TlsError>,
    (proxy, policy): (&ForwardProxy, &TlsPolicy),
    servers: &[ServerAddress],
) -> anyhow::Result<Vec<Capability>> {
    let budget = Arc::new(ProcessBudget::new(u64::MAX));
    let proxies = ForwardProxies::new(proxy, policy, &budget, &OwnSockets::off());
    // Broken files already have a line.
    let Ok(tls) = tls else {
        let untried = "not tried: the certificates above cannot be used";
        let line = missing(untried, "correct the certificates of the lines above");
        return Ok(vec![line.named(NAME)]);
    };
    let runtime = start_runtime(&mut Builder::new_current_thread(), 0, |_error| ())?;
    runtime.block_on(async {
        let connector = connector(Arc::new(SystemResolver::new()?), tls, proxies);
        let mut lines = Vec::new();
        for address in servers {
            lines.push(server(&connector, address).await.named(NAME));
        }
        Ok(lines)
    })
}

/// A connector that leaves no trace but its connections.
pub(super) fn connector(
    resolver: Arc<dyn Resolve>,
    tls: Arc<ReloadableClientTls>,
    proxies: ForwardProxies,
) -> ServerConnector {
    ServerConnector {
        resolver,
        tls,
        proxies,
        accounts: Accounts::off(),
        own_sockets: OwnSockets::off(),
        agent: AgentId::new(""),
        recent_servers: RecentServers::default(),
    }
}

/// Why a server cannot be used, by the hop that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Connect(#[from] ConnectorError),
    #[error("no answer within {} s", limits::LINK_CONNECT_TIMEOUT.as_secs())]
    Elapsed(#[from] tokio::time::error::Elapsed),
    #[error("the server closed the connection behind the handshake")]
    Closed,
    #[error("the server refused this certificate: {0}")]
    Refused(io::Error),
}

/// Connects to a server. Both ends accept each other, as far as that shows.
///
/// # Errors
/// They do not.
pub(super) async fn accepted(
    connector: &ServerConnector,
    address: &ServerAddress,
) -> Result<(), Failure> {
    let connecting = tokio::time::timeout(limits::LINK_CONNECT_TIMEOUT, connector.connect(address));
    let mut stream = connecting.await??.stream;
    let mut first = [0];
    match tokio::time::timeout(REFUSAL, stream.read(&mut first)).await {
        Ok(Ok(0)) => Err(Failure::Closed),
        Ok(Err(error)) => Err(Failure::Refused(error)),
        // The server sends first, or waits for the client to.
        Ok(Ok(_)) | Err(_) => Ok(()),
    }
}

async fn server(connector: &ServerConnector, address: &ServerAddress) -> Capability {
    match accepted(connector, address).await {
        Ok(()) => {
            let path = connector.proxies.path_to(address);
            ok(format!(
                "{address} can be reached{path}, and both ends accept each other"
            ))
        }
        Err(error) => {
            let remedy = match error {
                Failure::Refused(_) => {
                    "give one that the server's CA has signed: that of --cluster-ca-cert for agents, of --server-ca-cert for proxies"
                }
                _ => {
                    "check the address, the network path, and the CA and names of both certificates"
                }
            };
            missing(format!("{address}: {error}"), remedy)
        }
    }
}
