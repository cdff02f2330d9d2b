//! A leg's way over its link: the conduit's near end.

use std::sync::Arc;
use std::task::{Context, Poll};

use adit_core::session::TunnelEnd;
use bytes::Bytes;

use super::conduit::{Conduit, DRAINED_NOTICE_BYTES, LEG_FIN, LEG_GONE};
use super::leg::Incoming;

/// Dropping it without [`LinkWay::close`] resets the tunnel.
pub(super) struct LinkWay {
    conduit: Arc<Conduit>,
    drained_told: u64,
    peer_fin_seen: bool,
}

impl LinkWay {
    pub(super) fn new(conduit: Arc<Conduit>) -> Self {
        Self {
            conduit,
            drained_told: 0,
            peer_fin_seen: false,
        }
    }

    pub(super) fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.conduit.up_has_space() || self.conduit.end().is_some() {
            return Poll::Ready(());
        }
        self.conduit.register_up(cx.waker());
        if self.conduit.up_has_space() || self.conduit.end().is_some() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    pub(super) fn send(&self, bytes: Bytes) {
        self.conduit.put_up(bytes);
    }

    pub(super) fn fin(&self) {
        self.conduit.raise(LEG_FIN);
    }

    pub(super) fn close(&self, text: &str) {
        self.conduit.close_with(text.to_owned());
    }

    pub(super) fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        if let Some(incoming) = self.next() {
            return Poll::Ready(incoming);
        }
        self.conduit.register_down(cx.waker());
        self.next().map_or(Poll::Pending, Poll::Ready)
    }

    fn next(&mut self) -> Option<Incoming> {
        // Flags first: whatever was queued before they were raised is still found below.
        let ended = self.conduit.end().is_some();
        let finished = self.conduit.peer_finished();
        let discard = self.conduit.end().is_some_and(|end| !end.delivers_rest());
        if !discard
            && !self.conduit.aborted()
            && let Some(bytes) = self.conduit.take_down()
        {
            return Some(Incoming::Data(bytes));
        }
        if finished && !self.peer_fin_seen {
            self.peer_fin_seen = true;
            return Some(Incoming::PeerFin);
        }
        if ended {
            self.conduit.last_end().map(Incoming::Ended)
        } else {
            None
        }
    }

    pub(super) fn poll_aborted(&self, cx: &mut Context<'_>) -> bool {
        self.conduit.register_down(cx.waker());
        self.conduit.aborted() || self.conduit.end().is_some_and(|end| !end.delivers_rest())
    }

    pub(super) fn last_end(&self) -> Option<TunnelEnd> {
        self.conduit.last_end()
    }

    pub(super) fn drained(&mut self, bytes: usize) {
        let sum = self.conduit.add_drained(bytes as u64);
        if sum - self.drained_told >= DRAINED_NOTICE_BYTES {
            self.drained_told = sum;
            self.conduit.schedule();
        }
    }

    pub(super) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.conduit.register_down(cx.waker());
        let something = !self.conduit.down_is_empty()
            || self.conduit.peer_finished()
            || self.conduit.end().is_some();
        if something {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.conduit.down_is_empty()
    }
}

impl Drop for LinkWay {
    fn drop(&mut self) {
        self.conduit.raise(LEG_GONE);
    }
}
