//! Dials of targets, counted.

use adit_core::text::Excerpt;
use tokio::net::TcpStream;

use super::link::LinkContext;
use crate::net::descriptors::Use;
use crate::telemetry::labels::EndpointDialFailure;

/// Dials a target and counts how it went. A dropped call leaves nothing behind.
///
/// # Errors
/// The text for the client, as a Go dialler would have put it.
pub async fn dial_target(
    context: &LinkContext,
    protocol: &str,
    address: &str,
) -> Result<TcpStream, String> {
    let started = tokio::time::Instant::now();
    let descriptors = context.lane_room.descriptors();
    if !descriptors.has_room(Use::Tunnel) {
        context.metrics.dial_failure(EndpointDialFailure::Unknown);
        // What Go's dialler says when there is none left, and servers know. The last ones are for links and lookups.
        let (protocol, address) = (Excerpt(protocol), Excerpt(address));
        return Err(format!(
            "dial {protocol} {address}: socket: too many open files"
        ));
    }
    // Counted before there is one, or dials that wait together would each think to be the last.
    descriptors.opened();
    match context.dialer.dial(protocol, address).await {
        Ok(socket) => {
            context.metrics.dial_succeeded(started.elapsed());
            Ok(socket)
        }
        Err(error) => {
            let reason = if error.is_timeout() {
                EndpointDialFailure::Timeout
            } else {
                EndpointDialFailure::Unknown
            };
            context.metrics.dial_failure(reason);
            Err(error.to_string())
        }
    }
}
