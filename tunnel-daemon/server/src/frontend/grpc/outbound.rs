//! Server -> client on one `Proxy` stream: payload in messages sized to the client's pace.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use adit_core::ids::ConnId;
use adit_core::session::PacketSizer;
use adit_core::wire::encode::MessageBuf;
use bytes::{Bytes, BytesMut};

use adit_core::http2::StreamEnd;
use adit_net::calls::Call;
use adit_tunnel::{Endpoint, Incoming, moment};

/// Smaller pieces are joined, so that a message of many small chunks does not become a long list.
const JOIN_BELOW_BYTES: usize = 2048;

/// What waits to be sent on a stream.
#[derive(Default)]
pub(super) struct Outbound {
    sizer: PacketSizer,
    /// The end of a piece that did not fit into the last message.
    rest: Bytes,
    /// Payload of the last message that has not fully gone to the connection yet.
    in_transit: usize,
}

impl Outbound {
    /// Sends one message of the endpoint's payload, up to the size the client takes at a time. Pending without payload or
    /// room in the client's windows.
    pub(super) fn poll_payload(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnId,
        endpoint: &mut Endpoint,
        call: &mut Call,
    ) -> Poll<Result<Sent, StreamEnd>> {
        if self.in_transit > 0 {
            match call.poll_drained(cx) {
                Poll::Ready(result) => result?,
                Poll::Pending => {
                    endpoint.stalled(0);
                    return Poll::Pending;
                }
            }
            self.passed(endpoint);
        }
        let max = self.sizer.max_bytes(moment());
        let gathered = gather(cx, endpoint, &mut self.rest, max);
        if gathered.bytes == 0 {
            return match gathered.event {
                Some(event) => Poll::Ready(Ok(Sent::Event(event))),
                None => Poll::Pending,
            };
        }
        self.in_transit = gathered.bytes;
        if call.send(MessageBuf::data(conn, gathered.parts)) {
            self.passed(endpoint);
        }
        Poll::Ready(Ok(Sent::Payload {
            event: gathered.event,
        }))
    }

    /// The tunnel ended in order: bytes that wait for the connection reach the client by themselves, and count as delivered.
    pub(super) fn hand_over(&self, endpoint: &mut Endpoint) {
        endpoint.delivered(self.in_transit);
    }

    fn passed(&mut self, endpoint: &mut Endpoint) {
        let bytes = std::mem::take(&mut self.in_transit);
        endpoint.drained(bytes);
        self.sizer.took(bytes, moment());
    }
}

/// What [`Outbound::poll_payload`] did.
pub(super) enum Sent {
    /// A message was sent; `event` followed its payload.
    Payload { event: Option<Incoming> },
    /// No payload; this event came instead.
    Event(Incoming),
}

struct Gathered {
    parts: VecDeque<Bytes>,
    bytes: usize,
    event: Option<Incoming>,
}

/// Takes up to `max` bytes, those in `rest` first, and leaves the remainder of the last piece in `rest`. Stops at the first
/// event that is not data.
fn gather(cx: &mut Context<'_>, endpoint: &mut Endpoint, rest: &mut Bytes, max: usize) -> Gathered {
    let mut gathered = Gathered {
        parts: VecDeque::new(),
        bytes: 0,
        event: None,
    };
    let mut small_chunks = BytesMut::new();
    while gathered.bytes < max {
        let next = if rest.is_empty() {
            endpoint.poll_recv(cx)
        } else {
            Poll::Ready(Incoming::Data(std::mem::take(rest)))
        };
        match next {
            Poll::Ready(Incoming::Data(mut bytes)) => {
                *rest = bytes.split_off(bytes.len().min(max - gathered.bytes));
                gathered.bytes += bytes.len();
                if bytes.len() < JOIN_BELOW_BYTES
                    && !(endpoint.is_idle() && small_chunks.is_empty())
                {
                    small_chunks.extend_from_slice(&bytes);
                } else {
                    if !small_chunks.is_empty() {
                        gathered.parts.push_back(small_chunks.split().freeze());
                    }
                    gathered.parts.push_back(bytes);
                }
            }
            Poll::Ready(event) => {
                gathered.event = Some(event);
                break;
            }
            Poll::Pending => break,
        }
    }
    if !small_chunks.is_empty() {
        gathered.parts.push_back(small_chunks.freeze());
    }
    gathered
}
