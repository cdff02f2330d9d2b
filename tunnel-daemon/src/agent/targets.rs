//! A connected target and its leg: bytes both ways until the tunnel is over.

use std::io;

use bytes::Bytes;
use tokio::net::TcpStream;

use crate::hub::{Leg, PumpEnd, pump};

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
