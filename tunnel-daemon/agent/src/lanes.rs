//! Lanes of one link at the agent: opened ahead of need, each served by a task of its own.
//!
//! The keeper decides how many lanes exist and opens them; an idle lane waits for the server's OPEN. The lane's own task dials
//! and copies, so bytes pass through no queue.

use std::fmt;
use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use adit_core::ids::ServerId;
use adit_core::lane::{Growth, Lanes, Want};
use adit_core::session::{ProcessBudget, Queued};
use adit_core::wire::metadata::LaneGrant;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

mod backoff;
mod checkout;
mod serve;

pub use checkout::{Borrowed, Opened};

use self::backoff::Backoff;
use self::checkout::Checkouts;
use crate::context::LinkContext;
use adit_telemetry::labels::LaneCloseReason;
use adit_tunnel::lane::{BindTo, Lane, LaneFailure, LinkSecret, Slot};
use adit_tunnel::{DrainError, LaneOwner, LaneWatch, drain, moment};

/// How often the number of idle lanes is checked without other events.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long a server that lacked a lane for a connection of the node is not preferred for its zone.
const LACKED_FOR: Duration = Duration::from_secs(5);

/// The lanes of one link. Clones share the same lanes.
#[derive(Clone)]
pub struct LaneKeeper(Arc<Shared>);

struct Shared {
    server: ServerId,
    /// The server is in the zone of this agent.
    is_near: bool,
    /// When a connection of the node last waited for a lane in vain.
    lacked: Mutex<Option<Instant>>,
    bind: BindTo,
    context: LinkContext,
    lanes_max: usize,
    slots: Arc<Semaphore>,
    growth: Mutex<Growth>,
    idle: AtomicUsize,
    /// Lanes being opened; each holds a slot.
    opening: AtomicUsize,
    /// Bound lanes whose tasks do not wait for OPEN yet.
    arriving: AtomicUsize,
    /// A lane was used for a tunnel since the last check.
    proved: AtomicBool,
    /// The server is going away: this agent opens no tunnels there.
    leaving: AtomicBool,
    /// Lanes lost shortly after they were bound.
    stillborn: AtomicUsize,
    changed: Notify,
    surplus: Notify,
    checkouts: Checkouts,
    gone: CancellationToken,
}

/// Why a lane is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The keeper has fewer idle lanes than it wants.
    Missing,
    /// The server has asked for it, and keeps a place for it.
    Asked,
}

/// Why a lane could not be opened; logged, and several in a row cause a backoff.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct OpenError(pub String);

impl LaneKeeper {
    /// A keeper for a link whose server has granted lanes; it opens at most `lanes_max`. `is_near`: the server is in the zone of
    /// this agent.
    #[must_use]
    pub fn new(
        server: ServerId,
        grant: &LaneGrant,
        lanes_max: usize,
        is_near: bool,
        context: &LinkContext,
    ) -> Self {
        let granted = usize::try_from(grant.lanes_max).unwrap_or(usize::MAX);
        let lanes_max = lanes_max.min(granted).min(Semaphore::MAX_PERMITS);
        Self(Arc::new(Shared {
            server,
            is_near,
            lacked: Mutex::default(),
            bind: BindTo {
                link: grant.link,
                secret: LinkSecret::new(grant.secret.clone()),
            },
            context: context.clone(),
            lanes_max,
            slots: Arc::new(Semaphore::new(lanes_max)),
            growth: Mutex::new(Growth::new(lanes_max, moment())),
            idle: AtomicUsize::new(0),
            opening: AtomicUsize::new(0),
            arriving: AtomicUsize::new(0),
            proved: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            stillborn: AtomicUsize::new(0),
            changed: Notify::new(),
            surplus: Notify::new(),
            checkouts: Checkouts::default(),
            gone: CancellationToken::new(),
        }))
    }

    /// The server at the other end of the link.
    #[must_use]
    pub fn server(&self) -> &ServerId {
        &self.0.server
    }

    /// Whether the server is in the zone of this agent, and has not lacked lanes lately: connections do not wait there one after the
    /// other.
    #[must_use]
    pub fn is_near(&self) -> bool {
        let lacked = *self.0.lacked.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.is_near && lacked.is_none_or(|since| since.elapsed() >= LACKED_FOR)
    }

    /// A connection of the node has waited for a lane in vain.
    pub fn lacks(&self) {
        let mut lacked = self.0.lacked.lock().unwrap_or_else(PoisonError::into_inner);
        *lacked = Some(Instant::now());
    }

    /// The link id and secret with which a lane is bound.
    #[must_use]
    pub fn bind(&self) -> BindTo {
        self.0.bind.clone()
    }

    /// A dial came over the link, because no lane was idle.
    pub fn missed(&self) {
        self.growth().short();
        self.0.changed.notify_one();
    }

    /// The link is over: closes idle lanes; open tunnels live on.
    pub fn close(&self) {
        self.0.gone.cancel();
    }

    /// Keeps the right number of lanes until [`Self::close`]. `open` connects and binds one; behind a load balancer the lane
    /// may belong to another link of this agent.
    pub async fn run<F, O>(self, open: F)
    where
        F: Fn(Cause) -> O,
        O: Future<Output = Result<(Self, Lane), OpenError>>,
    {
        let gone = self.0.gone.clone();
        gone.run_until_cancelled(self.keep(open)).await;
    }

    async fn keep<F, O>(&self, open: F)
    where
        F: Fn(Cause) -> O,
        O: Future<Output = Result<(Self, Lane), OpenError>>,
    {
        let mut opening = FuturesUnordered::new();
        // Those that the server has not asked for.
        let mut unasked = 0_usize;
        let mut backoff = Backoff::default();
        let mut wanted = self.adit().lanes_wanted.share();
        loop {
            wanted.set(self.growth().wanted());
            // Tunnels on older lanes prove nothing about a server that has refused all lanes since.
            if self.0.proved.swap(false, Relaxed) && backoff.has_gained() {
                self.succeeded(&mut backoff);
            }
            for _lane in 0..self.0.stillborn.swap(0, Relaxed) {
                backoff.note(false);
            }
            let at_once = backoff.at_once(Growth::AT_ONCE);
            while !backoff.lasts() && self.missing() > 0 {
                let asked = opening.len() - unasked;
                // After a backoff a single attempt shows whether the server accepts lanes.
                let may_be_asked = at_once == Growth::AT_ONCE && asked < Growth::GRANT_MAX;
                let cause = if unasked < at_once {
                    Cause::Missing
                } else if may_be_asked && self.growth().take_granted() {
                    Cause::Asked
                } else {
                    break;
                };
                // The slot is taken before the server can open a tunnel on the lane.
                let Some(slot) = self.0.context.lane_room.take(&self.0.slots) else {
                    break;
                };
                unasked += usize::from(cause == Cause::Missing);
                let (lane, counted) = (open(cause), Counted::new(&self.0.opening));
                opening.push(async move { (lane.await, slot, counted, cause) });
            }
            let owed = self.0.context.lane_room.owed(self.0.idle.load(Relaxed));
            for _lane in 0..self.surplus().max(owed) {
                self.0.surplus.notify_one();
            }
            let paused = backoff.left();
            tokio::select! {
                () = self.0.changed.notified() => (),
                () = self.0.context.lane_room.shortage() => (),
                Some((opened, slot, _counted, cause)) = opening.next() => {
                    unasked -= usize::from(cause == Cause::Missing);
                    self.tried(opened, slot, &mut backoff);
                }
                () = tokio::time::sleep(paused.unwrap_or(LOOK_EVERY)) => {
                    // Lanes that have waited this long without being lost count as successes.
                    let waited = self.0.idle.load(Relaxed) > 0 && opening.is_empty();
                    if waited && (paused.is_none() || backoff.has_gained()) {
                        self.succeeded(&mut backoff);
                    }
                }
            }
        }
    }

    /// An attempt to open a lane has ended.
    fn tried(&self, opened: Result<(Self, Lane), OpenError>, slot: Slot, backoff: &mut Backoff) {
        match opened {
            Ok((keeper, lane)) if Arc::ptr_eq(&keeper.0, &self.0) => {
                let needed = self.0.context.lane_room.has_descriptors();
                self.add(lane, slot, needed);
                if needed {
                    backoff.gain();
                } else {
                    backoff.short();
                }
            }
            // Behind a load balancer the lane may belong to another link of this agent, which may need it.
            Ok((keeper, lane)) => {
                // Asked before the lane takes its slot there, which would count as a busy lane.
                let wanted = keeper.wants_more();
                let (slot, needed) = match slot.move_to(&keeper.0.slots) {
                    Ok(slot) => (slot, wanted),
                    Err(slot) => (slot, false),
                };
                keeper.add(lane, slot, needed);
                if !needed {
                    backoff.misrouted(self.wanted());
                }
            }
            Err(error) => {
                backoff.note(false);
                if backoff.is_news() {
                    tracing::warn!(
                        server = %self.0.server, %error,
                        "no lane can be opened, so tunnels use the link: does a proxy, router or balancer on the path allow few \
                         connections, or refuse the ALPN name adit-lane/1?"
                    );
                } else {
                    tracing::debug!(server = %self.0.server, %error, "no lane");
                }
            }
        }
    }

    /// The server takes lanes.
    fn succeeded(&self, backoff: &mut Backoff) {
        if backoff.is_told() {
            tracing::info!(server = %self.0.server, "lanes can be opened again");
        }
        backoff.note(true);
    }

    /// Number of lanes by state.
    #[must_use]
    pub fn count(&self) -> Lanes {
        let all = self.0.lanes_max - self.0.slots.available_permits();
        // In this order: a lane that becomes idle meanwhile is counted twice rather than missed.
        let opening = self.0.opening.load(Relaxed);
        let arriving = self.0.arriving.load(Acquire);
        let idle = self.0.idle.load(Relaxed);
        Lanes {
            idle,
            busy: all.saturating_sub(idle + arriving + opening),
            opening: opening + arriving,
        }
    }

    /// Target number of idle lanes.
    #[must_use]
    pub fn wanted(&self) -> usize {
        self.growth().wanted()
    }

    /// Limit on lanes.
    #[must_use]
    pub fn lanes_max(&self) -> usize {
        self.0.lanes_max
    }

    fn missing(&self) -> usize {
        if !self.0.context.lane_room.has_room() {
            return 0;
        }
        self.growth().missing(self.count())
    }

    /// Whether one more lane is of use to this keeper; the caller holds the process's slot.
    fn wants_more(&self) -> bool {
        self.0.context.lane_room.has_descriptors() && self.growth().missing(self.count()) > 0
    }

    fn surplus(&self) -> usize {
        self.growth().surplus(self.count(), moment())
    }

    fn growth(&self) -> MutexGuard<'_, Growth> {
        self.0.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lane is idle no more. Wakes the keeper only if it has to open another one, or another number is wanted.
    fn taken(&self) {
        let wanted = self.wanted();
        for _lane in 0..self.surplus() {
            self.0.surplus.notify_one();
        }
        if self.missing() > 0 || self.wanted() != wanted {
            self.0.changed.notify_one();
        }
    }

    /// Adds a lane that was just bound. A lane that is not `needed` is drained like idle lanes: its server may have opened a
    /// tunnel on it already.
    fn add(&self, mut lane: Lane, slot: Slot, needed: bool) {
        lane.hold(slot);
        self.0.context.lane_room.descriptors().opened();
        if !needed {
            lane.end().drain();
        }
        self.start(lane);
    }

    fn start(&self, lane: Lane) {
        let (keeper, arriving) = (self.clone(), Arriving::new(self));
        let serving = async move { keeper.serve(lane, Some(arriving)).await };
        if self.0.context.tasks.spawn("lane", serving).is_err() {
            self.adit().lanes_closed.count(LaneCloseReason::Lost);
        }
    }

    fn note(&self, failure: &LaneFailure) -> LaneCloseReason {
        tracing::debug!(server = %self.0.server, %failure, "a lane is lost");
        failure.into()
    }

    /// Counts the end of a lane.
    fn closed(&self, end: LaneCloseReason) {
        self.adit().lanes_closed.count(end);
        self.0.changed.notify_one();
    }

    fn adit(&self) -> &adit_telemetry::AditMetrics {
        self.0.context.metrics.adit()
    }
}

/// Takes lanes back when their tunnels are over.
impl LaneOwner for LaneKeeper {
    fn gone(&self) -> &CancellationToken {
        &self.0.gone
    }

    fn watch(&self) -> &LaneWatch {
        &self.0.context.lane_watch
    }

    fn silence_max(&self) -> Duration {
        self.0.context.isolation.half_closed_timeout
    }

    fn budget(&self) -> &Arc<ProcessBudget> {
        &self.0.context.budget
    }

    fn take_back(&self, mut lane: Lane, queued: Queued) {
        let keeper = self.clone();
        let settles = self.watch().settles();
        let draining = async move {
            let drained = drain(&mut lane).await;
            drop((settles, queued));
            match drained {
                Ok(()) => keeper.serve(lane, None).await,
                Err(DrainError::Failed(_given_up)) if lane.state().is_draining() => {
                    keeper.closed(LaneCloseReason::Drained);
                }
                Err(DrainError::Failed(_gone)) if keeper.0.gone.is_cancelled() => {
                    keeper.closed(LaneCloseReason::LinkGone);
                }
                Err(DrainError::Failed(failure)) => keeper.lost(&failure),
                Err(DrainError::Silent) => {
                    keeper.closed(LaneCloseReason::Silent);
                    lane.reset_connection();
                }
                // Closed with FIN: unread bytes still arrive.
                Err(DrainError::Unread) => keeper.closed(LaneCloseReason::Silent),
            }
        };
        if self.0.context.tasks.spawn("lane", draining).is_err() {
            self.adit().lanes_closed.count(LaneCloseReason::Lost);
        }
    }

    fn lost(&self, failure: &LaneFailure) {
        let end = self.note(failure);
        self.closed(end);
    }

    fn want(&self, want: Want) {
        self.growth().want(want);
        self.0.changed.notify_one();
    }
}

impl fmt::Debug for LaneKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LaneKeeper").field(&self.0.server).finish()
    }
}

/// A bound lane that is not idle yet: counted as arriving until its task begins or is dropped.
struct Arriving(LaneKeeper);

impl Arriving {
    fn new(keeper: &LaneKeeper) -> Self {
        keeper.0.arriving.fetch_add(1, Relaxed);
        Self(keeper.clone())
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.0.0.arriving.fetch_sub(1, Release);
        // More lanes may be wanted once none is arriving.
        self.0.0.changed.notify_one();
    }
}

/// Counts one more until dropped.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests;
