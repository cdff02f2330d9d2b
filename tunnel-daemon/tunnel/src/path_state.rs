//! What the paths over a connection of one tunnel have in common: how far the endpoint's own socket and the connection are.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::task::{Context, Poll};

use adit_config::limits;
use adit_core::session::{ProcessBudget, Queued, TunnelEnd};
use adit_relay::{BufferSizes, SocketBuffers};
use bytes::Bytes;

use crate::incoming::Incoming;
use crate::progress_timer::ProgressTimer;
use crate::watch::Probe;

/// See the module.
pub(super) struct PathState {
    pub(super) budget: Arc<ProcessBudget>,
    pub(super) probe: Arc<Probe>,
    /// Received, and not taken by the endpoint.
    pub(super) waiting: Option<Incoming>,
    pub(super) end: Option<TunnelEnd>,
    pub(super) write_failed: bool,
    /// The endpoint's socket has ended behind bytes that the connection does not take.
    pub(super) end_waits: bool,
    /// Armed while the tunnel is half-closed, and while bytes linger after its end.
    pub(super) timer: ProgressTimer,
    /// Bytes queued for the connection, as counted in the budget.
    pub(super) queued: Queued,
    /// The connection takes no more bytes.
    full: bool,
    /// The endpoint has sent bytes since the last check of its own socket.
    sent: bool,
    /// The endpoint's own socket is due for a check; whether bytes moved since the last one.
    check: Option<bool>,
    /// Bytes given to the endpoint that its socket or stream has not taken yet.
    held: u64,
    /// Bytes in flight at the watch's last check: behind a slow reader they shrink for minutes before more are taken.
    on_the_way_seen: usize,
    buffers: SocketBuffers,
}

impl PathState {
    pub(super) fn new(budget: &Arc<ProcessBudget>, probe: Arc<Probe>) -> Self {
        Self {
            budget: Arc::clone(budget),
            probe,
            waiting: None,
            end: None,
            write_failed: false,
            end_waits: false,
            timer: ProgressTimer::default(),
            queued: Queued::none(budget),
            full: false,
            sent: false,
            check: None,
            held: 0,
            on_the_way_seen: 0,
            buffers: SocketBuffers::default(),
        }
    }

    /// Whether the endpoint may send more.
    pub(super) fn poll_room(&mut self, is_full: bool) -> Poll<()> {
        if is_full != self.full {
            self.full = is_full;
            self.check = None;
            self.probe.set_full(is_full);
        }
        if is_full {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// Fits the buffers of the connection's socket.
    pub(super) fn fit_buffers(&mut self, socket: Option<impl AsFd>, sizes: BufferSizes) {
        if sizes != self.buffers.sizes()
            && let Some(socket) = socket
            && let Err(error) = self.buffers.fit(socket, sizes, false)
        {
            tracing::debug!(%error, "the buffers of a tunnel's connection stay as they are");
        }
    }

    /// Ready every few seconds while the connection takes no more; yields whether it took bytes since the last check.
    pub(super) fn poll_check(&mut self) -> Poll<bool> {
        self.check.take().map_or(Poll::Pending, Poll::Ready)
    }

    /// The endpoint sends bytes.
    pub(super) fn sends(&mut self) {
        self.timer.moved();
        self.sent = true;
    }

    /// Has the endpoint check its own socket, when the watch asked and the connection takes no more.
    pub(super) fn checked(&mut self, on_the_way: impl Fn() -> usize) {
        if self.full {
            let on_the_way = on_the_way();
            let moves = on_the_way < self.on_the_way_seen;
            self.on_the_way_seen = on_the_way;
            self.check = Some(std::mem::take(&mut self.sent) || moves);
        }
    }

    /// While memory is short, more is read once the endpoint's socket has taken what it was given; the endpoint polls again then.
    pub(super) fn reads_later(&self) -> bool {
        self.held > 0 && self.budget.is_half_full()
    }

    /// Charges bytes for the endpoint.
    pub(super) fn hold(&mut self, bytes: &Bytes) {
        self.timer.moved();
        self.held += bytes.len() as u64;
        self.budget.hold(bytes.len() as u64);
    }

    /// The endpoint's socket or stream has taken bytes.
    pub(super) fn drained(&mut self, bytes: usize) {
        if bytes > 0 {
            self.timer.moved();
            self.probe.set_stalled(false);
            self.release(bytes as u64);
        }
    }

    fn release(&mut self, bytes: u64) {
        let bytes = bytes.min(self.held);
        self.held -= bytes;
        self.budget.release(bytes);
    }

    /// Whether no more bytes arrive and none are delivered. After the end, received bytes linger for as long as the endpoint's socket
    /// makes progress.
    pub(super) fn poll_aborted(
        &mut self,
        cx: &mut Context<'_>,
        on_the_way: impl Fn() -> usize,
    ) -> bool {
        let delivers = |end: &TunnelEnd| end.delivers_rest();
        if self.end.as_ref().is_some_and(delivers)
            && self
                .timer
                .has_run_out(cx, limits::LINGER_TIMEOUT, on_the_way)
        {
            self.end = Some(TunnelEnd::LingerExpired);
        }
        self.end.as_ref().is_some_and(|end| !end.delivers_rest())
    }
}

impl Drop for PathState {
    fn drop(&mut self) {
        self.release(self.held);
    }
}
