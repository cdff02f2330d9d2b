//! A stream whose responses the peer must read within a time limit: a slow or stalled peer holds a response no longer.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Limits the time from a pending write to a completed flush, which hyper requests once its buffer is empty.
pub(super) struct AnswerDeadline<S> {
    stream: S,
    limit: Duration,
    /// Set while a response waits for the peer.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> AnswerDeadline<S> {
    pub(super) fn new(stream: S, limit: Duration) -> Self {
        Self {
            stream,
            limit,
            timer: None,
        }
    }

    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        let timer = self.timer.as_mut();
        timer.is_some_and(|timer| timer.as_mut().poll(cx).is_ready())
    }

    /// Passes the result of a write on; fails a write that is pending beyond the limit.
    fn within<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_pending() {
            self.timer
                .get_or_insert_with(|| Box::pin(sleep(self.limit)));
        }
        if self.is_over(cx) {
            let error = "the peer did not read its answer in time";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, error)));
        }
        polled
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AnswerDeadline<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AnswerDeadline<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.within(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.within(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        let polled = self.within(cx, polled);
        if polled.is_ready() {
            self.timer = None;
        }
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// How long an answer of `bytes` bytes is kept for a peer that reads `step` bytes a second.
    async fn kept(bytes: usize, step: usize) -> (io::Result<()>, Duration) {
        let (near, mut far) = duplex(64);
        let mut near = AnswerDeadline::new(near, LIMIT);
        let started = Instant::now();
        let writing = async {
            near.write_all(&vec![7; bytes]).await?;
            near.flush().await
        };
        let reading = async {
            let mut taken = vec![0; step];
            loop {
                sleep(Duration::from_secs(1)).await;
                if step > 0 {
                    let _read = far.read(&mut taken).await;
                }
            }
        };
        tokio::select! {
            written = writing => (written, started.elapsed()),
            () = reading => unreachable!("without end"),
        }
    }

    /// Limit (operations): Listeners for health, metrics and administration
    #[tokio::test(start_paused = true)]
    async fn a_slowly_read_answer_times_out_at_its_deadline() {
        for step in [0, 1] {
            let (written, took) = kept(1000, step).await;
            assert_eq!(
                written.map_err(|error| error.kind()),
                Err(io::ErrorKind::TimedOut)
            );
            assert!(took <= LIMIT + Duration::from_secs(1), "{took:?}");
        }
        let (written, _took) = kept(1000, 64).await;
        assert!(written.is_ok(), "{written:?}");
    }
}
