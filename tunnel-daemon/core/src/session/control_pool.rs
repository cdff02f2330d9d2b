//! The memory of one process for what its peers do not read: control packets that wait in links, and HTTP/2 frames that wait
//! for sockets. Links borrow from one pool. When the pool is full, one link ends: that of the owner that is furthest over.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Waker;

/// Share of the process budget for the pool, and the smallest pool: a small budget must not end honest links.
const POOL_DIVISOR: u64 = 16;
const POOL_PARTS: u64 = 3;
const POOL_BYTES_MIN: u64 = 1 << 20;
/// Share of the process budget for remembered ids.
const REMEMBERED_DIVISOR: u64 = 16;
/// A link that holds no more than this loses no place in the pool, unless the pool has less for each link that holds bytes.
pub(super) const LINK_BYTES_MIN: u64 = 64 << 10;

/// Memory of one frame in HTTP/2 beside its payload, bytes: its entry, its buffers and their heads.
const FRAME_BYTES: u64 = 448;
/// Frames of a link that are part of what a link takes anyway.
const FRAMES_UNCOUNTED: usize = 8;
/// Frames of a link that may wait for its socket. More wait in the link, where they are smaller.
pub(super) const FRAMES_MAX: usize = 256;
/// As [`FRAMES_MAX`], while half of the pool is in use.
pub(super) const FRAMES_MAX_SHORT: usize = 32;

/// What all links of a process hold for peers that do not read.
#[derive(Debug)]
pub(super) struct ControlPool {
    max_bytes: u64,
    bytes: AtomicU64,
    /// Bytes of links that were chosen to end and have not ended yet.
    ending: AtomicU64,
    remembered_max: u64,
    remembered: AtomicU64,
    shares: Mutex<Vec<Weak<ControlShare>>>,
}

/// What one link holds for its peer.
#[derive(Debug)]
pub struct ControlShare {
    pool: Arc<ControlPool>,
    owner: Arc<str>,
    bytes: AtomicU64,
    frames: AtomicUsize,
    /// The link has packets to send, and waits for HTTP/2 to write frames.
    waits: AtomicBool,
    must_end: AtomicBool,
    ending: AtomicU64,
    waker: OnceLock<Waker>,
}

/// One frame that waits in HTTP/2. Dropped once it is written.
#[derive(Debug)]
pub struct QueuedFrame(Arc<ControlShare>);

/// Entries of a list that only speeds up or tidies, beyond those that each link may keep.
#[derive(Debug)]
pub(super) struct LentEntries {
    pool: Arc<ControlPool>,
    entry_bytes: u64,
    count: u64,
}

impl ControlPool {
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self {
            max_bytes: (budget_bytes / POOL_DIVISOR * POOL_PARTS).max(POOL_BYTES_MIN),
            bytes: AtomicU64::new(0),
            ending: AtomicU64::new(0),
            remembered_max: budget_bytes / REMEMBERED_DIVISOR,
            remembered: AtomicU64::new(0),
            shares: Mutex::default(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    pub(super) fn remembered_bytes(&self) -> u64 {
        self.remembered.load(Relaxed)
    }

    /// Bytes without those of links that are about to end.
    fn kept(&self) -> u64 {
        self.bytes().saturating_sub(self.ending.load(Relaxed))
    }

    fn is_short(&self) -> bool {
        self.bytes() > self.max_bytes / 2
    }

    /// Chooses links to end until the others fit. Iterates over all links; each call frees what one link took thousands of
    /// packets to queue.
    fn make_room(&self) {
        let mut shares = self.locked();
        shares.retain(|share| share.strong_count() > 0);
        let mut busy: Vec<_> = shares
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|share| !share.must_end() && share.bytes() > 0)
            .collect();
        while let Some(victim) = victim(&busy, self.max_bytes) {
            let share = busy.swap_remove(victim);
            let bytes = share.bytes();
            share.ending.store(bytes, Relaxed);
            self.ending.fetch_add(bytes, Relaxed);
            share.must_end.store(true, SeqCst);
            share.wake();
        }
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Weak<ControlShare>>> {
        // No code panics while holding the lock.
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The link to end when the links together hold more than `max_bytes`. Its owner is the one furthest over: over the links'
/// minimum while the pool has that for each of them, so that many links of one owner lose nothing to one; else over an equal
/// part of the pool, so that many small links of one owner take nothing from another.
fn victim(busy: &[Arc<ControlShare>], max_bytes: u64) -> Option<usize> {
    let held: Vec<u64> = busy.iter().map(|share| share.bytes()).collect();
    if held.iter().sum::<u64>() <= max_bytes {
        return None;
    }
    let has_minimum = (busy.len() as u64).saturating_mul(LINK_BYTES_MIN) <= max_bytes;
    let minimum = if has_minimum { LINK_BYTES_MIN } else { 0 };
    let mut owners: HashMap<&str, u64> = HashMap::new();
    for (share, bytes) in busy.iter().zip(&held) {
        *owners.entry(&share.owner).or_default() += bytes.saturating_sub(minimum);
    }
    let furthest = busy.iter().zip(&held).enumerate();
    let furthest = furthest.max_by_key(|(_, (share, bytes))| {
        let owner = &*share.owner;
        // The name keeps two owners that hold the same apart.
        (owners.get(owner).copied(), owner, **bytes)
    });
    furthest.map(|(index, _)| index)
}

impl ControlShare {
    pub(super) fn new(pool: Arc<ControlPool>, owner: Arc<str>) -> Arc<Self> {
        let share = Arc::new(Self {
            pool,
            owner,
            bytes: AtomicU64::new(0),
            frames: AtomicUsize::new(0),
            waits: AtomicBool::new(false),
            must_end: AtomicBool::new(false),
            ending: AtomicU64::new(0),
            waker: OnceLock::new(),
        });
        let mut all = share.pool.locked();
        if all.len() == all.capacity() {
            all.retain(|other| other.strong_count() > 0);
        }
        all.push(Arc::downgrade(&share));
        drop(all);
        share
    }

    /// Sets how to wake the link's task: when it must end, and when it may send again.
    pub fn wake_by(&self, waker: Waker) {
        let _first = self.waker.set(waker);
    }

    /// Counts a frame that is given to HTTP/2.
    #[must_use]
    pub fn frame(self: &Arc<Self>) -> QueuedFrame {
        if self.frames.fetch_add(1, SeqCst) >= FRAMES_UNCOUNTED {
            self.add(FRAME_BYTES);
        }
        QueuedFrame(Arc::clone(self))
    }

    /// Whether HTTP/2 may get another frame of the link. If not, the link is woken when HTTP/2 has written some.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let frames = self.frames.load(SeqCst);
        if frames < FRAMES_MAX_SHORT || frames < self.frames_max() {
            return true;
        }
        self.waits.store(true, SeqCst);
        // Frames written before the flag was set wake nobody.
        self.frames.load(SeqCst) <= self.frames_max() / 2
    }

    fn frames_max(&self) -> usize {
        if self.pool.is_short() {
            FRAMES_MAX_SHORT
        } else {
            FRAMES_MAX
        }
    }

    /// Whether this link must end to make room for others.
    pub(super) fn must_end(&self) -> bool {
        self.must_end.load(SeqCst)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Counts `bytes`. Another link may have to end for them, or this one.
    pub(super) fn add(&self, bytes: u64) {
        let pool = &self.pool;
        self.bytes.fetch_add(bytes, Relaxed);
        pool.bytes.fetch_add(bytes, Relaxed);
        if pool.kept() > pool.max_bytes {
            pool.make_room();
        }
    }

    pub(super) fn subtract(&self, bytes: u64) {
        let pool = &self.pool;
        self.bytes.fetch_sub(bytes, Relaxed);
        pool.bytes.fetch_sub(bytes, Relaxed);
        if self.must_end() {
            self.end_bytes(bytes);
        }
    }

    /// Bytes of a link that ends are free.
    fn end_bytes(&self, bytes: u64) {
        let less = |ending: u64| Some(ending.saturating_sub(bytes));
        let before = self.ending.fetch_update(Relaxed, Relaxed, less);
        let ended = before.unwrap_or_default().min(bytes);
        self.pool.ending.fetch_sub(ended, Relaxed);
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake_by_ref();
        }
    }
}

impl Drop for ControlShare {
    fn drop(&mut self) {
        self.end_bytes(u64::MAX);
    }
}

impl Drop for QueuedFrame {
    fn drop(&mut self) {
        let share = &self.0;
        let frames = share.frames.fetch_sub(1, SeqCst);
        if frames > FRAMES_UNCOUNTED {
            share.subtract(FRAME_BYTES);
        }
        if share.waits.load(SeqCst)
            && frames <= share.frames_max() / 2 + 1
            && share.waits.swap(false, SeqCst)
        {
            share.wake();
        }
    }
}

impl LentEntries {
    pub(super) fn new(pool: &Arc<ControlPool>, entry_bytes: u64) -> Self {
        Self {
            pool: Arc::clone(pool),
            entry_bytes,
            count: 0,
        }
    }

    /// Takes room for the `count`-th entry beyond those that each link may keep; false: there is none.
    pub(super) fn has_room(&mut self, count: usize) -> bool {
        let pool = &self.pool;
        let count = count as u64;
        while self.count > count {
            self.count -= 1;
            pool.remembered.fetch_sub(self.entry_bytes, Relaxed);
        }
        while self.count < count {
            let before = pool.remembered.fetch_add(self.entry_bytes, Relaxed);
            if before + self.entry_bytes > pool.remembered_max {
                pool.remembered.fetch_sub(self.entry_bytes, Relaxed);
                return false;
            }
            self.count += 1;
        }
        true
    }
}

impl Drop for LentEntries {
    fn drop(&mut self) {
        self.has_room(0);
    }
}
