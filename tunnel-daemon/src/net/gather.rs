//! A write buffer to be put *under* HTTP/2, which writes and flushes every DATA frame on its own: one system call, one
//! wake-up of the reader and, over TLS, one short record for each 16 KiB that a Go peer takes.
//!
//! Frames of bulk size are gathered here while the connection's task has more of them, and leave together when it has
//! not. Small frames are never held back: what carries an echo goes the way it always did.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::buffered::{borrow, give_back};

/// Writes of at least this many bytes are bulk: worth a copy to save a system call.
const BULK_BYTES: usize = 8 << 10;

/// The half that HTTP/2 owns. What it flushes may stay here until [`Flusher::poll_flush`].
#[derive(Debug)]
pub(super) struct Gather<S>(Arc<Mutex<State<S>>>);

/// The half of whoever polls the connection: to be asked after every poll.
#[derive(Debug)]
pub(super) struct Flusher<S>(Arc<Mutex<State<S>>>);

/// Whether the peer has said anything. Does not keep the stream open.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard(Arc<AtomicBool>);

#[derive(Debug)]
struct State<S> {
    inner: S,
    heard: Heard,
    /// `None` whenever no byte is held.
    held: Option<Held>,
    /// The last write was bulk, so more of it may follow in the same poll.
    more: bool,
}

/// Bytes gathered and not yet written: `from..to` of `buffer`, never empty.
#[derive(Debug)]
struct Held {
    buffer: Box<[u8]>,
    from: usize,
    to: usize,
}

/// Splits a stream nothing was written to into what HTTP/2 gets and what its owner keeps. The lock between them is never
/// contended: one task uses both.
pub(super) fn gather<S>(inner: S) -> (Gather<S>, Flusher<S>) {
    let state = Arc::new(Mutex::new(State {
        inner,
        heard: Heard::default(),
        held: None,
        more: false,
    }));
    (Gather(Arc::clone(&state)), Flusher(state))
}

fn lock<S>(state: &Mutex<State<S>>) -> MutexGuard<'_, State<S>> {
    // No code of ours panics while it holds the lock; if the stream below did, its bytes are still in order.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heard {
    /// Whether it has since the last time this was asked.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Relaxed)
    }
}

impl<S> Flusher<S> {
    /// What tells whether anything comes.
    pub(super) fn heard(&self) -> Heard {
        lock(&self.0).heard.clone()
    }
}

impl<S: AsyncWrite + Unpin> Flusher<S> {
    /// Writes all that is held; the task is woken when the stream takes more.
    ///
    /// # Errors
    /// Those of the stream. The connection cannot go on then.
    pub(super) fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        if state.held.is_none() {
            return Poll::Ready(Ok(()));
        }
        ready!(state.poll_drain(cx))?;
        Pin::new(&mut state.inner).poll_flush(cx)
    }
}

impl<S: AsyncWrite + Unpin> State<S> {
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.more = false;
        while let Some(held) = &mut self.held {
            let bytes = held.buffer.get(held.from..held.to).unwrap_or_default();
            let written = ready!(Pin::new(&mut self.inner).poll_write(cx, bytes))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            held.from += written;
            if held.from >= held.to
                && let Some(held) = self.held.take()
            {
                give_back(held.buffer);
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
        let bulk = wanted >= BULK_BYTES;
        if self.held.is_none() && !bulk {
            return Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        }
        if self.is_full() {
            ready!(self.poll_drain(cx))?;
        }
        self.more = bulk;
        Poll::Ready(Ok(self.append(slices)))
    }

    fn is_full(&self) -> bool {
        self.held
            .as_ref()
            .is_some_and(|held| held.to == held.buffer.len())
    }

    /// Copies what fits; at least one byte unless the buffer is full or the slices are empty.
    fn append(&mut self, slices: &[IoSlice<'_>]) -> usize {
        let mut held = self.held.take().unwrap_or_else(|| Held {
            buffer: borrow(),
            from: 0,
            to: 0,
        });
        let before = held.to;
        for slice in slices {
            let space = held.buffer.get_mut(held.to..).unwrap_or_default();
            let fits = slice.len().min(space.len());
            if let (Some(space), Some(bytes)) = (space.get_mut(..fits), slice.get(..fits)) {
                space.copy_from_slice(bytes);
            }
            held.to += fits;
        }
        let appended = held.to - before;
        if held.from < held.to {
            self.held = Some(held);
        } else {
            give_back(held.buffer);
        }
        appended
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gather<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Done at once behind bulk, which leaves with [`Flusher::poll_flush`].
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        if state.more && state.held.is_some() {
            return Poll::Ready(Ok(()));
        }
        ready!(state.poll_drain(cx))?;
        Pin::new(&mut state.inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        ready!(state.poll_drain(cx))?;
        Pin::new(&mut state.inner).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gather<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        let before = buf.filled().len();
        let polled = Pin::new(&mut state.inner).poll_read(cx, buf);
        if buf.filled().len() > before {
            state.heard.0.store(true, Relaxed);
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::super::buffered::READ_BUFFER_BYTES;
    use super::*;
    use proptest::prelude::*;
    use std::task::Waker;

    /// Takes as many bytes as its script says, or `Pending` once for a 0; without a script all of them.
    #[derive(Default)]
    struct Sink {
        taken: Vec<u8>,
        script: Vec<usize>,
        writes: usize,
        flushes: usize,
        shut: bool,
    }

    impl AsyncWrite for Sink {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let most = self.script.pop().unwrap_or(usize::MAX);
            if most == 0 {
                return Poll::Pending;
            }
            self.writes += 1;
            let taken = bytes.len().min(most);
            self.taken
                .extend_from_slice(bytes.get(..taken).unwrap_or_default());
            Poll::Ready(Ok(taken))
        }

        fn poll_flush(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.flushes += 1;
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.shut = true;
            Poll::Ready(Ok(()))
        }
    }

    fn noop() -> Context<'static> {
        Context::from_waker(Waker::noop())
    }

    /// Writes and flushes as HTTP/2 does after each frame. How many bytes were taken, until one call waits.
    fn frame(io: &mut Gather<Sink>, bytes: &[u8]) -> usize {
        let mut written = 0;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            match Pin::new(&mut *io).poll_write(&mut noop(), rest) {
                Poll::Ready(taken) => written += taken.unwrap(),
                Poll::Pending => return written,
            }
        }
        let _later = Pin::new(io).poll_flush(&mut noop());
        written
    }

    #[test]
    fn frames_of_one_poll_leave_in_one_write() {
        let (mut io, flusher) = gather(Sink::default());
        for _frame in 0..7 {
            assert_eq!(frame(&mut io, &[7; 16 << 10]), 16 << 10);
        }
        assert_eq!(lock(&io.0).inner.writes, 0);
        assert!(flusher.poll_flush(&mut noop()).is_ready());
        let state = lock(&io.0);
        assert_eq!((state.inner.writes, state.inner.flushes), (1, 1));
        assert_eq!(state.inner.taken.len(), 7 * (16 << 10));
        assert!(state.held.is_none(), "an idle connection holds no buffer");
    }

    #[test]
    fn small_frames_are_written_and_flushed_at_once() {
        let (mut io, flusher) = gather(Sink::default());
        assert_eq!(frame(&mut io, b"ping"), 4);
        assert_eq!(lock(&io.0).inner.taken, b"ping");
        assert_eq!(lock(&io.0).inner.flushes, 1);
        // Behind bulk it takes everything along.
        frame(&mut io, &[1; 20_000]);
        frame(&mut io, b"pong");
        assert_eq!(lock(&io.0).inner.taken.len(), 4 + 20_000 + 4);
        assert!(flusher.poll_flush(&mut noop()).is_ready());
    }

    #[test]
    fn full_buffer_is_written_before_more_is_taken() {
        let (mut io, _flusher) = gather(Sink::default());
        let frames = 3 * READ_BUFFER_BYTES / (16 << 10);
        for _frame in 0..frames {
            frame(&mut io, &[3; 16 << 10]);
        }
        let state = lock(&io.0);
        assert_eq!(state.inner.taken.len(), 2 * READ_BUFFER_BYTES);
        assert_eq!(state.inner.writes, 2);
    }

    #[test]
    fn stream_that_takes_nothing_bounds_what_is_held() {
        let (mut io, flusher) = gather(Sink {
            script: vec![0; 8],
            ..Sink::default()
        });
        let huge = vec![5; 2 * READ_BUFFER_BYTES];
        assert_eq!(frame(&mut io, &huge), READ_BUFFER_BYTES);
        assert!(flusher.poll_flush(&mut noop()).is_pending());
        assert!(lock(&io.0).inner.taken.is_empty());
    }

    #[test]
    fn shutdown_takes_along_what_is_held() {
        let (mut io, _flusher) = gather(Sink::default());
        frame(&mut io, &[9; 10_000]);
        assert!(Pin::new(&mut io).poll_shutdown(&mut noop()).is_ready());
        assert_eq!(lock(&io.0).inner.taken.len(), 10_000);
        assert!(lock(&io.0).inner.shut);
    }

    proptest! {
        #[test]
        fn bytes_leave_in_the_order_they_came(
            frames in proptest::collection::vec((1_usize..60_000, any::<bool>()), 0..12),
            script in proptest::collection::vec(prop_oneof![Just(0), 1_usize..90_000], 0..24),
        ) {
            let (mut io, flusher) = gather(Sink { script, ..Sink::default() });
            let mut expected = Vec::new();
            let mut next = 0_u8;
            for (size, ask) in frames {
                let bytes: Vec<u8> = (0..size).map(|_| { next = next.wrapping_mul(5).wrapping_add(1); next }).collect();
                let mut rest = bytes.as_slice();
                while !rest.is_empty() {
                    let taken = frame(&mut io, rest);
                    rest = rest.get(taken..).unwrap_or_default();
                }
                expected.extend(bytes);
                if ask {
                    let _later = flusher.poll_flush(&mut noop());
                }
            }
            while flusher.poll_flush(&mut noop()).is_pending() {}
            let state = lock(&io.0);
            prop_assert_eq!(&state.inner.taken, &expected);
            prop_assert!(state.held.is_none());
        }
    }
}
