//! A target: dialled, then connected to its leg until the tunnel is over.

use std::io;

use adit_core::text::Excerpt;
use bytes::Bytes;
use tokio::net::TcpStream;

use super::link::LinkContext;
use crate::hub::{Leg, PumpEnd, pump};
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

/// Serves one target connection to its end. The socket is closed on return, after everything owed is written.
///
/// A cancelled call resets the tunnel.
pub async fn serve_target(mut socket: TcpStream, mut leg: Leg, address: &str) {
    let outcome = pump(&mut socket, &mut leg, Bytes::new()).await;
    match &outcome.end {
        PumpEnd::Tunnel(end) => {
            if !end.delivers_rest() {
                reset_on_close(&socket);
            }
        }
        // What was read before the failure still goes to the client, then the reason.
        PumpEnd::ReadFailed(error) | PumpEnd::WriteFailed(error) => {
            leg.close_with(&go_text(address, error))
        }
    }
    tracing::debug!(
        target_address = address,
        from_target = outcome.from_socket,
        to_target = outcome.to_socket,
        end = ?outcome.end,
        "target connection over"
    );
}

/// Go's words for a failed read or write, which clients may match.
fn go_text(address: &str, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset => format!("read tcp {address}: connection reset by peer"),
        io::ErrorKind::BrokenPipe => format!("write tcp {address}: broken pipe"),
        io::ErrorKind::TimedOut => format!("read tcp {address}: i/o timeout"),
        _ => format!("tcp {address}: {error}"),
    }
}

/// An abnormal end must not look like a clean one to the target.
fn reset_on_close(socket: &TcpStream) {
    if let Err(error) = socket2::SockRef::from(socket).set_linger(Some(std::time::Duration::ZERO)) {
        tracing::debug!(%error, "cannot reset a target connection");
    }
}
