//! The end of a conduit that a frontend or a target holds.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::session::{Moment, TunnelEnd};
use bytes::Bytes;

use super::clock::moment;
use super::conduit::{Conduit, DRAINED_NOTICE_BYTES, LEG_FIN, LEG_GONE, Mailbox};
use crate::telemetry::labels::ServiceMethod;
use crate::telemetry::{GaugeGuard, ServerMetrics};

/// What a leg may receive, in this order per tunnel: data, at most one `PeerFin`, one `Ended`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Incoming {
    /// Bytes for this side. Report them with [`Leg::drained`] once they have left.
    Data(Bytes),
    /// The other side sends no more; this side may.
    PeerFin,
    /// The tunnel is over. Repeats on every later call.
    Ended(TunnelEnd),
}

/// Who learns that a leg's socket or stream takes its bytes slower than they come.
#[derive(Clone, Debug)]
pub enum LegWatch {
    /// A client's writes are measured.
    Client(ServerMetrics),
    /// A target, by its address, is named in the log, once.
    Target(Arc<str>),
}

/// A write that waits.
struct Stalled {
    since: Moment,
    _counted: GaugeGuard,
}

/// One side of a tunnel. Dropping it without [`Leg::close`] resets the tunnel.
pub struct Leg {
    conduit: Arc<Conduit>,
    drained_told: u64,
    peer_fin_seen: bool,
    sent_bytes: u64,
    received_bytes: u64,
    watch: Option<LegWatch>,
    stalled: Option<Stalled>,
}

impl Leg {
    /// A leg towards the link that owns `mailbox`, and what that link needs of it.
    #[must_use]
    pub fn new(mailbox: &Arc<Mailbox>) -> (Self, Arc<Conduit>) {
        let conduit = Conduit::new(Arc::clone(mailbox));
        let leg = Self {
            conduit: Arc::clone(&conduit),
            drained_told: 0,
            peer_fin_seen: false,
            sent_bytes: 0,
            received_bytes: 0,
            watch: None,
            stalled: None,
        };
        (leg, conduit)
    }

    /// Ready when the link takes more bytes of this leg. An ended tunnel is always ready.
    pub fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
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

    /// Hands bytes to the link. Ask [`Self::poll_ready`] first; it is a bound, not a lock.
    pub fn send(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.sent_bytes += bytes.len() as u64;
            self.conduit.put_up(bytes);
        }
    }

    /// This side sends no more bytes.
    pub fn fin(&self) {
        self.conduit.raise(LEG_FIN);
    }

    /// Closes the tunnel once everything sent so far has reached the peer.
    pub fn close(&self) {
        self.conduit.close_with(String::new());
    }

    /// Like [`Self::close`], with a text for the other end where the protocol carries one.
    pub fn close_with(&self, text: &str) {
        self.conduit.close_with(text.to_owned());
    }

    /// The next event for this side.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        if let Some(incoming) = self.try_recv() {
            return Poll::Ready(incoming);
        }
        self.conduit.register_down(cx.waker());
        self.try_recv().map_or(Poll::Pending, Poll::Ready)
    }

    /// The next event, if there is one now.
    pub fn try_recv(&mut self) -> Option<Incoming> {
        // Flags first: whatever was queued before they were raised is still found below.
        let ended = self.conduit.end().is_some();
        let finished = self.conduit.peer_finished();
        let discard = self.conduit.end().is_some_and(|end| !end.delivers_rest());
        if !discard
            && !self.conduit.aborted()
            && let Some(bytes) = self.conduit.take_down()
        {
            self.received_bytes += bytes.len() as u64;
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

    /// Whether the link wants this side to give up what it still holds.
    #[must_use]
    pub fn aborted(&self) -> bool {
        self.conduit.aborted() || self.conduit.end().is_some_and(|end| !end.delivers_rest())
    }

    /// Like [`Self::aborted`], and has the task woken when it changes.
    pub fn poll_aborted(&self, cx: &mut Context<'_>) -> bool {
        self.conduit.register_down(cx.waker());
        self.aborted()
    }

    /// How the tunnel ended, if it has; an abort makes a clean end one that was not.
    #[must_use]
    pub fn last_end(&self) -> Option<TunnelEnd> {
        self.conduit.last_end()
    }

    /// Tells who wants to know of stalls from now on.
    pub fn watch(&mut self, watch: LegWatch) {
        self.watch = Some(watch);
    }

    /// Bytes received earlier wait for this side's socket or stream, until [`Self::drained`] is called.
    pub fn stalled(&mut self) {
        match &self.watch {
            Some(LegWatch::Client(metrics)) if self.stalled.is_none() => {
                // The client is what would hold up upstream's reader of the agent's stream.
                self.stalled = Some(Stalled {
                    since: moment(),
                    _counted: metrics.full_receive_channel(ServiceMethod::Connect),
                });
            }
            Some(LegWatch::Target(address)) => {
                tracing::warn!(
                    target_address = &**address,
                    "queue towards a target is full: it takes bytes slower than they come"
                );
                self.watch = None;
            }
            Some(LegWatch::Client(_)) | None => (),
        }
    }

    /// `bytes` received earlier have left this side (its socket or stream took them).
    pub fn drained(&mut self, bytes: usize) {
        if let Some(LegWatch::Client(metrics)) = &self.watch
            && bytes > 0
        {
            // No clock is read for a write that did not wait.
            let waited = self.stalled.take();
            let waited = waited.map_or(Duration::ZERO, |stalled| moment().since(stalled.since));
            metrics.frontend_write(waited);
        }
        let sum = self.conduit.add_drained(bytes as u64);
        if sum - self.drained_told >= DRAINED_NOTICE_BYTES {
            self.drained_told = sum;
            self.conduit.schedule();
        }
    }

    /// Completes when [`Self::try_recv`] has something. Takes nothing.
    pub async fn readable(&self) {
        std::future::poll_fn(|cx| {
            self.conduit.register_down(cx.waker());
            let something = !self.conduit.down_is_empty()
                || self.conduit.peer_finished()
                || self.conduit.end().is_some();
            if something {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Whether nothing is waiting for this side now.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.conduit.down_is_empty()
    }

    /// Bytes handed to the link, and bytes received from it, so far.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.sent_bytes, self.received_bytes)
    }

    /// Waits for the next event.
    pub async fn recv(&mut self) -> Incoming {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Waits until the link takes more bytes.
    pub async fn ready(&self) {
        std::future::poll_fn(|cx| self.poll_ready(cx)).await;
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        self.conduit.raise(LEG_GONE);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn a_leg_may_be_256_kibibytes_ahead_of_its_link() {
        let mailbox = Arc::new(Mailbox::default());
        let (mut leg, conduit) = Leg::new(&mailbox);
        let mut ahead = 0;
        while poll!(std::future::poll_fn(|cx| leg.poll_ready(cx))).is_ready() {
            leg.send(Bytes::from(vec![0; 4096]));
            ahead += 4096;
            assert!(ahead <= 1 << 20, "no end of it");
        }
        assert_eq!(ahead, 256 * 1024);
        let sent = conduit.take_up().expect("queued").len();
        conduit.release_up(sent);
        let ready = poll!(std::future::poll_fn(|cx| leg.poll_ready(cx)));
        assert!(ready.is_ready(), "what the link sent makes room");
    }
}
