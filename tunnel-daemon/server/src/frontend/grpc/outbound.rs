//! Server -> client on one `Proxy` stream: control packets, and payload in messages sized to the client's pace.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use adit_core::ids::ConnId;
use adit_core::session::PacketSizer;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::{Packet, PacketType};
use bytes::{Buf as _, Bytes, BytesMut};
use h2::SendStream;
use h2::server::SendResponse;
use http::HeaderMap;

use adit_net::grpc::{accepted, code_of, code_of_reason};
use adit_tunnel::{Endpoint, Incoming, moment};

/// Smaller pieces are joined, so that a message of many small chunks does not become a long list.
const JOIN_BELOW_BYTES: usize = 2048;

/// The sending half of a stream; its response headers are sent with the first packet, as upstream does.
pub(super) struct Outbound {
    respond: SendResponse<MessageBuf>,
    stream: Option<SendStream<MessageBuf>>,
    sizer: PacketSizer,
    /// The end of a piece that did not fit into the last message.
    rest: Bytes,
    /// Payload of the last message that HTTP/2 has not fully sent yet.
    in_transit: usize,
    /// Whether a control packet exceeded the client's window; it may have been sent since.
    is_control_waiting: bool,
}

impl Outbound {
    pub(super) fn new(respond: SendResponse<MessageBuf>) -> Self {
        Self {
            respond,
            stream: None,
            sizer: PacketSizer::default(),
            rest: Bytes::new(),
            in_transit: 0,
            is_control_waiting: false,
        }
    }

    fn stream(&mut self) -> Result<&mut SendStream<MessageBuf>, h2::Error> {
        if self.stream.is_none() {
            self.stream = Some(self.respond.send_response(accepted(), false)?);
        }
        match &mut self.stream {
            Some(stream) => Ok(stream),
            None => Err(h2::Reason::INTERNAL_ERROR.into()),
        }
    }

    /// Sends a small packet now; it is buffered if the client's window is closed.
    pub(super) fn control(&mut self, packet: Packet) -> Result<PacketType, h2::Error> {
        let kind = packet.kind();
        let stream = self.stream()?;
        stream.send_data(MessageBuf::packet(packet), false)?;
        stream.reserve_capacity(1);
        self.is_control_waiting = stream.capacity() == 0;
        Ok(kind)
    }

    /// Ends the call. Resets it if the client's window has no room for the last messages: they would stay in HTTP/2 for the
    /// connection's lifetime, and no task or budget would count them.
    pub(super) fn finish(&mut self, trailers: HeaderMap) {
        let is_waiting = self.in_transit > 0 || self.is_control_waiting;
        if let Some(stream) = self.stream.as_mut().filter(|_| is_waiting) {
            // Capacity for one more byte means that everything before it has been sent, or can be.
            stream.reserve_capacity(1);
            if stream.capacity() == 0 {
                return self.reset();
            }
        }
        if let Ok(stream) = self.stream() {
            // A client that has left needs no status.
            let _sent = stream.send_trailers(trailers);
        }
    }

    /// Resets the call.
    pub(super) fn reset(&mut self) {
        match &mut self.stream {
            Some(stream) => stream.send_reset(h2::Reason::CANCEL),
            None => self.respond.send_reset(h2::Reason::CANCEL),
        }
    }

    /// Completes when the client has reset the call or has left.
    pub(super) fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<tonic::Code> {
        let reset = match &mut self.stream {
            Some(stream) => stream.poll_reset(cx),
            None => self.respond.poll_reset(cx),
        };
        let gone = tonic::Code::Cancelled;
        reset.map(|reset| match reset {
            Ok(reason) => code_of_reason(reason, gone),
            Err(error) => code_of(&error, gone),
        })
    }

    /// Sends one message of the endpoint's payload, up to the size the client takes at a time. Pending without payload or
    /// capacity.
    pub(super) fn poll_payload(
        &mut self,
        cx: &mut Context<'_>,
        conn: ConnId,
        endpoint: &mut Endpoint,
    ) -> Poll<Result<Sent, h2::Error>> {
        if self.in_transit > 0 {
            match self.poll_capacity(cx, 1) {
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
        let bytes = gathered.bytes;
        let message = MessageBuf::data(conn, gathered.parts);
        let stream = self.stream()?;
        // One byte more than the message: capacity left afterwards means that the whole message fit into the client's window.
        // Not more, since an idle stream keeps this capacity out of the window that the connection's streams share.
        stream.reserve_capacity(message.remaining() + 1);
        stream.send_data(message, false)?;
        self.in_transit = bytes;
        if self.stream()?.capacity() > 0 {
            self.passed(endpoint);
        }
        Poll::Ready(Ok(Sent::Payload {
            event: gathered.event,
        }))
    }

    /// The tunnel ended in order: bytes still in HTTP/2 reach the client by themselves, and count as delivered.
    pub(super) fn hand_over(&self, endpoint: &mut Endpoint) {
        endpoint.delivered(self.in_transit);
    }

    fn passed(&mut self, endpoint: &mut Endpoint) {
        let bytes = std::mem::take(&mut self.in_transit);
        endpoint.drained(bytes);
        self.sizer.took(bytes, moment());
    }

    fn poll_capacity(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<Result<(), h2::Error>> {
        let stream = self.stream()?;
        loop {
            if stream.capacity() > 0 {
                return Poll::Ready(Ok(()));
            }
            stream.reserve_capacity(bytes);
            match stream.poll_capacity(cx) {
                Poll::Ready(Some(Ok(_))) => (),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                Poll::Ready(None) => return Poll::Ready(Err(h2::Reason::CANCEL.into())),
                Poll::Pending => return Poll::Pending,
            }
        }
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
