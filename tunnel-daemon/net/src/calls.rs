//! Calls of gRPC clients over the server's own HTTP/2: one task runs a connection and its calls.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use adit_config::limits::GREETING_TIMEOUT;
use adit_core::http2::{Arrival, Http2Error, Http2Server, ServerLimits, StreamEnd, StreamId};
use adit_core::session::{ProcessBudget, Queued};
use adit_core::wire::encode::MessageBuf;
use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_util::io::poll_read_buf;
use tokio_util::sync::CancellationToken;

use crate::call_pace::CallPace;
use crate::call_windows::{CallWindows, WindowGrowth};
use crate::grpc::{Code, PING_TIMEOUT};
use crate::poll_set::{PollSet, together};
use crate::tasks::Admitted;
use crate::write_coalescer::ANSWER_DELAY;

/// Bytes of a read: of a connection that carries little, and of one that fills its reads.
const READ_BYTES: usize = 16 * 1024;
const BULK_READ_BYTES: usize = 64 * 1024;
/// Reads before calls get their turn.
const READS_PER_ROUND: usize = 4;
/// A client that does not answer the PING behind GOAWAY has opened its last stream by then.
const DRAINED_AFTER: Duration = Duration::from_secs(2);

/// Why a connection ended before its client closed it.
#[derive(Debug, thiserror::Error)]
pub enum CallsError {
    /// The client broke HTTP/2.
    #[error(transparent)]
    Http2(#[from] Http2Error),
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// No answer to a keepalive ping.
    #[error("no answer to a keepalive ping")]
    Silent,
    /// The client did not acknowledge smaller windows.
    #[error("smaller windows were not acknowledged")]
    Unacknowledged,
    /// A new client did not send the whole HTTP/2 preface in time.
    #[error("no HTTP/2 preface within {} s", GREETING_TIMEOUT.as_secs())]
    NoGreeting,
}

type Shared = Arc<Mutex<Http2Server>>;

fn lock(shared: &Shared) -> MutexGuard<'_, Http2Server> {
    // One task uses it, so the lock is never contended; a panic ends the task.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call, as its task holds it. Dropping it cancels a call that was not finished.
#[derive(Debug)]
pub struct Call {
    http2: Shared,
    id: StreamId,
}

impl Drop for Call {
    fn drop(&mut self) {
        lock(&self.http2).detach(self.id);
    }
}

impl Call {
    /// The next piece of what the client sends; `None` at its end.
    pub fn poll_data(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Bytes, StreamEnd>>> {
        lock(&self.http2).poll_data(self.id, cx)
    }

    /// `bytes` were taken: the client may send as many more.
    pub fn release(&mut self, bytes: usize) {
        lock(&self.http2).release(self.id, bytes);
    }

    /// Sends a message, as far as the client's windows have room, and returns whether all of it has gone to the connection.
    pub fn send(&mut self, message: MessageBuf) -> bool {
        let mut http2 = lock(&self.http2);
        http2.send(self.id, message);
        http2.is_drained(self.id)
    }

    /// Completes when all messages have gone to the connection.
    pub fn poll_drained(&mut self, cx: &Context<'_>) -> Poll<Result<(), StreamEnd>> {
        lock(&self.http2).poll_drained(self.id, cx)
    }

    /// Completes when the client has reset the call or has left.
    pub fn poll_end(&mut self, cx: &Context<'_>) -> Poll<StreamEnd> {
        lock(&self.http2).poll_end(self.id, cx)
    }

    /// Ends the call with a status, or resets it if the client's windows have no room for what waits.
    pub fn finish(&mut self, code: Code, message: &str) {
        let message = crate::grpc::percent_encoded(message);
        lock(&self.http2).finish(self.id, code.number(), &message);
    }

    /// Answers a request that is no call with a status of HTTP.
    pub fn refuse(&mut self, status: &str) {
        lock(&self.http2).refuse(self.id, status);
    }

    /// Resets the call.
    pub fn reset(&mut self) {
        lock(&self.http2).reset(self.id);
    }
}

/// One client's connection.
pub struct CallConnection<S> {
    io: S,
    http2: Shared,
    /// Frames of which a part has come. Has no memory when empty.
    input: BytesMut,
    /// Bytes of the memory that it lies in.
    around: usize,
    read_bytes: usize,
    heard: Instant,
    answers_due: Option<Pin<Box<Sleep>>>,
    waiting: Queued,
    /// Output waits for the socket.
    is_stuck: bool,
    /// Something was written that the layers below may still hold.
    needs_flush: bool,
    pace: CallPace,
    windows: Option<WindowGrowth>,
}

/// Greets a client, whose stream was not read yet. Bytes that wait for it count in `budget`.
///
/// # Errors
/// The peer does not speak HTTP/2, or did not greet for 10 s.
pub async fn accept<S>(
    io: S,
    limits: ServerLimits,
    budget: &Arc<ProcessBudget>,
    windows: Option<&Arc<CallWindows>>,
) -> Result<Box<CallConnection<S>>, CallsError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut connection = Box::new(CallConnection {
        io,
        http2: Arc::new(Mutex::new(Http2Server::new(limits))),
        input: BytesMut::new(),
        around: 0,
        read_bytes: READ_BYTES,
        heard: Instant::now(),
        answers_due: None,
        waiting: Queued::none(budget),
        is_stuck: false,
        needs_flush: false,
        pace: CallPace::new(),
        windows: windows.map(WindowGrowth::new),
    });
    let greeting = std::future::poll_fn(|cx| connection.poll_greeting(cx));
    match timeout(GREETING_TIMEOUT, greeting).await {
        Ok(greeted) => greeted?,
        Err(_elapsed) => return Err(CallsError::NoGreeting),
    }
    Ok(connection)
}

impl<S: AsyncRead + AsyncWrite + Unpin> CallConnection<S> {
    fn poll_greeting(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallsError>> {
        loop {
            let read = self.poll_read(cx);
            if let Poll::Ready(Err(error)) = self.poll_write(cx) {
                return Poll::Ready(Err(error.into()));
            }
            match read {
                Poll::Ready(Ok(true)) if lock(&self.http2).is_greeted() => {
                    return Poll::Ready(Ok(()));
                }
                Poll::Ready(Ok(true)) => (),
                Poll::Ready(Ok(false)) => {
                    return Poll::Ready(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()));
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Reads once; false at the end of the stream. Nothing is read while much output waits.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, CallsError>> {
        if self.is_stuck && lock(&self.http2).is_full() {
            return Poll::Pending;
        }
        if self.input.capacity() - self.input.len() < self.read_bytes {
            self.input.reserve(self.read_bytes);
            self.around = self.around.max(self.input.capacity());
        }
        let read = ready!(poll_read_buf(Pin::new(&mut self.io), cx, &mut self.input));
        let read = match read {
            Ok(0) => return Poll::Ready(Ok(false)),
            Ok(read) => read,
            Err(error) => return Poll::Ready(Err(error.into())),
        };
        self.heard = Instant::now();
        self.read_bytes = if read >= READ_BYTES {
            BULK_READ_BYTES
        } else {
            READ_BYTES
        };
        lock(&self.http2).receive(&mut self.input, self.around)?;
        Poll::Ready(Ok(true))
    }

    /// Writes all output, which then has no memory.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self {
            io,
            http2,
            answers_due,
            waiting,
            is_stuck,
            needs_flush,
            ..
        } = self;
        let mut http2 = lock(http2);
        let was_full = http2.is_full();
        if http2.has_answers() || answers_due.is_some() {
            let due = answers_due.get_or_insert_with(|| Box::pin(sleep(ANSWER_DELAY)));
            if due.as_mut().poll(cx).is_ready() {
                *answers_due = None;
                http2.release_answers();
            }
        }
        loop {
            let out = http2.output();
            if out.is_empty() {
                *out = BytesMut::new();
                break;
            }
            match Pin::new(&mut *io).poll_write(cx, out) {
                Poll::Ready(Ok(0)) => {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                Poll::Ready(Ok(written)) => {
                    out.advance(written);
                    *needs_flush = true;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    waiting.set(out.len() as u64);
                    if waiting.budget().is_half_full() && !*is_stuck {
                        // In a buffer of their own size.
                        *out = BytesMut::from(&out[..]);
                    }
                    *is_stuck = true;
                    return Poll::Pending;
                }
            }
        }
        if std::mem::take(is_stuck) {
            waiting.set(0);
        }
        if was_full {
            // Nothing was read, and no call taken.
            cx.waker().wake_by_ref();
        }
        drop(http2);
        if *needs_flush {
            ready!(Pin::new(io).poll_flush(cx))?;
            *needs_flush = false;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_windows(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(windows) = &mut self.windows else {
            return Poll::Pending;
        };
        let http2 = &self.http2;
        windows.poll(cx, |bytes| lock(http2).resize_windows(bytes))
    }

    /// The next call that may begin. Calls wait while they come too fast; others go on meanwhile.
    fn next_call(&mut self, cx: &mut Context<'_>) -> Option<(Call, Arrival)> {
        let mut http2 = lock(&self.http2);
        for _call in 0..http2.take_cancelled() {
            self.pace.count(true);
        }
        // Answers to calls are output, too.
        if self.pace.is_paused(cx) || http2.is_full() {
            return None;
        }
        let arrival = http2.next_call()?;
        self.pace.count(false);
        let call = Call {
            http2: Arc::clone(&self.http2),
            id: arrival.stream,
        };
        Some((call, arrival))
    }

    /// Runs until the connection and its calls have ended. `on_call` gets every request and must not block; the future it returns is
    /// polled beside the connection, in the same task. Once this process is `leaving`, the client gets GOAWAY, and the connection
    /// ends as soon as it has no calls.
    ///
    /// # Errors
    /// The error that ended the connection, a missed keepalive included.
    pub async fn serve<F>(
        self: Box<Self>,
        keepalive_every: Duration,
        leaving: CancellationToken,
        mut on_call: F,
    ) -> Result<(), CallsError>
    where
        F: FnMut(Call, Arrival) -> Option<Admitted>,
    {
        let mut keepalive = Keepalive::new(keepalive_every);
        let mut leaving = Leaving::Not(Box::pin(leaving.cancelled_owned()));
        let mut calls = PollSet::default();
        let http2 = Arc::clone(&self.http2);
        let mut connection = Some(self);
        let mut result = Ok(());
        together(|cx| {
            // What is read wakes calls of this round.
            calls.expect_poll();
            if let Some(open) = &mut connection {
                let over = match open.poll_reads(cx) {
                    Poll::Ready(over) => Some(over),
                    Poll::Pending if open.poll_windows(cx).is_ready() => {
                        Some(Err(CallsError::Unacknowledged))
                    }
                    Poll::Pending if keepalive.poll(cx, open).is_ready() => {
                        Some(Err(CallsError::Silent))
                    }
                    Poll::Pending => None,
                };
                while let Some((call, arrival)) = open.next_call(cx) {
                    if let Some(call) = on_call(call, arrival) {
                        calls.push(call);
                    }
                }
                if let Some(over) = over {
                    // What is left is GOAWAY.
                    let _written = open.poll_write(cx);
                    let _closed = Pin::new(&mut open.io).poll_shutdown(cx);
                    result = over;
                    connection = None;
                    lock(&http2).gone();
                }
            }
            calls.poll(cx);
            if let Some(open) = &mut connection {
                leaving.poll(cx, &http2);
                let written = open.poll_write(cx);
                let is_over = calls.is_empty() && lock(&http2).is_over();
                match written {
                    Poll::Ready(Ok(())) if !is_over => (),
                    Poll::Pending => (),
                    Poll::Ready(written) => {
                        // Tells a client over TLS that this is the end.
                        let _closed = Pin::new(&mut open.io).poll_shutdown(cx);
                        result = written.map_err(Into::into);
                        connection = None;
                        lock(&http2).gone();
                    }
                }
            }
            if connection.is_none() && calls.is_empty() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        result
    }

    /// Reads what there is; ready when the connection has ended.
    fn poll_reads(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallsError>> {
        for _read in 0..READS_PER_ROUND {
            match self.poll_read(cx) {
                // Calls take what came with them before more comes.
                Poll::Ready(Ok(true)) if lock(&self.http2).has_untaken_bytes() => break,
                Poll::Ready(Ok(true)) => (),
                Poll::Ready(Ok(false)) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    if self.input.is_empty() {
                        (self.input, self.around) = (BytesMut::new(), 0);
                    }
                    return Poll::Pending;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// How far the end of a connection is, once its process leaves.
enum Leaving {
    Not(Pin<Box<dyn Future<Output = ()> + Send>>),
    /// The client has been told.
    Told(Pin<Box<Sleep>>),
    Over,
}

impl Leaving {
    /// Tells the client.
    fn poll(&mut self, cx: &mut Context<'_>, http2: &Shared) {
        if let Self::Not(left) = self {
            if left.as_mut().poll(cx).is_pending() {
                return;
            }
            lock(http2).drain();
            *self = Self::Told(Box::pin(sleep(DRAINED_AFTER)));
        }
        if let Self::Told(late) = self
            && late.as_mut().poll(cx).is_ready()
        {
            lock(http2).drained();
            *self = Self::Over;
        }
    }
}

/// Pings of a client, and how long their answers may take.
struct Keepalive {
    every: Duration,
    timer: Pin<Box<Sleep>>,
    /// When the client was last heard before the PING.
    asked: Option<Instant>,
}

impl Keepalive {
    fn new(every: Duration) -> Self {
        Self {
            every,
            timer: Box::pin(sleep(every)),
            asked: None,
        }
    }

    /// Ready when a PING has no answer, and nothing else has come for [`PING_TIMEOUT`].
    fn poll<S>(&mut self, cx: &mut Context<'_>, connection: &CallConnection<S>) -> Poll<()> {
        if self.asked.is_some() && lock(&connection.http2).take_pong() {
            self.asked = None;
            self.timer = Box::pin(sleep(self.every));
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let next = match self.asked {
                Some(known) if connection.heard <= known => return Poll::Ready(()),
                Some(_) => PING_TIMEOUT,
                None => {
                    lock(&connection.http2).ask();
                    PING_TIMEOUT
                }
            };
            self.asked = Some(connection.heard);
            self.timer.as_mut().reset(Instant::now() + next);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests;
