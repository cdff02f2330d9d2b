//! The accept loop: from a listener to handlers, with TLS in between where configured. Errors back off. Handshakes and
//! connections that wait for one are capped and timed. [`Tasks`] admits connections.

use std::{future::Future, io, sync::Arc, time::Duration};

use adit_core::proxy_header::{self, Header};
use ipnet::IpNet;
use tokio::io::AsyncReadExt as _;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    handshakes::{HandshakeLimits, Handshakes, Place, SlotError},
    listen::Listener,
    tasks::{Overloaded, Tasks},
};
use adit_tls::{
    cause::TlsCause,
    handshake::{HandshakeError, accept_tls},
    reload::ReloadableServerTls,
    stream::{ByteStream, PeerAddr, Socket},
};

/// First wait after accept fails for want of descriptors or memory.
const BACKOFF_MIN: Duration = Duration::from_millis(5);
/// Longest wait: a tenth of a second late is better than a busy loop, and soon enough for a freed descriptor.
const BACKOFF_MAX: Duration = Duration::from_millis(100);

/// How often a loop without room for connections asks for it.
const ROOM_EVERY: Duration = Duration::from_millis(50);

/// Where connections come from: a [`Listener`], or a script in tests.
pub trait Incoming: Send + 'static {
    /// Waits for a connection. Cancelling the call must lose none.
    fn accept(&mut self) -> impl Future<Output = io::Result<(Socket, PeerAddr)>> + Send;
}

impl Incoming for Listener {
    fn accept(&mut self) -> impl Future<Output = io::Result<(Socket, PeerAddr)>> + Send {
        self.accept_tuned()
    }
}

/// Events of the accept loop, for counters. All methods do nothing by default.
pub trait AcceptEvents: Send + Sync + 'static {
    /// Accept failed for want of descriptors or memory, or with an error that is not known to be temporary. The loop waits.
    fn accept_failed(&self, _error: &io::Error) {}
    /// A peer began a handshake and did not finish it.
    fn handshake_failed(&self, _peer: PeerAddr, _error: &HandshakeError) {}
    /// A connection was closed before its handshake began, or because its handshake stalled.
    fn no_slot(&self, _peer: PeerAddr, _why: SlotError) {}
    /// A connection was closed at once because all task slots are in use.
    fn connection_refused(&self, _peer: PeerAddr, _overloaded: Overloaded) {}
    /// Asked before each accept: whether there is room for one more connection. If not, the loop closes a connection whose
    /// peer has sent nothing for a while. Without such a connection it waits, and peers queue in the kernel.
    fn has_room(&self) -> bool {
        true
    }
    /// There is no room: the loop waits.
    fn paused(&self) {}
    /// A connection was accepted.
    fn accepted(&self) {}
}

/// TLS of a listener, and the limits of its handshakes.
#[derive(Clone)]
pub struct AcceptTls {
    /// Current certificates.
    pub tls: Arc<ReloadableServerTls>,
    /// Limits of connections before and during their handshake.
    pub limits: HandshakeLimits,
    /// Time from accept to the end of the handshake.
    pub deadline: Duration,
    /// Balancers, which say by a PROXY header whose connection it is.
    pub balancers: Arc<Balancers>,
}

/// Networks whose connections begin with a PROXY header.
#[derive(Debug, Default)]
pub struct Balancers(pub Vec<IpNet>);

impl Balancers {
    /// Reads the header of a balancer's connection, and not a byte more. Returns the peer that counts from here on.
    ///
    /// # Errors
    /// There is no header, or a wrong one.
    async fn peer(&self, socket: &mut Socket, peer: PeerAddr) -> Result<PeerAddr, HandshakeError> {
        let (Socket::Tcp(socket), PeerAddr::Tcp(by)) = (socket, peer) else {
            return Ok(peer);
        };
        let ip = by.ip().to_canonical();
        if !self.0.iter().any(|network| network.contains(&ip)) {
            return Ok(peer);
        }
        let mut read = Vec::new();
        loop {
            match proxy_header::parse(&read).map_err(TlsCause::from)? {
                Header::Needs(more) => {
                    let from = read.len();
                    read.resize(from + more, 0);
                    let more = read.get_mut(from..).unwrap_or_default();
                    let read = socket.read_exact(more).await;
                    read.map_err(|error| HandshakeError::of(&error))?;
                }
                Header::Whole(client) => {
                    return Ok(client.map_or(peer, |client| PeerAddr::Forwarded { client, by }));
                }
            }
        }
    }
}

/// Accepts until `stop`, then returns the listener; dropping the listener closes it. Each connection is a task of `tasks`:
/// the handshake, then the future that `handle` makes of the stream. `stop` also closes connections whose handshake is not
/// over, like those in the kernel's queue: a process that leaves would refuse their requests. Other connections go on.
pub async fn accept_loop<I, H, F>(
    incoming: I,
    tls: Option<AcceptTls>,
    tasks: Tasks,
    events: Arc<dyn AcceptEvents>,
    stop: CancellationToken,
    handle: H,
) -> I
where
    I: Incoming,
    H: Fn(ByteStream) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let handle = Arc::new(handle);
    let mut acceptor = Acceptor {
        incoming,
        handshakes: tls.as_ref().map(|tls| Handshakes::new(tls.limits)),
        backoff: Backoff::default(),
        events,
    };
    while let Some((socket, peer)) = stop.run_until_cancelled(acceptor.next()).await {
        let (events, handle) = (Arc::clone(&acceptor.events), Arc::clone(&handle));
        let handshakes = acceptor.handshakes.as_ref();
        let due = tls
            .clone()
            .zip(handshakes.map(|handshakes| handshakes.enter(peer)));
        // Boxed: the state of the greeting would otherwise stay in the connection's task for its whole life.
        let greeting = Box::pin(greet(socket, peer, due, stop.clone(), events));
        let connection = async move {
            if let Some(stream) = greeting.await {
                handle(stream).await;
            }
        };
        if let Err(overloaded) = tasks.spawn("connection", connection) {
            acceptor.events.connection_refused(peer, overloaded);
        }
    }
    acceptor.incoming
}

/// Failed handshakes of the process that may wait until their alert is read; others are closed at once.
static CLOSING: Semaphore = Semaphore::const_new(64);

/// Does the handshake of a connection, where TLS is configured, once a slot is free; returning frees the slot. `None`:
/// there was no handshake, which `events` has been told, or `stop` came first.
async fn greet(
    socket: Socket,
    peer: PeerAddr,
    due: Option<(AcceptTls, Place)>,
    stop: CancellationToken,
    events: Arc<dyn AcceptEvents>,
) -> Option<ByteStream> {
    let Some((
        AcceptTls {
            tls,
            deadline,
            balancers,
            ..
        },
        mut place,
    )) = due
    else {
        return Some(ByteStream::Plain(socket, peer));
    };
    let reject = |why: SlotError| {
        tracing::debug!(%peer, %why, "no TLS handshake");
        events.no_slot(peer, why);
        None
    };
    let until = Instant::now() + deadline;
    let (mut socket, mut named) = (socket, Ok(peer));
    // A balancer speaks before its client does: a client is silent until its own first byte.
    let first = async {
        named = balancers.peer(&mut socket, peer).await;
        named.is_ok() && socket.speaks().await
    };
    let slot = place.acquire_slot(first, until);
    let slot = stop.run_until_cancelled(slot).await?;
    let peer = match named {
        Ok(named) => named,
        Err(error) => {
            events.handshake_failed(peer, &error);
            return None;
        }
    };
    if let Err(why) = slot {
        return reject(why);
    }
    let left = until.saturating_duration_since(Instant::now());
    let handshake = tokio::select! {
        // The handshake first: a handshake that finished in time counts, however late this task is polled.
        biased;
        handshake = Box::pin(accept_tls(socket, peer, &tls, left)) => handshake,
        why = place.taken_back() => return reject(why),
        () = stop.cancelled() => return None,
    };
    match handshake {
        Ok(stream) => Some(stream),
        Err(failed) => {
            events.handshake_failed(peer, &failed.error);
            // Nobody waits for a peer that does not read its alert.
            drop(place);
            if let Ok(_place) = CLOSING.try_acquire() {
                let _stopped = stop.run_until_cancelled(failed.close()).await;
            }
            None
        }
    }
}

/// A listener whose errors back off.
struct Acceptor<I> {
    incoming: I,
    /// `None` without TLS.
    handshakes: Option<Arc<Handshakes>>,
    backoff: Backoff,
    events: Arc<dyn AcceptEvents>,
}

impl<I: Incoming> Acceptor<I> {
    /// The next connection.
    async fn next(&mut self) -> (Socket, PeerAddr) {
        loop {
            self.room().await;
            match self.incoming.accept().await {
                Ok((socket, peer)) => {
                    self.events.accepted();
                    self.backoff = Backoff::default();
                    return (socket, peer);
                }
                Err(error) if passes_by_itself(&error) && self.backoff.may_retry_at_once() => {}
                Err(error) => {
                    self.events.accept_failed(&error);
                    let wait = self.backoff.next_wait();
                    tracing::warn!(%error, ?wait, "cannot accept connections");
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    /// Waits for room for one more connection. To make room, closes a connection whose peer has sent nothing for a while:
    /// otherwise silent peers would block the listener where descriptors are few.
    async fn room(&self) {
        let mut waits = false;
        while !self.events.has_room() {
            let handshakes = self.handshakes.as_ref();
            if handshakes.is_some_and(|handshakes| handshakes.close_oldest_silent()) {
                // Lets the task that owns the descriptor close it.
                return tokio::task::yield_now().await;
            }
            if !std::mem::replace(&mut waits, true) {
                self.events.paused();
            }
            tokio::time::sleep(ROOM_EVERY).await;
        }
    }
}

/// Errors of accept(2) about one connection that is already gone, or that are temporary.
fn passes_by_itself(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::ConnectionAborted
            | Kind::ConnectionReset
            | Kind::Interrupted
            | Kind::HostUnreachable
            | Kind::NetworkUnreachable
    ) || matches!(
        error.raw_os_error(),
        Some(libc::EPROTO | libc::ENOPROTOOPT | libc::EHOSTDOWN | libc::ENONET)
    )
}

/// How long to wait after errors in a row.
#[derive(Debug, Default)]
struct Backoff {
    retries: u32,
    last: Duration,
}

impl Backoff {
    /// Temporary errors in a row that are retried at once: more of them look like a loop.
    const RETRIES_MAX: u32 = 64;

    fn may_retry_at_once(&mut self) -> bool {
        self.retries += 1;
        self.retries <= Self::RETRIES_MAX
    }

    fn next_wait(&mut self) -> Duration {
        self.last = (self.last * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
        self.last
    }
}

#[cfg(test)]
mod tests;
