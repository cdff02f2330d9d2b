//! Bytes held for legs that do not read, and credit granted, over all links of the process.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Shared by all links and lanes of a process. Sums only: who has to give is decided inside one link.
#[derive(Debug)]
pub struct ProcessBudget {
    max_bytes: u64,
    held: AtomicU64,
    granted: AtomicU64,
}

impl ProcessBudget {
    /// A budget of `max_bytes` for held bytes, and as much again for credit granted and not yet used.
    #[must_use]
    pub fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            held: AtomicU64::new(0),
            granted: AtomicU64::new(0),
        }
    }

    /// What may be held.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Bytes held for legs now.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held.load(Relaxed)
    }

    /// Credit outstanding now, bytes.
    #[must_use]
    pub fn granted_bytes(&self) -> u64 {
        self.granted.load(Relaxed)
    }

    /// `bytes` more are held. Whoever says so owes as many to [`Self::release`].
    pub fn hold(&self, bytes: u64) {
        self.held.fetch_add(bytes, Relaxed);
    }

    /// `bytes` that were held have left.
    pub fn release(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Relaxed);
    }

    /// Whether half of what may be held is. Who can hold its peer back does so from here on, and leaves the rest to links
    /// whose peers cannot be told to wait.
    #[must_use]
    pub fn is_half_full(&self) -> bool {
        self.held_bytes() > self.max_bytes / 2
    }

    /// Whether more is held than may be.
    pub(super) fn over(&self) -> bool {
        self.held_bytes() > self.max_bytes
    }

    pub(super) fn grant(&self, bytes: u64) {
        self.granted.fetch_add(bytes, Relaxed);
    }

    pub(super) fn ungrant(&self, bytes: u64) {
        self.granted.fetch_sub(bytes, Relaxed);
    }

    pub(super) fn credit_left(&self) -> u64 {
        self.max_bytes.saturating_sub(self.granted_bytes())
    }
}
