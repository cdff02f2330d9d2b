//! Which way a dial of a proxy goes: through its servers, by addresses or by name; through a customer's proxy behind them; or past
//! them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, ConnId, LinkId};
use adit_core::session::{Promise, TunnelKind};
use adit_core::target::{Host, Target};
use adit_proxy::http::Parent;
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::time::timeout_at;

use super::customer::Customer;
use super::direct::Direct;
use super::names::{Found, Names};
use super::servers::{Servers, Through};
use crate::process::Process;
use adit_config::plan::{DNS_PORT, ProxyPlan};
use adit_net::happy_eyeballs::Race;
use adit_server::frontend::events::Upstream;
use adit_server::router::{AskedAgents, OpenTunnel, Router};
use adit_tls::nested::Nested;
use adit_tls::stream::ByteStream;
use adit_tunnel::{Carrier, Endpoint, LaneWatch, ServerConnection};

/// See the module.
pub(super) struct Routes {
    servers: Arc<Servers>,
    names: Names,
    direct: Direct,
    customer: Customer,
    /// Without agents: it counts and refuses dials, and has the budget.
    router: Arc<Router>,
    timeout: Duration,
    silence_max: Duration,
    watch: Arc<LaneWatch>,
}

/// A connection to a target, and whose it is.
pub(super) struct Reached {
    pub(super) stream: Box<dyn Nested>,
    /// What the target has sent already.
    pub(super) early: Bytes,
    pub(super) by: AgentId,
}

impl From<Through> for Reached {
    fn from(through: Through) -> Self {
        Self {
            stream: Box::new(through.stream),
            early: through.early,
            by: through.server,
        }
    }
}

impl Routes {
    pub(super) fn new(
        plan: &ProxyPlan,
        process: &Process,
        router: Arc<Router>,
        servers: Arc<Servers>,
        (names, direct, customer): (Names, Direct, Customer),
    ) -> Self {
        Self {
            servers,
            names,
            direct,
            customer,
            router,
            timeout: plan.dial_timeout,
            silence_max: process.isolation.half_closed_timeout,
            watch: Arc::clone(&process.lane_watch),
        }
    }

    async fn dial(
        &self,
        target: &str,
        alone: bool,
        asked: &AskedAgents,
    ) -> Result<OpenTunnel<Carrier>, DialFailure> {
        let (_pending, promise) = self.router.admit_dial(TunnelKind::Socket)?;
        let reached = self.reach(target, alone, asked).await;
        asked.conclude(reached.as_ref().err());
        self.servers.make_ready();
        Ok(self.tunnel(reached?, promise))
    }

    fn tunnel(&self, reached: Reached, promise: Promise) -> OpenTunnel<Carrier> {
        let mut endpoint = Endpoint::on_server(ServerConnection {
            stream: reached.stream,
            early: reached.early,
            silence_max: self.silence_max,
            budget: Arc::clone(self.router.budget()),
            watch: Arc::clone(&self.watch),
        });
        endpoint.keep(promise);
        OpenTunnel {
            carrier: Carrier::Endpoint(endpoint),
            conn: ConnId(0),
            link: LinkId(0),
            agent: reached.by,
            principal: None,
            via: None,
        }
    }

    async fn reach(
        &self,
        target: &str,
        alone: bool,
        asked: &AskedAgents,
    ) -> Result<Reached, DialFailure> {
        let parsed = Target::parse(target);
        let parsed = parsed.map_err(|flaw| DialFailure::Target(flaw.to_string()))?;
        if parsed.zone.is_some() {
            // The zone is one of the agent's.
            let until = Instant::now() + self.timeout;
            let through = timeout_at(until.into(), self.through(target, until, asked)).await;
            return through.unwrap_or(Err(DialFailure::TimedOut));
        }
        let (host, port) = (host_of(&parsed), parsed.port);
        if self.direct.takes(&host) {
            return self.direct.open_cloud(&host, port).await.map(past);
        }
        match self.customer.of(&host, port, alone) {
            Some(proxy) if alone => {
                self.customer
                    .tunnel(proxy, target, self.to(&proxy.host, proxy.port, asked))
                    .await
            }
            Some(proxy) => {
                self.customer
                    .secured(proxy, self.to(&proxy.host, proxy.port, asked))
                    .await
            }
            None => self.to(&host, port, asked).await,
        }
    }

    /// Through the tunnel, or past it while it is out of order.
    async fn to(&self, host: &str, port: u16, asked: &AskedAgents) -> Result<Reached, DialFailure> {
        let until = Instant::now() + self.timeout;
        let through = async {
            match self.names.find(host).await? {
                // Name servers are never reached past the tunnel.
                Found::Past(ips) if port != DNS_PORT => Ok(Err(ips)),
                Found::Addresses(ips) => self.any_of(ips, port, until, asked).await.map(Ok),
                Found::Name | Found::Past(_) => {
                    let target = match host.contains(':') {
                        true => format!("[{host}]:{port}"),
                        false => format!("{host}:{port}"),
                    };
                    self.through(&target, until, asked).await.map(Ok)
                }
            }
        };
        let through = timeout_at(until.into(), through).await;
        match through.unwrap_or(Err(DialFailure::TimedOut))? {
            Ok(reached) => Ok(reached),
            Err(ips) => self.direct.open(host, ips, port).await.map(past),
        }
    }

    async fn through(
        &self,
        target: &str,
        until: Instant,
        asked: &AskedAgents,
    ) -> Result<Reached, DialFailure> {
        let through = self.servers.stream(target, until, asked).await;
        through.map(Reached::from)
    }

    /// The first of these addresses that can be reached through the tunnel; their attempts overlap.
    async fn any_of(
        &self,
        ips: Vec<IpAddr>,
        port: u16,
        until: Instant,
        asked: &AskedAgents,
    ) -> Result<Reached, DialFailure> {
        let attempt = |ip| async move {
            let target = SocketAddr::new(ip, port).to_string();
            self.through(&target, until, asked).await
        };
        let mut told = DialFailure::NoAgent;
        let mut race = Race::new(ips, attempt);
        while let Some((_ip, reached)) = race.next().await {
            match reached {
                Ok(reached) => return Ok(reached),
                Err(failure) => told = failure,
            }
        }
        Err(told)
    }
}

fn past((stream, early): (ByteStream, Bytes)) -> Reached {
    Reached {
        stream: Box::new(stream),
        early,
        by: AgentId::new("direct"),
    }
}

/// The host as text, an IPv6 address without brackets.
fn host_of(target: &Target) -> String {
    match &target.host {
        Host::Ip(ip) => ip.to_string(),
        Host::Name(name) => name.clone(),
    }
}

impl Upstream for Routes {
    fn open<'a>(
        self: Arc<Self>,
        target: &'a str,
        alone: bool,
        asked: &'a AskedAgents,
    ) -> BoxFuture<'a, Result<OpenTunnel<Carrier>, DialFailure>> {
        async move { self.dial(target, alone, asked).await }.boxed()
    }

    fn parent(&self, target: &str) -> Option<Parent> {
        let target = Target::parse(target).ok()?;
        let host = host_of(&target);
        if target.zone.is_some() || self.direct.takes(&host) {
            return None;
        }
        self.customer.parent(&host, target.port)
    }
}
