//! Gathers the state of a server or agent on request. Contains no secret: no key, token or lane secret.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use adit_core::registry::{Condition, Registry};
use adit_core::session::ProcessBudget;
use adit_relay::{Choice, RelayHandle};
use futures_util::future::{BoxFuture, join_all, ready};

use super::announced::Announced;
use super::answer::{LINKS_MAX, LinkChange, LinkQuery, Source};
use super::model::{
    API, AccountStatus, AgentStatus, Capability, Descriptors, DialStatus, LaneStatus, LinkLanes,
    LinkStatus, Links, LogStatus, Memory, Readiness, RelayStatus, Role, SearchStatus, Status,
    StrategyStatus, TunnelCounts,
};
use crate::certificates::CertificateTable;
use crate::check;
use crate::peers::PeerTable;
use crate::redirect_view::RedirectView;
use adit_agent::lanes::LaneKeeper;
use adit_agent::servers::Servers;
use adit_agent::sync::{CountOrigin, Progress, SearchView};
use adit_config::plan::DataPathPlan;
use adit_host::descriptors::Descriptors as OpenDescriptors;
use adit_host::privileges::{held_by_any_thread, names};
use adit_server::router::{LinkHandle, Router};
use adit_telemetry::labels::{LinkEnding, Path};
use adit_telemetry::{AditMetrics, AgentDials, DebugLog, OpenTunnels};
use adit_tunnel::LanePool;

/// What an unlinked agent is told.
const UNLINKED: &str = "an administrator of the server unlinked this agent (adit unlink)";
/// Time limit for links whose command queue is full.
const CHANGE_TIME: Duration = Duration::from_secs(5);

/// State common to server and agent.
pub(crate) struct Common {
    pub(crate) id: String,
    pub(crate) started: Instant,
    pub(crate) tunnels: Arc<OpenTunnels>,
    pub(crate) budget: Arc<ProcessBudget>,
    /// Budget of one link.
    pub(crate) link_budget_bytes: u64,
    pub(crate) descriptors: Arc<OpenDescriptors>,
    pub(crate) data_path: DataPathPlan,
    /// Most lanes that the process may have.
    pub(crate) lanes_max: usize,
    pub(crate) engine: Choice,
    /// `None` if there is nothing to relay.
    pub(crate) relay: Option<RelayHandle>,
    /// Host features as probed at the start: later the process may lack the capabilities to probe.
    pub(crate) host: Vec<Capability>,
    pub(crate) redirect: Arc<RedirectView>,
    pub(crate) account: AccountStatus,
    pub(crate) debug: DebugLog,
    pub(crate) certificates: Arc<CertificateTable>,
}

/// State of a server.
pub(crate) struct ServerSource {
    pub(crate) common: Common,
    /// Or of a proxy, which has no links.
    pub(crate) role: Role,
    pub(crate) router: Arc<Router>,
    pub(crate) metrics: AditMetrics,
    /// `None` of a proxy.
    pub(crate) announced: Option<Announced>,
    /// `None` without peers.
    pub(crate) peers: Option<PeerTable>,
}

/// State of an agent.
pub(crate) struct AgentSource {
    pub(crate) common: Common,
    pub(crate) servers: Servers,
}

/// Counts of open tunnels, by peer or link.
#[derive(Default)]
struct Tally {
    counts: TunnelCounts,
    by_link: HashMap<u64, u64>,
    by_peer: HashMap<String, u64>,
}

impl Tally {
    /// Counts by peer if `by_peer`, else by link.
    fn of(tunnels: &OpenTunnels, by_peer: bool) -> Self {
        let mut tally = Self::default();
        for live in tunnels.all() {
            tally.counts.open += 1;
            *match live.path() {
                Path::Link | Path::Server => &mut tally.counts.link,
                Path::Lane | Path::Peer => &mut tally.counts.lane,
                Path::RawLane | Path::KtlsLane => &mut tally.counts.raw_lane,
            } += 1;
            tally.counts.ktls_lane += u64::from(live.path() == Path::KtlsLane);
            let (to_target, to_client) = live.bytes();
            tally.counts.bytes_to_target += to_target;
            tally.counts.bytes_to_client += to_client;
            if !by_peer {
                *tally.by_link.entry(live.link()).or_default() += 1;
            } else if let Some(count) = tally.by_peer.get_mut(live.peer()) {
                *count += 1;
            } else {
                tally.by_peer.insert(live.peer().to_owned(), 1);
            }
        }
        tally
    }
}

/// Sums over all links, including links beyond the limit of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Totals {
    links: u64,
    lanes_idle: u64,
    lanes_busy: u64,
}

impl Totals {
    /// Sums over links; `None`: the link cannot have lanes.
    fn of(links: impl Iterator<Item = Option<LinkLanes>>) -> Self {
        links.fold(Self::default(), |mut all, lanes| {
            all.links += 1;
            all.lanes_idle += lanes.as_ref().map_or(0, |lanes| lanes.idle);
            all.lanes_busy += lanes.as_ref().map_or(0, |lanes| lanes.busy);
            all
        })
    }
}

impl Common {
    /// Needed host features, probed only if this process has an admin socket.
    pub(crate) fn host(answers: bool, needs: check::Needs) -> Vec<Capability> {
        let host = answers.then(|| check::host_lines(needs));
        host.unwrap_or_default()
    }

    fn status(&self, role: Role, tally: &Tally, links: Vec<LinkStatus>, all: Totals) -> Status {
        Status {
            api: API,
            role,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            id: self.id.clone(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            readiness: Readiness::default(),
            strategies: Vec::new(),
            tunnels: tally.counts,
            pending_dials: None,
            lanes: LaneStatus {
                idle: all.lanes_idle,
                busy: all.lanes_busy,
                limit_per_link: self.data_path.lanes_max.into(),
                limit: self.lanes_max as u64,
                security: self.data_path.lane_security.name().to_owned(),
            },
            links,
            links_total: all.links,
            search: None,
            server_count: None,
            peers: Vec::new(),
            relay: self.relay(),
            capabilities: self.host.clone(),
            privileges: held_by_any_thread().ok().map(names),
            descriptors: Descriptors {
                in_use: self.descriptors.in_use(),
                limit: self.descriptors.limit(),
            },
            memory: Memory {
                held_bytes: self.budget.held_bytes(),
                budget_bytes: self.budget.max_bytes(),
            },
            redirect: self.redirect.status(),
            account: self.account.clone(),
            log: LogStatus::of(&self.debug.view()),
            certificates: self.certificates.rows(),
        }
    }

    fn links(&self, role: Role, links: Vec<LinkStatus>, links_total: u64) -> Links {
        Links {
            api: API,
            role,
            id: self.id.clone(),
            links,
            links_total,
        }
    }

    fn relay(&self) -> RelayStatus {
        let stats = self.relay.as_ref().map(RelayHandle::stats);
        let stats = stats.unwrap_or_default();
        RelayStatus {
            engine: self.engine.engine.name().to_owned(),
            reason: self.engine.reason.clone(),
            used: self.relay.is_some(),
            tunnels: stats.active_pairs,
            slots: stats.slots,
            pipes: stats.pipes_in_use,
            buffer_bytes: stats.buffer_bytes,
        }
    }
}

impl Source for ServerSource {
    fn role(&self) -> Role {
        self.role
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn links(&self, of: &LinkQuery) -> Links {
        self.chosen(of).0
    }

    fn change(&self, of: &LinkQuery, change: LinkChange) -> BoxFuture<'_, Result<Links, String>> {
        let (links, handles) = self.chosen(of);
        Box::pin(async move {
            let unlinking = handles.into_iter().filter_map(|link| {
                let principal = link.info.identity.owner().map(AsRef::as_ref);
                match change {
                    LinkChange::Drain => {
                        tracing::info!(agent = %link.info.agent, principal, link = link.id.0, "a link is drained, as the admin socket was asked to");
                        self.router.set_draining(link.id);
                        None
                    }
                    LinkChange::Unlink => {
                        tracing::info!(agent = %link.info.agent, principal, link = link.id.0, "a link is ended, as the admin socket was asked to");
                        if let Some(lanes) = &link.lanes {
                            lanes.revoke();
                        }
                        let end = link.revoke(UNLINKED.to_owned());
                        if end.is_some() {
                            self.metrics.links_ended.count(LinkEnding::Unlinked);
                        }
                        end
                    }
                }
            });
            tokio::time::timeout(CHANGE_TIME, join_all(unlinking))
                .await
                .map_err(|_elapsed| "a link takes no commands now; ask again".to_owned())?;
            Ok(links)
        })
    }

    fn status(&self) -> Status {
        let tally = Tally::of(&self.common.tunnels, false);
        let mut links = self.router.links();
        links.sort_by_key(|link| link.id.0);
        let all = Totals::of(
            links
                .iter()
                .map(|link| link.lanes.as_deref().map(pool_lanes)),
        );
        links.truncate(LINKS_MAX);
        let links = self.rows(&links, &tally);
        let mut status = self.common.status(self.role, &tally, links, all);
        status.pending_dials = Some(self.router.pending_dials() as u64);
        status.peers = self.peers.as_ref().map(PeerTable::rows).unwrap_or_default();
        status.server_count = self.announced.as_ref().map(Announced::count);
        let strategies = self.router.with_registry(Registry::availability);
        status.strategies = strategies
            .into_iter()
            .map(|(strategy, availability)| StrategyStatus {
                name: strategy.name().to_owned(),
                state: availability.name().to_owned(),
            })
            .collect();
        status
    }

    fn agents(&self) -> Vec<AgentStatus> {
        let mut links = self.router.links();
        // The first link of an agent id is that of its holder.
        links.sort_by_key(|link| link.id.0);
        let mut by_agent: HashMap<&str, &LinkHandle> = HashMap::new();
        for link in &links {
            by_agent.entry(link.info.agent.as_str()).or_insert(link);
        }
        let agents = by_agent.into_iter().map(|(agent, link)| AgentStatus {
            agent: agent.to_owned(),
            principal: link.info.identity.owner().map(ToString::to_string),
            dials: dials(&link.info.dials),
        });
        agents.collect()
    }
}

fn dials(dials: &AgentDials) -> DialStatus {
    let counts = dials.counts();
    DialStatus {
        answered: counts.answered,
        slow: counts.slow,
        failed: counts.failed,
    }
}

impl ServerSource {
    /// The links that the query selects, as rows and as handles.
    fn chosen(&self, of: &LinkQuery) -> (Links, Vec<LinkHandle>) {
        let mut links = self.router.links();
        links.retain(|link| of.is_about(Some(link.id.0), link.info.agent.as_str()));
        links.sort_by_key(|link| link.id.0);
        let total = links.len() as u64;
        links.truncate(LINKS_MAX);
        let rows = self.rows(&links, &Tally::of(&self.common.tunnels, false));
        (self.common.links(self.role, rows, total), links)
    }

    fn rows(&self, links: &[LinkHandle], tally: &Tally) -> Vec<LinkStatus> {
        let conditions = self.router.with_registry(|registry| {
            let conditions = links.iter().map(|link| registry.condition(link.id));
            conditions.collect::<Vec<_>>()
        });
        std::iter::zip(links, conditions)
            .map(|(link, condition)| self.link(link, condition, tally))
            .collect()
    }

    fn link(&self, link: &LinkHandle, condition: Option<Condition>, tally: &Tally) -> LinkStatus {
        let info = &link.info;
        LinkStatus {
            link: Some(link.id.0),
            identifiers: Some(info.identifiers.encode()),
            peer: info.agent.as_str().to_owned(),
            address: info.address.to_string(),
            principal: info.identity.owner().map(ToString::to_string),
            dialect: dialect(info.credit),
            version: info.version.as_str().map(str::to_owned),
            age_seconds: link.since.elapsed().as_secs(),
            condition: match condition {
                Some(Condition::Serving) => "serving",
                Some(Condition::Draining) => "draining",
                Some(Condition::Suspected) => "silent",
                Some(Condition::Dead) => "dead",
                Some(Condition::Retired) => "retired",
                Some(Condition::Shadowed) => "shadowed",
                None => "leaving",
            }
            .to_owned(),
            tunnels: tally.by_link.get(&link.id.0).copied().unwrap_or(0),
            held_bytes: link.dirty_list.held_bytes(),
            budget_bytes: self.common.link_budget_bytes,
            lanes: link.lanes.as_deref().map(pool_lanes),
            dials: Some(dials(&info.dials)),
        }
    }
}

impl Source for AgentSource {
    fn role(&self) -> Role {
        Role::Agent
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn status(&self) -> Status {
        let tally = Tally::of(&self.common.tunnels, true);
        let mut links = self.rows(&tally);
        let all = Totals::of(links.iter().map(|link| link.lanes));
        links.truncate(LINKS_MAX);
        let mut status = self.common.status(Role::Agent, &tally, links, all);
        status.search = Some(search_status(&self.servers.search()));
        status
    }

    fn links(&self, of: &LinkQuery) -> Links {
        let mut rows = self.rows(&Tally::of(&self.common.tunnels, true));
        rows.retain(|link| of.is_about(None, &link.peer));
        let total = rows.len() as u64;
        rows.truncate(LINKS_MAX);
        self.common.links(Role::Agent, rows, total)
    }

    fn change(&self, _of: &LinkQuery, _change: LinkChange) -> BoxFuture<'_, Result<Links, String>> {
        let why = "this is an agent, and a server drains and ends links: ask its server".to_owned();
        Box::pin(ready(Err(why)))
    }

    fn agents(&self) -> Vec<AgentStatus> {
        Vec::new()
    }
}

impl AgentSource {
    fn rows(&self, tally: &Tally) -> Vec<LinkStatus> {
        let draining = self.servers.is_draining();
        let links = self.servers.links();
        let rows = links.iter().map(|link| LinkStatus {
            link: None,
            identifiers: None,
            peer: link.server.as_str().to_owned(),
            address: link.address.to_string(),
            principal: None,
            dialect: dialect(link.credit),
            version: link.version.as_str().map(str::to_owned),
            age_seconds: link.since.elapsed().as_secs(),
            condition: if draining { "draining" } else { "serving" }.to_owned(),
            tunnels: tally
                .by_peer
                .get(link.server.as_str())
                .copied()
                .unwrap_or(0),
            held_bytes: link.dirty_list.held_bytes(),
            budget_bytes: self.common.link_budget_bytes,
            lanes: link.lanes.as_ref().map(keeper_lanes),
            dials: None,
        });
        rows.collect()
    }
}

fn pool_lanes(pool: &LanePool) -> LinkLanes {
    let (all, idle) = (pool.lanes(), pool.idle_lanes());
    LinkLanes {
        idle: idle as u64,
        busy: all.saturating_sub(idle) as u64,
        wanted: None,
        limit: pool.lanes_max() as u64,
    }
}

fn keeper_lanes(keeper: &LaneKeeper) -> LinkLanes {
    let lanes = keeper.count();
    LinkLanes {
        idle: lanes.idle as u64,
        busy: lanes.busy as u64,
        wanted: Some(keeper.wanted() as u64),
        limit: keeper.lanes_max() as u64,
    }
}

fn search_status(view: &SearchView) -> SearchStatus {
    let origin = match &view.origin {
        Some(CountOrigin::Server(server)) => Some(format!("{server} announces {}", view.known)),
        Some(CountOrigin::Leases) => Some(format!("{} servers have a lease", view.known)),
        None => None,
    };
    let (state, reason) = match view.progress {
        Progress::Met => ("met", None),
        Progress::Draining => ("draining", None),
        Progress::Searching => ("searching", origin),
        Progress::Slow => {
            let origin = origin.map_or_else(String::new, |origin| format!("{origin}, but "));
            let reason = format!(
                "{origin}30 connections led to no other server: check --server-count and the load balancer"
            );
            ("slow", Some(reason))
        }
    };
    SearchStatus {
        linked: view.held as u64,
        known: view.known as u64,
        state: state.to_owned(),
        reason,
    }
}

fn dialect(credit: bool) -> String {
    if credit { "adit" } else { "go" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use adit_core::ids::ServerId;

    #[test]
    fn the_reason_of_a_slow_search_names_the_server_and_the_flag() {
        let view = SearchView {
            held: 3,
            known: 64,
            progress: Progress::Slow,
            origin: Some(CountOrigin::Server(ServerId::new("b"))),
        };
        let status = search_status(&view);
        assert_eq!(
            (status.linked, status.known, &*status.state),
            (3, 64, "slow")
        );
        assert_eq!(
            status.reason.unwrap(),
            "b announces 64, but 30 connections led to no other server: check --server-count and the load balancer"
        );
        let progress = Progress::Searching;
        let origin = Some(CountOrigin::Leases);
        let searching = search_status(&SearchView {
            progress,
            origin,
            ..view.clone()
        });
        assert_eq!(searching.reason.unwrap(), "64 servers have a lease");
        let progress = Progress::Met;
        assert_eq!(search_status(&SearchView { progress, ..view }).reason, None);
    }

    #[test]
    fn lanes_of_unlisted_links_are_counted() {
        let lanes = |idle, busy| LinkLanes {
            idle,
            busy,
            wanted: None,
            limit: 8,
        };
        let more_than_listed = (0..=LINKS_MAX).map(|_| Some(lanes(4, 1)));
        let all = Totals::of(more_than_listed.chain([None]));
        let links = LINKS_MAX as u64 + 1;
        let expected = Totals {
            links: links + 1,
            lanes_idle: 4 * links,
            lanes_busy: links,
        };
        assert_eq!(all, expected);
    }
}
