//! What a process promises its tunnels in advance, so that a flood through tunnels that are open cannot exceed its memory.
//!
//! A [`Promise`] is charged before a tunnel opens: its state, its smallest queues, and the socket buffers that it starts with.
//! A [`Growth`] is charged before the buffers of a busy tunnel become larger. What neither covers is not read: a tunnel
//! without room moves [`super::QUEUE_MIN_BYTES`] at a time.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::budget::ProcessBudget;

const KIB: u64 = 1024;

/// Smallest queues of a tunnel, both ways.
const QUEUES: u64 = 32 * KIB;
/// State of a tunnel, and of its sockets in the kernel.
const STATE: u64 = 8 * KIB;
/// A socket that has small buffers, and one more packet than fits.
const SOCKET: u64 = 48 * KIB;
/// State of a gRPC client's connection and call.
const GRPC_STATE: u64 = 24 * KIB;

/// Bytes that a gRPC client may send on a call before its tunnel takes them, where memory is bounded, until its windows grow.
pub const BOUNDED_CALL_WINDOW_BYTES: u32 = 32 * 1024;
/// Bytes of a call that HTTP/2 may have taken without writing them, where memory is bounded.
pub const BOUNDED_CALL_BUFFER_BYTES: usize = 16 * 1024;

/// What kind of tunnel is promised memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TunnelKind {
    /// One end is a socket of its own.
    Socket,
    /// One end is a call of a gRPC client.
    Grpc,
}

impl TunnelKind {
    /// Bytes that a tunnel of this kind may take while memory is short.
    #[must_use]
    pub const fn promised_bytes(self) -> u64 {
        match self {
            Self::Socket => STATE + QUEUES + SOCKET,
            Self::Grpc => {
                STATE
                    + QUEUES
                    + SOCKET
                    + GRPC_STATE
                    + BOUNDED_CALL_WINDOW_BYTES as u64
                    + BOUNDED_CALL_BUFFER_BYTES as u64
            }
        }
    }
}

/// Memory reserved for one open tunnel, until dropped.
#[derive(Debug)]
pub struct Promise {
    budget: Arc<ProcessBudget>,
    kind: TunnelKind,
    /// Large buffers are charged, too. With [`Self::kind`] this keeps a tunnel's state small.
    is_grown: bool,
}

impl Promise {
    /// Charges the large buffers that a tunnel on a raw lane has from the start, because nobody sees its bytes one by one. False
    /// without room: the tunnel must keep its frames.
    #[must_use]
    pub fn extend_to_raw_lane(&mut self) -> bool {
        if self.budget.starts_small() && !self.is_grown {
            self.is_grown = self.budget.try_grow(self.budget.charge());
            return self.is_grown;
        }
        true
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let budget = &self.budget;
        let bytes = self.kind.promised_bytes();
        budget.promised.fetch_sub(bytes, Relaxed);
        if self.is_grown {
            budget.grown.fetch_sub(budget.charge(), Relaxed);
        }
    }
}

/// Memory for the larger buffers or windows of one tunnel or connection, until dropped.
#[derive(Debug)]
pub struct Growth {
    budget: Arc<ProcessBudget>,
    bytes: u64,
}

impl Growth {
    /// Charges `bytes` more. False without room.
    #[must_use]
    pub fn extend(&mut self, bytes: u64) -> bool {
        let has_room = self.budget.try_grow(bytes);
        if has_room {
            self.bytes += bytes;
        }
        has_room
    }

    /// What is charged.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives back `bytes` of the charge, or all of it if it is less.
    pub fn reduce(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.grown.fetch_sub(bytes, Relaxed);
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        self.budget.grown.fetch_sub(self.bytes, Relaxed);
    }
}

impl ProcessBudget {
    /// Reserves memory for one tunnel. `None`: the process cannot promise it, and must refuse the dial.
    #[must_use]
    pub fn promise(self: &Arc<Self>, kind: TunnelKind) -> Option<Promise> {
        let bytes = kind.promised_bytes();
        (!self.is_full() && self.try_promise(bytes)).then(|| Promise {
            budget: Arc::clone(self),
            kind,
            is_grown: false,
        })
    }

    /// How many tunnels that are promised `bytes` each take half of the memory; `None`: it is not bounded.
    #[must_use]
    pub fn tunnels_in_half(&self, bytes: u64) -> Option<usize> {
        let half = self.bounds()?.room_bytes / 2;
        Some(usize::try_from(half / bytes.max(1)).unwrap_or(usize::MAX))
    }

    fn try_promise(&self, bytes: u64) -> bool {
        let Some(bounds) = self.bounds() else {
            self.promised.fetch_add(bytes, Relaxed);
            return true;
        };
        let taken = self.used_bytes().saturating_add(self.grown_bytes());
        let free = bounds.room_bytes.saturating_sub(taken);
        let fits = |promised: u64| promised.checked_add(bytes).filter(|sum| *sum <= free);
        self.promised.fetch_update(Relaxed, Relaxed, fits).is_ok()
    }

    /// Charges the larger socket buffers of one tunnel or connection. `None`: they must stay small.
    #[must_use]
    pub fn grow(self: &Arc<Self>) -> Option<Growth> {
        self.grow_by(self.charge())
    }

    /// Charges `bytes` beyond promises. `None`: there is no room.
    #[must_use]
    pub fn grow_by(self: &Arc<Self>, bytes: u64) -> Option<Growth> {
        self.try_grow(bytes).then(|| Growth {
            budget: Arc::clone(self),
            bytes,
        })
    }

    fn try_grow(&self, bytes: u64) -> bool {
        // Several threads may pass at once, and exceed the room by their number of growths.
        let may_grow = bytes > 0 && !self.is_half_full() && self.growth_room() >= bytes;
        if may_grow {
            self.grown.fetch_add(bytes, Relaxed);
        }
        may_grow
    }

    /// Bytes charged for one growth.
    fn charge(&self) -> u64 {
        self.bounds().map_or(0, |bounds| bounds.growth_bytes)
    }

    /// Whether sockets start with small buffers, which grow with a [`Growth`].
    #[must_use]
    pub fn starts_small(&self) -> bool {
        self.charge() > 0
    }

    /// Whether TCP sockets start with small buffers, too.
    #[must_use]
    pub fn starts_tcp_small(&self) -> bool {
        self.starts_small() && self.bounds().is_some_and(|bounds| bounds.counts_tcp)
    }

    /// Bytes promised to open tunnels.
    #[must_use]
    pub fn promised_bytes(&self) -> u64 {
        self.promised.load(Relaxed)
    }

    /// Bytes charged for larger buffers.
    #[must_use]
    pub fn grown_bytes(&self) -> u64 {
        self.grown.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryBounds;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bounded(room_bytes: u64) -> Arc<ProcessBudget> {
        let bounds = MemoryBounds {
            room_bytes,
            growth_bytes: MIB,
            counts_tcp: false,
        };
        Arc::new(ProcessBudget::new(room_bytes / 2).with_bounds(Some(bounds)))
    }

    /// Limit (memory): Tunnels that other servers forward | as many as half of the memory can be promised to: 176 KiB each
    #[test]
    fn half_of_the_memory_is_counted_in_tunnels() {
        let forwarded = 2 * TunnelKind::Socket.promised_bytes();
        assert_eq!(forwarded, 176 * 1024);
        assert_eq!(bounded(100 * MIB).tunnels_in_half(forwarded), Some(290));
        assert_eq!(ProcessBudget::new(MIB).tunnels_in_half(forwarded), None);
    }

    /// Limit (memory): Open tunnels | as many as the process can promise memory: 88 KiB each, 160 KiB for a gRPC client
    #[test]
    fn tunnels_beyond_what_memory_can_promise_are_refused() {
        for kind in [TunnelKind::Socket, TunnelKind::Grpc] {
            let budget = bounded(10 * MIB);
            let open: Vec<_> = std::iter::from_fn(|| budget.promise(kind)).collect();
            let most = 10 * MIB / kind.promised_bytes();
            assert_eq!(open.len() as u64, most, "{kind:?}");
            drop(open);
            assert_eq!(budget.promised_bytes(), 0);
        }
    }

    #[test]
    fn payload_and_growth_leave_less_for_promises() {
        let budget = bounded(10 * MIB);
        let open =
            || -> Vec<_> { std::iter::from_fn(|| budget.promise(TunnelKind::Socket)).collect() };
        let all = open().len();
        let growth = budget.grow().expect("there is room");
        budget.hold(2 * MIB);
        let fewer = open().len();
        let less = usize::try_from((3 * MIB).div_ceil(TunnelKind::Socket.promised_bytes()));
        assert!(fewer + less.expect("few") >= all && fewer < all);
        budget.release(2 * MIB);
        drop(growth);
        assert_eq!(budget.grown_bytes(), 0);
    }

    /// At most half of the budget is lent beyond promises, so that new tunnels find room.
    #[test]
    fn growth_ends_at_half_of_the_budget_and_leaves_promises_alone() {
        let budget = bounded(20 * MIB);
        let grown: Vec<_> = std::iter::from_fn(|| budget.grow()).collect();
        assert_eq!(grown.len() as u64, budget.max_bytes() / 2 / MIB);
        assert!(budget.promise(TunnelKind::Grpc).is_some());
        drop(grown);
        let open: Vec<_> = std::iter::from_fn(|| budget.promise(TunnelKind::Socket)).collect();
        assert!(budget.is_half_full() && budget.grow().is_none());
        drop(open);
        assert!(!budget.is_half_full());
    }

    #[test]
    fn a_raw_lane_is_promised_its_large_buffers() {
        let budget = bounded(20 * MIB);
        let tunnel = || budget.promise(TunnelKind::Socket).expect("there is room");
        let mut open: Vec<_> = (0..20).map(|_| tunnel()).collect();
        let raw = open.iter_mut().map(|promise| promise.extend_to_raw_lane());
        assert_eq!(raw.filter(|raw| *raw).count(), 5, "half of the budget");
        assert_eq!(budget.grown_bytes(), 5 * MIB);
        drop(open);
        assert_eq!((budget.promised_bytes(), budget.grown_bytes()), (0, 0));
    }

    #[test]
    fn without_bounds_tunnels_are_counted_and_none_is_refused() {
        let budget = Arc::new(ProcessBudget::new(MIB));
        let mut promise = budget.promise(TunnelKind::Grpc).expect("no bound");
        assert!(promise.extend_to_raw_lane() && !budget.starts_small());
        assert!(budget.grow().is_none());
        assert_eq!(budget.promised_bytes(), TunnelKind::Grpc.promised_bytes());
    }
}
