//! Lanes of one link at the server: idle lanes wait here, a dial takes one, and the lane returns when its tunnel is over.

mod idle;
mod opening;
mod opens;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::lane::{
    Demand, FrameType, LaneEvent, LaneViolation, OpenRequest, RefusalCode, Want,
};
use adit_core::session::{Moment, ProcessBudget, Queued};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::clock::moment;
use crate::drain::{DrainError, drain};
use crate::endpoint::Carrier;
use crate::lane::{Lane, LaneFailure, LaneRights, LaneRoom, LinkSecret, Slot, WarmShare};
use crate::lane_path::LaneOwner;
use crate::watch::LaneWatch;
use adit_net::tasks::Tasks;
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{LaneCloseReason, LaneDial, LaneState};
use adit_telemetry::rate::TokenBucket;
use adit_tls::agent_identity::AgentIdentity;

use opening::Opening;
use opens::Waiting;
pub use opens::{AgentOpen, AgentOpens};

/// Raw lanes that one link may begin per second on average: each uses up its lane, and a new lane costs both ends about a
/// millisecond of TLS handshake.
const RAW_LANES_PER_SECOND: u32 = 50;
/// Raw lanes that one link may begin at once.
const RAW_LANES_BURST: u32 = 100;

/// Lanes checked in one batch: some microseconds each, during which dials do not find them.
const IDLE_BATCH_LANES: usize = 16;

/// OPENs refused in one check of a lane. A correct agent waits for each answer; any other could keep the task that serves all
/// lanes busy for ever.
const REFUSALS_PER_LOOK: usize = 64;

/// What a pool is made of.
pub struct PoolSettings {
    /// Identity that the agent has proved: only this agent may bind lanes.
    pub identity: AgentIdentity,
    /// Whether the agent may still have tunnels; `None`: it may for as long as lanes live.
    pub rights: Option<Arc<dyn LaneRights>>,
    /// Limit on lanes of this link.
    pub lanes_max: usize,
    /// Limit on unanswered dials.
    pub dials_max: usize,
    /// How long a half-closed tunnel may be silent.
    pub silence_max: Duration,
    /// Slots for lanes in the whole process.
    pub room: Arc<LaneRoom>,
    /// Runs the tasks in which lanes drain.
    pub tasks: Tasks,
    /// Counters.
    pub metrics: AditMetrics,
    /// Checks stalled lanes and lanes without a link.
    pub watch: Arc<LaneWatch>,
    /// Budget of bytes held in the whole process.
    pub budget: Arc<ProcessBudget>,
    /// Decides on tunnels that the agent opens; `None`: it may open none.
    pub opens: Option<Arc<dyn AgentOpens>>,
    /// Reserves places for lanes that the agent is asked for.
    pub places: Arc<dyn LanePlaces>,
}

/// Places for connections of one agent that are to become lanes.
pub trait LanePlaces: Send + Sync {
    /// Reserves up to `lanes` places; returns how many. Must not block.
    fn reserve(&self, lanes: usize) -> usize;
}

/// The lanes of one link.
pub struct LanePool {
    settings: PoolSettings,
    secret: LinkSecret,
    slots: Arc<Semaphore>,
    dials: Semaphore,
    idle: Mutex<Idle>,
    /// An idle lane has become readable.
    became_readable: Arc<Notify>,
    /// The link is gone: lanes are no longer returned.
    gone: CancellationToken,
}

struct Idle {
    lanes: Vec<Waiting>,
    pings: u64,
    /// Rate limit on tunnels that become raw lanes.
    raw_lanes: TokenBucket,
    /// Lanes to ask the agent for.
    demand: Demand,
    /// Number of idle lanes that the agent was last asked to keep.
    told: usize,
    /// `None` once the link is gone.
    warm: Option<WarmShare>,
}

/// Outcome of opening a tunnel on a lane.
pub enum OnLane {
    Open(Carrier),
    /// The agent has not seen the OPEN: the dial may go over the link.
    NotSeen,
    /// The lane was lost; whether the agent has seen the OPEN is unknown.
    Lost,
    Failed(DialFailure),
}

impl LanePool {
    /// A pool without lanes, with a new secret.
    #[must_use]
    pub fn new(settings: PoolSettings) -> Arc<Self> {
        Arc::new(Self {
            secret: LinkSecret::random(),
            slots: Arc::new(Semaphore::new(settings.lanes_max)),
            dials: Semaphore::new(settings.dials_max),
            idle: Mutex::new(Idle {
                lanes: Vec::new(),
                pings: 0,
                raw_lanes: TokenBucket::new(
                    RAW_LANES_PER_SECOND,
                    RAW_LANES_BURST,
                    Instant::now().into_std(),
                ),
                demand: Demand::new(settings.lanes_max, moment()),
                told: 0,
                warm: Some(settings.room.join()),
            }),
            became_readable: Arc::default(),
            gone: CancellationToken::new(),
            settings,
        })
    }

    /// The secret with which lanes prove that they belong to the link.
    #[must_use]
    pub fn secret(&self) -> &LinkSecret {
        &self.secret
    }

    /// Identity that the agent has proved.
    #[must_use]
    pub fn identity(&self) -> &AgentIdentity {
        &self.settings.identity
    }

    /// Ends the tunnels on this agent's lanes within seconds, including lanes that outlive their link.
    pub fn revoke(&self) {
        if let Some(rights) = &self.settings.rights {
            rights.revoke();
        }
    }

    /// Limit on lanes of this link.
    #[must_use]
    pub fn lanes_max(&self) -> usize {
        self.settings.lanes_max
    }

    /// A slot for one more lane; `None` when the link or the process has reached its limit, or descriptors are short.
    #[must_use]
    pub fn slot(&self) -> Option<Slot> {
        self.settings.room.take(&self.slots)
    }

    /// Adds a lane that was just bound.
    pub fn add(self: &Arc<Self>, mut lane: Lane, slot: Slot) {
        lane.hold(slot);
        if let Some(rights) = &self.settings.rights {
            lane.depend_on(Arc::clone(rights));
        }
        self.keep(lane);
    }

    /// Closes idle lanes and accepts none back; open tunnels live on.
    pub fn close(&self) {
        let mut idle = self.lock();
        self.gone.cancel();
        let lanes = std::mem::take(&mut idle.lanes);
        let share = idle.warm.take();
        drop(idle);
        drop(share);
        for _lane in lanes {
            self.closed(LaneCloseReason::LinkGone);
        }
    }

    /// Drops dead idle lanes and pings the others. Call it every 30 s.
    pub async fn ping_idle(self: &Arc<Self>) {
        let (number, mut left) = {
            let mut idle = self.lock();
            idle.pings += 1;
            (idle.pings, idle.lanes.len())
        };
        while left > 0 {
            // The oldest first; lanes put back queue behind them. Outside the task's cooperative budget, which would make lanes
            // look unreadable once others have been read.
            let looked = tokio::task::unconstrained(async { self.check(number, left) }).await;
            left -= looked.max(1).min(left);
            tokio::task::yield_now().await;
        }
    }

    /// Checks some of the `left` oldest lanes; returns how many.
    fn check(self: &Arc<Self>, number: u64, left: usize) -> usize {
        let mut idle = self.lock();
        let count = left.min(IDLE_BATCH_LANES).min(idle.lanes.len());
        let lanes: Vec<Waiting> = idle.lanes.drain(..count).collect();
        drop(idle);
        let alive: Vec<Waiting> = lanes
            .into_iter()
            .filter_map(|waiting| self.usable(waiting))
            .filter_map(|waiting| self.pinged(waiting, number))
            .collect();
        self.put_back(alive);
        count
    }

    /// Pings the lane and returns it; `None` if an earlier ping is unanswered or the lane failed.
    fn pinged(self: &Arc<Self>, mut waiting: Waiting, number: u64) -> Option<Waiting> {
        if !waiting.lane.ping(number) {
            // A process that was stopped for a while checks its lanes before it has read their pongs.
            if waiting.lane.has_unread() {
                return Some(waiting);
            }
            self.closed(LaneCloseReason::Silent);
            return None;
        }
        // What the socket does not take now is written with the next frame.
        let cx = &mut Context::from_waker(Waker::noop());
        if let Poll::Ready(Err(error)) = waiting.lane.poll_flush(cx) {
            self.lost(&error.into());
            return None;
        }
        Some(waiting)
    }

    fn put_back(&self, lanes: Vec<Waiting>) {
        let mut idle = self.lock();
        if !self.gone.is_cancelled() {
            if lanes.iter().any(Waiting::is_readable) {
                // The task that serves readable lanes may have checked before these were back.
                self.became_readable.notify_one();
            }
            return idle.lanes.extend(lanes);
        }
        drop(idle);
        for _lane in lanes {
            self.closed(LaneCloseReason::LinkGone);
        }
    }

    /// Opens a tunnel on an idle lane. Dropping the call gives up the dial. `raw_lane`: the client's end is a plaintext socket,
    /// so the lane may become a raw lane if both ends support it.
    pub async fn open(
        self: &Arc<Self>,
        protocol: &str,
        address: &str,
        timeout: Option<Duration>,
        raw_lane: bool,
    ) -> OnLane {
        let metrics = &self.settings.metrics;
        let Some(Taken {
            lane,
            left,
            raw_lane,
        }) = self.take(raw_lane)
        else {
            metrics.lane_dials.count(LaneDial::Miss);
            self.lock().demand.miss(moment());
            return OnLane::NotSeen;
        };
        let Ok(_permit) = self.dials.try_acquire() else {
            self.keep(lane);
            return OnLane::Failed(DialFailure::TooManyPending { per_agent: true });
        };
        let mut opening = Opening {
            pool: self,
            lane: Some(lane),
        };
        let request = OpenRequest {
            protocol: protocol.to_owned(),
            address: address.to_owned(),
            raw: raw_lane,
            origin: None,
            forward: None,
        };
        let asked = Instant::now();
        let attempt = opening.run(&request, self.ask(left, Demand::after_dial));
        let outcome = match timeout {
            None => attempt.await,
            Some(timeout) => tokio::time::timeout(timeout, attempt)
                .await
                .unwrap_or(OnLane::Failed(DialFailure::TimedOut)),
        };
        metrics.lane_answer.observe(asked.elapsed().as_secs_f64());
        metrics.lane_dials.count(match outcome {
            OnLane::NotSeen | OnLane::Lost => LaneDial::Unacknowledged,
            OnLane::Open(_) | OnLane::Failed(_) => LaneDial::Hit,
        });
        outcome
    }

    /// An idle lane. `raw_lane`: it may become a raw lane if both ends support it and other lanes are left. A raw lane is not
    /// reused, and dials in quick succession gain more from reusable lanes.
    fn take(self: &Arc<Self>, raw_lane: bool) -> Option<Taken> {
        loop {
            let mut idle = self.lock();
            let waiting = idle.lanes.pop()?;
            let left = idle.lanes.len();
            drop(idle);
            let Some(Waiting { lane, .. }) = self.usable(waiting) else {
                continue;
            };
            let mut lane = *lane;
            let now = Instant::now().into_std();
            let raw_lane = raw_lane
                && lane.may_be_raw()
                && left >= Demand::IDLE_MIN
                && self.lock().raw_lanes.try_take(now);
            let raw_lane = raw_lane && lane.prepare_raw();
            lane.count_as(self.settings.metrics.lanes.of(LaneState::Busy).guard());
            return Some(Taken {
                lane,
                left,
                raw_lane,
            });
        }
    }

    /// The lane, if a tunnel may be opened on it.
    fn usable(self: &Arc<Self>, mut waiting: Waiting) -> Option<Waiting> {
        if self.gone.is_cancelled() {
            self.closed(LaneCloseReason::LinkGone);
            return None;
        }
        let waker = waiting.waker();
        let cx = &mut Context::from_waker(&waker);
        let mut refusals = 0;
        loop {
            match waiting.lane.poll_event(cx) {
                Poll::Ready(Ok(LaneEvent::Open(request))) => match &self.settings.opens {
                    Some(opens) => {
                        let opens = Arc::clone(opens);
                        opens.open(self.agent_open(*waiting.lane, request));
                        return None;
                    }
                    // In a loop: an agent may have sent several OPENs, each timed for the answer to the last one.
                    None => {
                        refusals += 1;
                        if refusals > REFUSALS_PER_LOOK {
                            self.lost(&LaneViolation::OutOfTurn(FrameType::Open).into());
                            return None;
                        }
                        let text = "this server opens no connections for agents";
                        waiting.lane.end().refuse(RefusalCode::Denied, text);
                    }
                },
                Poll::Ready(Ok(_)) => (),
                Poll::Ready(Err(failure)) => {
                    self.lost(&failure);
                    return None;
                }
                Poll::Pending => break,
            }
        }
        if waiting.lane.state().can_open() {
            return Some(waiting);
        }
        // The agent has announced that it closes the lane.
        self.closed(LaneCloseReason::Drained);
        None
    }

    /// Makes an idle lane available to dials.
    fn keep(self: &Arc<Self>, lane: Lane) {
        let mut waiting = self.waiting(lane);
        self.send_wants(&mut waiting.lane);
        if let Some(waiting) = self.usable(waiting) {
            self.put_back(vec![waiting]);
        }
    }

    /// Tells the agent on this idle lane how many idle lanes to keep, if that has changed, and how many dials missed one.
    fn send_wants(&self, lane: &mut Lane) {
        if !lane.state().can_open() {
            return;
        }
        let warm = self.settings.room.warm();
        let (left, has_changed) = {
            let mut idle = self.lock();
            let told = std::mem::replace(&mut idle.told, warm);
            (idle.lanes.len() + 1, told != warm)
        };
        if has_changed {
            let lanes = u32::try_from(warm).unwrap_or(u32::MAX);
            lane.end().want(Want::Keep(lanes));
        }
        let missing = self.ask(left, Demand::after_return);
        if missing > 0 {
            lane.end().want(Want::Open(missing));
        }
        if has_changed || missing > 0 {
            // What the socket does not take now is written with the next frame; a failure shows when the lane is read.
            let cx = &mut Context::from_waker(Waker::noop());
            let _flushed = lane.poll_flush(cx);
        }
    }

    /// Tells the agent how many idle lanes to keep, if that has changed and a lane is idle. Call it every second.
    pub fn announce_warm(self: &Arc<Self>) {
        let warm = self.settings.room.warm();
        let lane = {
            let mut idle = self.lock();
            if idle.told == warm {
                return;
            }
            idle.lanes.pop()
        };
        if let Some(Waiting { lane, .. }) = lane {
            self.keep(*lane);
        }
    }

    /// How many lanes to ask the agent for, with `left` idle ones; their places are reserved.
    fn ask(&self, left: usize, of: fn(&mut Demand, usize, Moment) -> usize) -> u32 {
        let (free, now) = (self.slots.available_permits(), moment());
        // One lock for all of it: two dials at once must not ask for the same lanes.
        let mut idle = self.lock();
        let wanted = of(&mut idle.demand, left, now).min(free);
        if wanted == 0 {
            return 0;
        }
        let lanes = self.settings.places.reserve(wanted);
        idle.demand.requested(lanes, now);
        u32::try_from(lanes).unwrap_or(u32::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LanePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LanePool")
    }
}

impl LaneOwner for Arc<LanePool> {
    fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    fn watch(&self) -> &LaneWatch {
        &self.settings.watch
    }

    fn silence_max(&self) -> Duration {
        self.settings.silence_max
    }

    fn budget(&self) -> &Arc<ProcessBudget> {
        &self.settings.budget
    }

    fn take_back(&self, mut lane: Lane, queued: Queued) {
        if lane.state().is_raw() {
            // Given up: the agent may take further bytes for payload to the target.
            self.closed(LaneCloseReason::Used);
            return lane.reset_connection();
        }
        let flushed = lane.poll_flush(&mut Context::from_waker(Waker::noop()));
        let is_clean = lane.state().is_idle() && lane.is_proven();
        if is_clean && matches!(flushed, Poll::Ready(Ok(()))) {
            return self.keep(lane);
        }
        let owner = Self::clone(self);
        let settles = self.watch().settles();
        let draining = async move {
            let drained = drain(&mut lane).await;
            drop(queued);
            match drained {
                Ok(()) => owner.keep(lane),
                Err(undrained) => owner.undrained(lane, &undrained),
            }
            drop(settles);
        };
        if self.settings.tasks.spawn("lane-settles", draining).is_err() {
            self.closed(LaneCloseReason::Lost);
        }
    }

    fn lost(&self, failure: &LaneFailure) {
        tracing::debug!(%failure, "a lane is lost");
        self.closed(failure.into());
    }
}

impl LanePool {
    /// Counts the end of a lane.
    fn closed(&self, why: LaneCloseReason) {
        self.settings.metrics.lanes_closed.count(why);
    }

    fn undrained(self: &Arc<Self>, lane: Lane, why: &DrainError) {
        match why {
            DrainError::Failed(failure) => self.lost(failure),
            DrainError::Silent => {
                tracing::debug!("agent did not confirm the end of a tunnel: the lane is reset");
                self.closed(LaneCloseReason::Silent);
                lane.reset_connection();
            }
            DrainError::Unread => self.closed(LaneCloseReason::Silent),
        }
    }
}

/// A lane taken for a dial.
struct Taken {
    lane: Lane,
    /// Idle lanes left.
    left: usize,
    /// The lane may become a raw lane.
    raw_lane: bool,
}
