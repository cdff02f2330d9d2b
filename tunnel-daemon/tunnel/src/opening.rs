//! Opens a tunnel on an idle lane: the OPEN, how long its answer may take, and what the answer means.

use std::time::Duration;

use adit_core::lane::{LaneEvent, OpenRequest, RefusalCode};

use crate::lane::{Lane, LaneFailure};
use crate::lane_path::LaneOwner;

/// Time for the peer's kernel to acknowledge an OPEN.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(2);

/// Outcome of an OPEN.
pub enum OpenAnswer {
    /// The tunnel is open.
    Opened,
    /// The peer refused the tunnel, with this text.
    Refused(RefusalCode, String),
    /// The peer has not seen the OPEN.
    NotSeen,
    /// The peer's kernel has not acknowledged the OPEN. The connection is to be reset, so that the peer does not dial when the
    /// network path recovers.
    Silent,
}

/// Sends OPEN, asks for `want` more lanes, and waits for the answer. A cancelled call leaves the tunnel to be reset.
///
/// # Errors
/// The lane failed.
pub async fn open_tunnel(
    lane: &mut Lane,
    request: &OpenRequest,
    want: u32,
    owner: &impl LaneOwner,
) -> Result<OpenAnswer, LaneFailure> {
    if lane.end().open(request, want).is_err() {
        return Ok(OpenAnswer::NotSeen);
    }
    match tokio::time::timeout(ACKNOWLEDGED_WITHIN, answer(lane, owner)).await {
        Ok(answer) => answer,
        Err(_elapsed) if lane.unacknowledged_bytes() > 0 => Ok(OpenAnswer::Silent),
        Err(_elapsed) => answer(lane, owner).await,
    }
}

async fn answer(lane: &mut Lane, owner: &impl LaneOwner) -> Result<OpenAnswer, LaneFailure> {
    loop {
        match lane.event().await? {
            LaneEvent::Opened => return Ok(OpenAnswer::Opened),
            LaneEvent::Failed { code, text } => return Ok(OpenAnswer::Refused(code, text)),
            // The agent had sent an OPEN of its own and reset it; it did not see this OPEN.
            LaneEvent::PeerReset { .. } if lane.state().has_crossed() => {
                return Ok(OpenAnswer::NotSeen);
            }
            LaneEvent::PeerReset { text } => {
                return Ok(OpenAnswer::Refused(RefusalCode::Failed, text));
            }
            LaneEvent::Want(want) => owner.want(want),
            _ => (),
        }
    }
}
