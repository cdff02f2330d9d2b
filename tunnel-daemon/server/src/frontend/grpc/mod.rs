//! The gRPC dialect: kube-apiserver's `ProxyService/Proxy` streams.

mod client_socket;
mod outbound;
mod state;
mod stream;

pub use client_socket::ClientSocket;
pub use stream::ProxyStream;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use adit_core::session::{BOUNDED_CALL_BUFFER_BYTES, BOUNDED_CALL_WINDOW_BYTES};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::frontend::events::{ClientAccess, FrontendContext, GrpcEvents, time_is_up};
use adit_net::call_windows::CallWindows;
use adit_net::grpc::{self, Windows};
use adit_telemetry::labels::ServiceMethod;

/// Path of the only method.
const METHOD: &str = "/ProxyService/Proxy";
/// Bytes a client may send on one stream before its tunnel takes them. Small: a thousand stalled streams on one connection must
/// not hold a gigabyte.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
/// Bytes of one stream that HTTP/2 may hold unwritten; the budget counts bytes beyond them.
const SEND_BUFFER_BYTES: usize = 128 * 1024;

/// Serves one client connection to its end; `admission` says whether the client is refused. Once this process leaves, the
/// connection ends when it has no calls, or at once before its HTTP/2 preface. Every `Proxy` call runs as a task of its own.
///
/// A cancelled call closes the connection, which resets its tunnels.
pub fn serve<S>(
    io: S,
    context: Arc<FrontendContext>,
    admission: ClientAccess,
    keepalive: Duration,
) -> impl Future<Output = ()> + Send + use<S>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let budget = context.router.budget();
    let windows = (budget.starts_small()).then(|| CallWindows::new(budget, STREAM_WINDOW_BYTES));
    let (stream_bytes, send_buffer_bytes) = if windows.is_some() {
        (BOUNDED_CALL_WINDOW_BYTES, BOUNDED_CALL_BUFFER_BYTES)
    } else {
        (STREAM_WINDOW_BYTES, SEND_BUFFER_BYTES)
    };
    // Boxed: its state is freed before the connection runs.
    let left = context.leaving.clone();
    let mut greeting = Box::pin(async move {
        let windows = Windows {
            frame_bytes: grpc::SMALL_FRAME_BYTES,
            stream_bytes,
            send_buffer_bytes,
        };
        let builder = grpc::server_builder(windows);
        tokio::select! {
            biased;
            greeted = grpc::accept(&builder, io) => Some(greeted),
            () = time_is_up(&left) => None,
        }
    });
    async move {
        let greeted = admission.within(greeting.as_mut()).await.flatten();
        drop(greeting);
        let connection = match greeted {
            Some(Ok(connection)) => connection.count_in(context.router.budget()),
            Some(Err(error)) => {
                return tracing::debug!(%error, "client connection is not HTTP/2");
            }
            None => return,
        };
        let connection = match &windows {
            Some(windows) => connection.grow(windows),
            None => connection,
        };
        let leaving = context.leaving.clone();
        let served = connection.serve(keepalive, leaving, |request, mut respond| {
            if !grpc::is_call(&request, METHOD, &mut respond) {
                return None;
            }
            let stream = ProxyStream::new(
                Arc::clone(&context.router),
                request.into_body(),
                respond,
                admission.clone(),
                windows.clone(),
                GrpcEvents::new(&context),
            );
            let counted = context
                .metrics
                .grpc_connections
                .of(ServiceMethod::Proxy)
                .guard();
            let admitted = context.tasks.admit("proxy-stream", stream.run(counted));
            if admitted.is_err() && context.limits.may_log_refusal() {
                tracing::warn!("client stream refused: too many streams");
            }
            admitted.ok()
        });
        if let Some(Err(error)) = admission.within(pin!(served)).await {
            tracing::debug!(%error, "client connection ended");
        }
    }
}

#[cfg(test)]
mod tests;
