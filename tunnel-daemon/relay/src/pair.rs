//! Two sockets on their way into a relay, and the thread of control their owner keeps.

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

/// Two connected stream sockets, TCP or unix, and what was already read for them.
#[derive(Debug)]
pub struct Pair {
    /// One socket.
    pub a: OwnedFd,
    /// The other.
    pub b: OwnedFd,
    /// Delivered to `a` before anything that comes from `b`.
    pub to_a: Bytes,
    /// Delivered to `b` before anything that comes from `a`.
    pub to_b: Bytes,
    /// Of `b`, when it is on kernel TLS.
    pub tls: Option<KernelTls>,
}

impl Pair {
    /// A pair of which nothing was read yet.
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

    /// From now on closing its sockets resets them, whoever closes them: a thread, whoever finds that there is none any more,
    /// or the kernel for a process that is killed.
    pub(crate) fn arm(&self) {
        for fd in [&self.a, &self.b] {
            // Fails on a socket that is already reset.
            let _reset_already = socket::reset_on_close(fd);
        }
    }
}

/// Called once with how a pair ended: on the relay thread, or on the one that stops or submits for a pair that was never
/// begun. Must not block. If it panics on the relay thread, the pairs of that thread end with it.
pub type Done = Box<dyn FnOnce(Outcome) + Send>;

/// Bytes delivered so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Taken by side a.
    pub to_a: u64,
    /// Taken by side b.
    pub to_b: u64,
    /// A side has said that it sends no more, and the pair goes on: the other side may still send, or has yet to take what
    /// was sent before.
    pub is_half_closed: bool,
    /// Bytes went through a pipe of the kernel at some time.
    pub has_spliced: bool,
}

/// What owner and relay thread share about a pair.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) to_a: AtomicU64,
    pub(crate) to_b: AtomicU64,
    /// The pair's key once a thread has adopted it; only that thread asks.
    pub(crate) key: AtomicU64,
    pub(crate) cancelled: AtomicBool,
    /// Sides that have said that they send no more.
    pub(crate) ended: AtomicU8,
    /// Directions that are through.
    pub(crate) finished: AtomicU8,
    /// A direction has borrowed a pipe.
    pub(crate) spliced: AtomicU8,
    /// The sockets for as long as a thread has the pair.
    pub(crate) sockets: OnceLock<[Weak<OwnedFd>; 2]>,
}

/// A pair that a relay has accepted. Dropping it changes nothing.
#[derive(Clone)]
pub struct Submitted {
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Arc<Inbox>,
}

impl Submitted {
    /// Ends the pair now: both sockets are reset, and `done` hears [`PairEnd::Cancelled`]. Without effect on a pair that
    /// has ended.
    pub fn cancel(&self) {
        // Each pair is announced once, so the list of cancels is never longer than that of pairs.
        if !self.shared.cancelled.swap(true, Ordering::AcqRel) {
            self.inbox.announce_cancel(Arc::clone(&self.shared));
        }
    }

    /// Bytes delivered so far; both numbers change after each system call.
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

    /// What the kernel knows of one side's way to its peer. `None` for a socket that is not TCP, before a thread has taken
    /// the pair, and after its end.
    #[must_use]
    pub fn tcp_state(&self, side: Side) -> Option<TcpState> {
        // Held for the call only; should the pair end meanwhile, the socket is closed here.
        let socket = self.shared.sockets.get()?.get(side.index())?.upgrade()?;
        tcp_state(&*socket).ok()
    }

    /// Fits the buffers of one side's socket. Without effect before a thread has taken the pair, and after its end.
    pub fn fit_buffers(&self, side: Side, buffers: &mut SocketBuffers, sizes: BufferSizes) {
        let sockets = self.shared.sockets.get();
        let socket = sockets.and_then(|sockets| sockets.get(side.index()));
        if let Some(socket) = socket.and_then(Weak::upgrade) {
            // Of a socket that its peer has closed it fails, or changes nothing.
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

/// The promise that `done` is called and the pair leaves the count: kept by `Drop` if by nobody else.
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
        self.tell(to_a, to_b, end);
    }

    /// Gives `done` back unheard, for a pair that was refused.
    pub(crate) fn withdraw(mut self) -> Done {
        self.inbox.leave();
        self.done.take().unwrap_or_else(|| Box::new(drop))
    }

    fn tell(&mut self, to_a: Flow, to_b: Flow, end: PairEnd) {
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
        // This may run while the thread unwinds: a callback that panics now would end the process.
        let _panicked_too = catch_unwind(AssertUnwindSafe(|| {
            // Of a pair that a thread had, what it has published of it.
            let flow = |delivered: &AtomicU64| Flow {
                bytes: delivered.load(Ordering::Relaxed),
                ..Flow::default()
            };
            let (to_a, to_b) = (flow(&self.shared.to_a), flow(&self.shared.to_b));
            self.tell(to_a, to_b, end);
        }));
    }
}

/// A pair on its way to a relay thread.
pub(crate) struct Job {
    pub(crate) pair: Pair,
    pub(crate) promise: Promise,
}

impl Job {
    /// Ends it before it began.
    pub(crate) fn reset(self, end: PairEnd) {
        let Self { pair, promise, .. } = self;
        // It was armed when it was submitted.
        drop(pair);
        let none = Flow::default();
        // A callback that panics must not take the thread along.
        let _panicked = catch_unwind(AssertUnwindSafe(|| promise.keep(none, none, end)));
    }
}
