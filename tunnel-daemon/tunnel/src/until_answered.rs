//! Waits on a lane whose peer has sent OPEN, until the OPEN can be answered.

use adit_core::lane::{LaneEvent, Want};

use crate::lane::{Lane, LaneFailure};

/// Waits for `work`, which decides the answer; `None` when the peer has withdrawn its OPEN. `want` is called when the peer asks
/// for more lanes. A cancelled call leaves the lane as it is.
///
/// # Errors
/// The lane failed.
pub async fn until_answered<T>(
    lane: &mut Lane,
    mut work: impl Future<Output = T> + Unpin,
    want: impl Fn(Want),
) -> Result<Option<T>, LaneFailure> {
    loop {
        tokio::select! {
            biased;
            event = lane.event() => match event? {
                LaneEvent::PeerReset { .. } => return Ok(None),
                LaneEvent::Want(lanes) => want(lanes),
                _ => (),
            },
            outcome = &mut work => return Ok(Some(outcome)),
        }
    }
}
