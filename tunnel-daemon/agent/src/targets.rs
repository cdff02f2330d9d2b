//! Dials of targets, counted.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use adit_core::failure::DialFailure;
use adit_core::text::Excerpt;
use adit_net::dial::{DialError, Dialer};
use adit_tls::stream::Socket;

use crate::context::LinkContext;
use adit_config::limits;
use adit_net::descriptors::Use;
use adit_telemetry::FailedDial;
use adit_telemetry::labels::{DialReason, DialStage, EndpointDialFailure, Path};

/// A dial under way.
pub type Dialing<'a> = Pin<Box<dyn Future<Output = Result<Socket, DialError>> + Send + 'a>>;

/// Opens connections to targets.
pub trait TargetDialer: Send + Sync {
    /// Connects to `address`, a host and a port as a client wrote them; `protocol` is that of the dial, of which Konnectivity has
    /// `tcp` only. Dropped, it leaves nothing behind.
    fn dial<'a>(&'a self, protocol: &'a str, address: &'a str) -> Dialing<'a>;
}

/// TCP, to names and addresses that the allow-list has.
impl TargetDialer for Dialer {
    fn dial<'a>(&'a self, protocol: &'a str, address: &'a str) -> Dialing<'a> {
        Box::pin(async move { Ok(Socket::Tcp(Self::dial(self, protocol, address).await?)) })
    }
}

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

impl LinkContext {
    /// A dial of a target failed, whose request came on `path`: counted and logged.
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
            path: Some(path),
        });
    }
}

/// Dials a target, counts how it went, and logs a failure; `path` is what the request came on. A dropped call leaves nothing
/// behind and is no failure: the dial was called off.
///
/// # Errors
/// The text for the client, as a Go dialler would have put it.
pub async fn dial_target(
    context: &LinkContext,
    protocol: &str,
    address: &str,
    path: Path,
) -> Result<Socket, String> {
    let refused = |reason, error: String| {
        context.metrics.dial_failure(EndpointDialFailure::Unknown);
        context.dial_failed(address, (reason, DialStage::Request), &error, path);
        Err(error)
    };
    if protocol.len() + address.len() > limits::DIAL_BYTES_MAX {
        // The address is kept for as long as its tunnel lives. Servers that are Adit ask no agent for such a one.
        return refused(DialReason::Other, DialFailure::TooLong.to_string());
    }
    let started = tokio::time::Instant::now();
    let descriptors = context.lane_room.descriptors();
    if !descriptors.has_room(Use::Tunnel) {
        // What Go's dialler says when there is none left, and servers know. The last ones are for links and lookups.
        let (protocol, address) = (Excerpt(protocol), Excerpt(address));
        let error = format!("dial {protocol} {address}: socket: too many open files");
        return refused(DialReason::Overload, error);
    }
    if context.budget.is_full() {
        let (protocol, address) = (Excerpt(protocol), Excerpt(address));
        let error = format!("dial {protocol} {address}: agent is short of memory for tunnels");
        return refused(DialReason::Overload, error);
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
        // Zeros in front of a port change nothing.
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
