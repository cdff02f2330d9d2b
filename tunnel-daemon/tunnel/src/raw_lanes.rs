//! Tunnels whose two ends are sockets, in clear text or on kernel TLS. Relay threads move their bytes, and a watch ends tunnels
//! that would never end by themselves.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use adit_core::session::ProcessBudget;
use adit_net::buffer_growth::sizes_at_rest;
use adit_relay::{
    BufferSizes, Choice, Done, Flow, Outcome, Pair, PairEnd, Relay, RelayConfig, RelayHandle, Side,
    SocketBuffers, Submitted, Why,
};
use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

mod outcome;

pub use outcome::{RawLaneEnd, RawLaneOutcome, driver_label, reason_label};

use self::outcome::conclude;
use crate::lane::{LaneRights, RawLane};
use adit_net::socket;
use adit_telemetry::labels::{Driver, EndReason, Engine};
use adit_telemetry::tunnels::{PathQuality, Relayed};
use adit_telemetry::{AditMetrics, LiveTunnel};

/// How often tunnels are checked.
const EVERY: Duration = Duration::from_secs(5);
/// Limit on tunnels; descriptors run out long before.
const TUNNELS_MAX: usize = 1 << 20;
/// Tunnels per kernel pipe for bulk splicing: pipes take at most a sixteenth of the descriptors.
const TUNNELS_PER_PIPE: usize = 10;
/// Tunnels checked in one batch: some microseconds each.
const LOOK_TUNNELS: usize = 64;
/// Tunnels that may wait for a relay thread to take them.
const QUEUE_TUNNELS: usize = 4096;
/// The side of a pair that is the client's or target's socket.
const SOCKET: Side = Side::A;
/// The side of a pair that is the lane.
const LANE: Side = Side::B;

/// Relays tunnels on raw lanes. Dropping it resets all remaining tunnels.
pub struct RawLaneRelay {
    handle: RelayHandle,
    metrics: AditMetrics,
    silence_max: Duration,
    watched: Mutex<Vec<Watched>>,
    shutting_down: CancellationToken,
    budget: Arc<ProcessBudget>,
    /// The size to which the sockets of all tunnels were last fitted.
    fitted: Mutex<BufferSizes>,
    tunnels_max: usize,
    /// Driver failures already logged.
    driver_failures: AtomicU64,
    _threads: Relay,
}

/// Why a tunnel is cut; set once, before it is cancelled.
type Cause = OnceLock<EndReason>;

/// A tunnel as the watch sees it.
struct Watched {
    submitted: Submitted,
    /// Dangling once the tunnel is over.
    cause: Weak<Cause>,
    /// Whether the agent may still have this tunnel.
    rights: Option<Arc<dyn LaneRights>>,
    /// Progress counters at the last check, and the time of their last change.
    seen: [u64; 4],
    since: Instant,
    /// Of the socket and of the lane.
    buffers: [SocketBuffers; 2],
}

/// Sizes of a raw lane's sockets. Its promise covers large ones.
fn buffer_sizes(budget: &ProcessBudget) -> BufferSizes {
    if budget.is_half_full() {
        BufferSizes::Small
    } else {
        sizes_at_rest(budget)
    }
}

impl RawLaneRelay {
    /// Starts the threads for at most `tunnels_max` tunnels; each calls `on_thread_start`. A half-closed tunnel may be silent
    /// for `silence_max`. Socket buffers are as large as `budget` allows.
    ///
    /// # Errors
    /// A thread or a descriptor could not be created.
    pub fn start(
        choice: Choice,
        tunnels_max: usize,
        silence_max: Duration,
        budget: Arc<ProcessBudget>,
        metrics: AditMetrics,
        on_thread_start: fn(),
    ) -> io::Result<Arc<Self>> {
        let mut config = RelayConfig::new(choice);
        config.on_thread_start = on_thread_start;
        let release = rustix::system::uname();
        config.thresholds.splice_into_tls =
            adit_relay::splices_into_kernel_tls(&release.release().to_string_lossy());
        // A tunnel that holds a lane is refused only if thousands arrive between two turns of a thread.
        config.pairs_max = tunnels_max.clamp(1, TUNNELS_MAX);
        config.queue_pairs = config.pairs_max.min(QUEUE_TUNNELS);
        // Each pipe takes two descriptors, which the descriptor budget does not count.
        let pipes = (config.pairs_max / TUNNELS_PER_PIPE).max(1);
        config.pipe_budget_bytes = config.pipe_budget_bytes.min(pipes * config.pipe_bytes);
        let threads = Relay::start(&config)?;
        let relay = Arc::new(Self {
            handle: threads.handle(),
            metrics,
            silence_max,
            watched: Mutex::default(),
            shutting_down: CancellationToken::new(),
            fitted: Mutex::new(buffer_sizes(&budget)),
            budget,
            tunnels_max: config.pairs_max,
            driver_failures: AtomicU64::new(0),
            _threads: threads,
        });
        relay.publish();
        Ok(relay)
    }

    /// Moves bytes between `socket` and `raw_lane` from now on, until the tunnel is over. `early` was read from the socket
    /// before. Dropping the future resets both connections. Not an `async` function: its future would keep room for the
    /// arguments.
    pub fn run(
        self: &Arc<Self>,
        socket: OwnedFd,
        early: Bytes,
        raw_lane: RawLane,
        live: &Arc<LiveTunnel>,
    ) -> impl Future<Output = RawLaneOutcome> + Send + use<> {
        /// Ends the tunnel with its task.
        struct CutOnDrop(Submitted, Weak<Cause>);
        impl Drop for CutOnDrop {
            fn drop(&mut self) {
                cut(&self.0, &self.1, EndReason::Shutdown);
            }
        }
        let (tell, told) = oneshot::channel();
        let submitted = self.submit(socket, early, raw_lane, live, move |outcome| {
            // The receiver is gone when this future was dropped.
            let _cancelled = tell.send(outcome);
        });
        let cut_on_drop = submitted.map(|(submitted, cause)| CutOnDrop(submitted, cause));
        let (relay, live) = (Arc::clone(self), Arc::clone(live));
        async move {
            let _cut = cut_on_drop;
            told.await.unwrap_or_else(|_dropped| RawLaneOutcome {
                from_socket: live.bytes().0,
                to_socket: live.bytes().1,
                end: EndReason::RelayFailed.into(),
                engine: Engine::Copy,
                driver: driver_label(relay.handle.choice().engine),
                driver_reason: reason_label(relay.handle.choice().basis),
            })
        }
    }

    /// Like [`Self::run`] without waiting: `done` receives the outcome on a relay thread, and must not block.
    pub fn hand_over(
        &self,
        socket: OwnedFd,
        raw_lane: RawLane,
        live: &LiveTunnel,
        done: impl FnOnce(RawLaneOutcome) + Send + 'static,
    ) {
        self.submit(socket, Bytes::new(), raw_lane, live, done);
    }

    fn submit(
        &self,
        socket: OwnedFd,
        early: Bytes,
        raw_lane: RawLane,
        live: &LiveTunnel,
        done: impl FnOnce(RawLaneOutcome) + Send + 'static,
    ) -> Option<(Submitted, Weak<Cause>)> {
        let RawLane {
            socket: lane,
            unsent,
            received,
            tls,
            mut kept,
        } = raw_lane;
        let rights = kept.rights().cloned();
        let cause = Arc::new(Cause::new());
        let metrics = self.metrics.clone();
        let reason = reason_label(self.handle.choice().basis);
        // Protocol bytes, which do not count as the tunnel's.
        let overhead = unsent.len() as u64;
        let watch = Arc::downgrade(&cause);
        let over: Done = Box::new(move |outcome| {
            let outcome = conclude(outcome, reason, overhead, cause.get().copied(), &metrics);
            drop(cause);
            if matches!(
                outcome.end.reason,
                EndReason::LaneLost | EndReason::RelayFailed | EndReason::RelayDriverFailed
            ) {
                kept.lost();
            }
            drop(kept);
            done(outcome);
        });
        let lane = match lane.into_std() {
            Ok(lane) => lane,
            Err(error) => {
                let _reset = socket::set_reset_on_close(&socket);
                over(self.never_begun(error, PairEnd::Panicked));
                return None;
            }
        };
        let pair = Pair {
            a: socket,
            b: lane.into(),
            to_a: received,
            to_b: if unsent.is_empty() {
                early
            } else {
                [unsent, early].concat().into()
            },
            tls,
        };
        let sizes = buffer_sizes(&self.budget);
        let mut buffers = [SocketBuffers::default(), SocketBuffers::default()];
        for (buffers, (socket, is_new)) in
            buffers.iter_mut().zip([(&pair.a, true), (&pair.b, false)])
        {
            // On a socket whose peer has closed, this fails or changes nothing.
            let _closed = buffers.fit(socket, sizes, is_new);
        }
        match self.handle.submit(pair, over) {
            Ok(submitted) => {
                self.enter(submitted.clone(), watch.clone(), rights, buffers);
                live.relayed_by(Box::new(OnRawLane {
                    submitted: submitted.clone(),
                    overhead,
                    driver: driver_label(self.handle.choice().engine),
                }));
                Some((submitted, watch))
            }
            Err(refused) => {
                for fd in [&refused.pair.a, &refused.pair.b] {
                    // An incomplete stream must not look complete. Fails on a socket that is reset already.
                    let _reset = socket::set_reset_on_close(fd);
                }
                let end = match refused.why {
                    Why::Stopping => PairEnd::Stopped,
                    Why::Full => PairEnd::Panicked,
                    Why::Suspended => PairEnd::DriverFailed {
                        error: io::Error::from_raw_os_error(self.handle.stats().driver_errno),
                    },
                };
                let error = io::Error::other(refused.why);
                (refused.done)(self.never_begun(error, end));
                None
            }
        }
    }

    /// Whether one more tunnel has room; ask before opening it.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let here = self.handle.stats().active_pairs;
        self.handle.is_able() && usize::try_from(here).is_ok_and(|here| here < self.tunnels_max)
    }

    /// Handle for metrics of the threads' resource use.
    #[must_use]
    pub fn handle(&self) -> RelayHandle {
        self.handle.clone()
    }

    /// Completes when this process ends its tunnels. For tunnels that are still being opened.
    pub async fn stopped(&self) {
        self.shutting_down.cancelled().await;
    }

    /// The outcome of a tunnel that no thread took, with `end` as its end.
    fn never_begun(&self, error: io::Error, end: PairEnd) -> Outcome {
        tracing::warn!(%error, "a tunnel could not be relayed");
        Outcome {
            to_b: Flow::default(),
            to_a: Flow::default(),
            end,
            engine: self.handle.choice().engine,
        }
    }

    /// Fits the sockets' buffers to the budget. Cheap to call often: it does nothing while the sizes are the same.
    pub fn fit_buffers(&self) {
        let sizes = buffer_sizes(&self.budget);
        let before = {
            let mut fitted = self.fitted.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *fitted, sizes)
        };
        if before != sizes {
            // Tunnels out of the list for a check are fitted by that check, or within seconds.
            for tunnel in &mut *self.lock() {
                tunnel.fit_buffers(sizes);
            }
        }
    }

    fn enter(
        &self,
        submitted: Submitted,
        cause: Weak<Cause>,
        rights: Option<Arc<dyn LaneRights>>,
        buffers: [SocketBuffers; 2],
    ) {
        let mut watched = self.lock();
        if watched.len() == watched.capacity() {
            // Pruned whenever the list would grow, so it holds at most twice the open tunnels.
            watched.retain(|tunnel| tunnel.cause.strong_count() > 0);
        }
        watched.push(Watched {
            submitted,
            cause,
            rights,
            seen: [0; 4],
            since: Instant::now(),
            buffers,
        });
        drop(watched);
        if self.shutting_down.is_cancelled() {
            self.check();
        }
    }

    /// Checks the tunnels until dropped.
    pub async fn watch(&self) {
        loop {
            tokio::time::sleep(EVERY).await;
            // Out of the list during the check, so that new tunnels need not wait for the lock.
            let mut left = std::mem::take(&mut *self.lock());
            let mut kept = Vec::with_capacity(left.len());
            while !left.is_empty() {
                let some = left.split_off(left.len().saturating_sub(LOOK_TUNNELS));
                kept.extend(some.into_iter().filter_map(|tunnel| self.looked_at(tunnel)));
                tokio::task::yield_now().await;
            }
            self.lock().append(&mut kept);
            if self.shutting_down.is_cancelled() {
                self.check();
            }
            self.publish();
        }
    }

    /// Updates the metrics.
    fn publish(&self) {
        let stats = self.handle.stats();
        let counts = [stats.thread_panics, stats.driver_failures];
        let driver = driver_label(self.handle.choice().engine);
        self.metrics.relay(driver, stats.active_pairs, counts);
        let told = self
            .driver_failures
            .swap(stats.driver_failures, Ordering::Relaxed);
        if stats.driver_failures > told {
            tracing::error!(
                error = %io::Error::from_raw_os_error(stats.driver_errno),
                failures = stats.driver_failures - told,
                suspended_threads = stats.suspended_threads,
                "relay threads got no events from the kernel: their tunnels were reset and they start again, with epoll"
            );
        }
    }

    /// Ends all tunnels because this process ends.
    pub fn shut_down(&self) {
        self.shutting_down.cancel();
        self.check();
    }

    fn check(&self) {
        let mut watched = self.lock();
        let all = std::mem::take(&mut *watched);
        *watched = all
            .into_iter()
            .filter_map(|tunnel| self.looked_at(tunnel))
            .collect();
    }

    /// Checks the tunnel; returns it if it goes on.
    fn looked_at(&self, mut tunnel: Watched) -> Option<Watched> {
        if tunnel.cause.strong_count() == 0 {
            return None;
        }
        tunnel.fit_buffers(buffer_sizes(&self.budget));
        let why = if self.shutting_down.is_cancelled() {
            Some(EndReason::Shutdown)
        } else {
            tunnel.trouble(Instant::now(), self.silence_max)
        };
        match why {
            None => Some(tunnel),
            Some(why) => {
                cut(&tunnel.submitted, &tunnel.cause, why);
                None
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched {
    fn fit_buffers(&mut self, sizes: BufferSizes) {
        for (buffers, side) in self.buffers.iter_mut().zip([SOCKET, LANE]) {
            self.submitted.fit_buffers(side, buffers, sizes);
        }
    }

    /// Why the tunnel has to end, or `None`.
    fn trouble(&mut self, now: Instant, silence_max: Duration) -> Option<EndReason> {
        if self
            .rights
            .as_ref()
            .is_some_and(|rights| rights.are_revoked())
        {
            return Some(EndReason::LaneLost);
        }
        let lane = self.submitted.tcp_state(LANE);
        if lane.is_some_and(|lane| lane.is_unanswered && lane.silent_for > socket::LANE_SILENCE_MAX)
        {
            return Some(EndReason::LaneLost);
        }
        let progress = self.submitted.progress();
        if !progress.is_half_closed {
            self.since = now;
            return None;
        }
        // Bytes that the peer's kernel takes count as progress, too: its buffers may hold minutes of a slow reader's input.
        let waiting = |side| {
            let state = self.submitted.tcp_state(side);
            state.map_or(0, |state| state.unacknowledged_bytes as u64)
        };
        let seen = [
            progress.to_a,
            progress.to_b,
            waiting(SOCKET),
            lane.map_or(0, |lane| lane.unacknowledged_bytes as u64),
        ];
        if seen != self.seen {
            (self.seen, self.since) = (seen, now);
        }
        (now.duration_since(self.since) >= silence_max).then_some(EndReason::HalfClosedIdle)
    }
}

/// A tunnel on a raw lane as the table of open tunnels sees it.
struct OnRawLane {
    submitted: Submitted,
    /// Protocol bytes, which do not count as the tunnel's.
    overhead: u64,
    driver: Driver,
}

impl Relayed for OnRawLane {
    fn bytes(&self) -> (u64, u64) {
        let progress = self.submitted.progress();
        (progress.to_b.saturating_sub(self.overhead), progress.to_a)
    }

    fn mover(&self) -> (Engine, Driver) {
        let engine = if self.submitted.progress().has_spliced {
            Engine::Splice
        } else {
            Engine::Copy
        };
        (engine, self.driver)
    }

    fn quality(&self) -> Option<PathQuality> {
        let lane = self.submitted.tcp_state(LANE)?;
        Some(PathQuality {
            rtt: lane.rtt,
            retransmits: lane.retransmits,
        })
    }
}

/// Ends a tunnel unless it is over; the first cause is kept.
fn cut(submitted: &Submitted, cause: &Weak<Cause>, why: EndReason) {
    if let Some(cause) = cause.upgrade() {
        let _another_first = cause.set(why);
        submitted.cancel();
    }
}

impl fmt::Debug for RawLaneRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RawLaneRelay").field(&self.handle).finish()
    }
}

#[cfg(test)]
mod tests;
