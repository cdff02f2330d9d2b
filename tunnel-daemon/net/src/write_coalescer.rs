//! A write buffer to be put *under* HTTP/2, which writes and flushes every DATA frame on its own: one system call, one
//! wake-up of the reader and, over TLS, one short record for each 16 KiB that a Go peer takes.
//!
//! Bulk frames are gathered here while the connection's task has more of them, and leave together when it has no more.
//! Small frames are never held back, so they are not delayed.
//!
//! It also bounds how far HTTP/2 may read ahead of the calls that its owner has taken: HTTP/2 reads as long as there is
//! data.
//!
//! Answers that no peer waits for need no write of their own. A Go peer measures its path with a PING for almost every
//! message that it gets, and each answer would wake it. Answers leave with the next frame, or after [`ANSWER_DELAY`].

use std::{
    future::Future as _,
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use adit_tls::buffered::{borrow, give_back};

/// Writes of at least this many bytes are bulk: worth a copy to save a system call.
const BULK_BYTES: usize = 8 << 10;

/// How long answers wait for another frame. Short for a peer that measures an idle path, long for a process that answers a
/// thousand times a second.
pub(super) const ANSWER_DELAY: Duration = Duration::from_millis(5);
/// Bytes of answers that may wait.
const ANSWERS_BYTES_MAX: usize = 64;

/// The half that HTTP/2 owns. What it flushes may stay here until [`Flusher::poll_flush`].
#[derive(Debug)]
pub(super) struct WriteCoalescer<S>(Arc<Mutex<State<S>>>);

/// The half of the task that polls the connection: to be flushed after every poll.
#[derive(Debug)]
pub(super) struct Flusher<S> {
    state: Arc<Mutex<State<S>>>,
    /// When waiting answers leave alone. The timer goes on when they have left with other frames, so that a busy connection
    /// sets it once in [`ANSWER_DELAY`] and not for each answer.
    delay: Option<Pin<Box<Sleep>>>,
}

/// When the peer last sent anything. Does not keep the stream open.
#[derive(Clone, Debug)]
pub(super) struct Heard {
    since: Instant,
    /// Milliseconds after `since`.
    last: Arc<AtomicU64>,
}

#[derive(Debug)]
struct State<S> {
    inner: S,
    /// Bytes that HTTP/2 may read before its owner allows more; the last read may go beyond them.
    may_read: usize,
    /// HTTP/2 would have read more.
    is_held_back: bool,
    heard: Heard,
    /// `None` whenever no byte is held.
    held: Option<Held>,
    /// The last write was bulk, so more of it may follow in the same poll.
    more: bool,
    /// Frames that may wait for others. Empty whenever any byte is held.
    answers: Answers,
}

/// Whole frames that answer a PING or SETTINGS, or open the connection's window, which is never closed.
#[derive(Debug)]
struct Answers {
    bytes: [u8; ANSWERS_BYTES_MAX],
    len: usize,
}

/// Bytes gathered and not yet written: `from..to` of `buffer`, never empty.
#[derive(Debug)]
struct Held {
    buffer: Box<[u8]>,
    from: usize,
    to: usize,
}

/// Splits a stream that was not written to into the half of HTTP/2 and the half of its owner. The lock between them is
/// never contended: one task uses both.
pub(super) fn gather<S>(inner: S) -> (WriteCoalescer<S>, Flusher<S>) {
    let state = Arc::new(Mutex::new(State {
        inner,
        may_read: usize::MAX,
        is_held_back: false,
        heard: Heard::new(),
        held: None,
        more: false,
        answers: Answers::default(),
    }));
    let flusher = Flusher {
        state: Arc::clone(&state),
        delay: None,
    };
    (WriteCoalescer(state), flusher)
}

fn lock<S>(state: &Mutex<State<S>>) -> MutexGuard<'_, State<S>> {
    // Our code never panics while it holds the lock. If the stream below did, its bytes are still in order.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heard {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            last: Arc::default(),
        }
    }

    fn note(&self) {
        let now = u64::try_from(self.since.elapsed().as_millis());
        self.last.store(now.unwrap_or(u64::MAX), Relaxed);
    }

    /// Time of the peer's last byte, to the millisecond; before the first one, the time when the stream came.
    pub(super) fn last(&self) -> Instant {
        self.since + Duration::from_millis(self.last.load(Relaxed))
    }
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            bytes: [0; ANSWERS_BYTES_MAX],
            len: 0,
        }
    }
}

impl Answers {
    /// Keeps `frames` for later if there is room; false when there is not.
    fn keep(&mut self, frames: &[u8]) -> bool {
        let to = self.len + frames.len();
        let Some(space) = self.bytes.get_mut(self.len..to) else {
            return false;
        };
        space.copy_from_slice(frames);
        self.len = to;
        true
    }
}

/// Whether these are whole frames that may wait (RFC 9113, section 4.1: length 3, type 1, flags 1, stream 4). The rest of a
/// payload that looks like such frames waits as well, and stays in order.
fn may_wait(mut bytes: &[u8]) -> bool {
    /// SETTINGS, acknowledged.
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 1, 0, 0, 0, 0];
    /// PING, answered.
    const PING: [u8; 9] = [0, 0, 8, 6, 1, 0, 0, 0, 0];
    /// WINDOW_UPDATE of the connection.
    const WINDOW: [u8; 9] = [0, 0, 4, 8, 0, 0, 0, 0, 0];
    if bytes.is_empty() {
        return false;
    }
    while let Some((head, rest)) = bytes.split_first_chunk() {
        let len = match *head {
            SETTINGS => 0,
            PING => 8,
            WINDOW => 4,
            _ => return false,
        };
        match rest.get(len..) {
            Some(rest) => bytes = rest,
            None => return false,
        }
    }
    bytes.is_empty()
}

impl<S> Flusher<S> {
    /// Handle for the time of the peer's last byte.
    pub(super) fn heard(&self) -> Heard {
        lock(&self.state).heard.clone()
    }

    /// HTTP/2 may read `bytes` more, and finish its last read beyond them. Without this call it may read everything.
    pub(super) fn allow(&self, bytes: usize) {
        lock(&self.state).may_read = bytes;
    }
}

impl<S: AsyncWrite + Unpin> Flusher<S> {
    /// Writes all that is held. The task is woken when the stream takes more, and when answers have waited long enough.
    ///
    /// # Errors
    /// The error of the stream: the connection cannot go on.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { state, delay } = self;
        Self::poll_flush_of(&mut lock(state), delay, cx)
    }

    /// As [`Self::poll_flush`] and [`Self::allow`]. Returns whether HTTP/2 has to be polled again: it is not woken for data
    /// that it was not allowed to read.
    ///
    /// # Errors
    /// As of [`Self::poll_flush`].
    pub(super) fn flush_and_allow(
        &mut self,
        cx: &mut Context<'_>,
        bytes: usize,
    ) -> io::Result<bool> {
        let Self { state, delay } = self;
        let mut state = lock(state);
        state.may_read = bytes;
        let again = bytes > 0 && std::mem::take(&mut state.is_held_back);
        match Self::poll_flush_of(&mut state, delay, cx) {
            Poll::Ready(Err(error)) => Err(error),
            Poll::Ready(Ok(())) | Poll::Pending => Ok(again),
        }
    }

    fn poll_flush_of(
        state: &mut State<S>,
        timer: &mut Option<Pin<Box<Sleep>>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        if state.answers.len > 0 || timer.is_some() {
            let delay = timer.get_or_insert_with(|| Box::pin(sleep(ANSWER_DELAY)));
            if delay.as_mut().poll(cx).is_ready() {
                *timer = None;
                state.release_answers();
            }
        }
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
        let answers = match slices {
            [frames] if wanted <= ANSWERS_BYTES_MAX && may_wait(frames) => Some(frames),
            _ => None,
        };
        if self.held.is_none() && !bulk {
            if answers.is_some_and(|frames| self.answers.keep(frames)) {
                return Poll::Ready(Ok(wanted));
            }
            if self.answers.len == 0 {
                return Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
            }
        }
        if self.is_full() {
            ready!(self.poll_drain(cx))?;
        }
        self.more = bulk || (answers.is_some() && self.more);
        Poll::Ready(Ok(self.append(slices)))
    }

    /// From now on waiting answers are held like other frames.
    fn release_answers(&mut self) {
        if self.answers.len > 0 {
            self.append(&[]);
        }
    }

    fn is_full(&self) -> bool {
        self.held
            .as_ref()
            .is_some_and(|held| held.to == held.buffer.len())
    }

    /// Copies what fits; at least one byte unless the buffer is full or the slices are empty.
    fn append(&mut self, slices: &[IoSlice<'_>]) -> usize {
        let mut held = self.held.take().unwrap_or_else(|| {
            let mut buffer = borrow();
            let answers = std::mem::take(&mut self.answers.len);
            let first = self.answers.bytes.get(..answers).unwrap_or_default();
            if let Some(space) = buffer.get_mut(..first.len()) {
                space.copy_from_slice(first);
            }
            Held {
                to: first.len(),
                from: 0,
                buffer,
            }
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

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteCoalescer<S> {
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

    /// Returns at once behind bulk, which [`Flusher::poll_flush`] writes.
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
        state.release_answers();
        ready!(state.poll_drain(cx))?;
        Pin::new(&mut state.inner).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteCoalescer<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        if state.may_read == 0 {
            state.is_held_back = true;
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let polled = Pin::new(&mut state.inner).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        if read > 0 {
            state.may_read = state.may_read.saturating_sub(read);
            state.heard.note();
        }
        polled
    }
}

#[cfg(test)]
mod tests;
