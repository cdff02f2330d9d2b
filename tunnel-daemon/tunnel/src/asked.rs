//! A lane whose peer has asked for a tunnel, until it is answered.

use adit_core::lane::LaneEvent;

use crate::lane::{Lane, LaneFailure};

/// Waits for the outcome of `work`, on which the answer depends; `None` when the peer has given up. `want` hears when the
/// peer would use more lanes. A cancelled call leaves the lane as it is.
///
/// # Errors
/// The lane is over.
pub async fn until_answered<T>(
    lane: &mut Lane,
    mut work: impl Future<Output = T> + Unpin,
    want: impl Fn(),
) -> Result<Option<T>, LaneFailure> {
    loop {
        tokio::select! {
            biased;
            event = lane.event() => match event? {
                LaneEvent::PeerReset { .. } => return Ok(None),
                LaneEvent::Want(_) => want(),
                _ => (),
            },
            outcome = &mut work => return Ok(Some(outcome)),
        }
    }
}
