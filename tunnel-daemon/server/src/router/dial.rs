//! A dial on the links of a server: the agents it asks, in turn or two at a time, and its timers.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use adit_core::dial::{
    AnswerTimes, Attempts, HEDGE_AFTER_MIN, HedgeBudget, LinkState, Reason, Step,
};
use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, ConnId, DialId, LinkId};
use adit_core::peer::Forward;
use adit_core::registry::{Condition, Registry, Scope};
use adit_core::session::{CancelledDial, DialRequest, Moment, Promise, TunnelKind};
use adit_core::target::Host;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::{sleep_until, timeout};

use crate::owner::owner_hash;
use crate::router::asked::AskedAgents;
use crate::router::counted_attempt::CountedAttempt;
use crate::router::handle::LinkHandle;
use crate::router::peers::{PeerAnswer, PeerHandle, time_left};
use crate::router::route::{OpenTunnel, Router};
use adit_config::limits;
use adit_net::poll_set::first_of;
use adit_telemetry::DialCounts;
use adit_telemetry::labels::{Path, PeerDial};
use adit_tunnel::clock::{instant, moment};
use adit_tunnel::endpoint::{Carrier, Endpoint};
use adit_tunnel::pool::OnLane;
use adit_tunnel::task::Command;

/// Margin beyond a link task's deadline, after which the caller gives up by itself.
const BACKSTOP: Duration = Duration::from_secs(1);
/// How long an additional link of an agent is provisional. An agent that looks for further servers connects, learns which
/// server answered, and closes duplicate links. That takes a round trip, of 100 ms on long paths.
const PROVISIONAL: Duration = Duration::from_millis(200);
/// Times that a dial goes on to another key, because peers have no agent under the one before.
const KEYS_MAX: usize = 4;
/// Of a dial that the agent may have seen.
const LOST: CancelledDial = CancelledDial {
    failure: DialFailure::LinkLost,
    written: true,
};
/// How long a dial waits for the first peer of a server that has just started.
const PEERS_WITHIN: Duration = Duration::from_secs(3);
/// Limit on dials that wait for an agent to reconnect.
const WAITING_MAX: usize = 1024;

/// State shared by all dials of a process.
#[derive(Debug)]
pub(super) struct DialState {
    budget: Mutex<HedgeBudget>,
    waiting: Semaphore,
    retries: AtomicU64,
    hedges: AtomicU64,
    failovers: AtomicU64,
    lost: AtomicU64,
    waited: AtomicU64,
    pub(super) suspicions: AtomicU64,
}

impl Default for DialState {
    fn default() -> Self {
        Self {
            budget: Mutex::default(),
            waiting: Semaphore::new(WAITING_MAX),
            retries: AtomicU64::new(0),
            hedges: AtomicU64::new(0),
            failovers: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            suspicions: AtomicU64::new(0),
        }
    }
}

impl DialState {
    pub(super) fn counts(&self) -> DialCounts {
        DialCounts {
            retries: self.retries.load(Relaxed),
            hedges: self.hedges.load(Relaxed),
            failovers: self.failovers.load(Relaxed),
            lost: self.lost.load(Relaxed),
            waited: self.waited.load(Relaxed),
            suspicions: self.suspicions.load(Relaxed),
        }
    }

    pub(super) fn with_budget<T>(&self, act: impl FnOnce(&mut HedgeBudget) -> T) -> T {
        act(&mut self.budget.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A slot among the dials that wait for an agent to reconnect.
    fn place(&self) -> Result<SemaphorePermit<'_>, DialFailure> {
        let place = self.waiting.try_acquire();
        let place = place.map_err(|_full| DialFailure::TooManyPending { per_agent: false })?;
        self.waited.fetch_add(1, Relaxed);
        Ok(place)
    }

    fn count(&self, reason: Reason) {
        let counter = match reason {
            Reason::First => return,
            Reason::NotSent => &self.retries,
            Reason::Slow => &self.hedges,
            Reason::Silent => &self.failovers,
            Reason::Lost => &self.lost,
        };
        counter.fetch_add(1, Relaxed);
    }
}

/// A client's request.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) dial: DialId,
    pub(super) protocol: &'a str,
    pub(super) address: &'a str,
    pub(super) raw_lane: bool,
}

/// Whom an attempt asks.
#[derive(Clone)]
enum Candidate {
    /// An agent of this server.
    Agent(LinkHandle),
    /// Another server, for its agents.
    Peer(PeerHandle),
}

impl Candidate {
    fn id(&self) -> LinkId {
        match self {
            Self::Agent(link) => link.id,
            Self::Peer(peer) => peer.id,
        }
    }

    fn answers(&self) -> &AnswerTimes {
        match self {
            Self::Agent(link) => &link.answers,
            Self::Peer(peer) => &peer.answers,
        }
    }

    fn is_silent(&self) -> bool {
        match self {
            Self::Agent(link) => link.is_silent.load(Relaxed),
            Self::Peer(peer) => peer.is_silent(),
        }
    }
}

type Opened = Result<OpenTunnel<Carrier>, CancelledDial>;
type Outcome = (Candidate, Opened);
type Running<'a> = Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

impl Router {
    /// Dials `address` through a matching agent. Dropping the call cancels the dial.
    ///
    /// # Errors
    /// See [`DialFailure`].
    pub async fn dial(
        &self,
        dial: DialId,
        protocol: &str,
        address: &str,
        asked: &AskedAgents,
    ) -> Result<OpenTunnel, DialFailure> {
        let wanted = Wanted {
            dial,
            protocol,
            address,
            raw_lane: false,
        };
        let open = self.dial_as(TunnelKind::Grpc, wanted, asked).await?;
        match open.carrier {
            Carrier::Endpoint(carrier) => Ok(OpenTunnel {
                carrier,
                conn: open.conn,
                link: open.link,
                agent: open.agent,
                principal: open.principal,
                via: open.via,
            }),
            // Not requested, so never returned.
            Carrier::RawLane(_) => Err(DialFailure::LinkLost),
        }
    }

    /// Like [`Self::dial`]. `raw_lane`: the client's end is a plaintext socket, so the tunnel may use a raw lane.
    ///
    /// # Errors
    /// See [`DialFailure`].
    pub async fn dial_for(
        &self,
        dial: DialId,
        protocol: &str,
        address: &str,
        raw_lane: bool,
        asked: &AskedAgents,
    ) -> Result<OpenTunnel<Carrier>, DialFailure> {
        let wanted = Wanted {
            dial,
            protocol,
            address,
            raw_lane,
        };
        self.dial_as(TunnelKind::Socket, wanted, asked).await
    }

    /// Counts a dial as pending until the permit is dropped, and reserves its tunnel's memory.
    ///
    /// # Errors
    /// This process is leaving, or at a limit.
    pub fn admit_dial(
        &self,
        kind: TunnelKind,
    ) -> Result<(SemaphorePermit<'_>, Promise), DialFailure> {
        if self.refuses_dials() {
            return Err(DialFailure::ShuttingDown);
        }
        let promise = self.budget.promise(kind).ok_or(DialFailure::NoMemory)?;
        let pending = self.pending.try_acquire();
        let pending = pending.map_err(|_full| DialFailure::TooManyPending { per_agent: false })?;
        Ok((pending, promise))
    }

    async fn dial_as(
        &self,
        kind: TunnelKind,
        mut wanted: Wanted<'_>,
        asked: &AskedAgents,
    ) -> Result<OpenTunnel<Carrier>, DialFailure> {
        let (_pending, mut promise) = self.admit_dial(kind)?;
        wanted.raw_lane = wanted.raw_lane && promise.extend_to_raw_lane();
        if wanted.protocol.len() + wanted.address.len() > limits::DIAL_BYTES_MAX {
            return Err(DialFailure::TooLong);
        }
        let host = Host::of_address(wanted.address);
        let Some(scope) = self.scope(&host).await? else {
            return Err(DialFailure::NoAgent);
        };
        self.dials.with_budget(|budget| budget.dial(moment()));
        let dialing = Dialing {
            router: self,
            wanted,
            scope,
            host,
            deadline: self.limits.timeout.map(|timeout| moment().after(timeout)),
            asked,
            attempts: Attempts::default(),
            handles: Vec::new(),
            tried: Vec::new(),
            not_here: Vec::new(),
            unasked: Vec::new(),
            first: None,
            changes_of_key: 0,
            replaced: None,
        };
        let dialing = dialing.run();
        let outcome = match self.limits.timeout {
            None => dialing.await,
            Some(timeout) => tokio::time::timeout(timeout + BACKSTOP, dialing)
                .await
                .unwrap_or(Err(DialFailure::TimedOut)),
        };
        asked.conclude(outcome.as_ref().err());
        outcome.map(|mut open| {
            open.carrier.keep(promise);
            open
        })
    }

    /// The key for a host. A server that has just started waits for its peers, unless the key is of the first strategy already: a peer
    /// may have an agent under an earlier one.
    ///
    /// # Errors
    /// Too many dials wait.
    async fn scope(&self, host: &Host) -> Result<Option<Scope>, DialFailure> {
        let find = || self.with_registry(|registry| registry.scope(host, moment()));
        let is_final = |scope: &Option<Scope>| {
            let is_first = |it: &Scope| {
                it.strategy() == self.with_registry(|registry| registry.strategies().first())
            };
            !self.expects_peers() || scope.as_ref().is_some_and(is_first)
        };
        // In this order: peers may have announced their keys just now.
        let found = find();
        if is_final(&found) {
            return Ok(found.or_else(find));
        }
        let _place = self.dials.place()?;
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                let found = find();
                if is_final(&found) {
                    return;
                }
                changed.await;
            }
        };
        let _late = timeout(PEERS_WITHIN, waiting).await;
        Ok(find())
    }

    /// Asks a candidate; `number` is the number of the attempt. `forward` is made for a peer only.
    async fn attempt(
        &self,
        candidate: Candidate,
        wanted: Wanted<'_>,
        forward: Option<Forward>,
        agents: &AskedAgents,
        number: usize,
    ) -> Outcome {
        match (candidate, forward) {
            (Candidate::Agent(handle), _) => {
                let (handle, opened) = self.ask_agent(handle, wanted, agents, number).await;
                (Candidate::Agent(handle), opened)
            }
            (Candidate::Peer(peer), Some(forward)) => {
                agents.on(number, Path::Peer);
                let opened = self.ask_peer(&peer, wanted, forward).await;
                if let Err(cancelled) = &opened {
                    agents.failed(number, &cancelled.failure);
                }
                (Candidate::Peer(peer), opened)
            }
            // Every question to a peer says under which key.
            (candidate @ Candidate::Peer(_), None) => (
                candidate,
                Err(CancelledDial {
                    failure: DialFailure::NoAgent,
                    written: false,
                }),
            ),
        }
    }

    /// Asks a peer.
    async fn ask_peer(&self, peer: &PeerHandle, wanted: Wanted<'_>, forward: Forward) -> Opened {
        let asked = moment();
        peer.answers.sent(asked);
        let series = peer.series();
        let opening = peer.opener.open(wanted.protocol, wanted.address, forward);
        let unasked = |failure| {
            Err(CancelledDial {
                failure,
                written: false,
            })
        };
        let endpoint = match opening.await {
            PeerAnswer::Open(endpoint) => endpoint.of_peer(Arc::clone(series)),
            PeerAnswer::NotHere => {
                series.dial(PeerDial::NotHere);
                peer.answers.answered(asked, moment());
                return unasked(DialFailure::NoAgent);
            }
            PeerAnswer::NotAsked => {
                series.dial(PeerDial::Refused);
                return unasked(DialFailure::LinkBusy);
            }
            PeerAnswer::Failed(failure) => {
                series.dial(PeerDial::Failed);
                if let DialFailure::Target(_) = failure {
                    peer.answers.answered(asked, moment());
                }
                let written = !matches!(
                    failure,
                    DialFailure::TooManyPending { .. } | DialFailure::NoMemory
                );
                return Err(CancelledDial { failure, written });
            }
        };
        let now = moment();
        peer.answers.answered(asked, now);
        series.dial(PeerDial::Opened);
        series.answered(now.since(asked));
        Ok(OpenTunnel {
            carrier: Carrier::Endpoint(endpoint),
            conn: ConnId(self.next_lane_conn.fetch_add(1, Relaxed)),
            link: peer.id,
            agent: AgentId::new(peer.server.as_str()),
            principal: None,
            via: Some(peer.server.clone()),
        })
    }

    /// Asks the agent of a link; `number` is the number of the attempt.
    pub(super) async fn ask_agent(
        &self,
        handle: LinkHandle,
        wanted: Wanted<'_>,
        agents: &AskedAgents,
        number: usize,
    ) -> (LinkHandle, Opened) {
        let asked = moment();
        handle.answers.sent(asked);
        let on = |path| agents.on(number, path);
        let mut counted = CountedAttempt::new(&handle.info.dials);
        let outcome = self.dial_on(&handle, wanted, on).await;
        counted.ended(outcome.as_ref().err().map(|cancelled| &cancelled.failure));
        drop(counted);
        if let Err(cancelled) = &outcome {
            agents.failed(number, &cancelled.failure);
        }
        if let Ok(_)
        | Err(CancelledDial {
            failure: DialFailure::Target(_) | DialFailure::Closed,
            ..
        }) = outcome
        {
            handle.answers.answered(asked, moment());
        }
        (handle, outcome)
    }

    /// Asks the agent over the paths that lead to it, in order: a lane, then the link. After a lane that was lost under the dial
    /// the link is asked, too; the agent may have seen the dial then, whatever becomes of it on the link.
    async fn dial_on(
        &self,
        handle: &LinkHandle,
        wanted: Wanted<'_>,
        on: impl Fn(Path),
    ) -> Result<OpenTunnel<Carrier>, CancelledDial> {
        let over_link = async || {
            on(Path::Link);
            on_link(handle, wanted).await
        };
        let (carrier, conn) = match self.on_lane(handle, wanted, &on).await {
            OnLane::Open(carrier) => {
                let conn = self.next_lane_conn.fetch_add(1, Relaxed);
                (carrier, ConnId(conn))
            }
            OnLane::Failed(failure) => {
                let written = !matches!(failure, DialFailure::TooManyPending { .. });
                return Err(CancelledDial { failure, written });
            }
            OnLane::NotSeen => over_link().await?,
            OnLane::Lost => {
                let opened = over_link().await;
                let is_final =
                    |it: &CancelledDial| it.written || it.failure == DialFailure::SendTimedOut;
                opened.map_err(|it| if is_final(&it) { it } else { LOST })?
            }
        };
        Ok(OpenTunnel {
            carrier,
            conn,
            link: handle.id,
            agent: handle.info.agent.clone(),
            principal: handle.info.identity.owner().cloned(),
            via: None,
        })
    }

    async fn on_lane(&self, handle: &LinkHandle, wanted: Wanted<'_>, on: impl Fn(Path)) -> OnLane {
        let Some(lanes) = &handle.lanes else {
            return OnLane::NotSeen;
        };
        let timeout = self.limits.timeout;
        on(Path::Lane);
        let opening = lanes.open(wanted.protocol, wanted.address, timeout, wanted.raw_lane);
        opening.await
    }

    /// The link to ask instead of one that is provisional.
    pub(super) fn settled(&self, handle: &LinkHandle) -> Option<LinkHandle> {
        let is_new = handle.since.elapsed() < PROVISIONAL;
        is_new.then(|| self.older(handle)).flatten()
    }

    /// The newest older link of the same agent that is serving.
    fn older(&self, handle: &LinkHandle) -> Option<LinkHandle> {
        let older = self.with_registry(|registry| {
            let links = registry.links_of(&handle.info.agent).iter();
            let older = links.take_while(|link| **link != handle.id);
            let serving =
                older.filter(|link| registry.condition(**link) == Some(Condition::Serving));
            serving.last().copied()
        });
        self.handle(older?)
    }
}

async fn on_link(
    handle: &LinkHandle,
    wanted: Wanted<'_>,
) -> Result<(Carrier, ConnId), CancelledDial> {
    let (endpoint, channel) = Endpoint::new(&handle.dirty_list);
    let (reply, outcome) = oneshot::channel();
    let spare = DialId(rand::random::<i64>() & i64::MAX);
    let request = DialRequest {
        dial: wanted.dial,
        spare,
        protocol: wanted.protocol.to_owned(),
        address: wanted.address.to_owned(),
    };
    if handle
        .commands
        .try_send(Command::Dial {
            request,
            channel,
            reply,
        })
        .is_err()
    {
        return Err(CancelledDial {
            failure: DialFailure::LinkBusy,
            written: false,
        });
    }
    match outcome.await {
        Ok(Ok(conn)) => Ok((Carrier::Endpoint(endpoint), conn)),
        Ok(Err(cancelled)) => Err(cancelled),
        Err(_dropped) => Err(LOST),
    }
}

/// A running dial.
struct Dialing<'a> {
    router: &'a Router,
    wanted: Wanted<'a>,
    scope: Scope,
    host: Host,
    deadline: Option<Moment>,
    asked: &'a AskedAgents,
    attempts: Attempts,
    /// Agents and peers that were asked.
    handles: Vec<Candidate>,
    /// Ids of their links.
    tried: Vec<LinkId>,
    /// Peers that had no agent under a key.
    not_here: Vec<(LinkId, Scope)>,
    /// Peers that have asked nobody.
    unasked: Vec<LinkId>,
    /// Whose agents the first attempt may have asked, as a hash, and by which link: peers may say something else of the key later.
    /// An unknown owner is `None`.
    first: Option<(LinkId, Option<u64>)>,
    changes_of_key: usize,
    /// The older link that was asked because its agent's newest link was provisional.
    replaced: Option<LinkId>,
}

impl Dialing<'_> {
    async fn run(mut self) -> Result<OpenTunnel<Carrier>, DialFailure> {
        let router = self.router;
        let mut running: Vec<Running<'_>> = Vec::new();
        let mut place = None;
        let mut step = Step::Ask(Reason::First);
        loop {
            let changed = router.changed.notified();
            let (until, listens) = match step {
                Step::Fail(failure) => return Err(failure),
                Step::Ask(reason) => {
                    step = match self.pick(reason) {
                        Some((candidate, number)) => {
                            let (wanted, asked) = (self.wanted, self.asked);
                            let forward = self.forward(&candidate);
                            let attempt = router.attempt(candidate, wanted, forward, asked, number);
                            running.push(Box::pin(attempt));
                            place = None;
                            self.check()
                        }
                        None => self.found_none(reason),
                    };
                    continue;
                }
                Step::Wait(until) => (until, until.is_none()),
                Step::WaitForLink(until) => {
                    if place.is_none() {
                        place = Some(router.dials.place()?);
                    }
                    (Some(until), true)
                }
            };
            let due = async {
                match until {
                    Some(until) => sleep_until(instant(until)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                (handle, outcome) = first_of(&mut running) => match outcome {
                    Ok(open) => return Ok(open),
                    Err(cancelled) => step = self.ended(&handle, cancelled),
                },
                () = due => step = self.check(),
                () = changed, if listens => step = self.check(),
            }
        }
    }

    /// Chooses whom to ask next; returns it with the number of the attempt. `None`: nobody matches, or the hedge budget is spent.
    fn pick(&mut self, reason: Reason) -> Option<(Candidate, usize)> {
        let (router, now) = (self.router, moment());
        let address = self.wanted.address;
        if reason == Reason::Slow
            && !router
                .dials
                .with_budget(|budget| budget.try_hedge(address, now))
        {
            return None;
        }
        let (candidate, is_replaced) = self.find(reason).or_else(|| self.find_elsewhere(reason))?;
        router.dials.count(reason);
        let number = match &candidate {
            Candidate::Agent(handle) => {
                let info = &handle.info;
                self.asked.add(&info.agent, info.identity.owner())
            }
            Candidate::Peer(peer) => self.asked.add(&AgentId::new(peer.server.as_str()), None),
        };
        let id = candidate.id();
        // Asked before, under another key.
        self.unasked.retain(|other| *other != id);
        if self.first().is_none() {
            let owner = match &candidate {
                Candidate::Agent(agent) => {
                    Some(owner_hash(agent.info.identity.owner().map(AsRef::as_ref)))
                }
                Candidate::Peer(_) => {
                    router.with_registry(|registry| registry.peer_owner(&self.scope))
                }
            };
            self.first = Some((id, owner));
        }
        self.attempts.begin(id, reason, now);
        self.tried.push(id);
        self.handles.push(candidate.clone());
        if is_replaced {
            self.replaced = Some(id);
        }
        Some((candidate, number))
    }

    /// When the key was that of peers alone, and all of them have said that they have no such agent any more, the dial is as good
    /// as new: nobody was asked, and the next key counts.
    fn find_elsewhere(&mut self, reason: Reason) -> Option<(Candidate, bool)> {
        let mut asked = self.handles.iter();
        let is_over = self.changes_of_key >= KEYS_MAX;
        if is_over || self.not_here.is_empty() || asked.any(|it| !self.unasked.contains(&it.id())) {
            return None;
        }
        let (router, not_here) = (self.router, &self.not_here);
        let scope = router
            .with_registry(|registry| registry.scope_without(&self.host, moment(), not_here))?;
        if scope == self.scope {
            return None;
        }
        self.scope = scope;
        self.changes_of_key += 1;
        // Nobody was asked under the key before.
        self.first = None;
        // A peer without an agent under one key may have one under the next.
        self.tried
            .retain(|tried| !not_here.iter().any(|(peer, _)| peer == tried));
        self.find(reason)
    }

    /// A candidate not asked before. True with an older link of an agent whose newest link is provisional.
    fn find(&mut self, reason: Reason) -> Option<(Candidate, bool)> {
        let router = self.router;
        let heard = matches!(reason, Reason::Slow | Reason::Silent | Reason::Lost);
        // Links to skip in this search; a later search may try them.
        let mut passed = self.tried.clone();
        let first = self.first();
        loop {
            let draw = rand::random();
            let link = router.with_registry(|registry| match first {
                None => registry.pick(&self.scope, draw, &passed),
                // Whose agent a peer has asked is not known.
                Some(None) if registry.is_claim(&self.scope) => None,
                Some(owner) => {
                    let is_owner = |other: Option<&str>| Some(owner_hash(other)) == owner;
                    registry.pick_owned(&self.scope, &is_owner, heard, draw, &passed)
                }
            })?;
            passed.push(link);
            // A link that is ending leaves these tables before the registry.
            let Some(handle) = router.handle(link) else {
                match router.peer(link) {
                    Some(peer) => return Some((Candidate::Peer(peer), false)),
                    None => continue,
                }
            };
            match router.settled(&handle) {
                None => return Some((Candidate::Agent(handle), false)),
                Some(older) if self.tried.contains(&older.id) => (),
                Some(older) => return Some((Candidate::Agent(older), true)),
            }
        }
    }

    /// The owner of the first attempt that may have asked somebody; `None` before it.
    fn first(&self) -> Option<Option<u64>> {
        let (link, owner) = self.first?;
        (!self.unasked.contains(&link)).then_some(owner)
    }

    /// What a peer is told of this dial.
    fn forward(&self, candidate: &Candidate) -> Option<Forward> {
        let Candidate::Peer(peer) = candidate else {
            return None;
        };
        let is_first = self.first.is_none_or(|(first, _)| first == peer.id);
        let owner = self.first().flatten().filter(|_| !is_first);
        let is_claim = |registry: &Registry| registry.is_claim(&self.scope);
        let owner = owner.filter(|_| self.router.with_registry(is_claim));
        Some(Forward {
            scope: self.scope.clone(),
            time_left: time_left(self.deadline, moment()),
            owner,
            dial: self.wanted.dial,
            client: self.asked.client(),
        })
    }

    fn found_none(&mut self, reason: Reason) -> Step {
        let now = moment();
        let registry = |registry: &Registry| registry.is_silent(&self.scope, now);
        let may_come = self.router.with_registry(registry);
        self.attempts.found_none(reason, may_come, now)
    }

    fn ended(&mut self, candidate: &Candidate, cancelled: CancelledDial) -> Step {
        let (dials, now) = (&self.router.dials, moment());
        let id = candidate.id();
        if let Candidate::Peer(_) = candidate
            && !cancelled.written
        {
            self.unasked.push(id);
            if cancelled.failure == DialFailure::NoAgent {
                self.not_here.push((id, self.scope.clone()));
            }
        }
        if let DialFailure::Target(_) = cancelled.failure {
            let took = self.attempts.took(id, now);
            dials.with_budget(|budget| budget.failed(self.wanted.address, took, now));
        }
        let is_silent = candidate.is_silent();
        self.attempts.ended(id, cancelled, is_silent, now)
    }

    fn check(&mut self) -> Step {
        let (handles, replaced) = (&self.handles, self.replaced);
        self.attempts.check(moment(), |link, asked| {
            let handle = handles.iter().find(|handle| handle.id() == link);
            LinkState {
                is_silent: handle.is_some_and(Candidate::is_silent),
                hedge_at: match handle {
                    Some(handle) if replaced != Some(link) => handle.answers().hedge_at(asked),
                    // By then the newer link of its agent is no longer provisional.
                    _ => asked.after(HEDGE_AFTER_MIN),
                },
            }
        })
    }
}
