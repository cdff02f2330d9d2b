//! Dials of targets, counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use adit_core::failure::DialFailure;
use adit_core::text::Excerpt;
use tokio::net::TcpStream;

use super::link::LinkContext;
use crate::config::limits;
use crate::net::descriptors::Use;
use crate::telemetry::labels::EndpointDialFailure;

/// The dials of a process: an agent that goes away waits for them.
#[derive(Debug, Default)]
pub struct Dials {
    under_way: AtomicUsize,
    asked: AtomicU64,
}

impl Dials {
    /// One more, for as long as the guard lives: until its target counts as open, or it has failed.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        self.asked.fetch_add(1, Relaxed);
        self.under_way.fetch_add(1, Relaxed);
        UnderWay(Arc::clone(self))
    }

    /// Those that have no outcome yet.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.under_way.load(Relaxed)
    }

    /// All since the process began: who looks now and then sees also those that were short.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Relaxed)
    }
}

/// A dial without an outcome.
#[derive(Debug)]
pub struct UnderWay(Arc<Dials>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Relaxed);
    }
}

/// Dials a target and counts how it went. A dropped call leaves nothing behind.
///
/// # Errors
/// The text for the client, as a Go dialler would have put it.
pub async fn dial_target(
    context: &LinkContext,
    protocol: &str,
    address: &str,
) -> Result<TcpStream, String> {
    if protocol.len() + address.len() > limits::DIAL_BYTES_MAX {
        // The address is kept for as long as its tunnel lives. Servers that are Adit ask no agent for such a one.
        context.metrics.dial_failure(EndpointDialFailure::Unknown);
        return Err(DialFailure::TooLong.to_string());
    }
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
    if context.budget.is_full() {
        context.metrics.dial_failure(EndpointDialFailure::Unknown);
        let (protocol, address) = (Excerpt(protocol), Excerpt(address));
        return Err(format!(
            "dial {protocol} {address}: agent is short of memory for tunnels"
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

#[cfg(test)]
mod tests {
    use super::super::link::tests::context;
    use super::*;

    #[tokio::test]
    async fn an_address_longer_than_1024_bytes_is_refused_and_not_dialled() {
        let context = context(1);
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        // Zeros in front of a port change nothing.
        let address = |length: usize| {
            let (host, port) = ("127.0.0.1:", port.to_string());
            let zeros = length - "tcp".len() - host.len() - port.len();
            format!("{host}{}{port}", "0".repeat(zeros))
        };
        let longest = dial_target(&context, "tcp", &address(limits::DIAL_BYTES_MAX)).await;
        assert!(longest.is_ok(), "{longest:?}");
        let longer = dial_target(&context, "tcp", &address(limits::DIAL_BYTES_MAX + 1)).await;
        assert_eq!(longer.unwrap_err(), "dial address is too long");
    }
}
