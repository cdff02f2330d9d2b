//! A dial on a lane, and what the answer to its OPEN means.

use std::sync::Arc;

use adit_core::failure::DialFailure;
use adit_core::lane::{OpenRequest, RefusalCode};
use adit_core::session::Queued;

use super::{LanePool, OnLane};
use crate::endpoint::{Carrier, Endpoint};
use crate::lane::{Lane, LaneFailure};
use crate::lane_path::LaneOwner as _;
use crate::opening::{OpenAnswer, open_tunnel};
use adit_telemetry::labels::LaneCloseReason;

/// A dial on a lane. Dropping it gives up the dial and returns the lane.
pub(super) struct Opening<'a> {
    pub(super) pool: &'a Arc<LanePool>,
    pub(super) lane: Option<Lane>,
}

impl Opening<'_> {
    /// Sends OPEN and asks for `want` more lanes. Cancelling it gives up the dial.
    pub(super) async fn run(&mut self, request: &OpenRequest, want: u32) -> OnLane {
        let Some(lane) = &mut self.lane else {
            return OnLane::NotSeen;
        };
        match open_tunnel(lane, request, want, self.pool).await {
            Ok(OpenAnswer::Opened) => match self.lane.take() {
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
            Ok(OpenAnswer::Refused(RefusalCode::Busy, _) | OpenAnswer::NotSeen) => OnLane::NotSeen,
            Ok(OpenAnswer::Silent) => {
                if let Some(lane) = self.lane.take() {
                    lane.reset_connection();
                    self.pool.closed(LaneCloseReason::Silent);
                }
                OnLane::NotSeen
            }
            Ok(OpenAnswer::Refused(_, text)) => OnLane::Failed(DialFailure::Target(text)),
            Err(failure) => {
                self.lane = None;
                match failure {
                    // As when a balancer has cut an idle connection. The agent cancels what it may have begun.
                    LaneFailure::Io(_) | LaneFailure::Closed => {
                        self.pool.lost(&failure);
                        OnLane::Lost
                    }
                    LaneFailure::Violation(_) => self.fail(&failure),
                }
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
