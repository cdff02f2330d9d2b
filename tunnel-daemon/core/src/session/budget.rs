//! The process's budget: bytes held for tunnels whose reader pauses, bytes queued towards peers, and credit granted, over all
//! links and lanes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use super::control_pool::ControlPool;
use super::holders::Holders;

/// The budget shared by all links and lanes of a process.
#[derive(Debug)]
pub struct ProcessBudget {
    max_bytes: u64,
    bounds: Option<MemoryBounds>,
    socket_buffer_kib_max: Option<u16>,
    pub(super) promised: AtomicU64,
    pub(super) grown: AtomicU64,
    held: AtomicU64,
    queued: AtomicU64,
    kernel: AtomicU64,
    granted: AtomicU64,
    pressure: AtomicU8,
    pub(super) control: Arc<ControlPool>,
    pub(super) holders: Holders,
}

/// How a process divides its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryBounds {
    /// Bytes for all tunnels together: promises, growth and payload.
    pub room_bytes: u64,
    /// Charge for one tunnel whose sockets get larger buffers; 0: every socket has large buffers from the start, since memory is
    /// ample.
    pub growth_bytes: u64,
    /// Whether the memory limit covers the buffers of TCP sockets. If not, they are large from the start.
    pub counts_tcp: bool,
}

/// How much of its cgroup's memory the process uses. This includes socket buffers, which no budget counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum MemoryPressure {
    /// Memory is free, or there is no limit.
    None,
    /// Buffers must be small, as if half of the budget were in use.
    High,
    /// No tunnel may be opened, as if the whole budget were in use.
    Critical,
}

/// Bytes that a tunnel may queue towards its link or lane.
pub const QUEUE_MAX_BYTES: usize = 256 << 10;
/// Bytes that a tunnel may queue while half of the budget is in use.
pub const QUEUE_MIN_BYTES: usize = 16 << 10;

/// What all threads together may read before one of them sees that memory is short, bytes.
const READS_AT_ONCE_BYTES: u64 = 1 << 20;

/// Bytes that count as queued until they are subtracted, or this value is dropped.
#[derive(Debug)]
pub struct Queued {
    budget: Arc<ProcessBudget>,
    bytes: u64,
}

impl Queued {
    /// No bytes.
    #[must_use]
    pub fn none(budget: &Arc<ProcessBudget>) -> Self {
        Self {
            budget: Arc::clone(budget),
            bytes: 0,
        }
    }

    /// The budget that counts them.
    #[must_use]
    pub fn budget(&self) -> &ProcessBudget {
        &self.budget
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds `bytes` that the budget already counts.
    pub(super) fn adopt(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    pub(super) fn take(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.budget.dequeue(bytes);
    }

    /// Sets the number of queued bytes.
    pub fn set(&mut self, bytes: u64) {
        if bytes > self.bytes {
            self.budget.queue(bytes - self.bytes);
            self.bytes = bytes;
        } else {
            self.take(self.bytes - bytes);
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.budget.dequeue(self.bytes);
    }
}

impl ProcessBudget {
    /// A budget of `max_bytes` for held bytes, and a second one of this size for credit granted and not yet used.
    #[must_use]
    pub fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            bounds: None,
            socket_buffer_kib_max: None,
            promised: AtomicU64::new(0),
            grown: AtomicU64::new(0),
            held: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            kernel: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            pressure: AtomicU8::new(MemoryPressure::None as u8),
            control: Arc::new(ControlPool::new(max_bytes)),
            holders: Holders::default(),
        }
    }

    /// Sets the memory that tunnels share. Without bounds nothing is refused for a promise.
    #[must_use]
    pub fn with_bounds(mut self, bounds: Option<MemoryBounds>) -> Self {
        self.bounds = bounds;
        self
    }

    pub(super) fn bounds(&self) -> Option<&MemoryBounds> {
        self.bounds.as_ref()
    }

    /// Sets a limit of the kernel's buffers per socket, KiB each way.
    #[must_use]
    pub fn with_socket_buffers(mut self, kib_max: Option<u16>) -> Self {
        self.socket_buffer_kib_max = kib_max;
        self
    }

    /// Most KiB that the kernel may allocate per socket each way; `None`: no limit.
    #[must_use]
    pub fn socket_buffer_kib_max(&self) -> Option<u16> {
        self.socket_buffer_kib_max
    }

    /// Most bytes that may be held.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Bytes held for endpoints now.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held.load(Relaxed)
    }

    /// Credit outstanding now, bytes.
    #[must_use]
    pub fn granted_bytes(&self) -> u64 {
        self.granted.load(Relaxed)
    }

    /// Counts `bytes` as held. The caller must [`Self::release`] them.
    pub fn hold(&self, bytes: u64) {
        self.held.fetch_add(bytes, Relaxed);
    }

    /// Counts `bytes` as no longer held.
    pub fn release(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Relaxed);
    }

    /// Counts `bytes` as queued towards a link or lane. The caller must [`Self::dequeue`] them.
    pub fn queue(&self, bytes: u64) {
        self.queued.fetch_add(bytes, Relaxed);
    }

    /// Counts `bytes` as no longer queued.
    pub fn dequeue(&self, bytes: u64) {
        self.queued.fetch_sub(bytes, Relaxed);
    }

    /// Counts `bytes` in kernel buffers of readers that pause. The caller must [`Self::leave_kernel`] them.
    pub fn enter_kernel(&self, bytes: u64) {
        self.kernel.fetch_add(bytes, Relaxed);
    }

    /// Stops counting `bytes` in the kernel.
    pub fn leave_kernel(&self, bytes: u64) {
        self.kernel.fetch_sub(bytes, Relaxed);
    }

    /// Bytes queued towards links and lanes now, with what links hold for peers that do not read.
    #[must_use]
    pub fn queued_bytes(&self) -> u64 {
        self.queued
            .load(Relaxed)
            .saturating_add(self.control.bytes())
    }

    /// Bytes in kernel buffers of readers that pause.
    #[must_use]
    pub fn kernel_bytes(&self) -> u64 {
        self.kernel.load(Relaxed)
    }

    /// Bytes held, queued and in the kernel now.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.held_bytes()
            .saturating_add(self.queued_bytes())
            .saturating_add(self.kernel_bytes())
            .saturating_add(self.control.remembered_bytes())
    }

    /// Sets the measured memory pressure.
    pub fn set_pressure(&self, pressure: MemoryPressure) {
        self.pressure.store(pressure as u8, Relaxed);
    }

    fn is_under(&self, pressure: MemoryPressure) -> bool {
        self.pressure.load(Relaxed) >= pressure as u8
    }

    /// Bytes that one tunnel may queue now.
    #[must_use]
    pub fn queue_share(&self) -> usize {
        if self.is_half_full() {
            QUEUE_MIN_BYTES
        } else {
            QUEUE_MAX_BYTES
        }
    }

    /// Whether half of the budget or most of the process's memory is in use or promised. Then peers with flow control are
    /// throttled; the other half is for links whose peers have none.
    #[must_use]
    pub fn is_half_full(&self) -> bool {
        let taken = self.used_bytes().saturating_add(self.grown_bytes());
        taken > self.max_bytes / 2
            || self.is_under(MemoryPressure::High)
            || self.bounds().is_some_and(|bounds| {
                let reserve = READS_AT_ONCE_BYTES.min(bounds.room_bytes / 16);
                let promised = self.promised_bytes().saturating_add(taken);
                promised.saturating_add(reserve) > bounds.room_bytes
            })
    }

    /// Bytes that may be lent beyond promises now: for larger buffers, and for credit.
    pub(super) fn growth_room(&self) -> u64 {
        let taken = self.used_bytes().saturating_add(self.grown_bytes());
        let half = (self.max_bytes / 2).saturating_sub(taken);
        let Some(bounds) = self.bounds() else {
            return half;
        };
        let promised = self.promised_bytes().saturating_add(taken);
        half.min(bounds.room_bytes.saturating_sub(promised))
    }

    /// Whether the whole budget or nearly all of the process's memory is in use. Then no tunnel is opened.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.used_bytes() >= self.max_bytes || self.is_under(MemoryPressure::Critical)
    }

    /// Whether held bytes exceed the budget.
    pub(super) fn over(&self) -> bool {
        self.held_bytes() > self.max_bytes
    }

    /// Whether held bytes exceed the budget by an eighth. Then no link waits for another link to release bytes.
    pub(super) fn far_over(&self) -> bool {
        self.held_bytes() > self.max_bytes.saturating_add(self.max_bytes / 8)
    }

    pub(super) fn grant(&self, bytes: u64) {
        self.granted.fetch_add(bytes, Relaxed);
    }

    pub(super) fn ungrant(&self, bytes: u64) {
        self.granted.fetch_sub(bytes, Relaxed);
    }

    pub(super) fn credit_left(&self) -> u64 {
        let left = self.max_bytes.saturating_sub(self.granted_bytes());
        if self.starts_small() {
            // What is granted may arrive at once.
            left.min(self.growth_room().saturating_sub(self.granted_bytes()))
        } else {
            left
        }
    }
}
