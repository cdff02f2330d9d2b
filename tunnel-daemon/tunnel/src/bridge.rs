//! Moves bytes between two endpoints, for a tunnel that one server carries for another.

use std::pin::Pin;
use std::task::{Context, Poll};

use adit_core::session::TunnelEnd;

use crate::endpoint::Endpoint;
use crate::incoming::Incoming;

/// Bytes moved in one direction before the other one gets its turn.
const BATCH_BYTES: usize = 256 * 1024;
/// Rounds before the task yields.
const ROUNDS_PER_POLL: usize = 4;

/// How a bridged tunnel ended.
#[derive(Debug)]
#[must_use = "an outcome carries how the tunnel ended, for metrics"]
pub struct BridgeOutcome {
    /// Bytes from the first endpoint to the second, and from the second to the first.
    pub moved: (u64, u64),
    /// How the endpoint that ended first has ended.
    pub end: TunnelEnd,
    /// Whether that was the first one.
    pub by_first: bool,
}

/// Joins two endpoints until one of them has ended. What it had sent goes to the other one, which then ends the same way: in
/// order, with its text, or by a reset. A dropped call resets both.
pub fn bridge(first: Endpoint, second: Endpoint) -> impl Future<Output = BridgeOutcome> {
    Bridge {
        ends: Some((first, second)),
        moved: (0, 0),
    }
}

/// Not an `async` function: its future would hold the endpoints twice.
struct Bridge {
    /// `None` once the tunnel is over.
    ends: Option<(Endpoint, Endpoint)>,
    moved: (u64, u64),
}

/// One direction, in one round.
enum Moved {
    Nothing,
    Something,
    Ended(TunnelEnd),
}

impl Future for Bridge {
    type Output = BridgeOutcome;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<BridgeOutcome> {
        let this = self.get_mut();
        let Some((first, second)) = &mut this.ends else {
            unreachable!("a bridge is polled again after its end");
        };
        let mut over = None;
        let mut is_busy = true;
        for _round in 0..ROUNDS_PER_POLL {
            let forth = forward(cx, first, second, &mut this.moved.0);
            if let Moved::Ended(end) = forth {
                over = Some((end, true));
                break;
            }
            let back = forward(cx, second, first, &mut this.moved.1);
            if let Moved::Ended(end) = back {
                over = Some((end, false));
                break;
            }
            is_busy = matches!(forth, Moved::Something) || matches!(back, Moved::Something);
            if !is_busy {
                break;
            }
        }
        let Some((end, by_first)) = over else {
            first.poll_flush(cx);
            second.poll_flush(cx);
            if is_busy {
                cx.waker().wake_by_ref();
            }
            return Poll::Pending;
        };
        if let Some((first, second)) = this.ends.take() {
            let mut other = if by_first { second } else { first };
            match &end {
                TunnelEnd::Closed { error } => other.close_with(error),
                end if end.delivers_rest() => other.close(),
                // Dropped, which resets it.
                _ => (),
            }
        }
        Poll::Ready(BridgeOutcome {
            moved: this.moved,
            end,
            by_first,
        })
    }
}

/// Moves what `from` has, as far as `to` takes it.
fn forward(cx: &mut Context<'_>, from: &mut Endpoint, to: &mut Endpoint, moved: &mut u64) -> Moved {
    if from.poll_aborted(cx)
        && let Some(end) = from.last_end()
    {
        return Moved::Ended(end);
    }
    let (mut bytes, mut is_busy) = (0, false);
    while bytes < BATCH_BYTES && to.poll_ready(cx).is_ready() {
        match from.poll_recv(cx) {
            Poll::Ready(Incoming::Data(data)) => {
                let length = data.len();
                to.send(data);
                from.drained(length);
                bytes += length;
                *moved += length as u64;
            }
            Poll::Ready(Incoming::PeerFin) => to.fin(),
            Poll::Ready(Incoming::Ended(end)) => return Moved::Ended(end),
            Poll::Pending => break,
        }
        is_busy = true;
    }
    if to.poll_ready(cx).is_pending() {
        // The other end is not read now: somebody has to notice when it is gone.
        from.stalled(0);
    }
    if is_busy {
        Moved::Something
    } else {
        Moved::Nothing
    }
}
