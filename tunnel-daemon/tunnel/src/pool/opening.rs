//! A dial on a lane: the OPEN, how long its answer may take, and what the answer means.

use std::sync::Arc;
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::lane::{LaneEvent, OpenRequest, RefusalCode};
use adit_core::session::Queued;

use super::{LanePool, OnLane};
use crate::endpoint::{Carrier, Endpoint};
use crate::lane::{Lane, LaneFailure};
use crate::lane_path::LaneOwner as _;
use adit_telemetry::labels::LaneCloseReason;

/// Time for the agent's kernel to acknowledge an OPEN; then the dial goes over the link.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(2);

/// A dial on a lane. Dropping it gives up the dial and returns the lane.
pub(super) struct Opening<'a> {
    pub(super) pool: &'a Arc<LanePool>,
    pub(super) lane: Option<Lane>,
}

enum Answer {
    Opened,
    Refused(RefusalCode, String),
    NotSeen,
}

impl Opening<'_> {
    /// Sends OPEN and asks for `want` more lanes. Cancelling it gives up the dial.
    pub(super) async fn run(&mut self, request: &OpenRequest, want: u32) -> OnLane {
        let Some(lane) = &mut self.lane else {
            return OnLane::NotSeen;
        };
        if lane.end().open(request, want).is_err() {
            return OnLane::NotSeen;
        }
        let soon = tokio::time::timeout(ACKNOWLEDGED_WITHIN, answer(lane)).await;
        let answer = match soon {
            Ok(answer) => answer,
            Err(_elapsed) if lane.unacknowledged_bytes() > 0 => {
                // Reset, so that the agent does not dial when the network path recovers.
                if let Some(lane) = self.lane.take() {
                    lane.reset_connection();
                    self.pool.closed(LaneCloseReason::Silent);
                }
                return OnLane::NotSeen;
            }
            Err(_elapsed) => answer(lane).await,
        };
        self.conclude(answer)
    }

    fn conclude(&mut self, answer: Result<Answer, LaneFailure>) -> OnLane {
        match answer {
            Ok(Answer::Opened) => match self.lane.take() {
                Some(lane) if lane.state().is_raw() => {
                    match lane.into_raw(&self.pool.settings.metrics) {
                        Ok(raw_lane) => OnLane::Open(Carrier::RawLane(raw_lane)),
                        Err(failure) => self.fail(&failure),
                    }
                }
                Some(lane) => {
                    let owner = Arc::new(Arc::clone(self.pool));
                    OnLane::Open(Carrier::Endpoint(Endpoint::on_lane(lane, owner)))
                }
                None => OnLane::NotSeen,
            },
            Ok(Answer::Refused(RefusalCode::Busy, _) | Answer::NotSeen) => OnLane::NotSeen,
            Ok(Answer::Refused(_, text)) => OnLane::Failed(DialFailure::Target(text)),
            Err(failure) => {
                self.lane = None;
                self.fail(&failure)
            }
        }
    }

    fn fail(&self, failure: &LaneFailure) -> OnLane {
        self.pool.lost(failure);
        OnLane::Failed(DialFailure::LinkLost)
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        if let Some(mut lane) = self.lane.take() {
            lane.end().reset("the client gave up");
            self.pool.take_back(lane, Queued::none(self.pool.budget()));
        }
    }
}

/// Waits for the answer to an OPEN.
async fn answer(lane: &mut Lane) -> Result<Answer, LaneFailure> {
    loop {
        match lane.event().await? {
            LaneEvent::Opened => return Ok(Answer::Opened),
            LaneEvent::Failed { code, text } => return Ok(Answer::Refused(code, text)),
            // The agent had sent an OPEN of its own and reset it; it did not see this OPEN.
            LaneEvent::PeerReset { .. } if lane.state().has_crossed() => {
                return Ok(Answer::NotSeen);
            }
            LaneEvent::PeerReset { text } => {
                return Ok(Answer::Refused(RefusalCode::Failed, text));
            }
            _ => (),
        }
    }
}
