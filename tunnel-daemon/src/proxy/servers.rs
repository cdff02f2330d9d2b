//! The servers of a proxy: which one a dial goes to, and connections that are ready for the next dials.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use adit_core::connect::failure_of;
use adit_core::failure::DialFailure;
use adit_core::ids::AgentId;
use adit_proxy::connect::{NoTunnel, open_tunnel};
use bytes::Bytes;
use rand::seq::SliceRandom as _;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::process::Process;
use adit_agent::connector::ServerConnector;
use adit_config::address::ServerAddress;
use adit_config::plan::ProxyPlan;
use adit_net::peer::{self, Peer};
use adit_net::socket;
use adit_net::tasks::Tasks;
use adit_server::router::AskedAgents;
use adit_tls::stream::{ByteStream, Connection as _};

/// Time for a connection to one server, TLS included; then the next one is tried.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// A dial that is given up later than this has found a server that takes no connection.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
/// The same for a server that gives no answer to CONNECT: agents give up a target sooner, unless a flag says otherwise.
const ANSWER_PATIENCE: Duration = Duration::from_secs(7);
/// Time for the server's kernel to acknowledge a request.
const REQUEST_WITHIN: Duration = Duration::from_secs(5);
/// How long a server that failed is asked after all others: at first, and at most. At most at once, if it gave no answer to
/// CONNECT: that it takes a connection does not show that it is back.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How long a ready connection waits for a dial: less than any server waits for a request.
const READY_FOR: Duration = Duration::from_secs(20);

/// All servers.
pub(super) struct Servers {
    connector: ServerConnector,
    servers: Vec<Server>,
    ready: Mutex<ReadyConnections>,
    ready_max: usize,
    /// Failures name the server and the target, as those of HyperShift's sidecars.
    quotes: bool,
    /// Connects ahead of dials.
    tasks: Tasks,
    stop: CancellationToken,
}

/// A tunnel through a server.
pub(super) struct Through {
    pub(super) stream: ByteStream,
    /// What the target has sent already.
    pub(super) early: Bytes,
    /// The server.
    pub(super) server: AgentId,
}

struct Server {
    address: ServerAddress,
    /// The address as agents' ids are shown.
    name: AgentId,
    /// `None`: it has answered, or was not asked yet.
    failed: Mutex<Option<Failed>>,
    /// Its last answer to CONNECT.
    answered_at: Mutex<Option<Instant>>,
}

#[derive(Clone)]
struct Failed {
    since: Instant,
    /// The server is tried by a connection of its own then, which no dial waits for.
    pause_ends: Instant,
    pause: Duration,
    why: String,
    is_tried: bool,
    /// It took a request and gave no answer, as it also does for a slow target.
    is_silent: bool,
}

/// Connections without a request yet.
#[derive(Default)]
struct ReadyConnections {
    waiting: Vec<Waiting>,
    opening: usize,
    /// As many as there were dials that found none of late.
    wanted: usize,
    /// Of the next connection.
    number: u64,
}

struct Waiting {
    number: u64,
    /// Index of its server.
    at: usize,
    stream: ByteStream,
    /// Dropped when it no longer waits.
    _taken: oneshot::Sender<()>,
}

impl Servers {
    pub(super) fn new(
        plan: &ProxyPlan,
        connector: ServerConnector,
        process: &Process,
    ) -> Arc<Self> {
        let server = |address: &ServerAddress| Server {
            address: address.clone(),
            name: AgentId::new(&address.to_string()),
            failed: Mutex::default(),
            answered_at: Mutex::default(),
        };
        Arc::new(Self {
            connector,
            servers: plan.servers.iter().map(server).collect(),
            ready: Mutex::default(),
            ready_max: usize::try_from(plan.spare_connections).unwrap_or(usize::MAX),
            quotes: plan.quotes_servers,
            tasks: process.services.clone(),
            stop: process.stop.clone(),
        })
    }

    /// Whether a server has answered last time, was not asked yet, or is to be tried again.
    pub(super) fn any_may_answer(&self) -> bool {
        let fails = |server: &Server| {
            let failed = server.failure();
            failed.is_some_and(|failed| !failed.is_over() && !failed.is_silent)
        };
        !self.servers.iter().all(fails)
    }

    /// Lines of `/readyz?verbose`.
    pub(super) fn lines(&self) -> String {
        let mut lines = String::new();
        for server in &self.servers {
            let _infallible = match server.failure() {
                None => writeln!(lines, "[+]server {}", server.address),
                Some(failed) => writeln!(lines, "[-]server {}: {}", server.address, failed.why),
            };
        }
        lines
    }

    /// Opens a tunnel to `target`, an authority: asks the servers in turn until one has the last word. Each has half of the time
    /// that is left until `until`, when the caller gives up, to take a connection. One that has the request may have dialled, and is
    /// waited for: no other server is asked then.
    ///
    /// # Errors
    /// The last word, or what the servers fail by.
    pub(super) async fn stream(
        &self,
        target: &str,
        until: Instant,
        asked: &AskedAgents,
    ) -> Result<Through, DialFailure> {
        let mut told: Option<DialFailure> = None;
        let mut ready = self.take_ready();
        let mut order = self.order(ready.as_ref().map(|ready| ready.0)).into_iter();
        let mut next = order.next();
        while let Some(server) = next.and_then(|at| self.servers.get(at)) {
            let attempt = asked.add(&server.name, None);
            let was_ready = ready.is_some();
            let share = until.saturating_duration_since(Instant::now()) / 2;
            let within = match order.len() {
                0 => CONNECT_WITHIN,
                _others => share.min(CONNECT_WITHIN),
            };
            let connected = match ready.take() {
                Some((_at, stream)) => Ok(stream),
                None => self.connect(server, share, within).await,
            };
            let opened = match connected {
                Ok(stream) => self.through(server, stream, target, share).await,
                Err(failure) => Err(failure),
            };
            let failure = match opened {
                Ok(through) => {
                    server.answered();
                    return Ok(through);
                }
                Err(failure) => failure,
            };
            asked.failed(attempt, &failure);
            if was_ready && matches!(failure, DialFailure::NoServer(_)) {
                // It was closed while it waited: the same server gets another connection.
                continue;
            }
            if !failure.lets_others_try() {
                server.answered();
                return Err(self.quoted(server, target, failure));
            }
            if failure.is_of_the_server() {
                server.has_failed(&failure);
            }
            told = match told {
                // An answer says more than a server that gives none.
                Some(before) if matches!(failure, DialFailure::NoServer(_)) => Some(before),
                _ => Some(failure),
            };
            next = order.next();
        }
        Err(told.unwrap_or(DialFailure::NoAgent))
    }

    /// In the words of HyperShift's sidecars, where this process stands in for one.
    fn quoted(&self, server: &Server, target: &str, failure: DialFailure) -> DialFailure {
        match failure {
            DialFailure::Target(text) if self.quotes => DialFailure::Target(format!(
                "proxy error from {} while dialing {target}: {text}",
                server.address
            )),
            other => other,
        }
    }

    /// Connects; a server that takes no connection for much of the dial's `share` is asked last afterwards.
    async fn connect(
        &self,
        server: &Server,
        share: Duration,
        within: Duration,
    ) -> Result<ByteStream, DialFailure> {
        let patience = Patience::new(server, share.min(CONNECT_PATIENCE), Awaited::Connection);
        let connecting = self.connector.connect_client(&server.address);
        let connected = tokio::time::timeout(within, connecting).await;
        patience.ends();
        match connected {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(DialFailure::NoServer(error.to_string())),
            Err(_elapsed) => {
                let (address, seconds) = (&server.address, within.as_secs_f32());
                let why = format!("{address} took no connection within {seconds:.1} s");
                Err(DialFailure::NoServer(why))
            }
        }
    }

    async fn through(
        &self,
        server: &Server,
        mut stream: ByteStream,
        target: &str,
        share: Duration,
    ) -> Result<Through, DialFailure> {
        let peer = stream.peer();
        // A host that is gone acknowledges nothing, and TCP would not give up for a quarter of an hour.
        give_up_unacknowledged(&stream, Some(REQUEST_WITHIN));
        let patience = Patience::new(server, (share / 2).min(ANSWER_PATIENCE), Awaited::Answer);
        let answered = open_tunnel(&mut stream, target, None).await;
        patience.ends();
        match answered {
            Ok(early) => {
                // From here on a peer may take its time to read.
                give_up_unacknowledged(&stream, None);
                Ok(Through {
                    stream,
                    early,
                    server: server.name.clone(),
                })
            }
            Err(NoTunnel::Refused { status, body, .. }) => Err(failure_of(status, &body)),
            Err(error @ NoTunnel::Target) => Err(DialFailure::Target(error.to_string())),
            Err(error) => Err(DialFailure::NoServer(format!("{peer}: {error}"))),
        }
    }

    /// Indices of the servers in the order in which a dial asks them: those that answer, in any order; then those that failed,
    /// the earliest first. `first` goes before all.
    fn order(&self, first: Option<usize>) -> Vec<usize> {
        let since = |server: &Server| server.failure().map(|failed| failed.since);
        let failed: Vec<Option<Instant>> = self.servers.iter().map(since).collect();
        let mut order: Vec<usize> = (0..self.servers.len()).collect();
        order.shuffle(&mut rand::rng());
        order.sort_by_key(|at| (Some(*at) != first, failed.get(*at).copied().flatten()));
        order
    }

    /// Takes a connection that is ready, the youngest first, of a server that answers.
    fn take_ready(&self) -> Option<(usize, ByteStream)> {
        let mut ready = self.ready();
        while let Some(waiting) = ready.waiting.pop() {
            let answers = |server: &Server| server.failure().is_none();
            if self.servers.get(waiting.at).is_some_and(answers) && is_open(&waiting.stream) {
                return Some((waiting.at, waiting.stream));
            }
        }
        ready.wanted = (ready.wanted + 1).min(self.ready_max);
        None
    }

    /// Connects ahead of the next dials, and to servers whose pause is over.
    pub(super) fn make_ready(self: &Arc<Self>) {
        let again = self.servers.iter().enumerate();
        for (at, _server) in again.filter(|(_at, server)| server.is_to_be_tried()) {
            self.ready().opening += 1;
            self.open_ready(at);
        }
        let missing = {
            let mut ready = self.ready();
            let missing = ready
                .wanted
                .saturating_sub(ready.waiting.len() + ready.opening);
            ready.opening += missing;
            missing
        };
        for _connection in 0..missing {
            self.open_ready(self.order(None).first().copied().unwrap_or_default());
        }
    }

    /// Opens a connection, already counted, and keeps it for a while.
    fn open_ready(self: &Arc<Self>, at: usize) {
        let this = Arc::clone(self);
        let opening = async move {
            let opening = Opening(&this);
            let Some(server) = this.servers.get(at) else {
                return;
            };
            let connected = this.connect(server, CONNECT_WITHIN, CONNECT_WITHIN).await;
            drop(opening);
            match connected {
                Ok(stream) => {
                    server.recovered();
                    let (taken, is_taken) = oneshot::channel();
                    let number = this.keep(at, stream, taken);
                    if tokio::time::timeout(READY_FOR, is_taken).await.is_err() {
                        this.give_up(number);
                    }
                }
                Err(failure) => server.has_failed(&failure),
            }
        };
        let stop = self.stop.clone();
        let spawned = self.tasks.spawn("ready-connections", async move {
            let _stopped = stop.run_until_cancelled(opening).await;
        });
        if spawned.is_err() {
            self.ready().opening -= 1;
            if let Some(server) = self.servers.get(at) {
                server.is_not_tried();
            }
        }
    }

    /// Keeps a connection for the next dial; returns its number.
    fn keep(&self, at: usize, stream: ByteStream, taken: oneshot::Sender<()>) -> u64 {
        let mut ready = self.ready();
        let number = ready.number;
        ready.number += 1;
        ready.waiting.push(Waiting {
            number,
            at,
            stream,
            _taken: taken,
        });
        number
    }

    /// Closes a connection that no dial has taken: fewer are wanted.
    fn give_up(&self, number: u64) {
        let mut ready = self.ready();
        let left = ready.waiting.len();
        ready.waiting.retain(|waiting| waiting.number != number);
        if ready.waiting.len() < left {
            ready.wanted = ready.wanted.saturating_sub(1);
        }
    }

    fn ready(&self) -> MutexGuard<'_, ReadyConnections> {
        locked(&self.ready)
    }
}

impl Server {
    fn failure(&self) -> Option<Failed> {
        locked(&self.failed).clone()
    }

    fn answered(&self) {
        *locked(&self.answered_at) = Some(Instant::now());
        self.recovered();
    }

    fn recovered(&self) {
        if let Some(failed) = locked(&self.failed).take() {
            tracing::info!(server = %self.address, failed_for_ms = failed.since.elapsed().as_millis(), "a server answers again");
        }
    }

    fn has_failed(&self, failure: &DialFailure) {
        self.mark(failure.to_string(), false);
    }

    /// It has had a request since then and gives no answer. If it answered another meanwhile, the target is slow.
    fn is_silent(&self, since: Instant) {
        let answered_at = *locked(&self.answered_at);
        if answered_at.is_none_or(|at| at < since) {
            self.mark(self.gives_no_answer().to_string(), true);
        }
    }

    fn gives_no_answer(&self) -> DialFailure {
        DialFailure::NoServer(format!("{} gives no answer", self.address))
    }

    fn mark(&self, why: String, is_silent: bool) {
        let mut failed = locked(&self.failed);
        let (shortest, longest) = PAUSE;
        let (since, pause) = match failed.take() {
            // Dials at the same time fail for the same reason.
            Some(before) if !before.is_over() => {
                *failed = Some(Failed {
                    why,
                    is_silent,
                    ..before
                });
                return;
            }
            Some(before) => (before.since, (before.pause * 2).min(longest)),
            None => {
                tracing::warn!(server = %self.address, error = why, "a server fails: others are asked first");
                (Instant::now(), shortest)
            }
        };
        let pause = if is_silent { longest } else { pause };
        *failed = Some(Failed {
            since,
            pause_ends: Instant::now() + pause,
            pause,
            why,
            is_tried: false,
            is_silent,
        });
    }

    /// Nobody tries it after all.
    fn is_not_tried(&self) {
        if let Some(failed) = locked(&self.failed).as_mut() {
            failed.is_tried = false;
        }
    }

    /// Whether it failed and its pause is over; true once for each pause.
    fn is_to_be_tried(&self) -> bool {
        let mut failed = locked(&self.failed);
        let over = failed
            .as_mut()
            .filter(|failed| failed.is_over() && !failed.is_tried);
        over.map(|failed| failed.is_tried = true).is_some()
    }
}

/// A connection that a task opens ahead of dials.
struct Opening<'a>(&'a Servers);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.ready().opening -= 1;
    }
}

/// What a dial waits for.
#[derive(Clone, Copy)]
enum Awaited {
    Connection,
    Answer,
}

/// Waits for a server on behalf of a dial. Dropped late, with the dial or its turn, it is a failure of the server.
struct Patience<'a> {
    server: &'a Server,
    since: Instant,
    patience: Duration,
    awaited: Option<Awaited>,
}

impl<'a> Patience<'a> {
    fn new(server: &'a Server, patience: Duration, awaited: Awaited) -> Self {
        Self {
            server,
            since: Instant::now(),
            patience,
            awaited: Some(awaited),
        }
    }

    fn ends(mut self) {
        self.awaited = None;
    }
}

impl Drop for Patience<'_> {
    fn drop(&mut self) {
        let (server, is_late) = (self.server, self.since.elapsed() >= self.patience);
        match self.awaited {
            Some(Awaited::Connection) if is_late => server.has_failed(&server.gives_no_answer()),
            Some(Awaited::Answer) if is_late => server.is_silent(self.since),
            Some(_) | None => (),
        }
    }
}

fn give_up_unacknowledged(stream: &ByteStream, within: Option<Duration>) {
    if let Some(socket) = stream.tcp()
        && let Err(error) = socket::set_acknowledged_within(socket, within)
    {
        tracing::debug!(%error, "cannot tune a server connection");
    }
}

impl Failed {
    fn is_over(&self) -> bool {
        Instant::now() >= self.pause_ends
    }
}

/// Whether the server has not closed it.
fn is_open(stream: &ByteStream) -> bool {
    stream
        .descriptor()
        .is_some_and(|socket| peer::state(socket) == Peer::There)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while a lock is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
