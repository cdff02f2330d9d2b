//! The HTTP-CONNECT dialect: one request, one tunnel, then bytes.
//!
//! The request head parser and every response text are the core's. This module owns the order: the 200 is written in full
//! before any tunnel byte.

use std::sync::Arc;
use std::time::Duration;

use adit_core::connect::{self, Connect, Progress, Rejection, RequestHead};
use adit_core::failure::DialFailure;
use bytes::{Buf as _, BytesMut};
use tokio::io::AsyncWriteExt as _;
use tokio_util::sync::CancellationToken;

use crate::frontend::establish::{self, Early, Frontend, Gone};
use crate::frontend::events::{ClientAccess, FrontendContext, time_is_up};
use crate::router::Router;
use adit_config::limits::UNANSWERED_BYTES_FREE;
use adit_config::plan::ConnectPlan;
use adit_telemetry::GaugeGuard;
use adit_telemetry::labels::ClientDialect;
use adit_tls::blocks;
use adit_tls::stream::{Connection, PeerAddr};

/// Delay for a target that speaks first, so that its bytes do not share a read with the 200.
const ANSWER_ALONE: Duration = Duration::from_millis(25);

/// Serves one connection to its end. `client` is its address for logs. Once this process is `leaving`, a connection without a
/// request is closed.
///
/// A cancelled call cancels the dial or resets the tunnel.
pub fn serve<S>(
    io: S,
    router: Arc<Router>,
    context: FrontendContext,
    plan: ConnectPlan,
    client: PeerAddr,
    leaving: CancellationToken,
) -> impl Future<Output = ()> + Send + use<S>
where
    S: Connection + Send + 'static,
{
    establish::serve(HttpConnect { plan, leaving }, io, router, context, client)
}

/// The HTTP-CONNECT dialect for one connection.
struct HttpConnect {
    plan: ConnectPlan,
    leaving: CancellationToken,
}

impl Frontend for HttpConnect {
    const DIALECT: ClientDialect = ClientDialect::HttpConnect;

    fn count(&self, context: &FrontendContext) -> Option<GaugeGuard> {
        Some(context.metrics.http_connection())
    }

    async fn request<S: Connection + Send>(
        &mut self,
        io: &mut S,
        early: &mut Early,
        admission: &ClientAccess,
    ) -> Option<String> {
        let head = tokio::time::timeout(
            admission.at_most(self.plan.head_timeout),
            read_head(io, early, self.plan),
        );
        // The client left, failed, or was too slow: there is no answer to send.
        let request = tokio::select! {
            biased;
            head = head => head.ok()?.ok()??,
            () = time_is_up(&self.leaving) => return None,
        };
        Some(request.authority)
    }

    async fn refuse<S: Connection + Send>(io: &mut S, failure: &DialFailure) {
        if let Some(response) = connect::failure_response(failure) {
            // A client that has left needs no answer.
            let _sent = io.write_all(&response).await;
        }
        let _closed = io.shutdown().await;
    }

    /// In full and alone: clients refuse tunnel bytes that arrive together with the answer. So bytes of a target that speaks
    /// first are delayed a little.
    async fn answer<S: Connection + Send>(
        io: &mut S,
        early: &mut BytesMut,
        target_speaks: impl Future<Output = ()> + Send,
    ) -> Result<(), Gone> {
        let answered = async {
            io.write_all(connect::ESTABLISHED).await?;
            io.flush().await
        };
        answered.await.map_err(|_error| Gone::BeforeAnswer)?;
        if early.is_empty() {
            tokio::select! {
                biased;
                // The client sends, so it has read the answer. The copy meets an EOF again. It would take a reset for EOF,
                // since the kernel reports a reset once.
                read = blocks::append(io, early) => {
                    read.map_err(|_error| Gone::BehindAnswer)?;
                }
                () = target_speaks => tokio::time::sleep(ANSWER_ALONE).await,
            }
        }
        Ok(())
    }
}

/// `None`: the client was answered or has left.
async fn read_head<S>(
    io: &mut S,
    early: &mut Early,
    plan: ConnectPlan,
) -> std::io::Result<Option<Connect>>
where
    S: Connection,
{
    let Early {
        bytes: early,
        unanswered,
    } = early;
    let mut parser = RequestHead::new(usize::try_from(plan.head_bytes_max).unwrap_or(usize::MAX));
    loop {
        let progress = match unanswered.append(io, early).await? {
            Some(0) => return Ok(None),
            Some(_read) => parser.parse(early),
            // The limit on long heads of all clients is reached; short heads are still read.
            None => Progress::Rejected(Rejection::TooLarge),
        };
        match progress {
            Progress::NeedMore => (),
            Progress::Connect(request) => {
                early.advance(request.consumed);
                if request.consumed > UNANSWERED_BYTES_FREE {
                    // The remaining bytes would keep the memory of the head alive.
                    *early = BytesMut::from(&early[..]);
                }
                unanswered.count(early.capacity());
                return Ok(Some(request));
            }
            Progress::Rejected(rejection) => {
                io.write_all(&rejection.response()).await?;
                io.shutdown().await?;
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests;
