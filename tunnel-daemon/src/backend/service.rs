//! `AgentService/Connect`: who calls, whether it may, and the link that becomes of it.

use std::sync::Arc;
use std::time::Duration;

use adit_core::session::ProcessBudget;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::metadata::{AgentHello, Extensions, ServerHello};
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, Request};
use tokio::io::{AsyncRead, AsyncWrite};

use super::link::{LinkSettings, run_link};
use crate::hub::{Hub, LinkInfo, LinkStreams};
use crate::net::grpc::{self, Code, Windows};
use crate::net::tasks::Tasks;
use crate::telemetry::ServerMetrics;

/// Path of the only method.
const METHOD: &str = "/AgentService/Connect";
/// Bytes on the way from one agent: enough for 1 Gbit/s over 100 ms.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// Of these, what a Go agent may use: its tunnels share it without credit, so less waits in a paced link.
const STREAM_WINDOW_GO_BYTES: u32 = 2 << 20;
/// Bytes in the HTTP/2 layer before control packets would have to wait behind them.
const SEND_BUFFER_BYTES: usize = 128 * 1024;
/// Streams one agent connection may open; agents open one.
const LINKS_PER_CONNECTION_MAX: u32 = 8;

/// What the listener needs to know.
pub struct BackendSettings {
    /// Told to agents.
    pub server: ServerHello,
    /// HTTP/2 ping interval.
    pub keepalive: Duration,
    /// Of every link.
    pub link: LinkSettings,
}

/// Serves agent connections.
pub struct Backend {
    hub: Arc<Hub>,
    settings: BackendSettings,
    budget: Arc<ProcessBudget>,
    metrics: ServerMetrics,
    tasks: Tasks,
}

impl Backend {
    /// A service over a hub; links run on `tasks`.
    #[must_use]
    pub fn new(
        hub: Arc<Hub>,
        settings: BackendSettings,
        budget: Arc<ProcessBudget>,
        metrics: ServerMetrics,
        tasks: Tasks,
    ) -> Arc<Self> {
        Arc::new(Self {
            hub,
            settings,
            budget,
            metrics,
            tasks,
        })
    }

    /// Serves one connection to its end. `principal` names whoever the TLS layer verified.
    ///
    /// No GOAWAY is ever sent while it runs: agents in the field drop all their tunnels on one. A cancelled
    /// call closes the connection; its links end by themselves.
    pub async fn serve<S>(self: &Arc<Self>, io: S, principal: Option<Arc<str>>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let windows = Windows {
            stream_bytes: STREAM_WINDOW_BYTES,
            send_buffer_bytes: SEND_BUFFER_BYTES,
        };
        let mut builder = grpc::server_builder(windows);
        builder.max_concurrent_streams(LINKS_PER_CONNECTION_MAX);
        let connection = match builder.handshake::<_, MessageBuf>(io).await {
            Ok(connection) => connection,
            Err(error) => return tracing::debug!(%error, "agent connection is not HTTP/2"),
        };
        let served = grpc::serve(connection, self.settings.keepalive, |request, respond| {
            self.call(request, respond, principal.clone());
        });
        if let Err(error) = served.await {
            tracing::debug!(%error, "agent connection ended");
        }
    }

    fn answer(&self, credit: bool) -> ServerHello {
        let extensions = Extensions {
            link: credit,
            lanes: false,
        };
        ServerHello {
            extensions,
            ..self.settings.server.clone()
        }
    }

    fn call(
        self: &Arc<Self>,
        request: Request<RecvStream>,
        mut respond: SendResponse<MessageBuf>,
        principal: Option<Arc<str>>,
    ) {
        if !grpc::is_call(&request, METHOD, &mut respond) {
            return;
        }
        let hello = match AgentHello::from_headers(header_values(request.headers())) {
            Ok(hello) => hello,
            Err(error) => {
                tracing::warn!(%error, "agent refused");
                return grpc::refuse(&mut respond, Code::InvalidArgument, &error.to_string());
            }
        };
        let credit = hello.extensions.link;
        let mut response = grpc::accepted();
        for (name, value) in self.answer(credit).to_headers() {
            if let Ok(value) = value.parse() {
                response.headers_mut().insert(name, value);
            }
        }
        let Ok(send) = respond.send_response(response, false) else {
            return;
        };
        let info = LinkInfo {
            agent: hello.agent,
            identifiers: hello.identifiers,
            principal,
            credit,
        };
        let entered = self.hub.enter(info);
        let withhold = if credit {
            0
        } else {
            STREAM_WINDOW_BYTES - STREAM_WINDOW_GO_BYTES
        };
        let streams = LinkStreams {
            send,
            recv: request.into_body(),
            withhold_bytes: withhold as usize,
        };
        let link = run_link(
            Arc::clone(&self.hub),
            entered,
            streams,
            self.settings.link,
            Arc::clone(&self.budget),
            self.metrics.clone(),
        );
        if self.tasks.spawn("link", link).is_err() {
            tracing::warn!("agent refused: too many links");
        }
    }
}

fn header_values(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.to_str().unwrap_or_default()))
}
