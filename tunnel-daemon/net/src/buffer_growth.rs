//! Decides when the socket of a tunnel or of a gRPC client gets large buffers: where memory is bounded it starts with small
//! ones, gets large ones once its peer has taken some bytes, and gives them back when it has been idle.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use adit_core::session::{Growth, ProcessBudget};
use adit_relay::BufferSizes;
use tokio::time::{Instant, Sleep, sleep};

/// Bytes of one socket, both ways, after which it may get large buffers. More than small buffers hold, so that its peer must
/// have read.
pub(crate) const GROWS_AFTER_BYTES: u64 = 96 * 1024;
/// A socket without a byte for this long gives its large buffers back.
pub(crate) const IDLE: Duration = Duration::from_secs(1);

/// Which memory holds a socket's buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SocketKind {
    /// In version 1 of cgroups TCP has a limit of its own.
    Tcp,
    /// The memory of the sender.
    Unix,
}

impl SocketKind {
    /// Whether sockets of this kind start with small buffers.
    #[must_use]
    pub fn starts_small(self, budget: &ProcessBudget) -> bool {
        match self {
            Self::Tcp => budget.starts_tcp_small(),
            Self::Unix => budget.starts_small(),
        }
    }
}

/// The buffers of one socket.
#[derive(Debug, Default)]
pub struct BufferGrowth {
    /// Bytes at the last check for idleness, or when buffers became small.
    seen: u64,
    grown: Option<Box<Grown>>,
}

#[derive(Debug)]
struct Grown {
    _charge: Growth,
    idle: Pin<Box<Sleep>>,
}

/// Sizes of a socket's buffers while memory is not short.
#[must_use]
pub fn sizes_at_rest(budget: &ProcessBudget) -> BufferSizes {
    let max = budget.socket_buffer_kib_max();
    max.map_or(BufferSizes::Kernel, BufferSizes::AtMost)
}

impl BufferGrowth {
    /// Sizes for a socket that has moved `moved` bytes since it was opened. Cheap; to be called at each poll.
    pub fn sizes(
        &mut self,
        budget: &Arc<ProcessBudget>,
        moved: u64,
        kind: SocketKind,
    ) -> BufferSizes {
        if !kind.starts_small(budget) {
            return if budget.is_half_full() {
                BufferSizes::Small
            } else {
                sizes_at_rest(budget)
            };
        }
        if self.grown.is_none() && moved.saturating_sub(self.seen) >= GROWS_AFTER_BYTES {
            self.grow(budget, moved);
        }
        if self.grown.is_some() && !budget.is_half_full() {
            sizes_at_rest(budget)
        } else {
            self.grown = None;
            BufferSizes::Small
        }
    }

    #[cold]
    fn grow(&mut self, budget: &Arc<ProcessBudget>, moved: u64) {
        // Not again before as many more bytes.
        self.seen = moved;
        self.grown = budget.grow().map(|charge| {
            Box::new(Grown {
                _charge: charge,
                idle: Box::pin(sleep(IDLE)),
            })
        });
    }

    /// Gives large buffers back after a second without a byte; the task is woken then, and must ask for the sizes again.
    pub fn poll_idle(&mut self, cx: &mut Context<'_>, moved: u64) {
        while let Some(grown) = &mut self.grown {
            if grown.idle.as_mut().poll(cx).is_pending() {
                return;
            }
            let was_idle = moved == self.seen;
            self.seen = moved;
            if was_idle {
                self.grown = None;
                cx.waker().wake_by_ref();
            } else {
                grown.idle.as_mut().reset(Instant::now() + IDLE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use adit_core::session::MemoryBounds;

    use super::SocketKind::{Tcp, Unix};
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bounded() -> Arc<ProcessBudget> {
        let bounds = MemoryBounds {
            room_bytes: 64 * MIB,
            growth_bytes: MIB,
            counts_tcp: false,
        };
        Arc::new(ProcessBudget::new(4 * MIB).with_bounds(Some(bounds)))
    }

    /// Limit (memory): Large socket buffers where memory is bounded | for tunnels that move bytes, up to half of the budget
    #[tokio::test(start_paused = true)]
    async fn buffers_grow_for_a_busy_socket_and_shrink_when_it_is_idle() {
        let budget = bounded();
        let cx = &mut Context::from_waker(Waker::noop());
        let mut growth = BufferGrowth::default();
        let small = GROWS_AFTER_BYTES - 1;
        assert_eq!(growth.sizes(&budget, small, Unix), BufferSizes::Small);
        let tcp = BufferGrowth::default().sizes(&budget, 0, Tcp);
        assert_eq!(tcp, BufferSizes::Kernel, "the limit does not cover it");
        assert_eq!(growth.sizes(&budget, MIB, Unix), BufferSizes::Kernel);
        assert_eq!(budget.grown_bytes(), MIB);
        growth.poll_idle(cx, MIB);
        tokio::time::advance(2 * IDLE).await;
        growth.poll_idle(cx, 2 * MIB);
        assert_eq!(budget.grown_bytes(), MIB, "it was busy");
        tokio::time::advance(2 * IDLE).await;
        growth.poll_idle(cx, 2 * MIB);
        assert_eq!(budget.grown_bytes(), 0);
        assert_eq!(growth.sizes(&budget, 2 * MIB, Unix), BufferSizes::Small);
    }

    #[tokio::test(start_paused = true)]
    async fn only_as_many_sockets_grow_as_the_budget_allows() {
        let budget = bounded();
        let mut all: Vec<_> = (0..5).map(|_| BufferGrowth::default()).collect();
        let sizes: Vec<_> = all
            .iter_mut()
            .map(|growth| growth.sizes(&budget, MIB, Unix))
            .collect();
        let grown = sizes.iter().filter(|sizes| **sizes == BufferSizes::Kernel);
        assert_eq!(grown.count(), 2);
        // All of them give way when memory is short.
        budget.hold(3 * MIB);
        for growth in &mut all {
            assert_eq!(growth.sizes(&budget, MIB, Unix), BufferSizes::Small);
        }
        assert_eq!(budget.grown_bytes(), 0);
        budget.release(3 * MIB);
    }
}
