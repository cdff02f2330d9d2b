//! Tunnels whose two ends are sockets in clear text: relay threads move their bytes, and a watch ends those that would not
//! end by themselves.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use adit_relay::{
    Choice, Done, Outcome, Pair, PairEnd, Relay, RelayConfig, RelayHandle, Side, Submitted,
};
use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::lane::Pipe;
use crate::net::socket;
use crate::telemetry::AditMetrics;
use crate::telemetry::labels::{Driver, Engine, LaneEnd};

/// How often tunnels are looked at.
const EVERY: Duration = Duration::from_secs(5);
/// Tunnels that may wait for a relay thread to notice them.
const QUEUE_TUNNELS: usize = 4096;
/// The side of a pair that is the client's or target's socket.
const SOCKET: Side = Side::A;
/// The side that is the lane.
const LANE: Side = Side::B;

/// Why a tunnel on a pipe is over.
#[derive(Debug)]
pub enum PipeEnd {
    /// Both ends said that they send no more, and every byte was delivered.
    Finished,
    /// The client's or target's socket failed.
    SocketFailed(io::Error),
    /// The other end of the lane cut it off.
    LaneReset,
    /// The lane failed, or its other end is gone.
    LaneLost,
    /// Half-closed, and not a byte for too long.
    HalfClosedIdle,
    /// This process ends.
    Shutdown,
    /// The relay thread failed.
    RelayFailed,
}

impl PipeEnd {
    /// The reason in metrics and the access log, on a server.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Finished => "closed",
            Self::SocketFailed(_) => "client_gone",
            Self::LaneReset => "peer_reset",
            Self::LaneLost => "lane_lost",
            Self::HalfClosedIdle => "half_closed_idle",
            Self::Shutdown => "shutdown",
            Self::RelayFailed => "relay_failed",
        }
    }
}

/// How a tunnel went.
#[derive(Debug)]
#[must_use = "an outcome carries the byte counts for metrics and the access log"]
pub struct PipeOutcome {
    /// Bytes of the client's or target's socket that the lane took.
    pub from_socket: u64,
    /// Bytes of the lane that the client's or target's socket took.
    pub to_socket: u64,
    /// How it ended.
    pub end: PipeEnd,
    /// What moved its bytes, the larger part.
    pub engine: Engine,
    /// What drove that.
    pub driver: Driver,
}

/// Relays tunnels on pipes. Dropping it resets those that are left.
pub struct PipeRelay {
    handle: RelayHandle,
    metrics: AditMetrics,
    silence_max: Duration,
    watched: Mutex<Vec<Watched>>,
    shutting_down: AtomicBool,
    _threads: Relay,
}

/// Why a tunnel is cut; set once, before it is cancelled.
type Cause = OnceLock<Cut>;

/// What this process cuts a tunnel for.
#[derive(Clone, Copy, Debug)]
enum Cut {
    LaneLost,
    HalfClosedIdle,
    Shutdown,
}

impl From<Cut> for PipeEnd {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::LaneLost => Self::LaneLost,
            Cut::HalfClosedIdle => Self::HalfClosedIdle,
            Cut::Shutdown => Self::Shutdown,
        }
    }
}

/// A tunnel as the watch sees it.
struct Watched {
    submitted: Submitted,
    /// Gone when the tunnel is over.
    cause: Weak<Cause>,
    /// What was there at the last look, and since when.
    seen: [u64; 4],
    since: Instant,
}

impl PipeRelay {
    /// Starts the threads, for at most `tunnels_max` tunnels. A half-closed one may be silent for `silence_max`.
    ///
    /// # Errors
    /// A thread or a descriptor could not be made.
    pub fn start(
        choice: Choice,
        tunnels_max: usize,
        silence_max: Duration,
        metrics: AditMetrics,
    ) -> io::Result<Arc<Self>> {
        let mut config = RelayConfig::new(choice);
        // None that holds a lane is refused, unless thousands came between two turns of a thread.
        config.pairs_max = tunnels_max.clamp(1, config.pairs_max);
        config.queue_pairs = config.pairs_max.min(QUEUE_TUNNELS);
        let threads = Relay::start(&config)?;
        Ok(Arc::new(Self {
            handle: threads.handle(),
            metrics,
            silence_max,
            watched: Mutex::default(),
            shutting_down: AtomicBool::new(false),
            _threads: threads,
        }))
    }

    /// Moves bytes between `socket` and `pipe` until the tunnel is over. `early` was read from the socket before. A
    /// cancelled call resets both.
    pub async fn run(&self, socket: OwnedFd, early: Bytes, pipe: Pipe) -> PipeOutcome {
        /// Ends the tunnel with its task.
        struct CutOnDrop(Submitted, Weak<Cause>);
        impl Drop for CutOnDrop {
            fn drop(&mut self) {
                cut(&self.0, &self.1, Cut::Shutdown);
            }
        }
        let (tell, told) = oneshot::channel();
        let submitted = self.submit(socket, early, pipe, move |outcome| {
            // Nobody listens when this call was cancelled.
            let _cancelled = tell.send(outcome);
        });
        let _cut = submitted.map(|(submitted, cause)| CutOnDrop(submitted, cause));
        told.await.unwrap_or_else(|_dropped| PipeOutcome {
            from_socket: 0,
            to_socket: 0,
            end: PipeEnd::RelayFailed,
            engine: Engine::Copy,
            driver: self.handle.choice().engine.into(),
        })
    }

    /// As [`Self::run`] without waiting: `done` hears how it went, on a relay thread, and must not block.
    pub fn hand_over(
        &self,
        socket: OwnedFd,
        pipe: Pipe,
        done: impl FnOnce(PipeOutcome) + Send + 'static,
    ) {
        self.submit(socket, Bytes::new(), pipe, done);
    }

    fn submit(
        &self,
        socket: OwnedFd,
        early: Bytes,
        pipe: Pipe,
        done: impl FnOnce(PipeOutcome) + Send + 'static,
    ) -> Option<(Submitted, Weak<Cause>)> {
        let Pipe {
            socket: lane,
            unsent,
            received,
            kept,
        } = pipe;
        let cause = Arc::new(Cause::new());
        let metrics = self.metrics.clone();
        // Not the tunnel's own bytes.
        let overhead = unsent.len() as u64;
        let watch = Arc::downgrade(&cause);
        let over: Done = Box::new(move |outcome| {
            let outcome = conclude(outcome, overhead, cause.get().copied(), &metrics);
            drop(cause);
            metrics.lane_closed(match outcome.end {
                PipeEnd::LaneLost | PipeEnd::RelayFailed => LaneEnd::Lost,
                _ => LaneEnd::Used,
            });
            drop(kept);
            done(outcome);
        });
        let lane = match lane.into_std() {
            Ok(lane) => lane,
            Err(error) => {
                over(never_begun(error, self.handle.choice()));
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
        };
        match self.handle.submit(pair, over) {
            Ok(submitted) => {
                self.enter(submitted.clone(), watch.clone());
                Some((submitted, watch))
            }
            Err(refused) => {
                for fd in [&refused.pair.a, &refused.pair.b] {
                    // What was not relayed must not look like the whole of it. Fails on a socket that is reset already.
                    let _reset = socket::set_reset_on_close(fd);
                }
                let why = io::Error::other(refused.why);
                (refused.done)(never_begun(why, self.handle.choice()));
                None
            }
        }
    }

    /// Closes a pipe that came to nothing, so that its peer does not take what it got for the whole.
    pub fn give_up(&self, pipe: Pipe) {
        self.metrics.lane_closed(LaneEnd::Used);
        pipe.reset();
    }

    fn enter(&self, submitted: Submitted, cause: Weak<Cause>) {
        let mut watched = self.lock();
        if watched.len() == watched.capacity() {
            // As often as the list would grow, so that it holds at most twice as many as there are.
            watched.retain(|tunnel| tunnel.cause.strong_count() > 0);
        }
        watched.push(Watched {
            submitted,
            cause,
            seen: [0; 4],
            since: Instant::now(),
        });
        drop(watched);
        if self.shutting_down.load(Relaxed) {
            self.look();
        }
    }

    /// Looks after the tunnels until dropped.
    pub async fn watch(&self) {
        loop {
            tokio::time::sleep(EVERY).await;
            self.look();
            let stats = self.handle.stats();
            let (panics, exhausted) = (stats.thread_panics, stats.pipes_exhausted);
            self.metrics.relay(stats.active_pairs, panics, exhausted);
        }
    }

    /// Ends all tunnels: this process does.
    pub fn shut_down(&self) {
        self.shutting_down.store(true, Relaxed);
        self.look();
    }

    fn look(&self) {
        let ending = self.shutting_down.load(Relaxed);
        let now = Instant::now();
        self.lock().retain_mut(|tunnel| {
            if tunnel.cause.strong_count() == 0 {
                return false;
            }
            let why = if ending {
                Some(Cut::Shutdown)
            } else {
                tunnel.trouble(now, self.silence_max)
            };
            if let Some(why) = why {
                cut(&tunnel.submitted, &tunnel.cause, why);
                return false;
            }
            true
        });
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched {
    /// Why the tunnel has to end, if it has to.
    fn trouble(&mut self, now: Instant, silence_max: Duration) -> Option<Cut> {
        let lane = self.submitted.tcp_state(LANE);
        if lane.is_some_and(|lane| lane.is_unanswered && lane.silent_for > socket::LANE_SILENCE_MAX)
        {
            return Some(Cut::LaneLost);
        }
        let progress = self.submitted.progress();
        if !progress.is_half_closed {
            self.since = now;
            return None;
        }
        // What the peer's kernel takes moves, too, for a reader whose buffers hold minutes of its pace.
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
        (now.duration_since(self.since) >= silence_max).then_some(Cut::HalfClosedIdle)
    }
}

/// Ends a tunnel unless it is over; the first cause counts.
fn cut(submitted: &Submitted, cause: &Weak<Cause>, why: Cut) {
    if let Some(cause) = cause.upgrade() {
        let _another_first = cause.set(why);
        submitted.cancel();
    }
}

fn never_begun(error: io::Error, choice: &Choice) -> Outcome {
    tracing::warn!(%error, "a tunnel could not be relayed");
    Outcome {
        to_b: adit_relay::Flow::default(),
        to_a: adit_relay::Flow::default(),
        end: PairEnd::Stopped,
        engine: choice.engine,
    }
}

fn conclude(
    outcome: Outcome,
    overhead: u64,
    cause: Option<Cut>,
    metrics: &AditMetrics,
) -> PipeOutcome {
    let Outcome {
        to_b,
        to_a,
        end,
        engine,
    } = outcome;
    let end = match end {
        PairEnd::Finished => PipeEnd::Finished,
        PairEnd::Failed {
            side: Side::A,
            error,
            ..
        } => PipeEnd::SocketFailed(error),
        PairEnd::Failed { error, .. } => match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => PipeEnd::LaneReset,
            _ => PipeEnd::LaneLost,
        },
        PairEnd::Cancelled => cause.unwrap_or(Cut::Shutdown).into(),
        PairEnd::Stopped => PipeEnd::Shutdown,
        PairEnd::Panicked => PipeEnd::RelayFailed,
    };
    let spliced = to_a.spliced_bytes + to_b.spliced_bytes;
    let copied = (to_a.bytes + to_b.bytes).saturating_sub(spliced);
    metrics.relay_bytes(Engine::Copy).inc_by(copied);
    metrics.relay_bytes(Engine::Splice).inc_by(spliced);
    PipeOutcome {
        from_socket: to_b.bytes.saturating_sub(overhead),
        to_socket: to_a.bytes,
        end,
        engine: if spliced > copied {
            Engine::Splice
        } else {
            Engine::Copy
        },
        driver: engine.into(),
    }
}

impl From<adit_relay::Engine> for Driver {
    fn from(engine: adit_relay::Engine) -> Self {
        match engine {
            adit_relay::Engine::Epoll => Self::Epoll,
            adit_relay::Engine::IoUring => Self::IoUring,
        }
    }
}

impl fmt::Debug for PipeRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PipeRelay").field(&self.handle).finish()
    }
}
