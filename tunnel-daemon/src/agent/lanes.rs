//! Lanes of one link at the agent: opened ahead of need, each served by a task of its own.
//!
//! The keeper decides how many there are and opens them; a lane without a tunnel waits for the server's OPEN. What it
//! carries is dialled and pumped in the lane's own task, so a byte meets no queue on its way.

use std::fmt;
use std::io::ErrorKind::ConnectionReset;
use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use adit_core::ids::ServerId;
use adit_core::lane::{Growth, LaneEvent, Lanes, OpenRequest, RefusalCode};
use adit_core::wire::metadata::LaneGrant;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

mod home;
mod loan;
mod pause;

pub use loan::{Borrowed, Opened};

use self::home::Home;
use self::loan::Loans;
use self::pause::Pause;
use super::link::LinkContext;
use super::targets::dial_target;
use crate::hub::{Leg, LegWatch, PipeEnd, moment, serve_target, until_answered};
use crate::lane::{BindTo, Lane, LaneFailure, LinkSecret};
use crate::telemetry::CountedTunnel;
use crate::telemetry::labels::{Label as _, LaneEnd, LaneState, Path};

/// Lanes that one keeper opens at once.
const OPENING_MAX: usize = 4;
/// A lane that is lost sooner than that without a tunnel counts as an attempt that failed.
const PROVED_AFTER: Duration = Duration::from_secs(5);
/// How often the number of idle lanes is looked at when nothing happens.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The lanes of one link. Clones name the same lanes.
#[derive(Clone)]
pub struct LaneKeeper(Arc<Shared>);

struct Shared {
    server: ServerId,
    bind: BindTo,
    context: LinkContext,
    lanes_max: usize,
    slots: Arc<Semaphore>,
    growth: Mutex<Growth>,
    idle: AtomicUsize,
    /// Bound lanes whose tasks have not begun to wait yet.
    arriving: AtomicUsize,
    /// A lane was asked for a tunnel.
    proved: AtomicBool,
    /// The server goes away: this end opens no tunnels there.
    leaving: AtomicBool,
    /// Lanes lost right after they were bound.
    stillborn: AtomicUsize,
    changed: Notify,
    surplus: Notify,
    loans: Loans,
    gone: CancellationToken,
}

/// Why a lane could not be opened; worth a line in the log, and a pause after some of them.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct OpenError(pub String);

impl LaneKeeper {
    /// For a link whose server has granted lanes; never more than `lanes_max` of them.
    #[must_use]
    pub fn new(
        server: ServerId,
        grant: &LaneGrant,
        lanes_max: usize,
        context: &LinkContext,
    ) -> Self {
        let granted = usize::try_from(grant.lanes_max).unwrap_or(usize::MAX);
        let lanes_max = lanes_max.min(granted).min(Semaphore::MAX_PERMITS);
        Self(Arc::new(Shared {
            server,
            bind: BindTo {
                link: grant.link,
                secret: LinkSecret::new(grant.secret),
            },
            context: context.clone(),
            lanes_max,
            slots: Arc::new(Semaphore::new(lanes_max)),
            growth: Mutex::new(Growth::new(lanes_max, moment())),
            idle: AtomicUsize::new(0),
            arriving: AtomicUsize::new(0),
            proved: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            stillborn: AtomicUsize::new(0),
            changed: Notify::new(),
            surplus: Notify::new(),
            loans: Loans::default(),
            gone: CancellationToken::new(),
        }))
    }

    /// The server at the other end of the link.
    #[must_use]
    pub fn server(&self) -> &ServerId {
        &self.0.server
    }

    /// What a lane of this link proves itself with.
    #[must_use]
    pub fn bind(&self) -> BindTo {
        self.0.bind.clone()
    }

    /// A dial came over the link, since no lane was idle.
    pub fn missed(&self) {
        self.short();
    }

    /// The link is over: idle lanes are closed, tunnels that are open live on.
    pub fn close(&self) {
        self.0.gone.cancel();
    }

    /// Keeps the right number of lanes until [`Self::close`]. `open` connects one and binds it; behind a load balancer
    /// it may belong to another link of this agent.
    pub async fn run<F, O>(self, open: F)
    where
        F: Fn() -> O,
        O: Future<Output = Result<(Self, Lane), OpenError>>,
    {
        let gone = self.0.gone.clone();
        gone.run_until_cancelled(self.keep(open)).await;
    }

    async fn keep<F, O>(&self, open: F)
    where
        F: Fn() -> O,
        O: Future<Output = Result<(Self, Lane), OpenError>>,
    {
        let mut opening = FuturesUnordered::new();
        let mut pause = Pause::default();
        let mut wanted = self.adit().lanes_wanted_share();
        loop {
            wanted.set(self.growth().wanted());
            // Tunnels on lanes from before say nothing of a server that has refused all since.
            if self.0.proved.swap(false, Relaxed) && pause.has_gained() {
                pause.note(true);
            }
            for _lane in 0..self.0.stillborn.swap(0, Relaxed) {
                pause.note(false);
            }
            let at_once = pause.at_once(OPENING_MAX);
            while !pause.lasts() && opening.len() < at_once && self.missing(opening.len()) > 0 {
                opening.push(open());
            }
            let owed = self.0.context.lane_room.owed(self.0.idle.load(Relaxed));
            for _lane in 0..self.surplus(opening.len()).max(owed) {
                self.0.surplus.notify_one();
            }
            let paused = pause.left();
            tokio::select! {
                () = self.0.changed.notified() => (),
                () = self.0.context.lane_room.shortage() => (),
                Some(opened) = opening.next() => match opened {
                    Ok((keeper, lane)) => {
                        // Behind a balancer it may be of use for another link of this agent.
                        let ours = Arc::ptr_eq(&keeper.0, &self.0);
                        let needed = ours || keeper.missing(0) > 0;
                        if !(keeper.add(lane, needed) && needed) {
                            pause.note(false);
                        } else if ours {
                            pause.gain();
                        }
                    }
                    Err(error) => {
                        pause.note(false);
                        tracing::debug!(server = %self.0.server, %error, "no lane");
                    }
                },
                () = tokio::time::sleep(paused.unwrap_or(LOOK_EVERY)) => {
                    // Lanes that have waited so long without being lost are as good as used.
                    let waited = self.0.idle.load(Relaxed) > 0 && opening.is_empty();
                    if waited && (paused.is_none() || pause.has_gained()) {
                        pause.note(true);
                    }
                }
            }
        }
    }

    /// Lanes now.
    #[must_use]
    pub fn count(&self) -> Lanes {
        self.lanes(0)
    }

    /// Idle lanes that are meant to be.
    #[must_use]
    pub fn wanted(&self) -> usize {
        self.growth().wanted()
    }

    /// Most lanes at once.
    #[must_use]
    pub fn lanes_max(&self) -> usize {
        self.0.lanes_max
    }

    fn missing(&self, opening: usize) -> usize {
        if !self.0.context.lane_room.has_room() {
            return 0;
        }
        self.growth().missing(self.lanes(opening))
    }

    fn surplus(&self, opening: usize) -> usize {
        self.growth().surplus(self.lanes(opening), moment())
    }

    fn lanes(&self, opening: usize) -> Lanes {
        let all = self.0.lanes_max - self.0.slots.available_permits();
        // In this order: a lane that begins to wait meanwhile is counted twice rather than not at all.
        let arriving = self.0.arriving.load(Acquire);
        let idle = self.0.idle.load(Relaxed);
        Lanes {
            idle,
            busy: all.saturating_sub(idle + arriving),
            opening: opening + arriving,
        }
    }

    fn growth(&self) -> MutexGuard<'_, Growth> {
        self.0.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a lane that was just bound; false when there is no room for it. One that is not `needed` is given up as the idle
    /// ones are: its server may have opened a tunnel on it already.
    fn add(&self, mut lane: Lane, needed: bool) -> bool {
        let Some(slot) = self.0.context.lane_room.take(&self.0.slots) else {
            return false;
        };
        lane.hold(slot);
        self.0.context.lane_room.descriptors().opened();
        self.adit().lane_opened();
        if !needed {
            lane.end().drain();
        }
        self.start(lane);
        true
    }

    fn start(&self, lane: Lane) {
        let (keeper, arriving) = (self.clone(), Arriving::new(self));
        let serving = async move { keeper.serve(lane, Some(arriving)).await };
        if self.0.context.tasks.spawn("lane", serving).is_err() {
            self.adit().lane_closed(LaneEnd::Lost);
        }
    }

    /// Serves a lane that carries nothing, up to its next tunnel that opens; one that is not `arriving` has carried one.
    async fn serve(&self, mut lane: Lane, mut arriving: Option<Arriving>) {
        let (since, proven) = (Instant::now(), arriving.is_none());
        loop {
            lane.count_as(self.adit().lane(LaneState::Idle));
            let request = match self.wait(&mut lane, arriving.take()).await {
                Ok(Waited::Asked(request)) => request,
                Ok(Waited::Lend(borrower)) => {
                    self.0.proved.store(true, Relaxed);
                    match borrower.send(Borrowed::new(lane, self.clone())) {
                        Ok(()) => return self.0.changed.notify_one(),
                        // It has given up in the meantime.
                        Err(borrowed) => match borrowed.give_back() {
                            Some(back) => lane = back,
                            None => return,
                        },
                    }
                    continue;
                }
                Err(end) => {
                    let lost = matches!(end, LaneEnd::Lost | LaneEnd::Violation);
                    if lost && !proven && since.elapsed() < PROVED_AFTER {
                        self.0.stillborn.fetch_add(1, Relaxed);
                    }
                    self.0.changed.notify_one();
                    return self.adit().lane_closed(end);
                }
            };
            self.0.proved.store(true, Relaxed);
            if request.raw && !lane.may_be_pipe() {
                let text = "a tunnel without frames needs a lane in clear text, or on kernel TLS";
                lane.end().refuse(RefusalCode::Denied, text);
                continue;
            }
            lane.count_as(self.adit().lane(LaneState::Busy));
            self.0.changed.notify_one();
            // Until its target counts as open, or the lane is idle again.
            let _under_way = self.0.context.dials.begin();
            let answer = {
                let dialing = dial_target(&self.0.context, &request.protocol, &request.address);
                // Boxed: a dial's state is large, and the tunnel that follows may live for days.
                until_answered(&mut lane, Box::pin(dialing), || self.short()).await
            };
            match answer {
                Ok(Some(Ok(socket))) if request.raw => match lane.accept_pipe() {
                    Ok(true) => return self.open_pipe(lane, socket, request.address),
                    Ok(false) => return self.open(lane, socket, request.address),
                    Err(failure) => return self.lost(&failure),
                },
                Ok(Some(Ok(socket))) => {
                    lane.end().accept();
                    return self.open(lane, socket, request.address);
                }
                Ok(Some(Err(text))) => lane.end().refuse(RefusalCode::Failed, &text),
                // Nobody waits for the answer any more.
                Ok(None) => (),
                // How a dial of a pipe is given up: nothing went wrong.
                Err(LaneFailure::Io(error)) if request.raw && error.kind() == ConnectionReset => {
                    self.adit().lane_closed(LaneEnd::Used);
                    return self.0.changed.notify_one();
                }
                Err(failure) => return self.lost(&failure),
            }
        }
    }

    /// Waits for an OPEN, or for somebody at this end who has a use for the lane.
    async fn wait(&self, lane: &mut Lane, arriving: Option<Arriving>) -> Result<Waited, LaneEnd> {
        // One that either end gives up takes no more tunnels, however long the server keeps it.
        let mut idle = (!lane.state().is_draining()).then(|| Counted::new(&self.0.idle));
        // Only now: whoever counts between the two would miss it, and open one too many.
        drop(arriving);
        let stopping = self.0.context.tasks.stopping();
        loop {
            if lane.state().is_draining() && idle.take().is_some() {
                self.0.changed.notify_one();
            }
            let free = lane.state().can_open();
            tokio::select! {
                biased;
                event = lane.event() => match event {
                    Ok(LaneEvent::Open(request)) => return Ok(Waited::Asked(request)),
                    Ok(LaneEvent::Want(_)) => self.short(),
                    Ok(_) => (),
                    Err(failure) => return Err(if lane.state().is_draining() {
                        LaneEnd::Drained
                    } else {
                        self.note(&failure)
                    }),
                },
                borrower = self.0.loans.next(), if free => return Ok(Waited::Lend(borrower)),
                () = self.0.surplus.notified(), if !lane.state().is_draining() => lane.end().drain(),
                () = self.0.gone.cancelled() => return Err(LaneEnd::LinkGone),
                () = stopping.cancelled() => return Err(LaneEnd::LinkGone),
            }
        }
    }

    /// Starts a tunnel that was accepted, in a task of its own: one that has waited and dialled keeps room for both.
    fn open(&self, lane: Lane, socket: TcpStream, address: String) {
        let context = &self.0.context;
        let home = Arc::new(Home(self.clone()));
        let mut leg = Leg::on_lane(lane, home);
        if context.warn_on_channel_limit {
            leg.watch(LegWatch::Target(address.as_str().into()));
        }
        let open = context.metrics.open_endpoint_connection();
        let entry = context.enter(&self.0.server, &address, Path::Lane);
        leg.tell(entry.live());
        let counted = CountedTunnel::opened(self.adit(), Path::Lane);
        let tunnel = serve_target(socket, leg, address, open, move |outcome| {
            drop(entry);
            counted.ended(outcome.reason_at_target());
        });
        // Without room the leg is dropped, which ends the tunnel.
        let _full = context.tasks.spawn("target", tunnel);
    }

    /// Starts a tunnel that was accepted without frames: relay threads have both sockets from here on.
    fn open_pipe(&self, lane: Lane, socket: TcpStream, address: String) {
        let context = &self.0.context;
        let (pipe, relay) = match (lane.into_pipe(self.adit()), &context.relay) {
            (Ok(pipe), Some(relay)) => (pipe, relay),
            // No lane becomes a pipe without a relay. The pipe is dropped, which resets it.
            (Ok(_), None) => return,
            (Err(failure), _) => return self.lost(&failure),
        };
        let socket = match socket.into_std() {
            Ok(socket) => socket.into(),
            Err(error) => {
                return tracing::debug!(%error, "a target's socket cannot be relayed");
            }
        };
        let open = context.metrics.open_endpoint_connection();
        let entry = context.enter(&self.0.server, &address, pipe.path());
        let live = entry.live();
        let keeper = Arc::downgrade(&self.0);
        let counted = CountedTunnel::opened(self.adit(), pipe.path());
        relay.hand_over(socket, pipe, &live, move |outcome| {
            drop((entry, open));
            counted.ended(outcome.end.reason_at_target());
            if matches!(outcome.end, PipeEnd::KeysUsedUp) {
                tracing::warn!(
                    target_address = address,
                    "a tunnel was cut: the keys of its kernel TLS are used up; --lane-security=tls has no such limit"
                );
            }
            tracing::debug!(
                target_address = address,
                from_target = outcome.from_socket,
                to_target = outcome.to_socket,
                end = ?outcome.end,
                engine = outcome.engine.as_str(),
                "target connection over"
            );
            // There is room for another lane.
            if let Some(keeper) = keeper.upgrade() {
                keeper.changed.notify_one();
            }
        });
    }

    fn short(&self) {
        self.growth().short();
        self.0.changed.notify_one();
    }

    fn note(&self, failure: &LaneFailure) -> LaneEnd {
        tracing::debug!(server = %self.0.server, %failure, "a lane is lost");
        failure.into()
    }

    fn lost(&self, failure: &LaneFailure) {
        let end = self.note(failure);
        self.closed(end);
    }

    /// Counts a lane that is no more.
    fn closed(&self, end: LaneEnd) {
        self.adit().lane_closed(end);
        self.0.changed.notify_one();
    }

    fn adit(&self) -> &crate::telemetry::AditMetrics {
        self.0.context.metrics.adit()
    }
}

impl fmt::Debug for LaneKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LaneKeeper").field(&self.0.server).finish()
    }
}

/// What an idle lane waited for.
enum Waited {
    /// The server has asked for a tunnel.
    Asked(OpenRequest),
    /// Somebody at this end would open one.
    Lend(oneshot::Sender<Borrowed>),
}

/// One more in a count for as long as it lives.
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

/// A lane that was bound and does not wait yet: on its way until its task begins, or is dropped.
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
        // More may be wanted now that none is on its way.
        self.0.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests;
