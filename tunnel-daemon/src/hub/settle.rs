//! The end of a tunnel on a lane that nobody listens to any more: what waits is written, what comes is dropped, until
//! the lane is clean.

use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::lane::LaneEvent;
use futures_util::FutureExt as _;

use crate::config::limits;
use crate::lane::{Lane, LaneFailure};

/// A RESET is answered within this time.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(5);

/// What the peer's kernel has acknowledged is read within this time: some megabytes at 20 KB/s.
const TAKEN_WITHIN: Duration = Duration::from_secs(300);

/// Why a lane cannot be used again.
#[derive(Debug, thiserror::Error)]
pub enum Unsettled {
    /// It is over.
    #[error(transparent)]
    Failed(#[from] LaneFailure),
    /// The peer does not let go of the tunnel.
    #[error("the peer does not let go of the tunnel")]
    Silent,
    /// The peer has not read the last bytes of the tunnel, which was over before: they are in its kernel's hands and ours, and
    /// arrive if the connection is closed in order.
    #[error("the peer does not read the last bytes of the tunnel")]
    Unread,
}

/// Waits until the lane is clean and its peer has read what was sent, so that the next tunnel is not behind it.
///
/// # Errors
/// [`Unsettled`]: close the lane, by a reset if the peer does not let go of it.
pub async fn settle(lane: &mut Lane) -> Result<(), Unsettled> {
    finish(lane).await?;
    prove(lane).await
}

/// Waits until the lane is clean; bytes that wait for the peer linger as long as its kernel takes some now and then. Those
/// that it has taken may be in its buffers for long, since we do not see them move there.
async fn finish(lane: &mut Lane) -> Result<(), Unsettled> {
    // Mostly there is nothing left to wait for, and nothing to ask the kernel.
    if let Some(clean) = clean(lane).now_or_never() {
        return Ok(clean?);
    }
    let mut before = usize::MAX;
    while !lane.state().is_resetting() {
        let left = lane.unacknowledged_bytes();
        if left >= before {
            break;
        }
        before = left;
        let patience = if before == 0 {
            TAKEN_WITHIN
        } else {
            limits::LINGER_TIMEOUT
        };
        if let Ok(clean) = tokio::time::timeout(patience, clean(lane)).await {
            return Ok(clean?);
        }
    }
    lane.end().reset("no progress after its end");
    tokio::time::timeout(ACKNOWLEDGED_WITHIN, clean(lane))
        .await
        .map_or(Err(Unsettled::Silent), |clean| Ok(clean?))
}

/// Waits as long for the peer to read what it has not.
async fn prove(lane: &mut Lane) -> Result<(), Unsettled> {
    let mut before = usize::MAX;
    while !lane.is_proven() {
        let patience = if before == 0 {
            TAKEN_WITHIN
        } else {
            limits::LINGER_TIMEOUT
        };
        let proven = std::future::poll_fn(|cx| lane.poll_proven(cx));
        if let Ok(proven) = tokio::time::timeout(patience, proven).await {
            return Ok(proven?);
        }
        let left = lane.unacknowledged_bytes();
        if left >= before {
            return Err(Unsettled::Unread);
        }
        before = left;
    }
    Ok(())
}

async fn clean(lane: &mut Lane) -> Result<(), LaneFailure> {
    std::future::poll_fn(|cx| poll_clean(cx, lane)).await
}

fn poll_clean(cx: &mut Context<'_>, lane: &mut Lane) -> Poll<Result<(), LaneFailure>> {
    loop {
        let flushed = lane.poll_flush(cx)?;
        if lane.state().is_idle() {
            return flushed.map(Ok);
        }
        match lane.poll_event(cx) {
            // The peer may have opened the next tunnel already, which is its owner's to answer.
            Poll::Ready(Ok(LaneEvent::Idle)) if !lane.state().is_idle() => {
                return Poll::Ready(Ok(()));
            }
            Poll::Ready(Ok(_void)) => (),
            Poll::Ready(Err(failure)) => return Poll::Ready(Err(failure)),
            Poll::Pending => return Poll::Pending,
        }
    }
}
