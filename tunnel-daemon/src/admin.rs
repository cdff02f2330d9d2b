//! The admin thread: health and metrics listeners on a thread and runtime of their own. A scrape cannot delay a packet, and a
//! busy data path cannot delay a liveness probe.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::DirBuilderExt as _;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
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
use crate::probes::HttpService;
use adit_config::plan::AdminSocketPlan;
use adit_host::privileges::give_up_here;
use adit_net::listen::{ListenError, SocketMode, StaleFile, UnixBound, UnixListening, listen};
use adit_net::tasks::Tasks;
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::Listener;

/// Commands to open a listener that may wait for the thread; a process has a handful.
const COMMANDS_MAX: usize = 8;
/// Time that connections get to finish their response after their listener closed or their life ended.
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
    /// Concurrent connections, at least 1. A further connection aborts the oldest: probes and scrapes last milliseconds, so
    /// an old connection is idle or slow, and a liveness probe still gets in.
    pub connections_max: usize,
    /// Time for writing a response, until the kernel has all of its bytes.
    pub answer_timeout: Duration,
    /// Life of one connection: a peer that never reads does not hold its slot forever.
    pub connection_life: Duration,
}

impl Default for AdminLimits {
    /// Upstream's time for headers (60 s), and this project's value where upstream has no limit. Upstream's 1 MiB of
    /// headers, 256 times per listener, is too much memory: headers of probes and scrapes have some hundred bytes.
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

/// Why a listener cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The address cannot be listened on.
    #[error("{name} port: cannot listen on {address}: {cause}; choose another address or port")]
    Bind {
        /// Which listener.
        name: &'static str,
        /// The requested address.
        address: SocketAddr,
        /// The system's error.
        cause: io::Error,
    },
    /// The unix socket cannot be listened on.
    #[error("admin socket: {0}")]
    Socket(#[from] ListenError),
    /// The thread or its runtime could not be created.
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

/// A listener that is bound, but not served yet.
enum Bound {
    Tcp(TcpListener),
    Unix(UnixBound),
}

/// A listener that is served.
enum Door {
    Tcp(tokio::net::TcpListener),
    Unix(UnixListening),
}

/// An accepted connection.
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
    /// Whether the peer may send requests: root and this process's user may. The check holds even if someone changes the
    /// socket's mode, which excludes other users.
    fn is_welcome(&self) -> bool {
        let Self::Unix(stream) = self else {
            return true;
        };
        rustix::net::sockopt::socket_peercred(stream)
            .is_ok_and(|peer| peer.uid.is_root() || peer.uid == rustix::process::geteuid())
    }
}

/// The admin thread. Dropping it ends every listener and connection at once.
#[derive(Debug)]
pub struct AdminThread {
    commands: Option<mpsc::Sender<Serve>>,
    thread: Option<JoinHandle<()>>,
}

impl AdminThread {
    /// Starts the thread, without listeners yet. `metrics` counts connections aborted by the cap; `services` notes a
    /// listener that ends by itself.
    ///
    /// # Errors
    /// [`AdminError::Start`] if the system refuses the thread or its descriptors.
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
                // Created on this thread: a refused thread would drop the runtime in an async context, which panics.
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

    /// Listens on `address` (port 0: any) and serves until the returned handle is dropped. Messages use `name`: `health`,
    /// `admin`. A failure concerns this listener only; upstream logs it and goes on.
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

    /// Listens on the admin socket for this process's user and root, and serves until the returned handle is dropped. A socket
    /// file of a dead process is replaced. `None`: off, or no default socket can be opened, which is logged.
    ///
    /// # Errors
    /// [`AdminError::Socket`] with the given path; [`AdminError::NotTaken`] if the thread is gone.
    pub fn serve_socket(
        &self,
        plan: &AdminSocketPlan,
        service: HttpService,
    ) -> Result<Option<AdminSocket>, AdminError> {
        let bound = match plan {
            AdminSocketPlan::Off => return Ok(None),
            AdminSocketPlan::At(path) => bind_socket(path)?,
            AdminSocketPlan::Default(places) => match first_of(places) {
                Ok(bound) => bound,
                Err(error) => {
                    tracing::warn!(
                        error = error.map(|error| error.to_string()),
                        "no admin socket, so adit status cannot ask this process: give --admin-socket a path, or off"
                    );
                    return Ok(None);
                }
            },
        };
        let path = bound.path().to_owned();
        let close = self.hand_over("admin socket", Bound::Unix(bound), service)?;
        Ok(Some(AdminSocket {
            path,
            _close: close,
        }))
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
            // The panic hook has already reported a panic of the thread.
            let _panicked = thread.join();
        }
    }
}

/// One listener. Dropping it closes the port; requests in flight get a moment to finish.
#[derive(Debug)]
pub struct AdminListener {
    local: SocketAddr,
    /// The listener's tasks end when this sender is dropped.
    _close: watch::Sender<bool>,
}

impl AdminListener {
    /// The bound address, with the port that the kernel chose if port 0 was requested.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

/// The unix socket. Dropping this handle closes the socket and removes its file.
#[derive(Debug)]
pub struct AdminSocket {
    path: PathBuf,
    _close: watch::Sender<bool>,
}

impl AdminSocket {
    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn bind_socket(path: &Path) -> Result<UnixBound, ListenError> {
    UnixBound::bind(path, StaleFile::RemoveDead, SocketMode::Owner)
}

/// Binds the first of these paths at which that works, and makes the folder of a path if it is missing.
///
/// # Errors
/// Why the first path cannot be bound, or that another process listens: a second process of a user must not take another path,
/// where no command would find it. `None` without paths.
fn first_of(places: &[PathBuf]) -> Result<UnixBound, Option<ListenError>> {
    let mut first = None;
    for path in places {
        if let Some(folder) = path.parent() {
            // If this fails, the socket's error names the path.
            let _made = std::fs::DirBuilder::new().mode(0o755).create(folder);
        }
        match bind_socket(path) {
            Ok(bound) => return Ok(bound),
            Err(error) if error.cause().kind() == io::ErrorKind::AddrInUse => {
                return Err(Some(error));
            }
            Err(error) => _ = first.get_or_insert(error),
        }
    }
    Err(first)
}

/// Main task of the thread. It ends, and the runtime with it, when [`AdminThread`] is dropped.
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

/// How an accept loop ended, unless it panicked.
enum Ended {
    /// The owner dropped the listener's handle.
    Closed,
    /// The listener cannot accept.
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
    // An AbortHandle keeps its task's allocation, so handles of finished tasks are removed.
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
                metrics.accept_errors.count(Listener::Admin);
                tracing::warn!(port = name, "a connection of another user was refused");
            }
            Ok(visitor) => {
                if connections.len() >= limits.connections_max {
                    metrics.accept_errors.count(Listener::Admin);
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
                metrics.accept_errors.count(Listener::Admin);
                tracing::warn!(port = name, %error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    // Each connection ends by itself within the grace.
    while connections.join_next().await.is_some() {}
    Ended::Closed
}

/// Aborts the oldest open connection and removes the handles of finished ones.
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

/// Serves one connection, keep-alive included. Bad requests and timeouts end only this connection.
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
