//! A pair of sockets to submit to a relay, and the owner's handle of a submitted pair.

use std::{
    fmt,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

use bytes::Bytes;

use crate::{
    inbox::Inbox,
    kernel_tls::KernelTls,
    outcome::{Flow, Outcome, PairEnd, Side},
    probe::Engine,
    socket_buffers::{BufferSizes, SocketBuffers},
    sync::AtomicBool,
    syscall::{TcpState, socket, tcp_state},
};

/// Two connected stream sockets, TCP or unix, and the bytes already read for them.
#[derive(Debug)]
pub struct Pair {
    /// One socket.
    pub a: OwnedFd,
    /// The other socket.
    pub b: OwnedFd,
    /// Delivered to `a` before anything that comes from `b`.
    pub to_a: Bytes,
    /// Delivered to `b` before anything that comes from `a`.
    pub to_b: Bytes,
    /// kTLS state of `b`, if `b` has kTLS.
    pub tls: Option<KernelTls>,
}

impl Pair {
    /// A pair without bytes already read.
    #[must_use]
    pub fn new(a: OwnedFd, b: OwnedFd) -> Self {
        Self {
            a,
            b,
            to_a: Bytes::new(),
            to_b: Bytes::new(),
            tls: None,
        }
    }

    /// Sets SO_LINGER so that closing the sockets sends RST: also if the thread has ended, or the kernel closes them for a
    /// killed process.
    pub(crate) fn arm(&self) {
        for fd in [&self.a, &self.b] {
            // Fails if the socket is already reset.
            let _reset_already = socket::reset_on_close(fd);
        }
    }
}

/// Called once with the outcome of a pair. Runs on the relay thread or, for a pair that never started, on the thread
/// that stops or submits. Must not block. A panic on the relay thread ends all pairs of that thread.
pub type Done = Box<dyn FnOnce(Outcome) + Send>;

/// Bytes delivered so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Taken by side a.
    pub to_a: u64,
    /// Taken by side b.
    pub to_b: u64,
    /// A side has reached EOF and the pair continues: the other side may still send, or has bytes left to take.
    pub is_half_closed: bool,
    /// A direction has used a pipe.
    pub has_spliced: bool,
}

/// State of a pair that owner and relay thread share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) to_a: AtomicU64,
    pub(crate) to_b: AtomicU64,
    /// The pair's key once a thread has adopted the pair; read by that thread only.
    pub(crate) key: AtomicU64,
    pub(crate) cancelled: AtomicBool,
    /// Number of sides that have reached EOF.
    pub(crate) ended: AtomicU8,
    /// Number of finished directions.
    pub(crate) finished: AtomicU8,
    /// A direction has borrowed a pipe.
    pub(crate) spliced: AtomicU8,
    /// The sockets, while a thread owns the pair.
    pub(crate) sockets: OnceLock<[Weak<OwnedFd>; 2]>,
}

/// The handle of an accepted pair. Dropping it has no effect.
#[derive(Clone)]
pub struct Submitted {
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Arc<Inbox>,
}

impl Submitted {
    /// Ends the pair now: resets both sockets and calls `done` with [`PairEnd::Cancelled`]. No effect on a pair that has ended.
    pub fn cancel(&self) {
        // Each pair is cancelled once, so the list of cancels is never longer than that of pairs.
        if !self.shared.cancelled.swap(true, Ordering::AcqRel) {
            self.inbox.announce_cancel(Arc::clone(&self.shared));
        }
    }

    /// Bytes delivered so far; updated after each system call.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress {
            to_a: self.shared.to_a.load(Ordering::Relaxed),
            to_b: self.shared.to_b.load(Ordering::Relaxed),
            is_half_closed: self.shared.ended.load(Ordering::Relaxed) > 0
                && self.shared.finished.load(Ordering::Relaxed) < 2,
            has_spliced: self.shared.spliced.load(Ordering::Relaxed) != 0,
        }
    }

    /// The kernel's TCP state of one side. `None` if the socket is not TCP, before a thread has adopted the pair, and
    /// after its end.
    #[must_use]
    pub fn tcp_state(&self, side: Side) -> Option<TcpState> {
        // Held for the call only; if the pair ends meanwhile, the socket is closed here.
        let socket = self.shared.sockets.get()?.get(side.index())?.upgrade()?;
        tcp_state(&*socket).ok()
    }

    /// Resizes the buffers of one side's socket. No effect before a thread has adopted the pair, and after its end.
    pub fn fit_buffers(&self, side: Side, buffers: &mut SocketBuffers, sizes: BufferSizes) {
        let sockets = self.shared.sockets.get();
        let socket = sockets.and_then(|sockets| sockets.get(side.index()));
        if let Some(socket) = socket.and_then(Weak::upgrade) {
            // Fails or has no effect if the peer has closed the socket.
            let _closed = buffers.fit(&*socket, sizes, false);
        }
    }
}

impl fmt::Debug for Submitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submitted")
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}

/// Ensures that `done` is called and the pair is no longer counted, at the latest in `Drop`.
pub(crate) struct Promise {
    done: Option<Done>,
    inbox: Arc<Inbox>,
    engine: Engine,
    shared: Arc<Shared>,
}

impl Promise {
    pub(crate) fn new(done: Done, inbox: Arc<Inbox>, engine: Engine, shared: Arc<Shared>) -> Self {
        Self {
            done: Some(done),
            inbox,
            engine,
            shared,
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn keep(mut self, to_a: Flow, to_b: Flow, end: PairEnd) {
        self.report(to_a, to_b, end);
    }

    /// Returns `done` without calling it, for a refused pair.
    pub(crate) fn withdraw(mut self) -> Done {
        self.inbox.leave();
        self.done.take().unwrap_or_else(|| Box::new(drop))
    }

    fn report(&mut self, to_a: Flow, to_b: Flow, end: PairEnd) {
        if let Some(done) = self.done.take() {
            self.inbox.leave();
            done(Outcome {
                to_b,
                to_a,
                end,
                engine: self.engine,
            });
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let end = if std::thread::panicking() {
            PairEnd::Panicked
        } else {
            PairEnd::Stopped
        };
        // During unwinding a panic of the callback would abort the process.
        let _panicked_too = catch_unwind(AssertUnwindSafe(|| {
            // The bytes that the thread has published for the pair.
            let flow = |delivered: &AtomicU64| Flow {
                bytes: delivered.load(Ordering::Relaxed),
                ..Flow::default()
            };
            let (to_a, to_b) = (flow(&self.shared.to_a), flow(&self.shared.to_b));
            self.report(to_a, to_b, end);
        }));
    }
}

/// A pair queued for a relay thread.
pub(crate) struct Job {
    pub(crate) pair: Pair,
    pub(crate) promise: Promise,
}

impl Job {
    /// Ends the pair before it was adopted.
    pub(crate) fn reset(self, end: PairEnd) {
        let Self { pair, promise, .. } = self;
        // Resets the sockets: SO_LINGER was set at submission.
        drop(pair);
        let none = Flow::default();
        // A panic of the callback must not end the thread.
        let _panicked = catch_unwind(AssertUnwindSafe(|| promise.keep(none, none, end)));
    }
}
