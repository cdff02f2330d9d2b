//! HTTP/2 windows of the calls of one gRPC client where memory is bounded: small at first, large at a charge once the client's
//! bytes move, and small again when they rest or memory is short (RFC 9113, section 6.9.2).

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use adit_core::session::{BOUNDED_CALL_WINDOW_BYTES, Growth, ProcessBudget};
use tokio::time::{Instant, Sleep, sleep};

use crate::buffer_growth::{GROWS_AFTER_BYTES, IDLE};

/// Bytes after which a connection with large windows looks at its budget again, before its timer does.
const CHECKED_EVERY_BYTES: u64 = 256 * 1024;
/// Checks, one for each [`IDLE`], until a client must have acknowledged a smaller size.
const ACKNOWLEDGED_WITHIN: u32 = 20;

/// What one call is charged while windows are large, bytes.
fn extra_bytes(large_bytes: u32) -> u64 {
    u64::from(large_bytes.saturating_sub(BOUNDED_CALL_WINDOW_BYTES))
}

/// What a connection and its calls know together.
#[derive(Debug)]
pub struct CallWindows {
    budget: Arc<ProcessBudget>,
    large_bytes: u32,
    /// Bytes that tunnels have taken from clients.
    moved: AtomicU64,
    /// Calls whose bytes wait, since their tunnels take no more.
    waiting: AtomicU64,
    charged: Mutex<Charged>,
}

/// The calls with a tunnel, and what their windows are charged.
#[derive(Debug, Default)]
struct Charged {
    calls: u64,
    growth: Option<Growth>,
    stage: Stage,
    /// How often the client has acknowledged that windows are small.
    acknowledged: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Stage {
    #[default]
    Small,
    Large,
    /// The client was told to make them small.
    Shrinking,
    /// It has, and what some calls have sent before still waits.
    Draining,
}

impl CallWindows {
    /// Windows that grow from [`BOUNDED_CALL_WINDOW_BYTES`] to `large_bytes` at a charge to `budget`.
    #[must_use]
    pub fn new(budget: &Arc<ProcessBudget>, large_bytes: u32) -> Arc<Self> {
        Arc::new(Self {
            budget: Arc::clone(budget),
            large_bytes,
            moved: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            charged: Mutex::default(),
        })
    }

    /// The window of a call that is about to have a tunnel. `None`: the client may send it a large window, and there is no room for
    /// that until the client has acknowledged the small size; the call may have no tunnel.
    #[must_use]
    pub fn open(self: &Arc<Self>) -> Option<CallWindow> {
        let mut charged = self.charged();
        let may_be_large = matches!(charged.stage, Stage::Large | Stage::Shrinking);
        if may_be_large
            && let Some(growth) = &mut charged.growth
            && !growth.extend(extra_bytes(self.large_bytes))
        {
            return None;
        }
        charged.calls += 1;
        Some(CallWindow {
            windows: Arc::clone(self),
            waits_since: None,
        })
    }

    fn charged(&self) -> MutexGuard<'_, Charged> {
        self.charged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The window of one call, until dropped.
#[derive(Debug)]
pub struct CallWindow {
    windows: Arc<CallWindows>,
    /// How often windows were acknowledged as small when its bytes began to wait.
    waits_since: Option<u64>,
}

impl CallWindow {
    /// Counts bytes that the tunnel has taken.
    pub fn moved(&self, bytes: usize) {
        self.windows.moved.fetch_add(bytes as u64, Relaxed);
    }

    /// Says whether the client's bytes wait.
    pub fn wait(&mut self, is_waiting: bool) {
        match (is_waiting, self.waits_since) {
            (true, None) => {
                self.windows.waiting.fetch_add(1, Relaxed);
                self.waits_since = Some(self.windows.charged().acknowledged);
            }
            (false, Some(since)) => {
                self.windows.waiting.fetch_sub(1, Relaxed);
                self.waits_since = None;
                let mut charged = self.windows.charged();
                if charged.stage == Stage::Draining && since < charged.acknowledged {
                    charged.give_back(extra_bytes(self.windows.large_bytes));
                }
            }
            (true, Some(_)) | (false, None) => (),
        }
    }
}

impl Charged {
    fn give_back(&mut self, bytes: u64) {
        if let Some(growth) = &mut self.growth {
            growth.reduce(bytes);
        }
    }
}

impl Drop for CallWindow {
    fn drop(&mut self) {
        self.wait(false);
        let mut charged = self.windows.charged();
        charged.calls -= 1;
        if matches!(charged.stage, Stage::Large | Stage::Shrinking) {
            charged.give_back(extra_bytes(self.windows.large_bytes));
        }
    }
}

/// The connection's part: sends the client the sizes.
#[derive(Debug)]
pub(crate) struct WindowGrowth {
    windows: Arc<CallWindows>,
    /// Bytes moved when the timer ran out last, or before windows grew.
    seen: u64,
    /// Bytes moved at the last check.
    checked: u64,
    /// Runs while windows are charged.
    idle: Option<Pin<Box<Sleep>>>,
    /// Checks since the client was told a smaller size.
    unacknowledged: u32,
}

impl WindowGrowth {
    pub(crate) fn new(windows: &Arc<CallWindows>) -> Self {
        Self {
            windows: Arc::clone(windows),
            seen: 0,
            checked: 0,
            idle: None,
            unacknowledged: 0,
        }
    }

    /// To be called at each poll of the connection, which is cheap; `resize` sends the client a size, and is false while the last one is not
    /// acknowledged. Ready when the client acknowledges none for [`ACKNOWLEDGED_WITHIN`] (RFC 9113, section 6.5.3).
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        resize: impl FnMut(u32) -> bool,
    ) -> Poll<()> {
        let moved = self.windows.moved.load(Relaxed);
        let is_due = match &self.idle {
            None => moved - self.seen >= GROWS_AFTER_BYTES,
            Some(timer) => timer.is_elapsed() || moved - self.checked >= CHECKED_EVERY_BYTES,
        };
        if !is_due {
            return Poll::Pending;
        }
        self.checked = moved;
        self.check(cx, moved, resize)
    }

    fn check(
        &mut self,
        cx: &mut Context<'_>,
        moved: u64,
        mut resize: impl FnMut(u32) -> bool,
    ) -> Poll<()> {
        let windows = Arc::clone(&self.windows);
        let mut charged = windows.charged();
        let extra = extra_bytes(windows.large_bytes);
        let is_short = windows.budget.is_half_full();
        match charged.stage {
            Stage::Small if moved - self.seen >= GROWS_AFTER_BYTES => {
                self.seen = moved;
                let Some(growth) = windows.budget.grow_by(extra * charged.calls) else {
                    return Poll::Pending;
                };
                if !resize(windows.large_bytes) {
                    return Poll::Pending;
                }
                (charged.growth, charged.stage) = (Some(growth), Stage::Large);
            }
            Stage::Large if is_short && resize(BOUNDED_CALL_WINDOW_BYTES) => {
                (charged.stage, self.unacknowledged) = (Stage::Shrinking, 0);
            }
            _ => (),
        }
        let timer = self.idle.get_or_insert_with(|| Box::pin(sleep(IDLE)));
        while timer.as_mut().poll(cx).is_ready() {
            timer.as_mut().reset(Instant::now() + IDLE);
            let was_idle = std::mem::replace(&mut self.seen, moved) == moved;
            let waiting = windows.waiting.load(Relaxed);
            match charged.stage {
                Stage::Large if was_idle && waiting == 0 && resize(BOUNDED_CALL_WINDOW_BYTES) => {
                    (charged.stage, self.unacknowledged) = (Stage::Shrinking, 0);
                }
                // Sent again only to learn that the client has acknowledged it.
                Stage::Shrinking if resize(BOUNDED_CALL_WINDOW_BYTES) => {
                    charged.stage = Stage::Draining;
                    charged.acknowledged += 1;
                    // What waits may be as much as a large window; the other calls have nothing left of theirs.
                    let drained = charged.calls.saturating_sub(waiting);
                    charged.give_back(extra * drained);
                }
                Stage::Shrinking => {
                    self.unacknowledged += 1;
                    if self.unacknowledged > ACKNOWLEDGED_WITHIN {
                        return Poll::Ready(());
                    }
                }
                _ => (),
            }
            if charged.stage == Stage::Draining
                && charged
                    .growth
                    .as_ref()
                    .is_none_or(|growth| growth.bytes() == 0)
            {
                (charged.growth, charged.stage) = (None, Stage::Small);
                self.idle = None;
                return Poll::Pending;
            }
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use adit_core::session::MemoryBounds;

    use super::*;

    const MIB: u64 = 1 << 20;
    const MUCH: usize = 1 << 20;
    const LARGE: u32 = 256 * 1024;
    const EXTRA: u64 = (LARGE - BOUNDED_CALL_WINDOW_BYTES) as u64;

    fn bounded(budget_bytes: u64) -> Arc<ProcessBudget> {
        let bounds = MemoryBounds {
            room_bytes: 64 * MIB,
            growth_bytes: MIB,
            counts_tcp: false,
        };
        Arc::new(ProcessBudget::new(budget_bytes).with_bounds(Some(bounds)))
    }

    /// A client's end: the sizes sent, and whether it acknowledges them.
    struct Client {
        growth: WindowGrowth,
        told: Vec<u32>,
        answers: bool,
        is_over: bool,
    }

    impl Client {
        fn of(windows: &Arc<CallWindows>) -> Self {
            Self {
                growth: WindowGrowth::new(windows),
                told: Vec::new(),
                answers: true,
                is_over: false,
            }
        }

        /// The sizes sent in one poll.
        fn poll(&mut self) -> Vec<u32> {
            let (told, answers) = (&mut self.told, self.answers);
            let cx = &mut Context::from_waker(Waker::noop());
            let over = self.growth.poll(cx, |bytes| {
                told.extend(answers.then_some(bytes));
                answers
            });
            self.is_over = over.is_ready();
            std::mem::take(&mut self.told)
        }

        async fn after_rest(&mut self) -> Vec<u32> {
            tokio::time::advance(IDLE).await;
            self.poll()
        }
    }

    /// Limit (memory): A gRPC client's window per call where memory is bounded | 32 KiB; 256 KiB while its bytes move and half of the budget has room
    #[tokio::test(start_paused = true)]
    async fn windows_are_large_at_a_charge_while_bytes_move() {
        let budget = bounded(16 * MIB);
        let windows = CallWindows::new(&budget, LARGE);
        let mut client = Client::of(&windows);
        let calls: Vec<_> = (0..2).filter_map(|_| windows.open()).collect();
        calls[0].moved(96 * 1024 - 1);
        assert_eq!(client.poll(), [0; 0]);
        calls[0].moved(1);
        assert_eq!(client.poll(), [LARGE]);
        assert_eq!(budget.grown_bytes(), 2 * EXTRA);
        let third = windows.open();
        assert_eq!(budget.grown_bytes(), 3 * EXTRA);
        drop(third);
        calls[1].moved(1);
        assert_eq!(client.after_rest().await, [0; 0], "it was busy");
        assert_eq!(client.after_rest().await, [BOUNDED_CALL_WINDOW_BYTES]);
        assert_eq!(budget.grown_bytes(), 2 * EXTRA, "not yet acknowledged");
        client.answers = false;
        client.after_rest().await;
        assert_eq!(budget.grown_bytes(), 2 * EXTRA, "not yet acknowledged");
        client.answers = true;
        client.after_rest().await;
        assert_eq!(budget.grown_bytes(), 0);
        calls[0].moved(MUCH);
        assert_eq!(client.poll(), [LARGE]);
        drop(calls);
        assert_eq!(budget.grown_bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_keeps_its_charge() {
        let budget = bounded(16 * MIB);
        let windows = CallWindows::new(&budget, LARGE);
        let mut client = Client::of(&windows);
        let mut call = windows.open().expect("windows are small");
        call.moved(MUCH);
        assert_eq!(client.poll(), [LARGE]);
        call.wait(true);
        client.after_rest().await;
        assert_eq!(
            client.after_rest().await,
            [0; 0],
            "its bytes fill the window"
        );
        // Memory is short: no more is offered, and what has come stays charged.
        let idle = windows.open().expect("there is room");
        budget.hold(9 * MIB);
        call.moved(MUCH);
        assert_eq!(client.poll(), [BOUNDED_CALL_WINDOW_BYTES]);
        assert!(windows.open().is_none(), "not yet acknowledged");
        client.after_rest().await;
        assert_eq!(budget.grown_bytes(), EXTRA, "what waits");
        let mut late = windows.open().expect("windows are small");
        late.wait(true);
        drop((late, idle));
        assert_eq!(
            budget.grown_bytes(),
            EXTRA,
            "these had no more than a small window"
        );
        call.wait(false);
        assert_eq!(budget.grown_bytes(), 0);
        client.after_rest().await;
        call.moved(MUCH);
        assert_eq!(client.poll(), [0; 0], "memory is short");
        budget.release(9 * MIB);
        call.moved(MUCH);
        assert_eq!(client.poll(), [LARGE]);
        drop(call);
        assert_eq!(budget.grown_bytes(), 0);
    }

    /// Limit (times): A gRPC client that does not acknowledge smaller windows where memory is bounded | closed after 20 s
    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_acknowledge_smaller_windows_is_closed() {
        let budget = bounded(16 * MIB);
        let windows = CallWindows::new(&budget, LARGE);
        let mut client = Client::of(&windows);
        let call = windows.open().expect("windows are small");
        call.moved(MUCH);
        assert_eq!(client.poll(), [LARGE]);
        assert_eq!(client.after_rest().await, [BOUNDED_CALL_WINDOW_BYTES]);
        client.answers = false;
        for second in 1..=20 {
            client.after_rest().await;
            assert!(!client.is_over, "{second} s");
        }
        client.after_rest().await;
        assert!(client.is_over);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_without_room_for_its_large_window_is_refused() {
        let budget = bounded(2 * MIB);
        let windows = CallWindows::new(&budget, LARGE);
        let mut client = Client::of(&windows);
        let first = windows.open().expect("windows are small");
        first.moved(MUCH);
        assert_eq!(client.poll(), [LARGE]);
        let more: Vec<_> = std::iter::from_fn(|| windows.open()).collect();
        assert_eq!(more.len() as u64, MIB / EXTRA - 1);
        drop(first);
        assert!(windows.open().is_some(), "a call has ended");
    }
}
