//! A tunnel's path over a link: the endpoint's side of the channel.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use adit_core::session::{ProcessBudget, TunnelEnd};
use bytes::Bytes;
use tokio::time::{Instant, Sleep};

use crate::channel::{
    Channel, DRAINED_NOTICE_BYTES, ENDPOINT_END_WAITS, ENDPOINT_FIN, ENDPOINT_GONE,
};
use crate::incoming::Incoming;
use crate::watch;
use adit_config::limits;

/// A tunnel's path over a link. Dropping it without [`LinkPath::close`] resets the tunnel.
pub(super) struct LinkPath {
    channel: Arc<Channel>,
    /// After the tunnel's end: armed while bytes linger; the link watches them, too, while it lives. Before the end: armed
    /// while the endpoint is paused, and some seconds longer.
    timer: Option<Pin<Box<Sleep>>>,
    /// The timer is for lingering bytes.
    lingers: bool,
    /// The endpoint has sent bytes since the timer was set.
    sent: bool,
    /// Drained bytes not yet reported to the link.
    untold_bytes: u32,
    peer_fin_seen: bool,
}

impl LinkPath {
    pub(super) fn new(channel: Arc<Channel>) -> Self {
        Self {
            channel,
            timer: None,
            lingers: false,
            sent: false,
            untold_bytes: 0,
            peer_fin_seen: false,
        }
    }

    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.channel.up_has_space() || self.channel.end().is_some() {
            // The pause is over. The timer is kept until it elapses, since the next pause may begin at once.
            let timer = self.timer.as_ref();
            if !self.lingers && timer.is_some_and(|timer| timer.is_elapsed()) {
                self.timer = None;
            }
            return Poll::Ready(());
        }
        self.channel.register_up(cx.waker());
        if self.channel.up_has_space() || self.channel.end().is_some() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    pub(super) fn budget(&self) -> Option<&Arc<ProcessBudget>> {
        self.channel.budget()
    }

    /// Bytes that the endpoint may send now.
    pub(super) fn room(&self) -> usize {
        self.channel.up_room()
    }

    /// Ready every few seconds while the link takes no more; yields whether it took bytes since the last check.
    pub(super) fn poll_check(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let timer = self.timer.get_or_insert_with(|| {
            self.sent = false;
            Box::pin(tokio::time::sleep(watch::EVERY))
        });
        let mut check = Poll::Pending;
        while timer.as_mut().poll(cx).is_ready() {
            check = Poll::Ready(std::mem::take(&mut self.sent));
            timer.as_mut().reset(Instant::now() + watch::EVERY);
        }
        check
    }

    /// A half-close behind unread bytes counts as a half-close.
    pub(super) fn end_waits(&self) {
        self.channel.raise(ENDPOINT_END_WAITS);
    }

    pub(super) fn send(&mut self, bytes: Bytes) {
        self.sent = true;
        self.channel.put_up(bytes);
    }

    pub(super) fn fin(&self) {
        self.channel.raise(ENDPOINT_FIN);
    }

    pub(super) fn close(&self, text: &str) {
        self.channel.close_with(text.to_owned());
    }

    pub(super) fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        if let Some(incoming) = self.next() {
            return Poll::Ready(incoming);
        }
        self.channel.register_down(cx.waker());
        self.next().map_or(Poll::Pending, Poll::Ready)
    }

    fn next(&mut self) -> Option<Incoming> {
        // Flags before data, so that data queued before a flag was raised is found below.
        let ended = self.channel.end().is_some();
        let finished = self.channel.peer_finished();
        let discard = self.channel.end().is_some_and(|end| !end.delivers_rest());
        if !discard && !self.channel.aborted() {
            if let Some(bytes) = self.channel.take_down() {
                return Some(Incoming::Data(bytes));
            }
            self.channel.ask_for_more();
        }
        if finished && !self.peer_fin_seen {
            self.peer_fin_seen = true;
            return Some(Incoming::PeerFin);
        }
        if ended {
            self.channel.last_end().map(Incoming::Ended)
        } else {
            None
        }
    }

    /// After the end, received bytes linger for as long as the endpoint's socket makes progress.
    pub(super) fn poll_aborted(&mut self, cx: &mut Context<'_>) -> bool {
        self.channel.register_down(cx.waker());
        let Some(end) = self.channel.end() else {
            return self.channel.aborted();
        };
        if self.channel.aborted() || !end.delivers_rest() {
            return true;
        }
        if !std::mem::replace(&mut self.lingers, true) {
            self.timer = None;
        }
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(limits::LINGER_TIMEOUT)));
        let has_run_out = timer.as_mut().poll(cx).is_ready();
        if has_run_out {
            self.channel.abort(&TunnelEnd::LingerExpired);
        }
        has_run_out
    }

    pub(super) fn last_end(&self) -> Option<TunnelEnd> {
        self.channel.last_end()
    }

    pub(super) fn drained(&mut self, bytes: usize) {
        self.channel.add_drained(bytes as u64);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.untold_bytes = self.untold_bytes.saturating_add(bytes);
        let mut is_due = self.untold_bytes >= DRAINED_NOTICE_BYTES;
        if bytes > 0
            && self.lingers
            && let Some(timer) = &mut self.timer
        {
            let at = Instant::now() + limits::LINGER_TIMEOUT;
            timer.as_mut().reset(at);
            // The link checks for progress, too, however small.
            is_due = true;
        }
        if is_due {
            self.untold_bytes = 0;
            self.channel.schedule();
        }
    }

    pub(super) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.channel.register_down(cx.waker());
        let something = !self.channel.down_is_empty()
            || self.channel.peer_finished()
            || self.channel.end().is_some();
        if something {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.channel.down_is_empty()
    }
}

impl Drop for LinkPath {
    fn drop(&mut self) {
        self.channel.raise(ENDPOINT_GONE);
    }
}
