//! A client's socket whose reader may stop for long: it looks readable, even when its peer is gone.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use adit_net::peer::{self, Peer};
use adit_tls::stream::Connection;

/// How often a socket is checked that is not read.
const EVERY: Duration = Duration::from_secs(5);

/// Fails its next flush when the peer is gone and the bytes before its end are not read.
pub(super) struct CheckedSocket<S> {
    pub(super) io: S,
    check: Interval,
    /// Since the last check.
    was_read: bool,
}

impl<S> CheckedSocket<S> {
    pub(super) fn new(io: S) -> Self {
        let mut check = interval_at(Instant::now() + EVERY, EVERY);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            io,
            check,
            was_read: false,
        }
    }
}

impl<S: Connection> AsyncRead for CheckedSocket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(cx, out);
        self.was_read |= read.is_ready();
        read
    }
}

impl<S: Connection> AsyncWrite for CheckedSocket<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.check.poll_tick(cx).is_ready() {
            let was_read = std::mem::take(&mut self.was_read);
            let state = self.io.descriptor().map(peer::state);
            if !was_read && matches!(state, Some(Peer::Closed | Peer::Failed)) {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
        }
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
