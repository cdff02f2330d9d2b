//! The admin thread: health and metrics listeners on a thread and runtime of their own, so that a scrape
//! cannot delay a packet and a busy data path cannot delay a liveness probe.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::pin::pin;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::FutureExt as _;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::answer_deadline::AnswerDeadline;
use crate::privileges::give_up_here;
use crate::probes::HttpService;
use adit_net::listen::{ListenError, SocketMode, StaleFile, UnixBound, UnixListening, listen};
use adit_net::tasks::Tasks;
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::Listener;

/// Listeners waiting to be taken up by the thread; a process has a handful.
const COMMANDS_MAX: usize = 8;
/// What connections get to finish their response once their listener closes or their time is up.
const CLOSE_GRACE: Duration = Duration::from_secs(2);
/// Pause after a failed accept, so that running out of descriptors does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Limits of each listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdminLimits {
    /// Time for the headers of one request, waiting for a further request included.
    pub header_timeout: Duration,
    /// Size of one request's headers, in bytes; hyper's least is 8192.
    pub header_bytes_max: usize,
    /// Connections at once, at least 1. A further one ends the oldest: probes and scrapes last
    /// milliseconds, so what is old is idle or slow on purpose, and a liveness probe still gets in.
    pub connections_max: usize,
    /// Time for writing an answer, until the kernel has all of it.
    pub answer_timeout: Duration,
    /// Life of one connection, so that a reader that never reads does not hold its place for good.
    pub connection_life: Duration,
}

impl Default for AdminLimits {
    /// Upstream's time for headers (60 s), and ours where it has none. Its 1 MiB of headers, 256 times for each listener, is more memory
    /// than probes and scrapes should get: they have some hundred bytes.
    fn default() -> Self {
        Self {
            header_timeout: Duration::from_secs(60),
            header_bytes_max: 64 * 1024,
            connections_max: 256,
            answer_timeout: Duration::from_secs(60),
            connection_life: Duration::from_secs(600),
        }
    }
}

/// Why a listener does not serve.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The address cannot be listened on.
    #[error("{name} port: cannot listen on {address}: {cause}; choose another address or port")]
    Bind {
        /// Which listener.
        name: &'static str,
        /// The address asked for.
        address: SocketAddr,
        /// The system's answer.
        cause: io::Error,
    },
    /// The path cannot be listened on.
    #[error("admin socket: {0}")]
    Socket(#[from] ListenError),
    /// The thread or its runtime could not be made.
    #[error("cannot start the admin thread: {0}")]
    Start(io::Error),
    /// The thread has ended or has too many listeners waiting.
    #[error("{name} port: the admin thread takes no more listeners")]
    NotTaken {
        /// Which listener.
        name: &'static str,
    },
}

struct Serve {
    name: &'static str,
    listener: Bound,
    service: HttpService,
    closing: watch::Receiver<bool>,
}

/// A listener that is not served yet.
enum Bound {
    Tcp(TcpListener),
    Unix(UnixBound),
}

/// A listener that is.
enum Door {
    Tcp(tokio::net::TcpListener),
    Unix(UnixListening),
}

/// A connection that came through one.
enum Visitor {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Bound {
    fn open(self) -> io::Result<Door> {
        match self {
            Self::Tcp(listener) => tokio::net::TcpListener::from_std(listener).map(Door::Tcp),
            Self::Unix(bound) => bound.listen().map(Door::Unix),
        }
    }
}

impl Door {
    async fn accept(&self) -> io::Result<Visitor> {
        match self {
            Self::Tcp(listener) => listener
                .accept()
                .await
                .map(|(stream, _)| Visitor::Tcp(stream)),
            Self::Unix(listener) => listener.accept().await.map(Visitor::Unix),
        }
    }
}

impl Visitor {
    /// Whether it may ask. The socket's mode lets nobody else connect; this holds, too, when someone changes the mode.
    fn is_welcome(&self) -> bool {
        let Self::Unix(stream) = self else {
            return true;
        };
        rustix::net::sockopt::socket_peercred(stream)
            .is_ok_and(|peer| peer.uid.is_root() || peer.uid == rustix::process::geteuid())
    }
}

/// The thread. Dropping it ends every listener and connection at once.
#[derive(Debug)]
pub struct AdminThread {
    commands: Option<mpsc::Sender<Serve>>,
    thread: Option<JoinHandle<()>>,
}

impl AdminThread {
    /// Starts the thread, without listeners yet. Connections ended by the cap are counted in `metrics`,
    /// and a listener that ends by itself is noted in `services`.
    ///
    /// # Errors
    /// [`AdminError::Start`] if the system gives no thread or descriptors.
    pub fn start(
        limits: AdminLimits,
        metrics: AditMetrics,
        services: Tasks,
    ) -> Result<Self, AdminError> {
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let (tell, told) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("adit-admin".to_owned())
            .spawn(move || {
                give_up_here();
                // Made here: a thread that is refused would drop it where that is not allowed.
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                match runtime {
                    Ok(runtime) => {
                        let _starting = tell.send(Ok(()));
                        runtime.block_on(run(received, limits, metrics, services));
                    }
                    Err(error) => {
                        let _starting = tell.send(Err(error));
                    }
                }
            })
            .map_err(AdminError::Start)?;
        let started = told.recv().map_err(io::Error::other).flatten();
        started.map_err(AdminError::Start)?;
        Ok(Self {
            commands: Some(commands),
            thread: Some(thread),
        })
    }

    /// Listens on `address` (port 0: any) and serves until the returned handle is dropped. `name` is for
    /// messages: `health`, `admin`. An error concerns this listener only; upstream logs it and goes on.
    ///
    /// # Errors
    /// [`AdminError::Bind`] with the address; [`AdminError::NotTaken`] if the thread is gone.
    pub fn serve(
        &self,
        name: &'static str,
        address: SocketAddr,
        service: HttpService,
    ) -> Result<AdminListener, AdminError> {
        let bind = || {
            let listener = listen(address, |_socket| ())?;
            let local = listener.local_addr()?;
            Ok((listener, local))
        };
        let (listener, local) = bind().map_err(|cause| AdminError::Bind {
            name,
            address,
            cause,
        })?;
        let close = self.hand_over(name, Bound::Tcp(listener), service)?;
        Ok(AdminListener {
            local,
            _close: close,
        })
    }

    /// Listens on a unix socket at `path`, for this process's user and root, and serves until the returned handle is dropped.
    /// A socket file that is there already is removed first.
    ///
    /// # Errors
    /// [`AdminError::Socket`] with the path; [`AdminError::NotTaken`] if the thread is gone.
    pub fn serve_unix(&self, path: &Path, service: HttpService) -> Result<AdminSocket, AdminError> {
        let bound = UnixBound::bind(path, StaleFile::Remove, SocketMode::Owner)?;
        let close = self.hand_over("admin socket", Bound::Unix(bound), service)?;
        Ok(AdminSocket { _close: close })
    }

    fn hand_over(
        &self,
        name: &'static str,
        listener: Bound,
        service: HttpService,
    ) -> Result<watch::Sender<bool>, AdminError> {
        let (close, closing) = watch::channel(false);
        let taken = self.commands.as_ref().map(|commands| {
            commands.try_send(Serve {
                name,
                listener,
                service,
                closing,
            })
        });
        match taken {
            Some(Ok(())) => Ok(close),
            _ => Err(AdminError::NotTaken { name }),
        }
    }
}

impl Drop for AdminThread {
    fn drop(&mut self) {
        drop(self.commands.take());
        if let Some(thread) = self.thread.take() {
            // A panic there was already reported by the panic hook.
            let _panicked = thread.join();
        }
    }
}

/// One listener. Dropping it closes the port; requests in flight get a moment to finish.
#[derive(Debug)]
pub struct AdminListener {
    local: SocketAddr,
    /// Its end is what the listener's tasks watch for.
    _close: watch::Sender<bool>,
}

impl AdminListener {
    /// The address it is bound to, with the port chosen if 0 was asked for.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

/// The unix socket. Dropping it closes it and removes its file.
#[derive(Debug)]
pub struct AdminSocket {
    _close: watch::Sender<bool>,
}

/// Main task of the thread; ends, and with it the runtime, when the owner goes.
async fn run(
    mut commands: mpsc::Receiver<Serve>,
    limits: AdminLimits,
    metrics: AditMetrics,
    services: Tasks,
) {
    let mut listeners = JoinSet::new();
    while let Some(serve) = commands.recv().await {
        while listeners.try_join_next().is_some() {}
        let (name, services) = (serve.name, services.clone());
        let accepting = AssertUnwindSafe(accept(serve, limits, metrics.clone())).catch_unwind();
        listeners.spawn(async move {
            if !matches!(accepting.await, Ok(Ended::Closed)) {
                services.service_ended(name);
            }
        });
    }
}

/// How an accept loop ended, where it did not panic.
enum Ended {
    /// Its owner closed it.
    Closed,
    /// It cannot accept.
    Lost,
}

/// Accept loop of one listener, then the drain of its connections.
async fn accept(serve: Serve, limits: AdminLimits, metrics: AditMetrics) -> Ended {
    let Serve {
        name,
        listener,
        service,
        mut closing,
    } = serve;
    let listener = match listener.open() {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(port = name, %error, "listener lost");
            return Ended::Lost;
        }
    };
    let mut connections = JoinSet::new();
    // A handle keeps what its task was made of.
    let mut by_age: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            biased;
            _closed = closing.changed() => break,
            Some(_ended) = connections.join_next(), if !connections.is_empty() => {
                while by_age.front().is_some_and(AbortHandle::is_finished) {
                    by_age.pop_front();
                }
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(visitor) if !visitor.is_welcome() => {
                metrics.accept_error(Listener::Admin);
                tracing::warn!(port = name, "a connection of another user was refused");
            }
            Ok(visitor) => {
                if connections.len() >= limits.connections_max {
                    metrics.accept_error(Listener::Admin);
                    end_oldest(&mut by_age);
                    connections.join_next().await;
                }
                if by_age.len() > 2 * limits.connections_max {
                    by_age.retain(|connection| !connection.is_finished());
                }
                let task = visit(visitor, service.clone(), limits, closing.clone());
                by_age.push_back(connections.spawn(task));
            }
            Err(error) => {
                metrics.accept_error(Listener::Admin);
                tracing::warn!(port = name, %error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    // Each ends by itself within the grace.
    while connections.join_next().await.is_some() {}
    Ended::Closed
}

/// Ends the oldest connection still open and forgets those that ended by themselves.
fn end_oldest(by_age: &mut VecDeque<AbortHandle>) {
    by_age.retain(|connection| !connection.is_finished());
    if let Some(oldest) = by_age.pop_front() {
        oldest.abort();
    }
}

async fn visit(
    visitor: Visitor,
    service: HttpService,
    limits: AdminLimits,
    closing: watch::Receiver<bool>,
) {
    match visitor {
        Visitor::Tcp(stream) => {
            if let Ok(local) = stream.local_addr() {
                connection(stream, local, service, limits, closing).await;
            }
        }
        Visitor::Unix(stream) => {
            let nowhere = (Ipv4Addr::UNSPECIFIED, 0).into();
            connection(stream, nowhere, service, limits, closing).await;
        }
    }
}

/// One connection, keep-alive included. Bad requests and timeouts end it and concern nobody else.
async fn connection<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    local: SocketAddr,
    service: HttpService,
    limits: AdminLimits,
    mut closing: watch::Receiver<bool>,
) {
    let answer = service_fn(move |request| {
        let service = service.clone();
        async move { Ok::<_, std::convert::Infallible>(service.answer(&request, local).await) }
    });
    let stream = AnswerDeadline::new(stream, limits.answer_timeout);
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(limits.header_bytes_max)
        .serve_connection(TokioIo::new(stream), answer);
    let mut serving = pin!(serving);
    tokio::select! {
        ended = serving.as_mut() => {
            if let Err(error) = ended {
                tracing::debug!(%error, "admin connection ended");
            }
            return;
        }
        _closed = closing.changed() => {}
        () = tokio::time::sleep(limits.connection_life) => {}
    }
    serving.as_mut().graceful_shutdown();
    let _cut = tokio::time::timeout(CLOSE_GRACE, serving).await;
}

#[cfg(test)]
mod tests;
