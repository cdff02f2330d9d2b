//! A tunnel's path over a lane. The task of the endpoint's socket or stream reads and writes the lane, only as fast as that
//! socket takes bytes. TCP provides the flow control.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::lane::{LaneEvent, Want};
use adit_core::session::{ProcessBudget, Queued, TunnelEnd};
use adit_relay::BufferSizes;
use adit_telemetry::PeerSeries;
use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use crate::incoming::Incoming;
use crate::lane::{Lane, LaneFailure};
use crate::path_state::PathState;
use crate::watch::LaneWatch;
use adit_net::buffer_growth::sizes_at_rest;
use adit_telemetry::tunnels::PathQuality;

/// Frames that an endpoint may queue for its lane: each takes memory beside its bytes, and the sender controls their size.
const QUEUE_FRAMES_MAX: usize = 4096;

/// Time for the peer to confirm a close, as on a link; then the endpoint is told that it is unconfirmed. The lane drains in the
/// background.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(10);

/// Takes a lane that its endpoint no longer needs: idle, or with the end of a tunnel in flight.
pub trait LaneOwner: Send + Sync {
    /// Cancelled when the lane's link is gone.
    fn gone(&self) -> &CancellationToken;
    /// Checks stalled lanes and lanes without a link.
    fn watch(&self) -> &LaneWatch;
    /// How long a half-closed tunnel may be silent.
    fn silence_max(&self) -> Duration;
    /// Budget of bytes held in the whole process.
    fn budget(&self) -> &Arc<ProcessBudget>;
    /// Takes the lane. Must not block.
    fn take_back(&self, lane: Lane, queued: Queued);
    /// A lane failed and was closed.
    fn lost(&self, failure: &LaneFailure);
    /// Agent: the server asks for lanes.
    fn want(&self, _want: Want) {}
}

/// A tunnel's path over a lane. Dropping it without [`LanePath::close`] resets the tunnel.
pub(super) struct LanePath {
    /// `None` once the tunnel is over on the lane; received bytes may still be undelivered then.
    lane: Option<Lane>,
    owner: Arc<dyn LaneOwner>,
    pub(super) state: PathState,
    closed: bool,
    /// The lane is one between servers.
    pub(super) peer: Option<Arc<PeerSeries>>,
}

impl LanePath {
    pub(super) fn new(lane: Lane, owner: Arc<dyn LaneOwner>) -> Self {
        let probe = owner.watch().enter(owner.gone().clone());
        Self {
            lane: Some(lane),
            state: PathState::new(owner.budget(), probe),
            owner,
            closed: false,
            peer: None,
        }
    }

    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let full = |path: &Self| {
            path.room() == 0
                || path
                    .lane
                    .as_ref()
                    .is_some_and(|lane| lane.state().queued_frames() >= QUEUE_FRAMES_MAX)
        };
        if full(self) {
            self.poll_flush(cx);
        }
        let is_full = full(self);
        self.state.poll_room(is_full)
    }

    /// Fits the lane's socket only: a link's socket carries many tunnels and keeps its buffers.
    pub(super) fn fit_buffers(&mut self, sizes: BufferSizes) {
        self.state
            .fit_buffers(self.lane.as_ref().and_then(Lane::tcp), sizes);
    }

    /// Bytes that the endpoint may send now. After the tunnel's end all are accepted and dropped.
    pub(super) fn room(&self) -> usize {
        let queued = self.lane.as_ref().map_or(0, Lane::queued_bytes);
        self.state.budget.queue_share().saturating_sub(queued)
    }

    /// Updates the budget with the bytes queued for the lane.
    fn count_queued(&mut self) {
        if let Some(lane) = &self.lane {
            self.state.queued.set(lane.queued_bytes() as u64);
        }
    }

    /// Returns the lane to its owner. Its queued bytes stay in the budget until they are written.
    fn give_back(&mut self) {
        // The next tunnel sizes the buffers anew.
        let budget = &self.state.budget;
        let sizes = if budget.starts_tcp_small() {
            BufferSizes::Small
        } else {
            sizes_at_rest(budget)
        };
        self.fit_buffers(sizes);
        if let Some(lane) = self.lane.take() {
            let none = Queued::none(&self.state.budget);
            let mut queued = std::mem::replace(&mut self.state.queued, none);
            queued.set(lane.queued_bytes() as u64);
            self.owner.take_back(lane, queued);
        }
    }

    pub(super) fn send(&mut self, bytes: Bytes) {
        self.state.sends();
        if let Some(lane) = &mut self.lane {
            lane.end().send(bytes);
        }
    }

    pub(super) fn fin(&mut self) {
        self.state.end_waits = false;
        if let Some(lane) = &mut self.lane {
            lane.end().fin();
        }
    }

    pub(super) fn close(&mut self, text: &str) {
        if !std::mem::replace(&mut self.closed, true)
            && let Some(lane) = &mut self.lane
        {
            lane.end().close(text);
            self.state.timer.stop();
        }
    }

    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) {
        if let Some(lane) = &mut self.lane
            && let Poll::Ready(Err(error)) = lane.poll_flush(cx)
        {
            if self.state.write_failed {
                self.fail(&error.into());
            }
            // Reading comes first: the peer may have sent an answer before it stopped reading.
            self.state.write_failed = true;
            cx.waker().wake_by_ref();
        }
        self.count_queued();
        self.poll_silence(cx);
        self.poll_watch(cx);
    }

    /// Quality of the lane's connection; one system call.
    pub(super) fn quality(&self) -> Option<PathQuality> {
        let state = adit_relay::tcp_state(self.lane.as_ref()?.tcp()?).ok()?;
        Some(PathQuality {
            rtt: state.rtt,
            retransmits: state.retransmits,
        })
    }

    /// When the watch asks: checks whether an unread lane has lost its peer, or has the endpoint check its own socket.
    fn poll_watch(&mut self, cx: &mut Context<'_>) {
        self.state.probe.register(cx.waker());
        if !self.state.probe.is_due() {
            return;
        }
        if self.owner.watch().is_shutting_down() {
            if let Some(lane) = &mut self.lane {
                lane.end().reset("the other end shuts down");
                self.finish(TunnelEnd::Shutdown);
            }
        } else if self.state.probe.is_troubled()
            && let Some(failure) = self.lane.as_ref().and_then(trouble)
        {
            self.fail(&failure);
        }
        self.state.checked(|| bytes_on_the_way(self.lane.as_ref()));
        cx.waker().wake_by_ref();
    }

    pub(super) fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        if let Some(waiting) = self.state.waiting.take() {
            return Poll::Ready(waiting);
        }
        loop {
            if let Some(end) = &self.state.end {
                return Poll::Ready(Incoming::Ended(end.clone()));
            }
            let Some(lane) = &mut self.lane else {
                return Poll::Ready(Incoming::Ended(TunnelEnd::LaneLost));
            };
            if self.state.reads_later() {
                return Poll::Pending;
            }
            // Charged before it is read: without room as little as a record.
            lane.read_little(self.state.budget.is_half_full());
            match lane.poll_event(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(failure)) => self.fail(&failure),
                Poll::Ready(Ok(event)) => match event {
                    LaneEvent::Data(bytes) => {
                        self.state.hold(&bytes);
                        return Poll::Ready(Incoming::Data(bytes));
                    }
                    LaneEvent::PeerFin => return Poll::Ready(Incoming::PeerFin),
                    LaneEvent::PeerClosed { text } => {
                        self.finish(TunnelEnd::Closed { error: text })
                    }
                    LaneEvent::PeerReset { text } => self.finish(TunnelEnd::Reset { error: text }),
                    LaneEvent::Idle => self.finish(TunnelEnd::Confirmed),
                    LaneEvent::Want(want) => self.owner.want(want),
                    // These events do not concern an open tunnel.
                    LaneEvent::Open(_)
                    | LaneEvent::Opened
                    | LaneEvent::Failed { .. }
                    | LaneEvent::Pong(_)
                    | LaneEvent::Draining => (),
                },
            }
        }
    }

    pub(super) fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.state.waiting.is_none() {
            match self.poll_recv(cx) {
                Poll::Ready(incoming) => self.state.waiting = Some(incoming),
                Poll::Pending => {
                    self.poll_flush(cx);
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.state.waiting.is_none() && self.lane.as_ref().is_none_or(|lane| !lane.has_input())
    }

    pub(super) fn poll_aborted(&mut self, cx: &mut Context<'_>) -> bool {
        let lane = self.lane.as_ref();
        self.state.poll_aborted(cx, || bytes_on_the_way(lane))
    }

    /// Resets a half-closed tunnel without a byte for too long, so that a close that looks like a half-close leaks nothing. A
    /// close that is not confirmed in time ends as unconfirmed.
    fn poll_silence(&mut self, cx: &mut Context<'_>) {
        if self.closed && self.state.end.is_none() {
            if self.has_run_out(cx, CONFIRMED_WITHIN) {
                self.finish(TunnelEnd::Unconfirmed);
                cx.waker().wake_by_ref();
            }
            return;
        }
        let half_closed = |lane: &Lane| self.state.end_waits || lane.state().is_half_closed();
        if self.lane.as_ref().is_some_and(half_closed)
            && self.state.end.is_none()
            && self.has_run_out(cx, self.owner.silence_max())
        {
            if let Some(lane) = &mut self.lane {
                lane.end().reset("half-closed and silent for too long");
            }
            self.finish(TunnelEnd::HalfClosedIdle);
            cx.waker().wake_by_ref();
        }
    }

    /// As [`ProgressTimer::has_run_out`].
    fn has_run_out(&mut self, cx: &mut Context<'_>, limit: Duration) -> bool {
        let lane = self.lane.as_ref();
        self.state
            .timer
            .has_run_out(cx, limit, || bytes_on_the_way(lane))
    }

    fn fail(&mut self, failure: &LaneFailure) {
        if self.lane.take().is_some() {
            self.owner.lost(failure);
        }
        self.count_queued();
        self.state.timer.stop();
        self.state.end.get_or_insert(TunnelEnd::LaneLost);
    }

    fn finish(&mut self, end: TunnelEnd) {
        self.state.timer.stop();
        self.state.end = Some(end);
        self.give_back();
    }
}

/// Bytes that the peer's kernel has not acknowledged.
fn bytes_on_the_way(lane: Option<&Lane>) -> usize {
    lane.map_or(0, Lane::unacknowledged_bytes)
}

/// Why a checked lane is over: its peer is gone, or its agent has lost the right to tunnels.
fn trouble(lane: &Lane) -> Option<LaneFailure> {
    if lane.is_revoked() {
        return Some(io::Error::from(io::ErrorKind::ConnectionAborted).into());
    }
    lane.peer_is_gone()
}

impl Drop for LanePath {
    fn drop(&mut self) {
        if let Some(lane) = &mut self.lane
            && !self.closed
        {
            lane.end().reset("");
        }
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::task::Waker;

    use adit_core::lane::{FrameReader, LaneRole};
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// An owner that keeps a single lane.
    struct Nowhere {
        gone: CancellationToken,
        watch: LaneWatch,
        budget: Arc<ProcessBudget>,
        back: Mutex<Option<(Lane, Queued)>>,
    }

    impl LaneOwner for Nowhere {
        fn gone(&self) -> &CancellationToken {
            &self.gone
        }

        fn watch(&self) -> &LaneWatch {
            &self.watch
        }

        fn silence_max(&self) -> Duration {
            Duration::from_secs(300)
        }

        fn budget(&self) -> &Arc<ProcessBudget> {
            &self.budget
        }

        fn take_back(&self, lane: Lane, queued: Queued) {
            *self.back.lock().unwrap() = Some((lane, queued));
        }

        fn lost(&self, _failure: &LaneFailure) {}
    }

    /// A frame of one byte takes as much memory as 70 bytes.
    ///
    /// Limit (memory): Bytes queued from an endpoint towards its link or lane | 256 KiB in at most 4,096 chunks
    /// Limit (memory): Bytes queued of a client or target that has closed
    #[tokio::test]
    async fn an_endpoint_may_be_4096_frames_ahead_of_its_lane_however_small_they_are() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap());
        let (near, server) = tokio::join!(near, listener.accept());
        let (mut server, _address) = server.unwrap();
        let frames = FrameReader::default();
        let mut lane = Lane::in_clear(near.unwrap(), LaneRole::Agent, frames, Bytes::new());
        let open = b"\x01\0\0\x01\0\0\0\x08\0\x03tcpa:1";
        server.write_all(open).await.unwrap();
        assert!(matches!(lane.event().await, Ok(LaneEvent::Open(_))));
        lane.end().accept();

        let owner = Nowhere {
            gone: CancellationToken::new(),
            watch: LaneWatch::default(),
            budget: Arc::new(ProcessBudget::new(1 << 30)),
            back: Mutex::default(),
        };
        let owner = Arc::new(owner);
        let mut path = LanePath::new(lane, Arc::clone(&owner) as Arc<dyn LaneOwner>);
        // The server reads nothing.
        let cx = &mut Context::from_waker(Waker::noop());
        let mut sent = 0;
        while path.poll_ready(cx).is_ready() {
            path.send(Bytes::from_static(b"x"));
            sent += 1;
            assert!(sent <= 10 << 20, "no end of it");
        }
        let lane = path.lane.as_ref().unwrap();
        assert_eq!(lane.state().queued_frames(), QUEUE_FRAMES_MAX);
        path.poll_flush(cx);
        let waits = path.lane.as_ref().unwrap().queued_bytes() as u64;
        path.close("");
        drop(path);
        // The close adds one more frame.
        assert!(owner.budget.queued_bytes() >= waits && waits > 0);
        *owner.back.lock().unwrap() = None;
        assert_eq!(owner.budget.queued_bytes(), 0);
    }
}
