//! The HTTP proxy dialect: requests with a whole URL, each to its target, and CONNECT. `adit-proxy` speaks HTTP; this module opens
//! the tunnels and carries their bytes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::session::{ProcessBudget, Promise, TunnelKind};
use adit_proxy::http::{After, Connector, Parent, Proxy, Refusal, Served};
use bytes::{Bytes, BytesMut};
use futures_util::future::OptionFuture;
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt as _;

use crate::frontend::checked_socket::CheckedSocket;
use crate::frontend::establish::{self, OpenClient, report};
use crate::frontend::events::{ClientAccess, ClientTunnel, FrontendContext, NETWORK};
use crate::frontend::pipe::{PipeEnd, pipe};
use crate::frontend::users::FrontendUsers;
use crate::router::OpenTunnel;
use adit_config::plan::ConnectPlan;
use adit_telemetry::labels::{ClientDialect, EndReason};
use adit_tls::stream::{ByteStream, Connection, PeerAddr};
use adit_tunnel::{Carrier, Closing, close_gracefully, reset_on_close};

/// Bytes that an HTTP connection to a target and the pipe to its tunnel hold each way, if memory is plentiful or not.
const BUFFER_BYTES: usize = 64 * 1024;
const SMALL_BUFFER_BYTES: usize = 16 * 1024;

/// How long a tunnel stays open whose HTTP connection has ended: the target gets its last bytes and may end in order.
const LEFT_OPEN: Duration = Duration::from_secs(5);

/// Bytes that a connection to a target may hold, each way.
#[must_use]
pub fn buffer_bytes(budget: &ProcessBudget) -> usize {
    if budget.starts_small() {
        SMALL_BUFFER_BYTES
    } else {
        BUFFER_BYTES
    }
}

/// Serves one connection to its end. `peer` is its address for logs, `plan` bounds the time for a request head; with `users`
/// it has to be one of them. Once this process leaves, no further request is read.
///
/// A cancelled call cancels dials and resets tunnels.
pub fn serve(
    io: ByteStream,
    peer: PeerAddr,
    context: Arc<FrontendContext>,
    proxy: Arc<Proxy>,
    plan: ConnectPlan,
    users: Option<FrontendUsers>,
) -> impl Future<Output = ()> + Send + use<> {
    establish::run(Box::pin(async move {
        context.account_shared(&io);
        if let Some(socket) = io.tcp() {
            // Only an orderly end undoes this: a response that is cut off, also by the end of this process, must not look complete.
            reset_on_close(socket);
        }
        let connector = Clients {
            access: context.admit(io.principal().map(AsRef::as_ref)),
            head_timeout: plan.head_timeout,
            may_take_raw_lane: io.is_plain(),
            peer,
            users,
            context: Arc::clone(&context),
        };
        // While its upload waits for a target, the client is not read.
        match adit_proxy::http::serve(CheckedSocket::new(io), proxy, connector).await {
            Served::Ended(mut client) => close_gracefully(&mut client.io, Closing::InOrder).await,
            Served::Broken(mut client) => close_gracefully(&mut client.io, Closing::CutOff).await,
            Served::Lost(After::Upgraded(_gone)) => (),
            Served::Lost(After::Tunnel(mut opened)) => {
                opened.tunnel.answer_lost();
                opened.tunnel.cut(EndReason::ClientGone);
            }
            Served::Became(CheckedSocket { mut io, .. }, early, After::Upgraded(upgrade)) => {
                let closing = match upgraded(&mut io, early, upgrade).await {
                    Ok(_bytes) => Closing::InOrder,
                    Err(_broken) => Closing::CutOff,
                };
                close_gracefully(&mut io, closing).await;
            }
            Served::Became(client, early, After::Tunnel(Opened { tunnel, open, .. })) => {
                let io = client.io;
                let class = || context.router.class_of(tunnel.destination(), open.link);
                context.account(&io, open.agent.as_str(), class);
                // A copy: these bytes keep the memory of a whole head alive.
                let copied = BytesMut::from(&early[..]);
                drop(early);
                // The answer is written.
                let open = OpenClient::new(io, copied, tunnel, open.carrier)?;
                return Some(open.answer_and_copy(b""));
            }
        }
        None
    }))
}

/// Carries the bytes of another protocol. The task of the target's connection reports them, and its end.
async fn upgraded<S: Connection + Send>(
    io: &mut S,
    early: Bytes,
    upgrade: OnUpgrade,
) -> io::Result<(u64, u64)> {
    let mut target = TokioIo::new(upgrade.await.map_err(io::Error::other)?);
    target.write_all(&early).await?;
    drop(early);
    tokio::io::copy_bidirectional(io, &mut target).await
}

/// Opens tunnels for one client.
struct Clients {
    context: Arc<FrontendContext>,
    access: ClientAccess,
    head_timeout: Duration,
    may_take_raw_lane: bool,
    /// For logs.
    peer: PeerAddr,
    users: Option<FrontendUsers>,
}

/// An open tunnel, and how it came about.
struct Opened {
    tunnel: ClientTunnel,
    open: OpenTunnel<Carrier>,
    /// Memory for the HTTP on both sides of a tunnel that carries requests.
    promise: Option<Promise>,
}

impl Connector for Clients {
    type Tunnel = Opened;
    type Stream = PipeEnd;

    fn head_timeout(&self) -> Duration {
        self.access.at_most(self.head_timeout)
    }

    fn authenticate(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(users) = &self.users else {
            return Ok(());
        };
        let shown = headers.get(PROXY_AUTHORIZATION);
        if users.permit_basic(shown) {
            return Ok(());
        }
        // Clients ask once without, to learn that they have to.
        if shown.is_some() {
            let dialect = ClientDialect::HttpProxy;
            self.context
                .refused(self.peer, dialect, &"wrong user or password");
        }
        Err(Refusal::unauthenticated())
    }

    fn may_wait(&self) -> bool {
        !self.context.router.budget().is_half_full()
    }

    async fn open(&self, target: &str, alone: bool) -> Result<Opened, Refusal> {
        let context = &self.context;
        let mut tunnel = ClientTunnel::new(context, ClientDialect::HttpProxy);
        tunnel.dropped_by_client();
        let asked = tunnel.dialing(target, &self.access);
        let raw_lane = alone && self.may_take_raw_lane && context.has_room_for_raw_lane();
        let promise = (!alone).then(|| context.router.budget().promise(TunnelKind::Socket));
        let dialed = match self.access.check(NETWORK, target) {
            Ok(()) if matches!(promise, Some(None)) => Err(DialFailure::NoMemory),
            Ok(()) => context.dial(target, alone, raw_lane, &asked).await,
            Err(failure) => Err(failure),
        };
        let open = report(&mut tunnel, dialed).map_err(|failure| Refusal::from(&failure))?;
        tracing::debug!(client = %self.peer, target_address = target, agent = %open.agent, "tunnel open");
        let promise = promise.flatten();
        Ok(Opened {
            tunnel,
            open,
            promise,
        })
    }

    fn parent(&self, target: &str) -> Option<Parent> {
        self.context.upstream.as_ref()?.parent(target)
    }

    fn stream(&self, opened: Opened) -> PipeEnd {
        let Opened {
            tunnel,
            open,
            promise,
        } = opened;
        let bytes = buffer_bytes(self.context.router.budget());
        let (near, far) = pipe(bytes, promise);
        let gone = near.gone();
        let open = OpenClient::new(far, BytesMut::new(), tunnel, open.carrier);
        let copying = OptionFuture::from(open.map(OpenClient::copy));
        self.spawn(async move {
            let left = async {
                gone.cancelled().await;
                tokio::time::sleep(LEFT_OPEN).await;
            };
            tokio::select! {
                _ended = copying => (),
                // The target neither sends nor closes, and nobody would read it.
                () = left => (),
            }
        });
        near
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Err(overloaded) = self.context.tasks.spawn("http-proxy", work) {
            tracing::warn!(client = %self.peer, %overloaded, "a request is dropped");
        }
    }
}
