//! One agent's link on the server: its task and what it reports.

use std::sync::Arc;
use std::time::Duration;

use adit_core::dial::AnswerTimes;
use adit_core::ids::LinkId;
use adit_core::registry::Standing;
use adit_core::session::{Event, Isolation, Link, LinkConfig, LinkFailure, ProcessBudget, Role};
use adit_core::wire::packet::{Packet, PacketType};

use crate::backend::announcements::Announcer;
use crate::router::{LinkInfo, RegisteredLink, Router};
use adit_net::grpc::{self, Code};
use adit_telemetry::labels::{
    DialFailureReason, LinkEnding, Offence, PeerKind, Segment, ServiceMethod,
};
use adit_telemetry::{GaugeGuard, PacketCounter, ServerMetrics};
use adit_tunnel::{LinkDriver, LinkExit, LinkHooks, LinkStreams};

/// Why a server ends its links.
const SHUTTING_DOWN: &str = "this server is shutting down";

/// Settings of every link of a server.
#[derive(Clone, Copy, Debug)]
pub struct LinkSettings {
    /// How far one tunnel may affect the others.
    pub isolation: Isolation,
    /// Limit on pending dials of one link.
    pub dials_max: usize,
    /// Deadline of a dial; `None`: no limit.
    pub dial_timeout: Option<Duration>,
}

/// Whether the agent's id and identifiers are covered by grants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Claims {
    Granted,
    /// No grants are configured: the id and identifiers are the agent's own claim.
    Unverified,
}

/// Runs a link until its stream ends; then it is removed from the router. `announcer`: the other end is a server.
pub(super) async fn run_link(
    router: Arc<Router>,
    entered: RegisteredLink,
    (claims, announcer): (Claims, Option<Announcer>),
    streams: LinkStreams,
    settings: LinkSettings,
    (budget, source): (Arc<ProcessBudget>, Arc<str>),
    metrics: ServerMetrics,
) -> LinkExit {
    let RegisteredLink {
        handle,
        commands,
        standing,
        mut guard,
    } = entered;
    let credit = handle.info.credit;
    let config = LinkConfig {
        dial_timeout: settings.dial_timeout,
        ..LinkConfig::new(Role::Server, credit, settings.isolation, settings.dials_max)
    };
    let _claim = (claims == Claims::Unverified).then(|| metrics.adit().claimed_identity());
    let _call = metrics.grpc_connections.of(ServiceMethod::Connect).guard();
    let _link = metrics
        .adit()
        .links
        .of(if credit { PeerKind::Adit } else { PeerKind::Go })
        .guard();
    let _version = metrics.adit().link_of_version(handle.info.version);
    let version = handle.info.version;
    let version = version.as_str().unwrap_or_default();
    let agent = handle.info.agent.clone();
    let principal = handle.info.identity.owner().cloned();
    let principal = principal.as_deref().unwrap_or_default();
    let is_peer = announcer.is_some();
    if is_peer {
        tracing::info!(server = %agent, version, principal, "another server asks this one");
    } else {
        tracing::info!(%agent, link = handle.id.0, adit = credit, version, principal, "agent connected");
    }
    if standing == Standing::Shadowed {
        tracing::warn!(%agent, link = handle.id.0, principal, "another principal holds this agent id; the newcomer gets no dials");
    }
    let hooks = Hooks {
        router: Arc::clone(&router),
        link: handle.id,
        info: Arc::clone(&handle.info),
        from_agent: metrics.packets(Segment::FromAgent),
        to_agent: metrics.packets(Segment::ToAgent),
        retired: None,
        answers: Arc::clone(&handle.answers),
        metrics: metrics.clone(),
        announcer,
    };
    let dirty_list = Arc::clone(&handle.dirty_list);
    let id = handle.id;
    // The router's handle keeps the command queue open; this handle would keep it open for ever.
    drop(handle);
    publish(&router, &metrics);
    let link = Link::new(config, budget, source);
    let mut driver = LinkDriver::new(link, streams, commands, dirty_list, hooks);
    let over = (&mut driver).await;
    let is_leaving = matches!(over, LinkExit::Stopped) && router.is_shutting_down();
    if is_leaving {
        driver.finish_with(grpc::status(Code::Unavailable, SHUTTING_DOWN));
    }
    if let LinkExit::Revoked(why) = &over {
        driver.finish_with(grpc::status(Code::PermissionDenied, why));
    }
    drop(driver);
    if let LinkExit::Failed(LinkFailure::ControlOverflow) = over {
        metrics.adit().links_ended.count(LinkEnding::ControlQueue);
    }
    let (received, sent) = (Segment::FromAgent, Segment::ToAgent);
    if let Some((segment, code, kind)) = over.stream_error(received, sent, tonic::Code::Cancelled) {
        metrics.stream_error(segment, code, kind.map(Into::into));
    }
    if over.breaks_silence() {
        guard.heard();
    }
    drop(guard);
    publish(&router, &metrics);
    if is_peer {
        tracing::info!(server = %agent, principal, reason = %over, "another server asks this one no more");
    } else if over.is_orderly() {
        tracing::info!(%agent, principal, link = id.0, "agent left");
    } else if is_leaving {
        tracing::info!(%agent, principal, link = id.0, reason = SHUTTING_DOWN, "agent disconnected");
    } else if let LinkExit::Failed(LinkFailure::ControlOverflow) = over {
        tracing::warn!(%agent, link = id.0, principal, reason = %LinkEnding::ControlQueue, "link ended: the agent does not read, and packets for it use too much memory; check the agent and its network");
    } else {
        tracing::info!(%agent, principal, link = id.0, reason = %over, "agent disconnected");
    }
    over
}

fn publish(router: &Router, metrics: &ServerMetrics) {
    router.with_registry(|registry| {
        for strategy in registry.strategies().iter() {
            metrics.set_ready_backends(strategy.name(), registry.keys(strategy));
        }
        metrics.ready_backend_connections.set(registry.agents());
    });
}

struct Hooks {
    router: Arc<Router>,
    link: LinkId,
    info: Arc<LinkInfo>,
    metrics: ServerMetrics,
    from_agent: PacketCounter,
    to_agent: PacketCounter,
    retired: Option<GaugeGuard>,
    answers: Arc<AnswerTimes>,
    /// At a link to another server.
    announcer: Option<Announcer>,
}

impl Hooks {
    /// The agent's id, and what the agent has proved.
    fn names(&self) -> (&str, Option<&str>) {
        let principal = self.info.identity.owner().map(AsRef::as_ref);
        (self.info.agent.as_str(), principal)
    }
}

impl LinkHooks for Hooks {
    fn has_idle_packet(&self) -> bool {
        self.announcer.as_ref().is_some_and(Announcer::has_news)
    }

    fn idle_packet(&mut self) -> Option<Packet> {
        let keys = self.announcer.as_mut()?.next_packet()?;
        Some(Packet::Keys(keys))
    }

    fn peer_draining(&mut self) {
        let (agent, principal) = self.names();
        tracing::info!(agent, principal, link = self.link.0, "agent is draining");
        self.router.set_draining(self.link);
    }

    fn retired(&mut self) {
        let (agent, principal) = self.names();
        tracing::warn!(
            agent,
            principal,
            link = self.link.0,
            "an agent took no dial within the dial timeout; it gets no more until it reads again"
        );
        self.retired = Some(self.metrics.adit().links_retired.guard());
        self.router.retire(self.link);
        publish(&self.router, &self.metrics);
    }

    fn revived(&mut self) {
        let (agent, principal) = self.names();
        tracing::info!(
            agent,
            principal,
            link = self.link.0,
            "a retired agent reads again"
        );
        self.retired = None;
        self.router.revive(self.link);
        publish(&self.router, &self.metrics);
    }

    fn shutting_down(&self) -> bool {
        self.router.is_shutting_down()
    }

    fn packet_in(&mut self, kind: Result<PacketType, i32>) {
        match kind {
            Ok(kind) => self.from_agent.count(kind),
            Err(number) => self.from_agent.count(number),
        }
    }

    fn packet_out(&mut self, kind: PacketType) {
        self.to_agent.count(kind);
    }

    fn count(&mut self, event: Event) {
        let adit = self.metrics.adit();
        match event {
            Event::UnrecognizedResponse => {
                self.metrics
                    .dial_failures
                    .count(DialFailureReason::UnrecognizedResponse);
            }
            Event::LateAnswer => {
                self.answers.heard();
                adit.late_dial_answers.inc();
            }
            Event::Offence(violation) => adit.offences.count(violation),
            Event::Foreign => adit.offences.count(Offence::Foreign),
            // Counted elsewhere: in the frontend and the packet counters.
            Event::DialAbandoned | Event::UnknownType(_) | Event::LateCredit => (),
        }
    }
}
