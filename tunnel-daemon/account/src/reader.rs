//! Transfers the kernel's events and tables to metrics.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use adit_ebpf_abi::{
    ACCOUNTS_MAX, Account, CLOSED_BYTES, CLOSED_RING_BYTES, CloseOutcome, Closed, FLAG_ESTABLISHED,
    RING_READ_EVERY_MS,
};
use aya::maps::{MapData, RingBuf};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{MissedTickBehavior, interval};

use super::counted::Counted;
use super::sockets::{Shared, SocketMap};
use adit_telemetry::labels::AccountLoss;
use adit_telemetry::{AccountCounts, AccountMetrics, OpenRtt};

/// Most end events taken before the task yields.
const ENDS_PER_TURN: usize = 256;
/// Portions of [`ENDS_PER_TURN`] that suffice for a full ring.
const ENDS_PER_RING: usize = CLOSED_RING_BYTES as usize / CLOSED_BYTES / ENDS_PER_TURN + 1;
/// Live connections read before the task yields.
const LIVE_PER_TURN: usize = 256;
/// Most connections of one sweep.
const LIVE_PER_SWEEP: usize = ACCOUNTS_MAX as usize;
/// Interval of the sweeps over live connections.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// Transfers the kernel's counts to the metrics.
pub struct Reader {
    ring: AsyncFd<RingBuf<MapData>>,
    sockets: SocketMap,
    ledger: Ledger,
}

/// Counts that the metrics already contain.
struct Ledger {
    shared: Arc<Shared>,
    metrics: AccountMetrics,
    /// Counts of live connections.
    counted: Counted,
    /// Round-trip times of live connections in the last sweep, by class.
    open: HashMap<u32, OpenTrips>,
}

/// Round-trip times of one class in one sweep.
#[derive(Default)]
struct OpenTrips {
    /// Sum of the round-trip times.
    seconds: f64,
    /// Connections with a measurement.
    connections: u32,
    exported: Option<OpenRtt>,
}

impl Reader {
    pub(super) fn new(
        shared: Arc<Shared>,
        ring: RingBuf<MapData>,
        sockets: SocketMap,
        metrics: AccountMetrics,
    ) -> io::Result<Self> {
        Ok(Self {
            ring: registered(ring)?,
            sockets,
            ledger: Ledger {
                shared,
                metrics,
                counted: Counted::new(LIVE_PER_SWEEP),
                open: HashMap::new(),
            },
        })
    }

    /// Runs until dropped. Dropping counts the pending end events.
    pub async fn run(mut self) {
        self.ledger.metrics.attached(true);
        let mut sweep = interval(SWEEP_EVERY);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The program wakes the reader only if many connections end, because a wake-up costs more than counting.
        let mut read = interval(Duration::from_millis(RING_READ_EVERY_MS));
        read.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                ready = self.ring.readable_mut() => {
                    let mut ready = match ready {
                        Ok(ready) => ready,
                        Err(error) => {
                            tracing::error!(%error, "accounting ends: its ring buffer cannot be read");
                            return self.ledger.metrics.attached(false);
                        }
                    };
                    if self.ledger.take(ready.get_inner_mut()) {
                        ready.clear_ready();
                    }
                }
                _tick = read.tick() => while !self.ledger.take(self.ring.get_mut()) {
                    tokio::task::yield_now().await;
                },
                _tick = sweep.tick() => {
                    self.ledger.lost();
                    self.ledger.look(&self.sockets).await;
                }
            }
            tokio::task::yield_now().await;
        }
    }
}

impl Ledger {
    /// Takes end events from the ring; returns whether the ring is empty.
    fn take<R: std::borrow::Borrow<MapData>>(&mut self, ring: &mut RingBuf<R>) -> bool
    where
        RingBuf<R>: AsRawFd,
    {
        for _end in 0..ENDS_PER_TURN {
            let Some(bytes) = ring.next() else {
                return true;
            };
            // Events of another length cannot occur: the object is part of this program.
            if let Some(closed) = Closed::from_bytes(&bytes) {
                self.ended(&closed);
            }
        }
        false
    }

    fn ended(&mut self, closed: &Closed) {
        let account = &closed.account;
        let before = self.counted.take(closed.cookie);
        let classes = self.shared.classes();
        let Some(series) = classes.series(account.class) else {
            return;
        };
        series.grew(&counts(account).since(&before));
        let rtt = (account.rtt_us > 0).then(|| f64::from(account.rtt_us) / 1e6);
        let lifetime = Duration::from_nanos(closed.closed_ns.saturating_sub(account.since_ns));
        series.ended(rtt, lifetime.as_secs_f64());
    }

    /// Counts what live connections have moved since the last sweep, and exports their round-trip times.
    async fn look(&mut self, sockets: &SocketMap) {
        self.counted.begin_sweep();
        for trips in self.open.values_mut() {
            (trips.seconds, trips.connections) = (0.0, 0);
        }
        // A connection that ends meanwhile restarts the iteration, so the iteration is bounded. A connection seen twice is
        // counted once.
        let (mut entries, mut is_cut) = (0_usize, false);
        for entry in sockets.iter().take(LIVE_PER_SWEEP) {
            entries += 1;
            match entry {
                Ok((cookie, bytes)) => self.goes_on(cookie, &Account::from_bytes(&bytes)),
                Err(_refused) => is_cut = true,
            }
            if entries.is_multiple_of(LIVE_PER_TURN) {
                tokio::task::yield_now().await;
            }
        }
        self.counted.end_sweep(is_cut || entries == LIVE_PER_SWEEP);
        self.export_open();
    }

    /// Exports the means of this sweep; removes the series of classes without a measurement.
    fn export_open(&mut self) {
        self.open.retain(|class, trips| {
            if trips.connections == 0 {
                return false;
            }
            let mean = trips.seconds / f64::from(trips.connections);
            if let Some(exported) = &trips.exported {
                exported.set(mean);
            } else {
                let classes = self.shared.classes();
                trips.exported = classes.series(*class).map(|series| series.open_rtt(mean));
            }
            true
        });
    }

    fn goes_on(&mut self, cookie: u64, account: &Account) {
        if account.flags & FLAG_ESTABLISHED == 0 {
            return;
        }
        let now = counts(account);
        let (before, is_first) = self.counted.met(cookie, now);
        if let Some(series) = self.shared.classes().series(account.class) {
            series.grew(&now.since(&before));
        }
        if account.rtt_us > 0 && is_first {
            let trips = self.open.entry(account.class).or_default();
            trips.seconds += f64::from(account.rtt_us) / 1e6;
            trips.connections += 1;
        }
    }

    /// Updates the counters of losses.
    fn lost(&self) {
        for (outcome, why) in [
            (CloseOutcome::RingFull, AccountLoss::RingFull),
            (CloseOutcome::Unknown, AccountLoss::Unknown),
        ] {
            match self.shared.outcomes.get(&(outcome as u32), 0) {
                Ok(of_each_cpu) => self.metrics.lost(why, of_each_cpu.iter().sum()),
                Err(error) => tracing::debug!(%error, "losses of accounting cannot be read"),
            }
        }
    }
}

impl Drop for Reader {
    /// Counts the pending end events; at most as many as the ring holds.
    fn drop(&mut self) {
        for _portion in 0..ENDS_PER_RING {
            if self.ledger.take(self.ring.get_mut()) {
                break;
            }
        }
        self.ledger.metrics.attached(false);
    }
}

#[expect(
    unsafe_code,
    reason = "the safe way is gone: it cannot tell who closes the descriptor"
)]
fn registered(ring: RingBuf<MapData>) -> io::Result<AsyncFd<RingBuf<MapData>>> {
    // SAFETY: the ring buffer owns its descriptor, returns the same descriptor for its lifetime, and closes it only on drop.
    // The registration owns the ring buffer from here on and drops it after deregistering.
    let registered = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
    registered.map_err(io::Error::from)
}

fn counts(account: &Account) -> AccountCounts {
    AccountCounts {
        sent_bytes: account.sent_bytes,
        received_bytes: account.received_bytes,
        segments_out: u64::from(account.segments_out),
        segments_in: u64::from(account.segments_in),
        retransmits: u64::from(account.retransmits),
    }
}
