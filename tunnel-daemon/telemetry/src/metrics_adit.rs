//! Adit's own families, prefix `adit_`.
//!
//! To add a family: a row in [`AditFamilies`]. Use a label enum from `labels` where the values are known: such families show
//! zeroes from the start, so that an alert on increases sees the first event.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use adit_core::wire::metadata::PeerVersion;
use prometheus::{Histogram, IntCounter, IntGaugeVec, Registry};
use tokio::runtime::Handle;

use crate::agent_dials::{AgentDials, DialsByAgent};
use crate::dial_counts::DialCounts;
use crate::failed_dials::{FailedDial, FailedDials};
use crate::families::{BUCKETS_DIAL, Counters, Gauge, Gauges, Registrar, families};
use crate::guard::GaugeGuard;
use crate::labels::{
    AgentRefusal, CertificateKind, DialCap, DialRetry, Driver, EndClass, EndReason, Engine,
    HandshakeFailure, Label as _, LaneCloseReason, LaneDial, LaneRefusal, LaneState, LinkEnding,
    Listener, NodeRefusal, Offence, Path, PeerAddressState, PeerDirection, PeerKind, ReloadResult,
};
use crate::metrics_account::AccountMetrics;
use crate::metrics_redirect::RedirectMetrics;
use crate::peers::{PeerMetrics, PeerSeries};
use crate::tunnels::{OpenTunnels, TunnelBytes};
use crate::versions::LinksByVersion;

/// Which program this is: families used by only one program are not exported by the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// A server.
    Server,
    /// An agent.
    Agent,
}

/// Handles of Adit's own families. Cheap to clone; clones share the series.
#[derive(Clone)]
pub struct AditMetrics(Arc<AditSeries>);

struct AditSeries {
    families: AditFamilies,
    account: AccountMetrics,
    redirect: RedirectMetrics,
    failed_dials: FailedDials,
    dials_by_agent: DialsByAgent,
    peers: Arc<PeerMetrics>,
    links_by_version: LinksByVersion,
    open_tunnels: Arc<OpenTunnels>,
    /// That of links and tunnels; scrapes have one of their own.
    runtime: Option<Handle>,
}

families! {
    /// Families with series that callers count in. Those of `server` or `agent` are exported by that program only.
    pub struct AditFamilies(families, server, agent) {
        /// 1 for each active flag that disables a protection
        insecure_flags: IntGaugeVec = families.gauge_vec("insecure_flags", &["flag"]),
        /// Payload bytes buffered for clients and targets that read slower than their peers send
        held_bytes: Gauge = families.gauge("held_bytes"),
        /// Bytes queued towards links and lanes, with packets and frames that wait for peers that do not read
        queued_bytes: Gauge = families.gauge("queued_bytes"),
        /// Limit on payload bytes buffered for clients and targets that read slower than their peers send (--process-budget)
        process_budget: Gauge = families.gauge("process_budget_bytes"),
        /// Tasks of the async runtime; their number follows that of links, lanes, tunnels and dials
        tasks: Gauge = families.gauge("tasks"),
        /// Bytes in kernel socket buffers of clients and targets that have stopped reading
        kernel_bytes: Gauge = families.gauge("kernel_bytes"),
        /// Tunnels opened, by path between server and agent
        tunnels_opened: Counters<Path> = families.counters_from_zero("tunnels_opened_total", "path"),
        /// Tunnels ended, by reason
        tunnels_closed: Counters<EndClass> = families.counters_from_zero("tunnels_closed_total", "reason"),
        /// Protocol violations by peers, by kind. A violation affects one tunnel, unless the violation ended the link
        offences: Counters<Offence> = families.counters_from_zero("protocol_offences_total", "kind"),
        /// Dials sent to an additional agent, by reason
        dial_retries: Counters<DialRetry> = server.counters_from_zero("dial_retries_total", "reason"),
        /// Dials that waited for a silent agent to answer again or reconnect
        dials_waited: IntCounter = server.counter("dials_waited_total"),
        /// Answers to cancelled dials
        late_dial_answers: IntCounter = server.counter("late_dial_answers_total"),
        /// Times an agent stopped answering on its link
        link_suspicions: IntCounter = server.counter("link_suspicions_total"),
        /// Dials refused because of a limit or a shutdown, by cap
        dials_refused: Counters<DialCap> = server.counters_from_zero("dials_refused_total", "cap"),
        /// Time of dials that succeeded. Server: from the client's request to its answer; agent: lookup of the name and connect to the target
        dial_time: Histogram = families.histogram("dial_seconds", BUCKETS_DIAL),
        /// Expiry of a TLS file or a kubeconfig in use, in seconds since 1970. Certificate chain: the earliest expiry; CA file: the latest expiry
        certificate_expiry: IntGaugeVec = families.gauge_vec("certificate_expiry_timestamp_seconds", &["file", "kind"]),
        /// Reloads of changed TLS files, by result; after a failure the old files stay in use
        tls_reloads: Counters<ReloadResult> = families.counters_from_zero("tls_reloads_total", "result"),
        /// Reloads of a changed deny list (--agent-deny), by result; after a failure the old list stays in use
        deny_reloads: Counters<ReloadResult> = server.counters_from_zero("agent_deny_reloads_total", "result"),
        /// Reloads of a changed list of users (--frontend-users), by result; after a failure the old list stays in use
        users_reloads: Counters<ReloadResult> = server.counters_from_zero("frontend_users_reloads_total", "result"),
        /// Open agent links, by implementation of the peer
        links: Gauges<PeerKind> = server.gauges_from_zero("links", "peer"),
        /// Open agent links excluded from dials because the agent reads nothing
        links_retired: Gauge = server.gauge("links_retired"),
        /// Bound lanes, by state
        lanes: Gauges<LaneState> = families.gauges_from_zero("lanes", "state"),
        /// Lanes closed, by reason
        lanes_closed: Counters<LaneCloseReason> = families.counters_from_zero("lanes_closed_total", "reason"),
        /// Target number of idle lanes, over all links of this agent
        lanes_wanted: Gauge = agent.gauge("lanes_wanted"),
        /// Dials to agents with lanes, by result. A dial without a lane went over the link
        lane_dials: Counters<LaneDial> = server.counters_from_zero("lane_dials_total", "result"),
        /// Time a dial on a lane waited for its answer, including the agent's dial to the target
        lane_answer: Histogram = server.histogram("lane_answer_seconds", BUCKETS_DIAL),
        /// Lanes refused, by reason
        lanes_refused: Counters<LaneRefusal> = server.counters_from_zero("lanes_refused_total", "reason"),
        /// Tunnels moved by relay threads, by event engine. The log names the reason for the choice of the engine
        relay_tunnels: Gauges<Driver> = families.gauges("relay_tunnels", "driver"),
        /// Payload bytes moved by relay threads in both directions, by method; counted when a tunnel ends
        relay_bytes: Counters<Engine> = families.counters_from_zero("relay_bytes_total", "mover"),
        /// Relay threads restarted after a panic; the tunnels of the thread were reset
        relay_panics: IntCounter = families.counter("relay_thread_panics_total"),
        /// Failures of epoll_wait or io_uring_enter in a relay thread; the tunnels of the thread were reset and the thread was restarted
        relay_driver_failures: IntCounter = families.counter("relay_driver_failures_total"),
        /// Open tunnels from node to control plane
        node_tunnels: Gauge = families.gauge("node_tunnels"),
        /// Agent: connections to its listeners that wait for a tunnel. Server: dials for agents in progress
        node_waiting: Gauge = families.gauge("node_waiting"),
        /// Tunnels opened from node to control plane
        node_opened: IntCounter = families.counter("node_tunnels_opened_total"),
        /// Tunnels from node to control plane that ended, by reason
        node_closed: Counters<EndClass> = families.counters_from_zero("node_tunnels_closed_total", "reason"),
        /// Tunnels from node to control plane that were refused or failed to open, by reason
        node_refusals: Counters<NodeRefusal> = families.counters_from_zero("node_refusals_total", "reason"),
        /// Connections lost at accept or in the TLS handshake, or refused by a connection limit or as of another user, by listener
        accept_errors: Counters<Listener> = families.counters_from_zero("accept_errors_total", "listener"),
        /// Times a listener stopped accepting connections because file descriptors ran short, by listener
        accept_pauses: Counters<Listener> = families.counters_from_zero("accept_pauses_total", "listener"),
        /// TLS handshakes that failed, by reason
        handshakes_failed: Counters<HandshakeFailure> = server.counters_from_zero("handshakes_failed_total", "reason"),
        /// Links opened with an agent id that the agent claimed without a grant to its certificate
        claimed_identities: IntCounter = server.counter("claimed_identities_total"),
        /// Open links whose agent id and identifiers are unverified claims of the agent, because no grant was configured
        claims_unverified: Gauge = server.gauge("agent_claims_unverified"),
        /// Connect calls of agents refused by the server, by reason
        agents_refused: Counters<AgentRefusal> = server.counters_from_zero("agents_refused_total", "reason"),
        /// Open links that received nothing from the agent for 4 seconds, not even a PING
        links_silent: Gauge = server.gauge("links_silent"),
        /// Links ended by this process, by reason. An agent ends links for `control_queue` only
        links_ended: Counters<LinkEnding> = families.counters_from_zero("links_ended_total", "reason"),
        /// Access events not logged because of the rate limit
        access_events_suppressed: IntCounter = server.counter("access_events_suppressed_total"),
    }
}

impl Deref for AditMetrics {
    type Target = AditFamilies;

    fn deref(&self) -> &AditFamilies {
        &self.0.families
    }
}

impl AditMetrics {
    pub(super) fn register(registry: &Registry, side: Side) -> Self {
        let families = Registrar::new(registry, "adit_");
        let server = families.exported_if(side == Side::Server);
        let agent = families.exported_if(side == Side::Agent);
        families
            .gauge_vec(
                "build_info",
                "Always 1; the version label names the running version",
                &["version"],
            )
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1);
        Self(Arc::new(AditSeries {
            families: AditFamilies::declare(&families, &server, &agent),
            account: AccountMetrics::register(registry),
            redirect: RedirectMetrics::register(&families),
            failed_dials: FailedDials::register(&families),
            dials_by_agent: DialsByAgent::register(&server),
            peers: PeerMetrics::register(&server),
            links_by_version: LinksByVersion::new(&families),
            open_tunnels: Arc::new(OpenTunnels::counted_in(TunnelBytes::declare(&families))),
            runtime: Handle::try_current().ok(),
        }))
    }

    /// A flag that disables a protection is set; name it without leading dashes.
    pub fn insecure_flag(&self, flag: &'static str) {
        self.insecure_flags.with_label_values(&[flag]).set(1);
    }

    /// Adds the dials between two snapshots.
    pub fn dials(&self, before: &DialCounts, now: &DialCounts) {
        let retries = &self.dial_retries;
        retries
            .of(DialRetry::NotSent)
            .inc_by(now.retries - before.retries);
        retries
            .of(DialRetry::Slow)
            .inc_by(now.hedges - before.hedges);
        retries
            .of(DialRetry::Silent)
            .inc_by(now.failovers - before.failovers);
        retries.of(DialRetry::Lost).inc_by(now.lost - before.lost);
        self.dials_waited.inc_by(now.waited - before.waited);
        self.link_suspicions
            .inc_by(now.suspicions - before.suspicions);
    }

    /// A dial succeeded after this time.
    pub(super) fn dial_succeeded(&self, elapsed: Duration) {
        self.dial_time.observe(elapsed.as_secs_f64());
    }

    /// Sets the number of agents whose dials have series of their own.
    pub fn set_agents_labelled(&self, agents: usize) {
        self.0.dials_by_agent.set_labelled_max(agents);
    }

    /// Counts of the dials of an agent, shared by all of its links.
    #[must_use]
    pub fn dials_of(&self, agent: &str) -> Arc<AgentDials> {
        self.0.dials_by_agent.of(agent)
    }

    /// The series of a server that this one asks, or that asks this one.
    #[must_use]
    pub fn peer(&self, server: &str, direction: PeerDirection) -> Arc<PeerSeries> {
        self.0.peers.of(server, direction)
    }

    /// Addresses of servers that this one asks.
    #[must_use]
    pub fn peer_addresses(&self) -> &Gauges<PeerAddressState> {
        self.0.peers.addresses()
    }

    /// A dial failed: counted, and logged within the rate limit. Called once per client dial, however many agents it asked.
    pub fn dial_failed(&self, dial: &FailedDial<'_>) {
        self.0.failed_dials.record(dial);
    }

    /// The loaded part of a file expires at this time, in seconds since 1970.
    pub fn certificate_expiry(&self, file: &str, kind: CertificateKind, seconds: u64) {
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        let gauge = &self.certificate_expiry;
        gauge.with_label_values(&[file, kind.as_str()]).set(seconds);
    }

    /// Removes the series of a file that is no longer in use.
    pub fn certificate_gone(&self, file: &str, kind: CertificateKind) {
        let gauge = &self.certificate_expiry;
        // An error means that the series does not exist.
        gauge.remove_label_values(&[file, kind.as_str()]).ok();
    }

    /// A link to a peer of this release is open.
    pub fn link_of_version(&self, version: PeerVersion) -> GaugeGuard {
        self.0.links_by_version.link(version)
    }

    /// Publishes the relay's own counts: open tunnels, and failures since its start.
    pub fn relay(&self, driver: Driver, tunnels: u64, [panics, driver_failures]: [u64; 2]) {
        let up_to = |counter: &IntCounter, now: u64| {
            counter.inc_by(now.saturating_sub(counter.get()));
        };
        self.relay_tunnels.of(driver).set(tunnels);
        up_to(&self.relay_panics, panics);
        up_to(&self.relay_driver_failures, driver_failures);
    }

    /// A tunnel requested by an agent is open until the guard is dropped.
    pub fn node_tunnel(&self) -> GaugeGuard {
        self.node_opened.inc();
        self.node_tunnels.guard()
    }

    /// Connections on an agent's listeners, with or without a tunnel.
    #[must_use]
    pub fn node_connections(&self) -> i64 {
        self.node_tunnels.get() + self.node_waiting.get()
    }

    /// An agent's id and identifiers are unverified claims until the guard is dropped.
    pub fn claimed_identity(&self) -> GaugeGuard {
        self.claimed_identities.inc();
        self.claims_unverified.guard()
    }

    /// Kernel accounting of connections.
    #[must_use]
    pub fn account(&self) -> &AccountMetrics {
        &self.0.account
    }

    /// Series of the transparent frontend.
    #[must_use]
    pub fn redirect(&self) -> &RedirectMetrics {
        &self.0.redirect
    }

    /// The table of open tunnels.
    #[must_use]
    pub fn open_tunnels(&self) -> &Arc<OpenTunnels> {
        &self.0.open_tunnels
    }

    /// Brings values up to date that are not counted as they change.
    pub(super) fn publish(&self) {
        self.0.open_tunnels.publish_bytes();
        if let Some(runtime) = &self.0.runtime {
            self.0
                .families
                .tasks
                .set(runtime.metrics().num_alive_tasks());
        }
    }
}

impl std::fmt::Debug for AditMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AditMetrics")
    }
}

/// Counts an open tunnel. Its end is counted once, also when its task is dropped by a panic or at the end of the process.
#[must_use = "the tunnel counts as ended as soon as this is dropped"]
pub struct CountedTunnel {
    metrics: AditMetrics,
    by_agent: bool,
    reason: Option<EndReason>,
}

impl CountedTunnel {
    /// A tunnel opened for a client; its target has accepted.
    pub fn opened(metrics: &AditMetrics, path: Path) -> Self {
        metrics.tunnels_opened.count(path);
        Self {
            metrics: metrics.clone(),
            by_agent: false,
            reason: None,
        }
    }

    /// A tunnel opened for an agent.
    pub fn opened_by_agent(metrics: &AditMetrics) -> Self {
        Self {
            metrics: metrics.clone(),
            by_agent: true,
            reason: None,
        }
    }

    /// Records why the tunnel ended.
    pub fn ended(mut self, reason: EndReason) {
        self.reason = Some(reason);
    }
}

impl Drop for CountedTunnel {
    fn drop(&mut self) {
        let reason = self.reason.unwrap_or_else(EndReason::of_drop);
        if self.by_agent {
            self.metrics.node_closed.count(reason.end());
        } else {
            self.metrics.tunnels_closed.count(reason.end());
        }
    }
}
