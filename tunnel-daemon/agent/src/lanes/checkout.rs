//! Idle lanes for tunnels that this agent opens: requests, loans and returns.
//!
//! A task of its own holds each idle lane and lends it on request. The borrower opens one tunnel on it. Afterwards, or when the
//! borrower drops it, the lane is served as before.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_core::lane::{OpenRequest, RefusalCode};
use adit_core::session::Queued;
use tokio::sync::{Notify, oneshot};

use super::LaneKeeper;
use adit_telemetry::labels::{LaneCloseReason, LaneState};
use adit_tunnel::lane::Lane;
use adit_tunnel::{Endpoint, LaneOwner as _, OpenAnswer, open_tunnel};

/// Requests for a lane of one link.
#[derive(Default)]
pub(super) struct Checkouts {
    asking: Mutex<VecDeque<oneshot::Sender<Borrowed>>>,
    asked: Notify,
}

impl Checkouts {
    fn lock(&self) -> MutexGuard<'_, VecDeque<oneshot::Sender<Borrowed>>> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self) -> oneshot::Receiver<Borrowed> {
        let (borrower, lent) = oneshot::channel();
        let mut asking = self.lock();
        asking.retain(|other| !other.is_closed());
        asking.push_back(borrower);
        drop(asking);
        self.asked.notify_one();
        lent
    }

    fn take(&self) -> Option<oneshot::Sender<Borrowed>> {
        let mut asking = self.lock();
        while let Some(borrower) = asking.pop_front() {
            if !borrower.is_closed() {
                if !asking.is_empty() {
                    // One notification may have stood for several requests.
                    self.asked.notify_one();
                }
                return Some(borrower);
            }
        }
        None
    }

    /// Waits for a request to borrow a lane. A cancelled call removes no request.
    pub(super) async fn next(&self) -> oneshot::Sender<Borrowed> {
        loop {
            if let Some(borrower) = self.take() {
                return borrower;
            }
            self.asked.notified().await;
        }
    }
}

/// Outcome of an OPEN.
pub enum Opened {
    /// The tunnel.
    Open(Endpoint),
    /// The server refused the tunnel, with this text.
    Refused(RefusalCode, String),
    /// No tunnel, and the server has not seen the OPEN.
    NotSeen,
    /// No tunnel; whether the server has seen the OPEN is unknown. Another lane may be tried.
    Lost,
}

/// A lane lent for one tunnel. Dropping it returns the lane and gives up a tunnel that is being opened.
pub struct Borrowed {
    lane: Option<Lane>,
    keeper: LaneKeeper,
    opening: bool,
}

impl Borrowed {
    pub(super) fn new(lane: Lane, keeper: LaneKeeper) -> Self {
        let lane = Some(lane);
        Self {
            lane,
            keeper,
            opening: false,
        }
    }

    pub(super) fn give_back(mut self) -> Option<Lane> {
        self.lane.take()
    }

    /// Opens a tunnel. A cancelled call gives up the tunnel.
    pub async fn open(mut self, request: &OpenRequest) -> Opened {
        let Some(lane) = &mut self.lane else {
            return Opened::Lost;
        };
        lane.count_as(self.keeper.adit().lanes.of(LaneState::Busy).guard());
        self.opening = true;
        let answer = open_tunnel(lane, request, 0, &self.keeper).await;
        self.opening = false;
        match answer {
            Ok(OpenAnswer::Opened) => self.lane.take().map_or(Opened::Lost, |lane| {
                Opened::Open(Endpoint::on_lane(lane, Arc::new(self.keeper.clone())))
            }),
            Ok(OpenAnswer::Refused(code, text)) => Opened::Refused(code, text),
            Ok(OpenAnswer::NotSeen) => Opened::NotSeen,
            Ok(OpenAnswer::Silent) => {
                if let Some(lane) = self.lane.take() {
                    lane.reset_connection();
                    self.keeper.closed(LaneCloseReason::Silent);
                }
                Opened::NotSeen
            }
            Err(failure) => {
                self.lane = None;
                self.keeper.lost(&failure);
                Opened::Lost
            }
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(mut lane) = self.lane.take() {
            // Reset only this end's tunnel: the keeper answers an OPEN of the server.
            if self.opening {
                lane.end().reset("the client gave up");
            }
            let owner = &self.keeper;
            owner.take_back(lane, Queued::none(owner.budget()));
        }
    }
}

impl LaneKeeper {
    /// Whether a lane is idle.
    #[must_use]
    pub fn has_idle(&self) -> bool {
        self.0.idle.load(Relaxed) > 0
    }

    /// The server has announced that it is going away.
    pub fn leaves(&self) {
        if !self.0.leaving.swap(true, Relaxed) {
            tracing::info!(server = %self.server(), "server is draining: it receives no new connections of this node");
        }
    }

    /// Whether the server has announced that it is going away.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.0.leaving.load(Relaxed)
    }

    /// Borrows an idle lane, or the next that becomes idle; `None` when the link is gone. A dropped call withdraws the request.
    pub async fn borrow(&self) -> Option<Borrowed> {
        let mut lent = self.0.checkouts.ask();
        // A missing lane is opened now, not at the keeper's next check.
        self.0.changed.notify_one();
        tokio::select! {
            biased;
            lent = &mut lent => lent.ok(),
            () = self.0.gone.cancelled() => None,
        }
    }
}
