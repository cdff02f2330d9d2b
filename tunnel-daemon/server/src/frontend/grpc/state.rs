//! The state of a `Proxy` call, how it ends, and how long it may be without a dial or a tunnel.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use adit_core::failure::DialFailure;
use adit_core::ids::{ConnId, DialId};
use adit_core::wire::decode::StreamError;
use tokio::time::{Sleep, sleep};

use crate::router::OpenTunnel;
use adit_config::limits::CALL_IDLE_TIMEOUT;
use adit_tunnel::Endpoint;

pub(super) type Dialing = Pin<Box<dyn Future<Output = Result<OpenTunnel, DialFailure>> + Send>>;

/// The state of a call.
pub(super) enum CallState {
    /// No dial yet.
    Fresh,
    Dialing {
        dial: DialId,
        work: Dialing,
    },
    Open {
        conn: ConnId,
        endpoint: Endpoint,
        closing: bool,
    },
    /// The call is over; the client's packets are read and dropped until it leaves.
    Over,
}

/// Why a stream's task ends.
pub(super) enum Done {
    ClientFinished,
    Gone,
    /// The client knows that there is no room.
    Refused,
    /// No dial or tunnel for too long.
    Idle,
    Broken(StreamError),
}

/// The deadline of a call without a dial or a tunnel. The timer is created when the call waits, so a call that dials at once
/// has none.
#[derive(Default)]
pub(super) struct Idle(Option<Pin<Box<Sleep>>>);

impl Idle {
    /// Ready when the call has been without a dial or a tunnel for too long. Packets without effect do not count.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, state: &CallState) -> Poll<()> {
        if matches!(state, CallState::Dialing { .. } | CallState::Open { .. }) {
            self.0 = None;
            return Poll::Pending;
        }
        let timer = self
            .0
            .get_or_insert_with(|| Box::pin(sleep(CALL_IDLE_TIMEOUT)));
        timer.as_mut().poll(cx)
    }

    /// The error text for the client.
    pub(super) fn text() -> String {
        format!(
            "call without a dial or a tunnel for {} s: dial at once, and end the call with its tunnel",
            CALL_IDLE_TIMEOUT.as_secs()
        )
    }
}
