//! The HTTP-CONNECT dialect: one request, one tunnel, then bytes.
//!
//! The request head parser and every response text are the core's. This module owns the order: the 200 is written in full
//! before any tunnel byte.

use std::sync::Arc;

use adit_core::connect::{self, Connect, Progress, Rejection, RequestHead};
use adit_core::failure::DialFailure;
use bytes::{Buf as _, BytesMut};
use tokio::io::AsyncWriteExt as _;

use crate::frontend::establish::{self, Establishing, NewClient};
use crate::frontend::events::{FrontendContext, time_is_up};
use adit_config::limits::UNANSWERED_BYTES_FREE;
use adit_config::plan::ConnectPlan;
use adit_telemetry::labels::ClientDialect;
use adit_tls::stream::{ByteStream, Connection, PeerAddr};

/// Serves one connection to its end. `peer` is its address for logs. Once this process leaves, a connection without a request
/// is closed.
///
/// A cancelled call cancels the dial or resets the tunnel.
pub fn serve(
    io: ByteStream,
    peer: PeerAddr,
    context: Arc<FrontendContext>,
    plan: ConnectPlan,
) -> impl Future<Output = ()> + Send + use<> {
    establish::run(establishing(io, peer, context, plan))
}

fn establishing<S: Connection + Send + 'static>(
    io: S,
    peer: PeerAddr,
    context: Arc<FrontendContext>,
    plan: ConnectPlan,
) -> Establishing {
    Box::pin(async move {
        let counted = context.metrics.http_connections.guard();
        let leaving = context.leaving.clone();
        let mut client = NewClient::new(io, peer, context, ClientDialect::HttpConnect);
        let time = client.admission.at_most(plan.head_timeout);
        // The client left, failed, or was too slow: there is no answer to send.
        let request = tokio::select! {
            biased;
            head = tokio::time::timeout(time, read_head(&mut client, plan)) => head.ok()?.ok()??,
            () = time_is_up(&leaving) => return None,
        };
        let opened = match client.dial(&request.authority, || None).await? {
            Ok(opened) => opened,
            Err(failure) => {
                refuse(&mut client.io, &failure).await;
                return None;
            }
        };
        let mut open = client.open(opened)?;
        open.client.counted = Some(counted);
        Some(open.answer_and_copy(connect::ESTABLISHED))
    })
}

async fn refuse<S: Connection + Send>(io: &mut S, failure: &DialFailure) {
    if let Some(response) = connect::failure_response(failure) {
        // A client that has left needs no answer.
        let _sent = io.write_all(&response).await;
    }
    let _closed = io.shutdown().await;
}

/// `None`: the client was answered or has left.
async fn read_head<S>(
    client: &mut NewClient<S>,
    plan: ConnectPlan,
) -> std::io::Result<Option<Connect>>
where
    S: Connection,
{
    let NewClient {
        io,
        early,
        unanswered,
        ..
    } = client;
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
