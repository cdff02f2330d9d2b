//! The SOCKS5 dialect (RFC 1928): a greeting, one CONNECT request, one tunnel.
//!
//! All messages may come at once. Parsers and answers are the core's; this module owns the order.

use std::io;
use std::sync::Arc;

use adit_core::socks5::{self, Method, Parsed, Reply};
use bytes::Buf as _;
use tokio::io::AsyncWriteExt as _;

use crate::frontend::establish::{self, Establishing, NewClient};
use crate::frontend::events::{FrontendContext, time_is_up};
use crate::frontend::users::FrontendUsers;
use adit_config::plan::ConnectPlan;
use adit_telemetry::labels::ClientDialect;
use adit_tls::stream::{ByteStream, Connection, PeerAddr};
use adit_tunnel::{Closing, close_gracefully};

/// Serves one connection to its end. `peer` is its address for logs, `plan` bounds the time for the request. With `users` the
/// client has to be one of them. Once this process leaves, a connection without a request is closed.
///
/// A cancelled call cancels the dial or resets the tunnel.
pub fn serve(
    io: ByteStream,
    peer: PeerAddr,
    context: Arc<FrontendContext>,
    plan: ConnectPlan,
    users: Option<FrontendUsers>,
) -> impl Future<Output = ()> + Send + use<> {
    establish::run(establishing(io, peer, context, plan, users))
}

fn establishing<S: Connection + Send + 'static>(
    io: S,
    peer: PeerAddr,
    context: Arc<FrontendContext>,
    plan: ConnectPlan,
    users: Option<FrontendUsers>,
) -> Establishing {
    Box::pin(async move {
        let leaving = context.leaving.clone();
        let mut client = NewClient::new(io, peer, context, ClientDialect::Socks5);
        let time = client.admission.at_most(plan.head_timeout);
        // The client left, failed, or was too slow: there is no answer to send.
        let destination = tokio::select! {
            biased;
            request = tokio::time::timeout(time, request(&mut client, users)) => request.ok()?.ok()??,
            () = time_is_up(&leaving) => return None,
        };
        let opened = match client.dial(&destination, || None).await? {
            Ok(opened) => opened,
            Err(failure) => {
                answer_last(&mut client.io, &Reply::of_failure(&failure).octets()).await;
                return None;
            }
        };
        let mut open = client.open(opened)?;
        open.client.answer(&Reply::Succeeded.octets()).await?;
        Some(open.copy())
    })
}

/// Reads greeting and request; `None`: the client was answered or has left.
async fn request<S: Connection + Send + 'static>(
    client: &mut NewClient<S>,
    users: Option<FrontendUsers>,
) -> io::Result<Option<String>> {
    let wanted = if users.is_some() {
        Method::Password
    } else {
        Method::None
    };
    let greeting = message(client, |bytes| socks5::greeting(bytes, wanted)).await?;
    if greeting.is_none() {
        return Ok(None);
    }
    answer(&mut client.io, &wanted.answer()).await?;
    if let Some(users) = users {
        let permit = |bytes: &[u8]| {
            let both = socks5::credentials(bytes)?;
            Ok(both.map(|(both, len)| (users.permit(both.user, both.password), len)))
        };
        let Some(is_right) = message(client, permit).await? else {
            return Ok(None);
        };
        if !is_right {
            client.refused(&"wrong user or password");
            answer_last(&mut client.io, &socks5::verdict(false)).await;
            return Ok(None);
        }
        answer(&mut client.io, &socks5::verdict(true)).await?;
    }
    message(client, socks5::request).await
}

/// Reads one message; `None`: the client was answered or has left.
async fn message<S: Connection + Send + 'static, T>(
    client: &mut NewClient<S>,
    parse: impl Fn(&[u8]) -> Parsed<T>,
) -> io::Result<Option<T>> {
    loop {
        match parse(&client.early) {
            Ok(Some((message, octets))) => {
                client.early.advance(octets);
                return Ok(Some(message));
            }
            Ok(None) => (),
            Err(rejection) => {
                client.refused(&rejection);
                answer_last(&mut client.io, rejection.answer()).await;
                return Ok(None);
            }
        }
        // No message is longer than what every client may hold, so there is room.
        if client
            .unanswered
            .append(&mut client.io, &mut client.early)
            .await?
            .unwrap_or(0)
            == 0
        {
            return Ok(None);
        }
    }
}

async fn answer<S: Connection + Send>(io: &mut S, octets: &[u8]) -> io::Result<()> {
    io.write_all(octets).await?;
    io.flush().await
}

/// And closes the connection, up to dropping it. A client that has left needs no answer.
async fn answer_last<S: Connection + Send>(io: &mut S, octets: &[u8]) {
    if answer(io, octets).await.is_ok() {
        // Input that nobody reads would reset the connection, and the answer with it.
        close_gracefully(io, Closing::InOrder).await;
    }
}

#[cfg(test)]
mod tests;
