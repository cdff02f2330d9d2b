//! The end of a socket whose tunnel is over: its last bytes are still on their way, and it may still be spoken to.
//!
//! A kernel that closes a TCP socket with input unread, or that gets some afterwards, answers with a reset and drops what it
//! has not delivered. So a socket is read until it is safe to close.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use adit_relay::unacknowledged_bytes;
use tokio::io::AsyncRead;
use tokio::time::{Instant, Sleep};

use crate::target::{end_on_close, reset_on_close};
use adit_config::limits;
use adit_tls::blocks;
use adit_tls::stream::Connection;

/// Reads before the task lets others run.
const READS_PER_POLL: usize = 4;
/// How long until the kernel is asked again whether all is delivered, at first and at most: there is no event for it.
/// Mostly the peer closes, too, which is one.
const ASK_AFTER: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// How a socket is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Closing {
    /// With an end behind the last byte.
    InOrder,
    /// With a reset behind the last byte. A unix socket has none: its peer sees one if it has said what nobody read, else
    /// an end.
    CutOff,
    /// With a reset, which may overtake bytes. As above on a unix socket, which loses none.
    Reset,
}

/// Closes a socket, but for dropping it: that is up to the owner once this is ready. Bytes that its peer takes none of for
/// 30 s are given up.
pub(super) struct GracefulClose {
    closing: Closing,
    /// Closing the socket resets it.
    armed: bool,
    /// Everything is in the kernel's hands, the end included if there is to be one.
    told: bool,
    /// The peer has said something since the tunnel's end.
    spoken: bool,
    /// It says no more.
    silent: bool,
    /// Rarely needed.
    patience: Option<Box<Patience>>,
}

/// Waits for the peer's kernel to take bytes.
struct Patience {
    timer: Pin<Box<Sleep>>,
    ask_after: Duration,
    left: usize,
    since: Instant,
}

/// Closes `io`, but for dropping it, which is up to the caller. What comes is read and dropped until the last bytes are
/// delivered; bytes that the peer takes none of for 30 s are given up. A cancelled call leaves the rest to the kernel, if that
/// has all of it by then.
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

    /// To be asked with the same socket, and not again once it is ready.
    pub(super) fn poll<S: Connection>(&mut self, cx: &mut Context<'_>, io: &mut S) -> Poll<()> {
        if self.closing != Closing::InOrder
            && !std::mem::replace(&mut self.armed, true)
            && let Some(socket) = io.tcp()
        {
            // At once: a task that is dropped, or a process that is killed, closes it as well.
            reset_on_close(socket);
        }
        if self.closing != Closing::Reset {
            ready!(self.poll_delivered(cx, io));
        }
        Poll::Ready(())
    }

    /// Ready, too, once there is no use in waiting.
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

    /// Whether it is safe to close with so many bytes unacknowledged.
    fn is_delivered(&self, left: usize) -> bool {
        match self.closing {
            // An end counts as a byte. The kernel sees to it alone, and to all the rest, where nothing comes that it answers
            // with a reset.
            Closing::InOrder => self.silent || left == 0 || (left == 1 && !self.spoken),
            Closing::CutOff | Closing::Reset => left == 0,
        }
    }

    /// Bytes written to a unix socket are with its peer already.
    fn poll_without_tcp<S: Connection>(&mut self, cx: &mut Context<'_>, io: &mut S) -> Poll<()> {
        // An end is no end to a peer whose last words nobody has read.
        let reads = self.closing == Closing::InOrder;
        if self.told && !(reads && io.refuse_input()) {
            return Poll::Ready(());
        }
        if self.poll_input(cx, io).is_err() || (self.told && self.silent) {
            return Poll::Ready(());
        }
        self.poll_patience(cx, 0)
    }

    /// Reads what comes and drops it.
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

    /// Ready when bytes have waited too long, `left` of them now.
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

#[cfg(test)]
mod tests;
