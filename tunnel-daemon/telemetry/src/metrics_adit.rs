//! Adit's own families, prefix `adit_`.
//!
//! To add a family: a field, a line in `register` (of `server` or `agent` if only one program counts in it), a method. Use a
//! label enum from `labels` where the values are known: such families show zeroes from the start, so that an alert on increases
//! sees the first event.

use std::sync::Arc;
use std::time::Duration;

use adit_core::wire::metadata::PeerVersion;
use prometheus::{Histogram, IntCounter, IntGauge, IntGaugeVec, Registry};

use crate::agent_dials::{AgentDials, DialsByAgent};
use crate::dial_counts::DialCounts;
use crate::failed_dials::{FailedDial, FailedDials};
use crate::families::{BUCKETS_DIAL, Counters, Gauges, Registrar};
use crate::guard::{AmountGuard, GaugeGuard};
use crate::labels::{
    AgentRefusal, CertificateKind, DialCap, DialRetry, Driver, Engine, HandshakeFailure,
    Label as _, LaneDial, LaneEnd, LaneRefusal, LaneState, LinkEnding, Listener, NodeRefusal,
    Offence, Path, PeerKind, ReloadResult, TunnelEnd,
};
use crate::metrics_account::AccountMetrics;
use crate::metrics_redirect::RedirectMetrics;
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
pub struct AditMetrics(Arc<Inner>);

struct Inner {
    account: AccountMetrics,
    insecure_flags: IntGaugeVec,
    held_bytes: IntGauge,
    queued_bytes: IntGauge,
    process_budget: IntGauge,
    kernel_bytes: IntGauge,
    tunnels_opened: Counters<Path>,
    tunnels_closed: Counters<TunnelEnd>,
    offences: Counters<Offence>,
    dial_retries: Counters<DialRetry>,
    dials_waited: IntCounter,
    late_dial_answers: IntCounter,
    link_suspicions: IntCounter,
    dials_refused: Counters<DialCap>,
    failed_dials: FailedDials,
    dial_time: Histogram,
    dials_by_agent: DialsByAgent,
    certificate_expiry: IntGaugeVec,
    tls_reloads: Counters<ReloadResult>,
    deny_reloads: Counters<ReloadResult>,
    links: Gauges<PeerKind>,
    links_by_version: LinksByVersion,
    links_retired: IntGauge,
    lanes: Gauges<LaneState>,
    lanes_closed: Counters<LaneEnd>,
    lanes_wanted: IntGauge,
    lane_dials: Counters<LaneDial>,
    lane_answer: Histogram,
    lanes_refused: Counters<LaneRefusal>,
    relay_tunnels: Gauges<Driver>,
    relay_bytes: Counters<Engine>,
    relay_panics: IntCounter,
    relay_driver_failures: IntCounter,
    node_tunnels: IntGauge,
    node_waiting: IntGauge,
    node_opened: IntCounter,
    node_closed: Counters<TunnelEnd>,
    node_refusals: Counters<NodeRefusal>,
    accept_errors: Counters<Listener>,
    accept_pauses: Counters<Listener>,
    handshakes_failed: Counters<HandshakeFailure>,
    claimed_identities: IntCounter,
    claims_unverified: IntGauge,
    agents_refused: Counters<AgentRefusal>,
    links_silent: IntGauge,
    links_ended: Counters<LinkEnding>,
    access_events_suppressed: IntCounter,
    open_tunnels: Arc<OpenTunnels>,
    redirect: RedirectMetrics,
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
        let bytes = TunnelBytes {
            of_clients: families.counters_from_zero(
                "tunnel_bytes_total",
                "Payload bytes moved through tunnels, by direction; includes open tunnels",
                "direction",
            ),
            of_agents: families.counters_from_zero(
                "node_tunnel_bytes_total",
                "Payload bytes moved through tunnels from node to control plane, by direction; includes open tunnels",
                "direction",
            ),
        };
        Self(Arc::new(Inner {
            account: AccountMetrics::register(registry),
            insecure_flags: families.gauge_vec(
                "insecure_flags",
                "1 for each active flag that disables a protection",
                &["flag"],
            ),
            held_bytes: families.gauge("held_bytes", "Payload bytes buffered for clients and targets that read slower than their peers send"),
            queued_bytes: families.gauge("queued_bytes", "Bytes queued towards links and lanes, with packets and frames that wait for peers that do not read"),
            process_budget: families.gauge("process_budget_bytes", "Limit on payload bytes buffered for clients and targets that read slower than their peers send (--process-budget)"),
            kernel_bytes: families.gauge("kernel_bytes", "Bytes in kernel socket buffers of clients and targets that have stopped reading"),
            tunnels_opened: families.counters_from_zero(
                "tunnels_opened_total",
                "Tunnels opened, by path between server and agent",
                "path",
            ),
            tunnels_closed: families.counters_from_zero("tunnels_closed_total", "Tunnels ended, by reason", "reason"),
            offences: families.counters_from_zero(
                "protocol_offences_total",
                "Protocol violations by peers, by kind. A violation affects one tunnel, unless the violation ended the link",
                "kind",
            ),
            dial_retries: server.counters_from_zero("dial_retries_total", "Dials sent to an additional agent, by reason", "reason"),
            dials_waited: server.counter("dials_waited_total", "Dials that waited for a silent agent to answer again or reconnect"),
            late_dial_answers: server.counter("late_dial_answers_total", "Answers to cancelled dials"),
            link_suspicions: server.counter("link_suspicions_total", "Times an agent stopped answering on its link"),
            dials_refused: server.counters_from_zero("dials_refused_total", "Dials refused because of a limit or a shutdown, by cap", "cap"),
            failed_dials: FailedDials::register(&families),
            dial_time: families.histogram(
                "dial_seconds",
                "Time of dials that succeeded. Server: from the client's request to its answer; agent: lookup of the name and connect to the target",
                BUCKETS_DIAL,
            ),
            dials_by_agent: DialsByAgent::register(&server),
            certificate_expiry: families.gauge_vec(
                "certificate_expiry_timestamp_seconds",
                "Expiry of a TLS file or a kubeconfig in use, in seconds since 1970. Certificate chain: the earliest expiry; CA file: the latest expiry",
                &["file", "kind"],
            ),
            tls_reloads: families.counters_from_zero(
                "tls_reloads_total",
                "Reloads of changed TLS files, by result; after a failure the old files stay in use",
                "result",
            ),
            deny_reloads: server.counters_from_zero(
                "agent_deny_reloads_total",
                "Reloads of a changed deny list (--agent-deny), by result; after a failure the old list stays in use",
                "result",
            ),
            links: server.gauges_from_zero("links", "Open agent links, by implementation of the peer", "peer"),
            links_by_version: LinksByVersion::new(&families),
            links_retired: server.gauge(
                "links_retired",
                "Open agent links excluded from dials because the agent reads nothing",
            ),
            lanes: families.gauges_from_zero("lanes", "Bound lanes, by state", "state"),
            lanes_closed: families.counters_from_zero("lanes_closed_total", "Lanes closed, by reason", "reason"),
            lanes_wanted: agent.gauge("lanes_wanted", "Target number of idle lanes, over all links of this agent"),
            lane_dials: server.counters_from_zero(
                "lane_dials_total",
                "Dials to agents with lanes, by result. A dial without a lane went over the link",
                "result",
            ),
            lane_answer: server.histogram(
                "lane_answer_seconds",
                "Time a dial on a lane waited for its answer, including the agent's dial to the target",
                BUCKETS_DIAL,
            ),
            lanes_refused: server.counters_from_zero(
                "lanes_refused_total",
                "Lanes refused, by reason",
                "reason",
            ),
            relay_tunnels: families.gauges(
                "relay_tunnels",
                "Tunnels moved by relay threads, by event engine. The log names the reason for the choice of the engine",
                "driver",
            ),
            relay_bytes: families.counters_from_zero(
                "relay_bytes_total",
                "Payload bytes moved by relay threads in both directions, by method; counted when a tunnel ends",
                "mover",
            ),
            relay_panics: families.counter(
                "relay_thread_panics_total",
                "Relay threads restarted after a panic; the tunnels of the thread were reset",
            ),
            relay_driver_failures: families.counter(
                "relay_driver_failures_total",
                "Failures of epoll_wait or io_uring_enter in a relay thread; the tunnels of the thread were reset and the thread was restarted",
            ),
            node_tunnels: families.gauge("node_tunnels", "Open tunnels from node to control plane"),
            node_waiting: families.gauge(
                "node_waiting",
                "Agent: connections to its listeners that wait for a tunnel. Server: dials for agents in progress",
            ),
            node_opened: families.counter("node_tunnels_opened_total", "Tunnels opened from node to control plane"),
            node_closed: families.counters_from_zero(
                "node_tunnels_closed_total",
                "Tunnels from node to control plane that ended, by reason",
                "reason",
            ),
            node_refusals: families.counters_from_zero(
                "node_refusals_total",
                "Tunnels from node to control plane that were refused or failed to open, by reason",
                "reason",
            ),
            accept_errors: families.counters_from_zero(
                "accept_errors_total",
                "Connections lost at accept or in the TLS handshake, or refused by a connection limit or as of another user, by listener",
                "listener",
            ),
            accept_pauses: families.counters_from_zero(
                "accept_pauses_total",
                "Times a listener stopped accepting connections because file descriptors ran short, by listener",
                "listener",
            ),
            handshakes_failed: server.counters_from_zero(
                "handshakes_failed_total",
                "TLS handshakes that failed, by reason",
                "reason",
            ),
            claimed_identities: server.counter(
                "claimed_identities_total",
                "Links opened with an agent id that the agent claimed without a grant to its certificate",
            ),
            claims_unverified: server.gauge(
                "agent_claims_unverified",
                "Open links whose agent id and identifiers are unverified claims of the agent, because no grant was configured",
            ),
            agents_refused: server.counters_from_zero("agents_refused_total", "Connect calls of agents refused by the server, by reason", "reason"),
            links_silent: server.gauge("links_silent", "Open links that received nothing from the agent for 4 seconds, not even a PING"),
            links_ended: families.counters_from_zero("links_ended_total", "Links ended by this process, by reason. An agent ends links for `control_queue` only", "reason"),
            access_events_suppressed: server
                .counter("access_events_suppressed_total", "Access events not logged because of the rate limit"),
            open_tunnels: Arc::new(OpenTunnels::counted_in(bytes)),
            redirect: RedirectMetrics::register(&families),
        }))
    }

    /// Kernel accounting of connections.
    #[must_use]
    pub fn account(&self) -> &AccountMetrics {
        &self.0.account
    }

    /// A flag that disables a protection is set; name it without leading dashes.
    pub fn insecure_flag(&self, flag: &'static str) {
        self.0.insecure_flags.with_label_values(&[flag]).set(1);
    }

    /// The process-wide gauge of held payload bytes, for a caller that adds and subtracts by itself.
    #[must_use]
    pub fn held_bytes(&self) -> &IntGauge {
        &self.0.held_bytes
    }

    /// Sets the memory limit for tunnels, bytes.
    pub fn set_process_budget(&self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.0.process_budget.set(bytes);
    }

    /// Sets the memory for tunnels in use, bytes: held, queued, in the kernel.
    pub fn set_memory(&self, held: u64, queued: u64, kernel: u64) {
        let gauges = [
            (&self.0.held_bytes, held),
            (&self.0.queued_bytes, queued),
            (&self.0.kernel_bytes, kernel),
        ];
        for (gauge, bytes) in gauges {
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// A share of the held bytes, subtracted when dropped.
    pub fn held_bytes_share(&self) -> AmountGuard {
        AmountGuard::new(&self.0.held_bytes)
    }

    /// The table of open tunnels.
    #[must_use]
    pub fn open_tunnels(&self) -> &Arc<OpenTunnels> {
        &self.0.open_tunnels
    }

    /// A tunnel is open.
    pub fn tunnel_opened(&self, path: Path) {
        self.0.tunnels_opened.of(path).inc();
    }

    /// A tunnel ended.
    pub fn tunnel_closed(&self, end: TunnelEnd) {
        self.0.tunnels_closed.of(end).inc();
    }

    /// A peer broke the protocol; `kind` is the violation's label, never a peer's text.
    pub fn protocol_offence(&self, kind: impl Into<Offence>) {
        self.0.offences.of(kind.into()).inc();
    }

    /// Adds the dials between two snapshots.
    pub fn dials(&self, before: &DialCounts, now: &DialCounts) {
        let retries = &self.0.dial_retries;
        retries
            .of(DialRetry::NotSent)
            .inc_by(now.retries - before.retries);
        retries
            .of(DialRetry::Slow)
            .inc_by(now.hedges - before.hedges);
        retries
            .of(DialRetry::Silent)
            .inc_by(now.failovers - before.failovers);
        self.0.dials_waited.inc_by(now.waited - before.waited);
        self.0
            .link_suspicions
            .inc_by(now.suspicions - before.suspicions);
    }

    /// An answer came to a cancelled dial.
    pub fn late_dial_answer(&self) {
        self.0.late_dial_answers.inc();
    }

    /// A dial was refused.
    pub fn dial_refused(&self, cap: DialCap) {
        self.0.dials_refused.of(cap).inc();
    }

    /// A dial succeeded after this time.
    pub(super) fn dial_succeeded(&self, elapsed: Duration) {
        self.0.dial_time.observe(elapsed.as_secs_f64());
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

    /// A dial failed: counted, and logged within the rate limit. Called once per client dial, however many agents it asked.
    pub fn dial_failed(&self, dial: &FailedDial<'_>) {
        self.0.failed_dials.record(dial);
    }

    /// The loaded part of a file expires at this time, in seconds since 1970.
    pub fn certificate_expiry(&self, file: &str, kind: CertificateKind, seconds: u64) {
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        let gauge = &self.0.certificate_expiry;
        gauge.with_label_values(&[file, kind.as_str()]).set(seconds);
    }

    /// Removes the series of a file that is no longer in use.
    pub fn certificate_gone(&self, file: &str, kind: CertificateKind) {
        let gauge = &self.0.certificate_expiry;
        // An error means that the series does not exist.
        gauge.remove_label_values(&[file, kind.as_str()]).ok();
    }

    /// Changed TLS files were loaded.
    pub fn tls_reload(&self, result: ReloadResult) {
        self.0.tls_reloads.of(result).inc();
    }

    /// A changed deny list was loaded, or could not be.
    pub fn deny_reload(&self, result: ReloadResult) {
        self.0.deny_reloads.of(result).inc();
    }

    /// A link is open.
    pub fn link(&self, peer: PeerKind) -> GaugeGuard {
        GaugeGuard::new(self.0.links.of(peer))
    }

    /// A link to a peer of this release is open.
    pub fn link_of_version(&self, version: PeerVersion) -> GaugeGuard {
        self.0.links_by_version.link(version)
    }

    /// A link is retired.
    pub fn link_retired(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0.links_retired)
    }

    /// A lane is bound and in this state until the guard is dropped.
    pub fn lane(&self, state: LaneState) -> GaugeGuard {
        GaugeGuard::new(self.0.lanes.of(state))
    }

    /// A bound lane ended.
    pub fn lane_closed(&self, why: LaneEnd) {
        self.0.lanes_closed.of(why).inc();
    }

    /// A dial to an agent with lanes took this path.
    pub fn lane_dial(&self, result: LaneDial) {
        self.0.lane_dials.of(result).inc();
    }

    /// A dial on a lane was answered or given up after this time.
    pub fn lane_answered(&self, waited: Duration) {
        self.0.lane_answer.observe(waited.as_secs_f64());
    }

    /// A share of the target number of idle lanes, subtracted when dropped.
    pub fn lanes_wanted_share(&self) -> AmountGuard {
        AmountGuard::new(&self.0.lanes_wanted)
    }

    /// A connection did not become a lane.
    pub fn lane_refused(&self, why: LaneRefusal) {
        self.0.lanes_refused.of(why).inc();
    }

    /// Counter of payload bytes moved by relay threads.
    #[must_use]
    pub fn relay_bytes(&self, mover: Engine) -> &IntCounter {
        self.0.relay_bytes.of(mover)
    }

    /// Publishes the relay's own counts: open tunnels, and failures since its start.
    pub fn relay(&self, driver: Driver, tunnels: u64, [panics, driver_failures]: [u64; 2]) {
        let up_to = |counter: &IntCounter, now: u64| {
            counter.inc_by(now.saturating_sub(counter.get()));
        };
        let tunnels = i64::try_from(tunnels).unwrap_or(i64::MAX);
        self.0.relay_tunnels.of(driver).set(tunnels);
        up_to(&self.0.relay_panics, panics);
        up_to(&self.0.relay_driver_failures, driver_failures);
    }

    /// A tunnel requested by an agent is open until the guard is dropped.
    pub fn node_tunnel(&self) -> GaugeGuard {
        self.0.node_opened.inc();
        GaugeGuard::new(&self.0.node_tunnels)
    }

    /// One more connection waits for such a tunnel until the guard is dropped.
    pub fn node_waiting(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0.node_waiting)
    }

    /// Connections on an agent's listeners, with or without a tunnel.
    #[must_use]
    pub fn node_connections(&self) -> i64 {
        self.0.node_tunnels.get() + self.0.node_waiting.get()
    }

    /// A tunnel requested by an agent ended.
    pub fn node_tunnel_closed(&self, end: TunnelEnd) {
        self.0.node_closed.of(end).inc();
    }

    /// A tunnel requested by an agent was refused.
    pub fn node_refused(&self, why: NodeRefusal) {
        self.0.node_refusals.of(why).inc();
    }

    /// accept(2) failed, or a limit refused a connection.
    pub fn accept_error(&self, listener: Listener) {
        self.0.accept_errors.of(listener).inc();
    }

    /// A listener waits for descriptors.
    pub fn accept_paused(&self, listener: Listener) {
        self.0.accept_pauses.of(listener).inc();
    }

    /// A connection to a TLS listener got no TLS session.
    pub fn handshake_failed(&self, why: HandshakeFailure) {
        self.0.handshakes_failed.of(why).inc();
    }

    /// An agent's id and identifiers are unverified claims until the guard is dropped.
    pub fn claimed_identity(&self) -> GaugeGuard {
        self.0.claimed_identities.inc();
        GaugeGuard::new(&self.0.claims_unverified)
    }

    /// Sets the number of links whose agent is silent.
    pub fn set_links_silent(&self, links: usize) {
        self.0
            .links_silent
            .set(i64::try_from(links).unwrap_or(i64::MAX));
    }

    /// The server has ended a link.
    pub fn link_ended(&self, why: LinkEnding) {
        self.0.links_ended.of(why).inc();
    }

    /// An agent's call was refused.
    pub fn agent_refused(&self, reason: AgentRefusal) {
        self.0.agents_refused.of(reason).inc();
    }

    /// Series of the transparent frontend.
    #[must_use]
    pub fn redirect(&self) -> &RedirectMetrics {
        &self.0.redirect
    }

    /// Counter for [`crate::AccessLog::new`].
    #[must_use]
    pub fn access_events_suppressed(&self) -> IntCounter {
        self.0.access_events_suppressed.clone()
    }
}

impl std::fmt::Debug for AditMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AditMetrics")
    }
}
