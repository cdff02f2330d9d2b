//! Dials targets and serves their tunnels.

use adit_core::failure::DialFailure;
use adit_core::ids::ServerId;
use adit_core::session::{Promise, TunnelKind};
use adit_core::text::Excerpt;
use adit_tls::stream::Socket;

use crate::context::LinkContext;
use adit_config::limits;
use adit_host::descriptors::Use;
use adit_telemetry::labels::{DialReason, DialStage, EndpointDialFailure, Path};
use adit_telemetry::{CountedTunnel, FailedDial};
use adit_tunnel::{Endpoint, EndpointWatch, serve_target};

impl LinkContext {
    /// Counts and logs a failed dial of a target; its request came on `path`.
    pub(super) fn dial_failed(
        &self,
        destination: &str,
        (reason, stage): (DialReason, DialStage),
        error: &str,
        path: Path,
    ) {
        self.metrics.adit().dial_failed(&FailedDial {
            destination,
            reason,
            stage,
            error,
            agent: Some(self.agent.as_str()),
            principal: None,
            path: Some(path),
        });
    }

    /// Serves a tunnel between a target and its endpoint to its end, and counts it.
    pub(super) fn serve(
        &self,
        server: &ServerId,
        target: DialedTarget,
        mut endpoint: Endpoint,
        address: String,
        path: Path,
    ) -> impl Future<Output = ()> + Send + use<> {
        endpoint.keep(target.promise);
        if self.warn_on_channel_limit {
            endpoint.watch(EndpointWatch::Target(address.as_str().into()));
        }
        let open = self.metrics.open_endpoint_connections.guard();
        let entry = self.enter(server, &address, path);
        endpoint.report_to(entry.live());
        let counted = CountedTunnel::opened(self.metrics.adit(), path);
        serve_target(target.socket, endpoint, address, open, move |outcome| {
            drop(entry);
            counted.ended(outcome.reason_at_target());
        })
    }
}

/// A connection to a target, with the memory reserved for its tunnel.
#[derive(Debug)]
pub struct DialedTarget {
    /// The connection.
    pub socket: Socket,
    /// To be kept by the tunnel's endpoint.
    pub promise: Promise,
}

/// Dials a target, counts the outcome, and logs a failure; the request came on `path`. A dropped call is a cancelled dial: it
/// has no effect and counts as no failure.
///
/// # Errors
/// The text for the client, in the words of a Go dialler.
pub async fn dial_target(
    context: &LinkContext,
    protocol: &str,
    address: &str,
    path: Path,
) -> Result<DialedTarget, String> {
    let refused = |reason, error: String| {
        context
            .metrics
            .endpoint_dial_failures
            .count(EndpointDialFailure::Unknown);
        context.dial_failed(address, (reason, DialStage::Request), &error, path);
        Err(error)
    };
    if protocol.len() + address.len() > limits::DIAL_BYTES_MAX {
        // The address is kept for the tunnel's lifetime. Adit servers never send one this long.
        return refused(DialReason::Other, DialFailure::TooLong.to_string());
    }
    let started = tokio::time::Instant::now();
    let descriptors = context.lane_room.descriptors();
    if !descriptors.has_room(Use::Tunnel) {
        // Go's dialler uses this text without descriptors, and servers know it. The last descriptors are for links and lookups.
        let (protocol, address) = (Excerpt(protocol), Excerpt(address));
        let error = format!("dial {protocol} {address}: socket: too many open files");
        return refused(DialReason::Overload, error);
    }
    let Some(promise) = context.budget.promise(TunnelKind::Socket) else {
        let (protocol, address) = (Excerpt(protocol), Excerpt(address));
        let error = format!("dial {protocol} {address}: agent is short of memory for tunnels");
        return refused(DialReason::Overload, error);
    };
    // Counted before the dial succeeds, or concurrent dials would each take the last descriptor.
    descriptors.opened();
    match context.dialer.dial(protocol, address).await {
        Ok(socket) => {
            context.metrics.dial_succeeded(started.elapsed());
            Ok(DialedTarget { socket, promise })
        }
        Err(error) => {
            let reason = if error.is_timeout() {
                EndpointDialFailure::Timeout
            } else {
                EndpointDialFailure::Unknown
            };
            context.metrics.endpoint_dial_failures.count(reason);
            let text = error.to_string();
            context.dial_failed(address, error.reason(), &text, path);
            Err(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::tests::context;

    /// Limit (sizes): Protocol and address of a dial | 1,024 bytes together, then the dial is refused
    #[tokio::test]
    async fn an_address_longer_than_1024_bytes_is_refused_and_not_dialled() {
        let context = context(1);
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        // Leading zeros do not change the port.
        let address = |length: usize| {
            let (host, port) = ("127.0.0.1:", port.to_string());
            let zeros = length - "tcp".len() - host.len() - port.len();
            format!("{host}{}{port}", "0".repeat(zeros))
        };
        let longest = dial_target(
            &context,
            "tcp",
            &address(limits::DIAL_BYTES_MAX),
            Path::Link,
        )
        .await;
        assert!(longest.is_ok(), "{longest:?}");
        let longer = dial_target(
            &context,
            "tcp",
            &address(limits::DIAL_BYTES_MAX + 1),
            Path::Link,
        )
        .await;
        assert_eq!(longer.unwrap_err(), "dial address is too long");
    }
}
