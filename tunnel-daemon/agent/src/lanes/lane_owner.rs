//! Takes lanes back when their tunnels are over.

use std::sync::Arc;
use std::time::Duration;

use adit_core::lane::Want;
use adit_core::session::{ProcessBudget, Queued};
use tokio_util::sync::CancellationToken;

use super::LaneKeeper;
use adit_telemetry::labels::LaneEnd;
use adit_tunnel::lane::{Lane, LaneFailure};
use adit_tunnel::{DrainError, LaneOwner, LaneWatch, drain};

/// The owner of a keeper's lanes, as endpoints see it.
pub(super) struct Owner(pub(super) LaneKeeper);

impl LaneOwner for Owner {
    fn gone(&self) -> &CancellationToken {
        &self.0.0.gone
    }

    fn watch(&self) -> &LaneWatch {
        &self.0.0.context.lane_watch
    }

    fn silence_max(&self) -> Duration {
        self.0.0.context.isolation.half_closed_timeout
    }

    fn budget(&self) -> &Arc<ProcessBudget> {
        &self.0.0.context.budget
    }

    fn take_back(&self, mut lane: Lane, queued: Queued) {
        let keeper = self.0.clone();
        let settles = self.watch().settles();
        let draining = async move {
            let drained = drain(&mut lane).await;
            drop((settles, queued));
            match drained {
                Ok(()) => keeper.serve(lane, None).await,
                Err(DrainError::Failed(_given_up)) if lane.state().is_draining() => {
                    keeper.closed(LaneEnd::Drained);
                }
                Err(DrainError::Failed(_gone)) if keeper.0.gone.is_cancelled() => {
                    keeper.closed(LaneEnd::LinkGone);
                }
                Err(DrainError::Failed(failure)) => keeper.lost(&failure),
                Err(DrainError::Silent) => {
                    keeper.closed(LaneEnd::Silent);
                    lane.reset_connection();
                }
                // Closed with FIN: unread bytes still arrive.
                Err(DrainError::Unread) => keeper.closed(LaneEnd::Silent),
            }
        };
        if self.0.0.context.tasks.spawn("lane", draining).is_err() {
            self.0.adit().lane_closed(LaneEnd::Lost);
        }
    }

    fn lost(&self, failure: &LaneFailure) {
        self.0.lost(failure);
    }

    fn want(&self, want: Want) {
        self.0.want(want);
    }
}
