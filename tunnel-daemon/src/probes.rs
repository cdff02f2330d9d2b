//! Answers of the health and admin ports: paths, codes and bodies are those of upstream's programs.
//!
//! This module has no sockets: [`HttpService::answer`] maps a request to a response. A readiness check asks the data runtime,
//! because a probe claims to test it; no answer in time means "not ready".

use std::borrow::Cow;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HOST, HeaderValue, LOCATION};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use tokio::sync::{mpsc, oneshot};

use adit_telemetry::{Scrape, exposition};

/// How long the data runtime may take to answer a readiness check.
pub const READINESS_TIMEOUT: Duration = Duration::from_secs(1);
/// Readiness checks that may wait; further ones are answered "not ready" at once.
const QUESTIONS_MAX: usize = 64;

const PLAIN: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
/// This path and all below it are answered with a hint what to use instead of pprof.
const PROFILES: &str = "/debug/pprof";
const NO_PROFILES: &str = "404 no profiles here: this program is not written in Go, so it has no pprof endpoints.\n\
    For a CPU profile run `perf record -g -p <pid>` on the host; for counters read /metrics.\n";

/// Body of a server that is not ready because no agent is connected.
pub const NO_AGENT: &str = "no connection to any proxy agent";
/// Reason of a server whose agents have no identifier that a strategy looks for.
pub const NO_MATCH: &str = "agents are connected, but --proxy-strategies finds none of them";
/// Reason of an agent whose servers all fail to respond.
pub const SERVERS_SILENT: &str = "servers are connected, but none of them responds";
/// Reason of a server whose agents all fail to respond.
pub const ALL_SILENT: &str = "agents are connected, but none of them responds";
/// Reason of a process that is shutting down.
pub const SHUTTING_DOWN: &str = "shutting down";
/// State of an agent that was told to end and still serves tunnels and new dials.
pub const DRAINING: &str = "ready, draining";
/// Reason of an agent that is not ready because it has no link.
pub const NO_SERVER: &str = "no servers connected";

/// Whether this process can serve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Readiness {
    Ready,
    /// Serves, and has told its servers to choose other agents: [`DRAINING`].
    Draining,
    /// Cannot serve, for this reason: [`NO_AGENT`], [`NO_SERVER`] or text of this project.
    NotReady(Cow<'static, str>),
}

impl Readiness {
    /// Readiness of a process whose `services` have ended; `None` if none has.
    #[must_use]
    pub fn without(services: &[&'static str]) -> Option<Self> {
        let names = services.join(", ");
        (!services.is_empty()).then(|| {
            Self::NotReady(format!("service {names} has ended: restart this process").into())
        })
    }
}

/// A readiness check in flight.
pub type ReadinessFuture<'a> = Pin<Box<dyn Future<Output = Readiness> + Send + 'a>>;

/// Answers readiness checks. Closures returning [`Readiness`] are probes too.
pub trait ReadinessProbe: Send + Sync + 'static {
    /// Checks in bounded time. A cancelled check leaves nothing behind.
    fn check(&self) -> ReadinessFuture<'_>;
}

impl<F: Fn() -> Readiness + Send + Sync + 'static> ReadinessProbe for F {
    fn check(&self) -> ReadinessFuture<'_> {
        Box::pin(std::future::ready(self()))
    }
}

/// The asking end of [`readiness_channel`], kept by the admin thread.
#[derive(Clone, Debug)]
pub struct ReadinessAsker(mpsc::Sender<oneshot::Sender<Readiness>>);

/// The answering end of [`readiness_channel`], run on the data runtime.
#[derive(Debug)]
pub struct ReadinessQuestions(mpsc::Receiver<oneshot::Sender<Readiness>>);

/// A channel by which the admin thread asks the data runtime.
#[must_use]
pub fn readiness_channel() -> (ReadinessAsker, ReadinessQuestions) {
    let (asker, questions) = mpsc::channel(QUESTIONS_MAX);
    (ReadinessAsker(asker), ReadinessQuestions(questions))
}

impl ReadinessQuestions {
    /// Answers until every asker is gone, then stays pending. Spawn it on the data runtime; it calls `state` there.
    pub async fn answer(mut self, mut state: impl FnMut() -> Readiness) {
        while let Some(asked) = self.0.recv().await {
            // The asker may have given up.
            let _gone = asked.send(state());
        }
        std::future::pending().await
    }
}

impl ReadinessProbe for ReadinessAsker {
    fn check(&self) -> ReadinessFuture<'_> {
        Box::pin(async {
            let (answer, answered) = oneshot::channel();
            if self.0.try_send(answer).is_err() {
                return Readiness::NotReady("the data runtime takes no readiness questions".into());
            }
            match tokio::time::timeout(READINESS_TIMEOUT, answered).await {
                Ok(Ok(readiness)) => readiness,
                Ok(Err(_dropped)) => Readiness::NotReady(SHUTTING_DOWN.into()),
                Err(_elapsed) => {
                    Readiness::NotReady("the data runtime did not answer within 1s".into())
                }
            }
        })
    }
}

/// Current lines that `/readyz?verbose` adds. Called on the admin thread, so it must not block.
pub type Detail = Arc<dyn Fn() -> String + Send + Sync>;

/// Format of readiness answers: upstream's two programs differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadinessStyle {
    /// 500 and the bare reason; query `verbose` appends the lines.
    Server,
    /// 503 and a line per check. Query `verbose` shows the lines on 200, too, and adds further ones to both.
    Agent,
}

#[derive(Clone)]
enum Route {
    Alive,
    /// The detail holds the lines that `verbose` adds.
    Ready(ReadinessStyle, Arc<dyn ReadinessProbe>, Detail),
    Metrics(Scrape),
    /// 301 to the same host, path and query on this port.
    OtherPort(u16),
    NoProfiles,
    /// Reads state of the process on the admin socket.
    Json(Arc<dyn JsonSource>),
    /// Changes state on the admin socket, and answers with the result.
    Change(Arc<dyn JsonSource>),
}

/// Answers with JSON. Called on the admin thread: it may read state, but must not wait for the data path.
pub trait JsonSource: Send + Sync + 'static {
    /// The complete answer to a query on a path.
    ///
    /// # Errors
    /// One line that names the error in the query.
    fn json<'a>(&'a self, path: &'a str, query: &'a str) -> JsonFuture<'a>;
}

/// A pending answer.
pub type JsonFuture<'a> = Pin<Box<dyn Future<Output = Result<Vec<u8>, String>> + Send + 'a>>;

/// The paths of one port. Cheap to clone.
#[derive(Clone, Default)]
pub struct HttpService {
    routes: Arc<Vec<(&'static str, Route)>>,
}

impl HttpService {
    /// The health port of a program of this style. `detail`: lines that `/readyz?verbose` adds.
    #[must_use]
    pub fn health(
        style: ReadinessStyle,
        probe: Arc<dyn ReadinessProbe>,
        scrape: Scrape,
        detail: Detail,
    ) -> Self {
        let ready = Route::Ready(style, probe, detail);
        Self::default()
            .route("/healthz", Route::Alive)
            .route("/livez", Route::Alive)
            .route("/readyz", ready.clone())
            .route("/ready", ready)
            .route("/metrics", Route::Metrics(scrape))
    }

    /// The server's admin port.
    #[must_use]
    pub fn server_admin(scrape: Scrape) -> Self {
        let routes = Self::default().route("/metrics", Route::Metrics(scrape));
        routes.route(PROFILES, Route::NoProfiles)
    }

    /// The agent's admin port; `health_port` is the one its health listener is bound to.
    #[must_use]
    pub fn agent_admin(health_port: u16) -> Self {
        Self::default()
            .route("/metrics", Route::OtherPort(health_port))
            .route(PROFILES, Route::NoProfiles)
    }

    /// Adds a path that answers with JSON.
    #[must_use]
    pub fn json(self, path: &'static str, source: &Arc<dyn JsonSource>) -> Self {
        self.route(path, Route::Json(Arc::clone(source)))
    }

    /// Adds a path that changes something, by POST, and answers with JSON.
    #[must_use]
    pub fn change(self, path: &'static str, source: &Arc<dyn JsonSource>) -> Self {
        self.route(path, Route::Change(Arc::clone(source)))
    }

    fn route(mut self, path: &'static str, route: Route) -> Self {
        Arc::make_mut(&mut self.routes).push((path, route));
        self
    }

    /// The response to one request that came in on `local`. Takes as long as the readiness probe.
    pub async fn answer<B>(
        &self,
        request: &Request<B>,
        local: SocketAddr,
    ) -> Response<Full<Bytes>> {
        let Some(route) = self.find(request.uri().path()) else {
            return respond(StatusCode::NOT_FOUND, PLAIN, "404 page not found\n");
        };
        let changes = matches!(route, Route::Change(_));
        let (allowed, methods, text) = if changes {
            (&[Method::POST][..], "POST", "405 only POST here\n")
        } else {
            let text = "405 only GET and HEAD here\n";
            (&[Method::GET, Method::HEAD][..], "GET, HEAD", text)
        };
        if !allowed.contains(request.method()) {
            let mut refusal = respond(StatusCode::METHOD_NOT_ALLOWED, PLAIN, text);
            refusal
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static(methods));
            return refusal;
        }
        match route {
            Route::Alive => respond(StatusCode::OK, PLAIN, "ok"),
            Route::Ready(style, probe, detail) => {
                let wanted = wants_detail(request.uri().query());
                let readiness = probe.check().await;
                let lines = wanted.then(|| detail());
                let detail = lines.as_deref();
                match style {
                    ReadinessStyle::Server => server_readiness(readiness, detail),
                    ReadinessStyle::Agent => agent_readiness(readiness, detail),
                }
            }
            Route::Metrics(scrape) => {
                respond(StatusCode::OK, exposition::CONTENT_TYPE, scrape.answer())
            }
            Route::OtherPort(port) => redirect(request, local, *port),
            Route::NoProfiles => respond(StatusCode::NOT_FOUND, PLAIN, NO_PROFILES),
            Route::Json(source) | Route::Change(source) => {
                let (path, query) = (request.uri().path(), request.uri().query());
                match source.json(path, query.unwrap_or_default()).await {
                    Ok(body) => respond(StatusCode::OK, JSON, body),
                    Err(error) => respond(StatusCode::BAD_REQUEST, PLAIN, format!("400 {error}\n")),
                }
            }
        }
    }

    fn find(&self, path: &str) -> Option<&Route> {
        let serves = |known: &str, route: &Route| match path.strip_prefix(known) {
            Some("") => true,
            Some(below) => matches!(route, Route::NoProfiles) && below.starts_with('/'),
            None => false,
        };
        self.routes
            .iter()
            .find(|(known, route)| serves(known, route))
            .map(|(_, route)| route)
    }
}

impl std::fmt::Debug for HttpService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.routes.iter().map(|(path, _)| path))
            .finish()
    }
}

fn respond(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// `detail`: lines for clients that ask for more than upstream's server reports.
fn server_readiness(readiness: Readiness, detail: Option<&str>) -> Response<Full<Bytes>> {
    match (readiness, detail) {
        (Readiness::Ready | Readiness::Draining, Some(detail)) => {
            let lines = format!("[+]agent-connected ok\n{detail}check passed\n");
            respond(StatusCode::OK, PLAIN, lines)
        }
        (Readiness::Ready | Readiness::Draining, None) => respond(StatusCode::OK, PLAIN, "ok"),
        (Readiness::NotReady(reason), detail) => {
            let lines = detail.map_or_else(String::new, |detail| format!("\n{detail}"));
            let text = format!("{reason}{lines}");
            respond(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, text)
        }
    }
}

fn agent_readiness(readiness: Readiness, detail: Option<&str>) -> Response<Full<Bytes>> {
    match (readiness, detail) {
        (Readiness::Draining, Some(detail)) => {
            let lines = format!(
                "[+]ping ok\n[+]server-connected ok\n[+]{DRAINING}\n{detail}check passed\n"
            );
            respond(StatusCode::OK, PLAIN, lines)
        }
        (Readiness::Draining, None) => respond(StatusCode::OK, PLAIN, DRAINING),
        (Readiness::Ready, Some(detail)) => {
            let lines = format!("[+]ping ok\n[+]server-connected ok\n{detail}check passed\n");
            respond(StatusCode::OK, PLAIN, lines)
        }
        (Readiness::Ready, None) => respond(StatusCode::OK, PLAIN, "ok"),
        (Readiness::NotReady(reason), detail) => {
            let detail = detail.unwrap_or_default();
            let lines = format!("[+]ping ok\n[-]server-connected failed: {reason}\n{detail}");
            respond(StatusCode::SERVICE_UNAVAILABLE, PLAIN, lines)
        }
    }
}

/// Whether the query has the key `verbose`, with or without a value.
fn wants_detail(query: Option<&str>) -> bool {
    let key = |pair: &str| {
        pair.split_once('=')
            .map_or_else(|| pair.to_owned(), |(key, _)| key.to_owned())
    };
    query.is_some_and(|query| query.split('&').any(|pair| key(pair) == "verbose"))
}

/// 301 to the same host, path and query on `port`; without a scheme, as upstream writes it.
fn redirect<B>(request: &Request<B>, local: SocketAddr, port: u16) -> Response<Full<Bytes>> {
    let header = request
        .headers()
        .get(HOST)
        .and_then(|host| host.to_str().ok());
    let asked = request
        .uri()
        .authority()
        .map(http::uri::Authority::as_str)
        .or(header);
    let host = asked
        .map(without_port)
        .filter(|host| is_host(host))
        .map_or_else(
            || match local {
                SocketAddr::V4(v4) => v4.ip().to_string(),
                SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
            },
            ToOwned::to_owned,
        );
    let path = request
        .uri()
        .path_and_query()
        .map_or("/", http::uri::PathAndQuery::as_str);
    let Ok(location) = HeaderValue::try_from(format!("//{host}:{port}{path}")) else {
        return respond(
            StatusCode::BAD_REQUEST,
            PLAIN,
            "400 the host or path cannot be redirected\n",
        );
    };
    let mut response = respond(StatusCode::MOVED_PERMANENTLY, PLAIN, "Moved Permanently\n");
    response.headers_mut().insert(LOCATION, location);
    response
}

/// The host of a Host header; IPv6 keeps its brackets.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|b| b.is_ascii_digit())
                && (name.ends_with(']') || !name.contains(':')) =>
        {
            name
        }
        _ => host,
    }
}

/// Rejects headers that would turn the redirect's host into something else (user info, path).
fn is_host(host: &str) -> bool {
    let inner = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(host);
    !inner.is_empty()
        && inner
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b".-_:".contains(&b))
}

#[cfg(test)]
mod tests;
