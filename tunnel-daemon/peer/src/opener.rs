//! Opens tunnels at one peer, each on a lane of its link.

use std::pin::pin;
use std::time::Duration;

use adit_agent::lanes::{Borrowed, LaneKeeper, Opened};
use adit_core::failure::DialFailure;
use adit_core::lane::{OpenRequest, RefusalCode};
use adit_core::peer::Forward;
use adit_server::backend::failure;
use adit_server::router::{Asking, PeerAnswer, PeerOpener};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// How long a dial waits for a lane, while lanes are being opened: a burst of dials needs many. Meanwhile the dial is hedged.
const LENT_WITHIN: Duration = Duration::from_secs(10);
/// How long it waits while none is being opened.
const FREE_WITHIN: Duration = Duration::from_secs(1);
/// Lanes tried for one dial: each before the last was lost before the peer could see the dial.
const ATTEMPTS_MAX: usize = 3;

/// Opens tunnels on the lanes of one link.
pub(crate) struct LaneOpener {
    pub(crate) lanes: LaneKeeper,
    /// Cancelled when the link is over: what the peer has not answered by then is lost.
    pub(crate) over: CancellationToken,
}

impl PeerOpener for LaneOpener {
    fn open<'a>(&'a self, protocol: &'a str, address: &'a str, forward: Forward) -> Asking<'a> {
        let request = OpenRequest {
            protocol: protocol.to_owned(),
            address: address.to_owned(),
            raw: false,
            origin: None,
            forward: Some(forward.encode()),
        };
        Box::pin(self.ask(request))
    }
}

impl LaneOpener {
    /// A lane; `None` if there is none in time.
    async fn lent(&self) -> Option<Borrowed> {
        let until = Instant::now() + LENT_WITHIN;
        let mut borrowing = pin!(self.lanes.borrow());
        loop {
            let step = (Instant::now() + FREE_WITHIN).min(until);
            tokio::select! {
                lane = &mut borrowing => return lane,
                () = self.over.cancelled() => return None,
                () = sleep_until(step) => {
                    if Instant::now() >= until || self.lanes.count().opening == 0 {
                        return None;
                    }
                }
            }
        }
    }

    async fn ask(&self, request: OpenRequest) -> PeerAnswer {
        if self.lanes.is_leaving() {
            return PeerAnswer::NotAsked;
        }
        if !self.lanes.has_idle() {
            // More lanes for the next dials, as a burst needs them.
            self.lanes.missed();
        }
        for _attempt in 0..ATTEMPTS_MAX {
            let Some(lane) = self.lent().await else {
                return PeerAnswer::NotAsked;
            };
            let opened = self.over.run_until_cancelled(lane.open(&request)).await;
            match opened.unwrap_or(Opened::Lost) {
                Opened::Open(endpoint) => return PeerAnswer::Open(endpoint),
                Opened::NotSeen => (),
                Opened::Lost => return PeerAnswer::Failed(DialFailure::LinkLost),
                Opened::Refused(RefusalCode::NotHere, _) => return PeerAnswer::NotHere,
                Opened::Refused(RefusalCode::Leaving, _) => {
                    self.lanes.leaves();
                    return PeerAnswer::NotAsked;
                }
                Opened::Refused(code, text) => {
                    return failure(code, text).map_or(PeerAnswer::NotAsked, PeerAnswer::Failed);
                }
            }
        }
        PeerAnswer::NotAsked
    }
}
