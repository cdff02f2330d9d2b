//! Serves one lane in a task of its own: waits, lends the lane or takes an OPEN, dials, and hands the tunnel on.

use std::io::ErrorKind::ConnectionReset;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use adit_core::lane::{LaneEvent, OpenRequest, RefusalCode};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::checkout::Borrowed;
use super::{Arriving, Counted, LaneKeeper};
use crate::targets::{DialedTarget, dial_target};
use adit_telemetry::CountedTunnel;
use adit_telemetry::labels::{EndReason, Label as _, LaneCloseReason, LaneState, Offence, Path};
use adit_tls::stream::Connection as _;
use adit_tunnel::lane::{Lane, LaneFailure};
use adit_tunnel::{Endpoint, LaneOwner as _, until_answered};

/// A lane lost sooner than this without a tunnel counts as a failed attempt.
const PROVED_AFTER: Duration = Duration::from_secs(5);

impl LaneKeeper {
    /// Serves a lane without a tunnel until a tunnel opens on it. A lane that is not `arriving` has carried a tunnel before.
    pub(super) async fn serve(&self, mut lane: Lane, mut arriving: Option<Arriving>) {
        let (since, proven) = (Instant::now(), arriving.is_none());
        loop {
            lane.count_as(self.adit().lanes.of(LaneState::Idle).guard());
            let request = match self.wait(&mut lane, arriving.take()).await {
                Ok(Waited::Asked(request)) => request,
                Ok(Waited::Lend(borrower)) => {
                    self.0.proved.store(true, Relaxed);
                    match borrower.send(Borrowed::new(lane, self.clone())) {
                        Ok(()) => return self.0.changed.notify_one(),
                        // The borrower has given up meanwhile.
                        Err(borrowed) => match borrowed.give_back() {
                            Some(back) => lane = back,
                            None => return,
                        },
                    }
                    continue;
                }
                Err(end) => {
                    let lost = matches!(end, LaneCloseReason::Lost | LaneCloseReason::Violation);
                    if lost && !proven && since.elapsed() < PROVED_AFTER {
                        self.0.stillborn.fetch_add(1, Relaxed);
                    }
                    self.0.changed.notify_one();
                    return self.adit().lanes_closed.count(end);
                }
            };
            if let Some(asker) = &self.0.context.asker {
                asker.asked("OPEN");
                let text = "a server dials nothing for another one";
                lane.end().refuse(RefusalCode::Denied, text);
                continue;
            }
            self.0.proved.store(true, Relaxed);
            if request.forward.is_some() {
                self.adit().offences.count(Offence::Forward);
                let text = "an agent takes no forwarded dials";
                lane.end().refuse(RefusalCode::Denied, text);
                continue;
            }
            if request.raw && !lane.may_be_raw() {
                let text = "a raw lane must be plaintext or use kernel TLS";
                lane.end().refuse(RefusalCode::Denied, text);
                continue;
            }
            lane.count_as(self.adit().lanes.of(LaneState::Busy).guard());
            self.taken();
            // Until the target counts as open, or the lane is idle again.
            let _under_way = self.0.context.dials.begin();
            let answer = {
                let OpenRequest {
                    protocol, address, ..
                } = &request;
                let dialing = dial_target(&self.0.context, protocol, address, Path::Lane);
                // Boxed: a dial's state is large, and the tunnel that follows may live for days.
                until_answered(&mut lane, Box::pin(dialing), |want| self.want(want)).await
            };
            match answer {
                Ok(Some(Ok(target))) => return self.opened(lane, target, request),
                Ok(Some(Err(text))) => lane.end().refuse(RefusalCode::Failed, &text),
                // The server has withdrawn the OPEN.
                Ok(None) => (),
                // The server gives up a dial for a raw lane by RST; this is no failure.
                Err(LaneFailure::Io(error)) if request.raw && error.kind() == ConnectionReset => {
                    self.adit().lanes_closed.count(LaneCloseReason::Used);
                    return self.0.changed.notify_one();
                }
                Err(failure) => return self.lost(&failure),
            }
        }
    }

    /// Answers the OPEN of a target that has accepted.
    fn opened(&self, mut lane: Lane, mut target: DialedTarget, request: OpenRequest) {
        let OpenRequest { raw, address, .. } = request;
        if !raw {
            lane.end().accept();
            return self.open(lane, target, address);
        }
        let relay = self.0.context.relay.as_ref();
        let has_room = relay.is_some_and(|relay| relay.has_room());
        if !has_room || !target.promise.extend_to_raw_lane() {
            // A task copies the tunnel's frames.
            lane.end().accept_framed();
            return self.open(lane, target, address);
        }
        match lane.accept_raw() {
            Ok(true) => self.open_raw(lane, target, address),
            Ok(false) => self.open(lane, target, address),
            Err(failure) => self.lost(&failure),
        }
    }

    /// Waits for an OPEN, or for a local request to borrow the lane.
    async fn wait(
        &self,
        lane: &mut Lane,
        arriving: Option<Arriving>,
    ) -> Result<Waited, LaneCloseReason> {
        // A lane that either end drains takes no more tunnels, however long the server keeps it.
        let mut idle = (!lane.state().is_draining()).then(|| Counted::new(&self.0.idle));
        // Only after the lane counts as idle: a count in between would miss it, and one lane too many would be opened.
        drop(arriving);
        let stopping = self.0.context.tasks.stopping();
        loop {
            if lane.state().is_draining() && idle.take().is_some() {
                self.0.changed.notify_one();
            }
            let free = lane.state().can_open();
            tokio::select! {
                biased;
                event = lane.event() => match event {
                    Ok(LaneEvent::Open(request)) => return Ok(Waited::Asked(request)),
                    Ok(LaneEvent::Want(want)) => self.want(want),
                    Ok(_) => (),
                    Err(failure) => return Err(if lane.state().is_draining() {
                        LaneCloseReason::Drained
                    } else {
                        self.note(&failure)
                    }),
                },
                borrower = self.0.checkouts.next(), if free => return Ok(Waited::Lend(borrower)),
                () = self.0.surplus.notified(), if !lane.state().is_draining() => lane.end().drain(),
                () = self.0.gone.cancelled() => return Err(LaneCloseReason::LinkGone),
                () = stopping.cancelled() => return Err(LaneCloseReason::LinkGone),
            }
        }
    }

    /// Starts an accepted tunnel in a task of its own: this future, which has waited and dialled, is larger.
    fn open(&self, lane: Lane, target: DialedTarget, address: String) {
        let context = &self.0.context;
        let owner = Arc::new(self.clone());
        let endpoint = Endpoint::on_lane(lane, owner);
        let tunnel = context.serve(&self.0.server, target, endpoint, address, Path::Lane);
        // When the task is refused, the endpoint is dropped, which ends the tunnel.
        let _full = context.tasks.spawn("target", tunnel);
    }

    /// Starts an accepted tunnel on a raw lane: from here on relay threads own both sockets.
    fn open_raw(&self, lane: Lane, target: DialedTarget, address: String) {
        let context = &self.0.context;
        let (mut raw_lane, relay) = match (lane.into_raw(self.adit()), &context.relay) {
            (Ok(raw_lane), Some(relay)) => (raw_lane, relay),
            // Without a relay no lane becomes a raw lane. Dropping the raw lane resets it.
            (Ok(_), None) => return,
            (Err(failure), _) => return self.lost(&failure),
        };
        raw_lane.kept.promise = Some(target.promise);
        let Some(socket) = target.socket.into_descriptor() else {
            return tracing::debug!("a target's socket cannot be relayed");
        };
        let open = context.metrics.open_endpoint_connections.guard();
        let entry = context.enter(&self.0.server, &address, raw_lane.path());
        let live = entry.live();
        let keeper = Arc::downgrade(&self.0);
        let counted = CountedTunnel::opened(self.adit(), raw_lane.path());
        relay.hand_over(socket, raw_lane, &live, move |outcome| {
            drop((entry, open));
            counted.ended(outcome.end.reason.at_target());
            if outcome.end.reason == EndReason::KeysUsedUp {
                tracing::warn!(
                    target_address = address,
                    "a tunnel was cut: the keys of its kernel TLS are used up; --lane-security=tls has no such limit"
                );
            }
            tracing::debug!(
                target_address = address,
                from_target = outcome.from_socket,
                to_target = outcome.to_socket,
                end = %outcome.end,
                engine = outcome.engine.as_str(),
                "target connection over"
            );
            // A slot for another lane is free.
            if let Some(keeper) = keeper.upgrade() {
                keeper.changed.notify_one();
            }
        });
    }
}

/// What an idle lane received.
enum Waited {
    /// The server has sent OPEN.
    Asked(OpenRequest),
    /// A local borrower requests the lane.
    Lend(oneshot::Sender<Borrowed>),
}
