//! The gRPC dialect: kube-apiserver's `ProxyService/Proxy` streams.

mod client_socket;
mod outbound;
mod state;
mod stream;

pub use client_socket::ClientSocket;
pub use stream::ProxyStream;

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use adit_core::session::{BOUNDED_CALL_BUFFER_BYTES, BOUNDED_CALL_WINDOW_BYTES};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

use crate::frontend::events::{ClientAccess, FrontendContext, GrpcEvents, time_is_up};
use adit_config::limits::CLIENT_STREAMS_MAX;
use adit_core::http2::ServerLimits;
use adit_net::call_windows::CallWindows;
use adit_net::calls;
use adit_net::grpc::{self, Code};
use adit_telemetry::labels::ServiceMethod;

/// Path of the only method.
const METHOD: &str = "/ProxyService/Proxy";
/// Bytes a client may send on one stream before its tunnel takes them. Small: a thousand stalled streams on one connection must
/// not hold a gigabyte.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
/// Bytes of a connection that wait for its socket before its streams wait. The budget counts them while they do.
const OUTPUT_BYTES: usize = 128 * 1024;

/// Calls of one connection that wait to be told that there is no room; further ones are reset.
const REFUSED_CALLS: usize = 64;

/// Windows of the calls of a connection, and whether they grow.
fn windows_of(context: &FrontendContext) -> (u32, Option<Arc<CallWindows>>) {
    let budget = context.router.budget();
    if budget.starts_small() {
        let windows = CallWindows::new(budget, STREAM_WINDOW_BYTES);
        (BOUNDED_CALL_WINDOW_BYTES, Some(windows))
    } else {
        (STREAM_WINDOW_BYTES, None)
    }
}

/// Serves one client connection to its end; `admission` says whether the client is refused. Once this process leaves, the
/// connection ends when it has no calls, or at once before its HTTP/2 preface. Every `Proxy` call is polled as a task of its own.
///
/// A cancelled call closes the connection, which resets its tunnels.
pub fn serve(
    io: ClientSocket,
    context: Arc<FrontendContext>,
    admission: ClientAccess,
    keepalive: Duration,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(serve_io(io, context, admission, keepalive))
}

pub(super) async fn serve_io<S>(
    io: S,
    context: Arc<FrontendContext>,
    admission: ClientAccess,
    keepalive: Duration,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (window_bytes, windows) = windows_of(&context);
    let limits = ServerLimits {
        calls_max: CLIENT_STREAMS_MAX,
        window_bytes,
        output_bytes: if windows.is_some() {
            BOUNDED_CALL_BUFFER_BYTES
        } else {
            OUTPUT_BYTES
        },
    };
    let mut greeting = Box::pin(async {
        tokio::select! {
            biased;
            greeted = calls::accept(io, limits, context.router.budget(), windows.as_ref()) => Some(greeted),
            () = time_is_up(&context.leaving) => None,
        }
    });
    let greeted = admission.within(greeting.as_mut()).await.flatten();
    drop(greeting);
    let connection = match greeted {
        Some(Ok(connection)) => connection,
        Some(Err(error)) => {
            return tracing::debug!(%error, "client connection is not HTTP/2");
        }
        None => return,
    };
    let leaving = context.leaving.clone();
    let mut refused = None;
    let served = connection.serve(keepalive, leaving, |mut call, arrival| {
        let head = arrival.head;
        if !head.is_grpc {
            call.refuse("415");
            return None;
        }
        if head.path != METHOD {
            call.finish(Code::Unimplemented, &grpc::unknown_method(&head.path));
            return None;
        }
        let stream = ProxyStream::new(
            Arc::clone(&context.router),
            call,
            admission.clone(),
            windows.clone(),
            GrpcEvents::new(&context),
        );
        if arrival.is_excess || !context.tasks.has_room() {
            if context.limits.may_log_refusal() {
                tracing::warn!("client stream refused: too many streams");
            }
            let own = refused.get_or_insert_with(|| Arc::new(Semaphore::new(REFUSED_CALLS)));
            let own = Arc::clone(own).try_acquire_owned().ok()?;
            let place = (context.limits.refused_call()?, own);
            return Some(Box::pin(stream.refusing().run(place)));
        }
        let counted = context.metrics.grpc_connections.of(ServiceMethod::Proxy);
        let admitted = context
            .tasks
            .admit("proxy-stream", stream.run(counted.guard()));
        if admitted.is_err() && context.limits.may_log_refusal() {
            tracing::warn!("client stream refused: too many streams");
        }
        admitted.ok()
    });
    if let Some(Err(error)) = admission.within(pin!(served)).await {
        tracing::debug!(%error, "client connection ended");
    }
}

#[cfg(test)]
mod tests;
