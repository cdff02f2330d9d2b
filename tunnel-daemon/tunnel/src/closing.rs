//! Closes a socket whose tunnel is over while its last bytes are in flight and its peer may still send.
//!
//! A kernel that closes a TCP socket with unread input, or receives input afterwards, sends RST and drops undelivered bytes. So
//! the socket is read until closing it is safe.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use adit_relay::unacknowledged_bytes;
use tokio::io::AsyncRead;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use adit_config::limits;
use adit_net::socket;
use adit_tls::blocks;
use adit_tls::stream::Connection;

/// Reads in one poll, before the task yields.
const READS_PER_POLL: usize = 4;
/// First and longest interval between questions to the kernel whether all bytes are delivered: it has no event for that.
/// Usually the peer closes, too, which is an event.
const ASK_AFTER: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// How a socket is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Closing {
    /// With FIN after the last byte.
    InOrder,
    /// With RST after the last byte. A unix socket has no RST: its peer sees a reset if it sent bytes that were not read, else
    /// EOF.
    CutOff,
    /// With RST at once, which may discard undelivered bytes. A unix socket behaves as for `CutOff` and loses no bytes.
    Reset,
}

/// Closes a socket up to dropping it, which the owner does once this is ready. Bytes that the peer does not take for 30 s are
/// given up.
pub(super) struct GracefulClose {
    closing: Closing,
    /// Dropping the socket resets the connection.
    armed: bool,
    /// The kernel has all bytes, and FIN where one is due.
    told: bool,
    /// The peer has sent bytes since the tunnel's end.
    spoken: bool,
    /// The peer has sent EOF.
    silent: bool,
    /// Boxed: rarely needed.
    patience: Option<Box<Patience>>,
}

/// Waits for the peer's kernel to take bytes.
struct Patience {
    timer: Pin<Box<Sleep>>,
    ask_after: Duration,
    left: usize,
    since: Instant,
}

/// Closes `io` up to dropping it, which the caller does. Input is read and dropped until the last bytes are delivered. Bytes
/// that the peer does not take for 30 s are given up. A cancelled call leaves the rest to the kernel, if that has all of it by
/// then.
pub fn close_gracefully<S: Connection>(io: &mut S, closing: Closing) -> impl Future<Output = ()> {
    let mut graceful = GracefulClose::new(closing);
    std::future::poll_fn(move |cx| graceful.poll(cx, io))
}

impl GracefulClose {
    pub(super) fn new(closing: Closing) -> Self {
        Self {
            closing,
            armed: false,
            told: false,
            spoken: false,
            silent: false,
            patience: None,
        }
    }

    /// Call it with the same socket each time, and not again once it is ready.
    pub(super) fn poll<S: Connection>(&mut self, cx: &mut Context<'_>, io: &mut S) -> Poll<()> {
        if self.closing != Closing::InOrder
            && !std::mem::replace(&mut self.armed, true)
            && let Some(socket) = io.tcp()
        {
            // At once: dropping the task or killing the process closes the socket as well.
            reset_on_close(socket);
        }
        if self.closing != Closing::Reset {
            ready!(self.poll_delivered(cx, io));
        }
        Poll::Ready(())
    }

    /// Ready when all bytes are delivered, or when waiting is of no more use.
    fn poll_delivered<S: Connection>(&mut self, cx: &mut Context<'_>, io: &mut S) -> Poll<()> {
        if !self.told {
            let told = match self.closing {
                Closing::InOrder => Pin::new(&mut *io).poll_shutdown(cx),
                Closing::CutOff | Closing::Reset => Pin::new(&mut *io).poll_flush(cx),
            };
            match told {
                Poll::Ready(Ok(())) => {
                    self.told = true;
                    if self.closing == Closing::InOrder
                        && let Some(socket) = io.tcp()
                    {
                        end_on_close(socket);
                    }
                }
                Poll::Ready(Err(_gone)) => return Poll::Ready(()),
                Poll::Pending => (),
            }
        }
        let Some(left) = io.tcp().map(|tcp| unacknowledged_bytes(tcp).unwrap_or(0)) else {
            return self.poll_without_tcp(cx, io);
        };
        if self.poll_input(cx, io).is_err() {
            return Poll::Ready(());
        }
        if self.told && self.is_delivered(left) {
            return Poll::Ready(());
        }
        self.poll_patience(cx, left)
    }

    /// Whether it is safe to close with `left` bytes unacknowledged.
    fn is_delivered(&self, left: usize) -> bool {
        match self.closing {
            // FIN counts as a byte. The kernel delivers FIN by itself, and all bytes before it as long as no input arrives that
            // it answers with RST.
            Closing::InOrder => self.silent || left == 0 || (left == 1 && !self.spoken),
            Closing::CutOff | Closing::Reset => left == 0,
        }
    }

    /// Bytes written to a unix socket are with its peer already.
    fn poll_without_tcp<S: Connection>(&mut self, cx: &mut Context<'_>, io: &mut S) -> Poll<()> {
        // A close with unread input looks like a reset to the peer, not like EOF.
        let reads = self.closing == Closing::InOrder;
        if self.told && !(reads && io.refuse_input()) {
            return Poll::Ready(());
        }
        if self.poll_input(cx, io).is_err() || (self.told && self.silent) {
            return Poll::Ready(());
        }
        self.poll_patience(cx, 0)
    }

    /// Reads and drops input.
    ///
    /// # Errors
    /// The connection is gone.
    fn poll_input<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut S,
    ) -> std::io::Result<()> {
        for _read in 0..READS_PER_POLL {
            if self.silent {
                return Ok(());
            }
            match blocks::poll_discard(cx, io)? {
                Poll::Ready(0) => self.silent = true,
                Poll::Ready(_count) => self.spoken = true,
                Poll::Pending => return Ok(()),
            }
        }
        cx.waker().wake_by_ref();
        Ok(())
    }

    /// Ready when the bytes have waited too long; `left` bytes wait now.
    fn poll_patience(&mut self, cx: &mut Context<'_>, left: usize) -> Poll<()> {
        let patience = self.patience.get_or_insert_with(|| {
            let (ask_after, _at_most) = ASK_AFTER;
            Box::new(Patience {
                timer: Box::pin(tokio::time::sleep(ask_after)),
                ask_after,
                left,
                since: Instant::now(),
            })
        });
        while patience.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if left != patience.left {
                (patience.left, patience.since) = (left, now);
            }
            if now.duration_since(patience.since) >= limits::LINGER_TIMEOUT {
                return Poll::Ready(());
            }
            let (_at_first, at_most) = ASK_AFTER;
            patience.ask_after = (patience.ask_after * 2).min(at_most);
            patience.timer.as_mut().reset(now + patience.ask_after);
        }
        Poll::Pending
    }
}

/// Makes a close send RST, so that an abnormal end does not look clean to the peer.
pub fn reset_on_close(socket: &TcpStream) {
    if let Err(error) = socket::set_reset_on_close(socket) {
        tracing::debug!(%error, "cannot reset a connection");
    }
}

/// The peer has been sent FIN: from here on a close lets the kernel deliver the rest, whichever code closes the socket.
pub(super) fn end_on_close(socket: &TcpStream) {
    if let Err(error) = socket::set_end_on_close(socket) {
        tracing::debug!(%error, "a connection is reset though it has ended");
    }
}

#[cfg(test)]
mod tests;
