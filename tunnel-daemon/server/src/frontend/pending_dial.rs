//! A client whose dial runs: what it says meanwhile waits, and only a client that is gone calls the dial off.

use bytes::BytesMut;

use crate::frontend::client_limits::Unanswered;
use adit_net::peer;
use adit_tls::stream::Connection;

/// Bytes a client may send before its tunnel is open; then it waits.
const EARLY_BYTES_MAX: usize = 64 * 1024;

/// Waits for the outcome of a dial and reads the client meanwhile. `None`: the client is gone.
///
/// An end of the stream is a half-close: the answer and what the target says are still wanted. Whoever moves the bytes reads
/// that end again. Gone is a client whose connection has failed, whose TLS ended without a close_notify, or that has closed a
/// unix socket. A TCP client that closes looks like one that half-closes, until something is written to it.
///
/// A cancelled call leaves what was read in `early`.
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
