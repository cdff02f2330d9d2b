//! A connection in memory whose ends tell an orderly end from a broken one, as sockets do.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio_util::sync::{CancellationToken, DropGuard};

use adit_core::session::Promise;
use adit_tls::stream::Connection;

/// One end. Dropped without a shutdown it is a reset for the other.
pub(super) struct PipeEnd {
    io: DuplexStream,
    shut: Arc<AtomicBool>,
    other_shut: Arc<AtomicBool>,
    /// Memory for the pipe, and for what its owners do with the bytes.
    _promise: Option<Arc<Promise>>,
    gone: DropGuard,
}

/// Two ends, with at most `bytes` on their way in each direction. They keep `promise`.
pub(super) fn pipe(bytes: usize, promise: Option<Promise>) -> (PipeEnd, PipeEnd) {
    let (a, b) = tokio::io::duplex(bytes);
    let [of_a, of_b] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let promise = promise.map(Arc::new);
    let end = |io, shut: &Arc<AtomicBool>, other_shut: &Arc<AtomicBool>| PipeEnd {
        io,
        shut: Arc::clone(shut),
        other_shut: Arc::clone(other_shut),
        _promise: promise.clone(),
        gone: CancellationToken::new().drop_guard(),
    };
    (end(a, &of_a, &of_b), end(b, &of_b, &of_a))
}

impl PipeEnd {
    /// Cancelled when this end is dropped.
    pub(super) fn gone(&self) -> CancellationToken {
        self.gone.token().clone()
    }
}

impl AsyncRead for PipeEnd {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, out))?;
        let is_end = out.filled().len() == before && out.remaining() > 0;
        if is_end && !self.other_shut.load(Acquire) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PipeEnd {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Before the other end can read the EOF.
        self.shut.store(true, Release);
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl Connection for PipeEnd {
    fn is_plain(&self) -> bool {
        false
    }

    fn into_descriptor(self) -> Option<OwnedFd> {
        None
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn an_end_that_is_dropped_is_a_reset_and_one_that_is_shut_down_an_eof() {
        for is_orderly in [true, false] {
            let (mut a, mut b) = pipe(64, None);
            a.write_all(b"last").await.unwrap();
            if is_orderly {
                a.shutdown().await.unwrap();
            }
            drop(a);
            let mut read = Vec::new();
            let end = b.read_to_end(&mut read).await;
            assert_eq!(read, b"last");
            let error = end.err().map(|error| error.kind());
            assert_eq!(
                error,
                (!is_orderly).then_some(io::ErrorKind::ConnectionReset)
            );
        }
    }
}
