//! A client whose dial is pending: its bytes are buffered, and only the client's loss cancels the dial.

use bytes::BytesMut;

use crate::frontend::client_limits::Unanswered;
use adit_net::peer;
use adit_tls::stream::Connection;

/// Bytes buffered for a client before its tunnel is open; then it is not read.
const EARLY_BYTES_MAX: usize = 64 * 1024;

/// Waits for the outcome of a dial and reads the client meanwhile. `None`: the client has left.
///
/// EOF is a half-close: the client still expects the answer and the target's bytes; the copy reads the EOF again. The client
/// has left if its connection failed, its TLS ended without close_notify, or it closed a unix socket. A TCP client that closes
/// looks like one that half-closes, until bytes are written to it.
///
/// A cancelled call leaves the bytes read in `early`.
pub(super) async fn outcome<S: Connection, T>(
    mut dialing: impl Future<Output = T> + Unpin,
    io: &mut S,
    early: &mut BytesMut,
    unanswered: &mut Unanswered,
) -> Option<T> {
    while early.len() < EARLY_BYTES_MAX {
        tokio::select! {
            biased;
            outcome = &mut dialing => return Some(outcome),
            read = unanswered.append_or_wait(io, early) => match read {
                Ok(0) => break,
                Ok(_) => (),
                Err(_) => return None,
            },
        }
    }
    let socket = io.descriptor();
    let gone = async move {
        match socket {
            Some(socket) => peer::closed(socket).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        outcome = &mut dialing => Some(outcome),
        () = gone => None,
    }
}
