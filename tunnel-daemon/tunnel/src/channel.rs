//! What an endpoint and its link share: two byte queues and a few flags, without a lock.
//!
//! Endpoint -> link is bounded by [`ProcessBudget::queue_share`] and `ENDPOINT_QUEUE_PIECES`: the endpoint stops reading its
//! socket when the queue is full. Link -> endpoint is never refused here; the session machine bounds it by credit or budgets.
//! Every hand-over writes the data or flag first, then notifies the receiver (dirty list or waker).

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::task::Wake;

use adit_core::ids::TunnelKey;
use adit_core::session::{ProcessBudget, QUEUE_MAX_BYTES, TunnelEnd};
use bytes::Bytes;
use crossbeam::queue::SegQueue;
use futures_util::task::AtomicWaker;

/// Limit on queued pieces: each takes memory beside its bytes, and the peer controls their size.
const ENDPOINT_QUEUE_PIECES: usize = 4096;

/// Drained bytes after which an endpoint notifies the link; half of the smallest window.
pub(super) const DRAINED_NOTICE_BYTES: u32 = 8 * 1024;

pub(super) const ENDPOINT_FIN: u8 = 1;
pub(super) const ENDPOINT_CLOSE: u8 = 2;
pub(super) const ENDPOINT_GONE: u8 = 4;
/// The endpoint's socket is known to have ended, but the EOF is behind bytes that the endpoint cannot read yet.
pub const ENDPOINT_END_WAITS: u8 = 8;

const PEER_FIN: u8 = 1;
const ABORT: u8 = 2;
/// With [`ABORT`]: aborted for the budget; without this flag, for lack of progress.
const ABORT_BUDGET: u8 = 4;

/// Where endpoints notify their link of queued data and flags.
#[derive(Default)]
pub struct DirtyList {
    ready: SegQueue<Arc<Channel>>,
    waker: AtomicWaker,
    closed: AtomicBool,
    held_bytes: AtomicU64,
    lingering: AtomicUsize,
    /// Notifications by endpoints, and how many of them the link's task has processed.
    told: AtomicU64,
    seen: AtomicU64,
    /// Budget that counts the queued bytes; set once the link runs.
    budget: OnceLock<Arc<ProcessBudget>>,
}

impl DirtyList {
    /// Counts what endpoints queue in `budget` from now on.
    pub(super) fn count_in(&self, budget: &Arc<ProcessBudget>) {
        let _first = self.budget.set(Arc::clone(budget));
    }

    /// Bytes that one endpoint may queue at present.
    fn queue_share(&self) -> usize {
        let budget = self.budget.get();
        budget.map_or(QUEUE_MAX_BYTES, |budget| budget.queue_share())
    }

    /// Payload bytes that the link holds for its endpoints, as last reported by the link's task.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Relaxed)
    }

    /// Whether the link has sent the peer everything that dropped endpoints left queued.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        // `seen` is read first here and written last in `tell`: `lingering` is then of the same time or later.
        let seen = self.seen.load(Acquire);
        seen == self.told.load(Acquire) && self.lingering.load(Acquire) == 0
    }

    /// The generation to pass to [`Self::tell`]. Read it before visiting endpoints.
    pub(super) fn generation(&self) -> u64 {
        self.told.load(Acquire)
    }

    /// The link's state after its task has processed the notifications up to `generation`.
    pub(super) fn publish(&self, held_bytes: u64, lingering: usize, generation: u64) {
        self.held_bytes.store(held_bytes, Relaxed);
        self.lingering.store(lingering, Release);
        self.seen.store(generation, Release);
    }

    pub(super) fn register(&self, waker: &std::task::Waker) {
        self.waker.register(waker);
    }

    pub(super) fn take(&self) -> Option<Arc<Channel>> {
        self.ready.pop()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// The link is over: its task no longer reads the list. Clearing breaks reference cycles, since each queued channel holds
    /// this list.
    pub(super) fn close(&self) {
        self.closed.store(true, SeqCst);
        self.clear();
    }

    fn put(&self, channel: Arc<Channel>) {
        self.ready.push(channel);
        // After the push, or the link could count the notification as seen before the channel is queued.
        self.told.fetch_add(1, Release);
        // In this order, so that either this call or `close` clears a channel that was pushed meanwhile.
        if self.closed.load(SeqCst) {
            self.clear();
        } else {
            self.waker.wake();
        }
    }

    fn clear(&self) {
        while self.ready.pop().is_some() {}
    }
}

impl Wake for DirtyList {
    fn wake(self: Arc<Self>) {
        self.waker.wake();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.waker.wake();
    }
}

/// Shared by one endpoint and its link.
pub struct Channel {
    dirty_list: Arc<DirtyList>,
    key: OnceLock<TunnelKey>,
    scheduled: AtomicBool,
    // Endpoint -> link.
    up: SegQueue<Bytes>,
    up_bytes: AtomicUsize,
    up_pieces: AtomicUsize,
    up_space: AtomicWaker,
    up_flags: AtomicU8,
    close_text: OnceLock<String>,
    drained: AtomicU64,
    // Link -> endpoint.
    down: SegQueue<Bytes>,
    /// The link holds back bytes until the endpoint has taken those in `down`.
    kept_back: AtomicBool,
    down_flags: AtomicU8,
    end: OnceLock<TunnelEnd>,
    down_waker: AtomicWaker,
}

impl Channel {
    pub(super) fn new(dirty_list: Arc<DirtyList>) -> Arc<Self> {
        Arc::new(Self {
            dirty_list,
            key: OnceLock::new(),
            scheduled: AtomicBool::new(false),
            up: SegQueue::new(),
            up_bytes: AtomicUsize::new(0),
            up_pieces: AtomicUsize::new(0),
            up_space: AtomicWaker::new(),
            up_flags: AtomicU8::new(0),
            close_text: OnceLock::new(),
            drained: AtomicU64::new(0),
            down: SegQueue::new(),
            kept_back: AtomicBool::new(false),
            down_flags: AtomicU8::new(0),
            end: OnceLock::new(),
            down_waker: AtomicWaker::new(),
        })
    }

    // The link's side.

    pub(super) fn bind(&self, key: TunnelKey) {
        // Bound once, by the one link task that owns the tunnel.
        let _first = self.key.set(key);
    }

    pub(super) fn key(&self) -> Option<TunnelKey> {
        self.key.get().copied()
    }

    /// From here on the endpoint schedules itself again when it has more. Call before reading flags and data.
    pub(super) fn begin_visit(&self) {
        self.scheduled.swap(false, AcqRel);
    }

    /// The next bytes that the endpoint queued. The budget still counts them as queued: the caller must dequeue them there.
    pub fn take_up(&self) -> Option<Bytes> {
        self.up.pop()
    }

    /// The peer's stream took `bytes` of this endpoint, which completes `pieces` pieces, or they were dropped: the endpoint may
    /// queue as many again.
    pub fn release_up(&self, bytes: usize, pieces: usize) {
        self.up_bytes.fetch_sub(bytes, AcqRel);
        self.up_pieces.fetch_sub(pieces, AcqRel);
        // The room depends on the budget, too, so a waiting endpoint checks for itself.
        self.up_space.wake();
    }

    pub fn endpoint_flags(&self) -> u8 {
        self.up_flags.load(Acquire)
    }

    pub(super) fn close_text(&self) -> String {
        self.close_text.get().cloned().unwrap_or_default()
    }

    pub(super) fn drained(&self) -> u64 {
        self.drained.load(Acquire)
    }

    pub fn deliver(&self, bytes: Bytes) {
        self.down.push(bytes);
        self.down_waker.wake();
    }

    /// The link holds back bytes for the endpoint, which asks for them once it has taken what is queued.
    pub(super) fn keep_back(&self) {
        if !self.kept_back.swap(true, AcqRel) {
            // The endpoint may have emptied the queue meanwhile.
            self.down_waker.wake();
        }
    }

    /// The bytes held back are about to be delivered.
    pub(super) fn keep_no_more(&self) {
        self.kept_back.store(false, Release);
    }

    pub(super) fn down_pieces(&self) -> usize {
        self.down.len()
    }

    pub(super) fn peer_fin(&self) {
        self.down_flags.fetch_or(PEER_FIN, Release);
        self.down_waker.wake();
    }

    pub(super) fn finish(&self, end: TunnelEnd) {
        let _first = self.end.set(end);
        self.down_waker.wake();
        self.up_space.wake();
    }

    pub(super) fn abort(&self, end: &TunnelEnd) {
        let cause = if *end == TunnelEnd::Budget {
            ABORT_BUDGET
        } else {
            0
        };
        self.down_flags.fetch_or(ABORT | cause, Release);
        self.down_waker.wake();
    }

    // The endpoint's side.

    pub(super) fn put_up(self: &Arc<Self>, bytes: Bytes) {
        self.up_bytes.fetch_add(bytes.len(), AcqRel);
        self.up_pieces.fetch_add(1, AcqRel);
        if let Some(budget) = self.dirty_list.budget.get() {
            budget.queue(bytes.len() as u64);
        }
        self.up.push(bytes);
        self.schedule();
    }

    pub(super) fn up_has_space(&self) -> bool {
        self.up_room() > 0 && self.up_pieces.load(Acquire) < ENDPOINT_QUEUE_PIECES
    }

    /// The budget that counts the endpoint's bytes, once the link runs.
    pub(super) fn budget(&self) -> Option<&Arc<ProcessBudget>> {
        self.dirty_list.budget.get()
    }

    /// Bytes that the endpoint may queue at present.
    pub(super) fn up_room(&self) -> usize {
        let share = self.dirty_list.queue_share();
        share.saturating_sub(self.up_bytes.load(Acquire))
    }

    pub(super) fn register_up(&self, waker: &std::task::Waker) {
        self.up_space.register(waker);
    }

    pub(super) fn raise(self: &Arc<Self>, flag: u8) {
        self.up_flags.fetch_or(flag, AcqRel);
        self.schedule();
    }

    pub(super) fn close_with(self: &Arc<Self>, text: String) {
        let _first = self.close_text.set(text);
        self.raise(ENDPOINT_CLOSE);
    }

    pub(super) fn add_drained(&self, bytes: u64) {
        self.drained.fetch_add(bytes, AcqRel);
    }

    pub(super) fn schedule(self: &Arc<Self>) {
        if !self.scheduled.swap(true, AcqRel) {
            self.dirty_list.put(Arc::clone(self));
        }
    }

    pub(super) fn take_down(&self) -> Option<Bytes> {
        self.down.pop()
    }

    /// The queue is empty: asks the link for bytes that it holds back, if any.
    pub(super) fn ask_for_more(self: &Arc<Self>) {
        if self.kept_back.load(Acquire) {
            self.schedule();
        }
    }

    pub(super) fn down_is_empty(&self) -> bool {
        self.down.is_empty()
    }

    pub(super) fn peer_finished(&self) -> bool {
        self.down_flags.load(Acquire) & PEER_FIN != 0
    }

    pub(super) fn aborted(&self) -> bool {
        self.down_flags.load(Relaxed) & ABORT != 0
    }

    pub(super) fn end(&self) -> Option<&TunnelEnd> {
        self.end.get()
    }

    /// How the tunnel ended: an abort replaces a clean end that was reported before.
    pub(super) fn last_end(&self) -> Option<TunnelEnd> {
        let end = self.end.get()?;
        let flags = self.down_flags.load(Relaxed);
        Some(match flags & (ABORT | ABORT_BUDGET) {
            0 => end.clone(),
            ABORT => TunnelEnd::LingerExpired,
            _ => TunnelEnd::Budget,
        })
    }

    pub(super) fn register_down(&self, waker: &std::task::Waker) {
        self.down_waker.register(waker);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // The link is over and takes no more of these bytes. It dequeues by itself the bytes that it took.
        if let Some(budget) = self.dirty_list.budget.get() {
            while let Some(bytes) = self.up.pop() {
                budget.dequeue(bytes.len() as u64);
            }
        }
    }
}
