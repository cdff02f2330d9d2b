//! One `Proxy` stream: its packets, its dial, its tunnel (upstream's contract, section by section).

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::ids::{ConnId, DialId};
use adit_core::session::TunnelEnd;
use adit_core::wire::decode::Decoder;
use adit_core::wire::packet::{Packet, PacketType, Received, Violation};

use super::outbound::{Outbound, Sent};
use super::state::{CallState, Done, Idle};
use crate::frontend::events::{ClientAccess, GrpcEvents};
use crate::router::{OpenTunnel, Router};
use adit_core::http2::{StreamEnd, code};
use adit_core::wire::encode::MessageBuf;
use adit_net::call_windows::{CallWindow, CallWindows};
use adit_net::calls::Call;
use adit_net::grpc::{Code, code_of_end};
use adit_telemetry::labels::EndReason;
use adit_tunnel::Incoming;

/// Error answers to packets out of place, before the call is ended: a client that never reads makes them wait in all its calls.
const REBUKES_MAX: u32 = 16;
/// Rounds before the task yields.
const ROUNDS_PER_POLL: usize = 32;
/// Client frames per round: full frames are as many bytes as the client may have in flight.
const FRAMES_PER_ROUND: usize = 16;

/// The Go client library gives up a tunnel whose bytes its user does not take for 10 s. Measured here from the first byte that
/// waits in this process, which is a little later.
const CLIENT_PATIENCE: Duration = Duration::from_secs(9);

/// The task of one `Proxy` stream. Completes when the client has ended the call; dropping it resets the tunnel.
pub struct ProxyStream {
    router: Arc<Router>,
    call: Call,
    out: Outbound,
    decoder: Decoder,
    state: CallState,
    idle: Idle,
    rebukes: u32,
    /// Its dial is refused, and the call ends then.
    is_refusing: bool,
    admission: ClientAccess,
    windows: Option<Arc<CallWindows>>,
    window: Option<CallWindow>,
    events: GrpcEvents,
}

impl ProxyStream {
    /// Takes over a call to `ProxyService/Proxy`. `windows`: those of its connection, where memory is bounded.
    pub fn new(
        router: Arc<Router>,
        call: Call,
        admission: ClientAccess,
        windows: Option<Arc<CallWindows>>,
        events: GrpcEvents,
    ) -> Self {
        Self {
            router,
            call,
            out: Outbound::default(),
            decoder: Decoder::default(),
            state: CallState::Fresh,
            idle: Idle::default(),
            rebukes: 0,
            is_refusing: false,
            admission,
            windows,
            window: None,
            events,
        }
    }

    /// There is no room for its tunnel: the client is told so when it dials.
    pub fn refusing(mut self) -> Self {
        self.is_refusing = true;
        self
    }

    /// Serves the stream to its end. `kept` is dropped with it.
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async` function would keep the stream twice"
    )]
    pub fn run<K>(mut self, kept: K) -> impl Future<Output = ()> {
        async move {
            // Borrowed in this order, so that cancelling drops them in this order.
            let (stream, _kept) = (&mut self, &kept);
            let done = std::future::poll_fn(|cx| stream.poll(cx)).await;
            stream.over(done);
        }
    }

    fn over(&mut self, done: Done) {
        match done {
            Done::ClientFinished => {
                self.leave(true, EndReason::ClientClosed);
                self.call.finish(Code::Ok, "");
            }
            Done::Refused => self.call.finish(Code::ResourceExhausted, ""),
            Done::Gone => {
                self.leave(false, EndReason::ClientGone);
                self.call.reset();
            }
            Done::Idle => {
                self.events.read_failed(tonic::Code::DeadlineExceeded);
                let text = Idle::text();
                self.call.finish(Code::DeadlineExceeded, &text);
            }
            Done::Broken(error) => {
                self.leave(false, EndReason::ClientProtocol);
                self.call.finish(Code::Internal, &error.to_string());
            }
        }
    }

    fn leave(&mut self, graceful: bool, reason: EndReason) {
        self.window = None;
        match std::mem::replace(&mut self.state, CallState::Over) {
            CallState::Dialing { .. } => self.events.tunnel.abandoned(),
            CallState::Open { mut endpoint, .. } => {
                if graceful {
                    endpoint.close();
                }
                if reason != EndReason::ClientGone {
                    self.out.hand_over(&mut endpoint);
                }
                let (from_client, to_client) = endpoint.bytes();
                // A client that stalled for its library's timeout has given up the tunnel by itself.
                let gave_up =
                    reason == EndReason::ClientGone && endpoint.stalled_for() >= CLIENT_PATIENCE;
                let reason = if gave_up {
                    EndReason::ClientStalled
                } else {
                    reason
                };
                self.events.tunnel.ended(from_client, to_client, reason);
            }
            CallState::Fresh | CallState::Over => (),
        }
    }

    /// Many messages are flushed in one write, however the poll ends: a reset discards unsent bytes.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Done> {
        let done = self.poll_rounds(cx);
        self.flush(cx);
        if done.is_pending() && self.idle.poll(cx, &self.state).is_ready() {
            return Poll::Ready(Done::Idle);
        }
        done
    }

    fn poll_rounds(&mut self, cx: &mut Context<'_>) -> Poll<Done> {
        for _round in 0..ROUNDS_PER_POLL {
            if let Poll::Ready(end) = self.call.poll_end(cx) {
                self.events.read_failed(code_of_end(end));
                return Poll::Ready(Done::Gone);
            }
            let mut progress = match self.poll_frames(cx) {
                Ok(progress) => progress,
                Err(done) => return Poll::Ready(done),
            };
            progress |= match self.poll_tunnel(cx) {
                Ok(progress) => progress,
                Err(end) => {
                    self.events.write_failed(code_of_end(end));
                    return Poll::Ready(Done::Gone);
                }
            };
            if self.is_refusing && matches!(self.state, CallState::Over) {
                return Poll::Ready(Done::Refused);
            }
            if !progress {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn flush(&mut self, cx: &mut Context<'_>) {
        if let CallState::Open { endpoint, .. } = &mut self.state {
            endpoint.poll_flush(cx);
        }
    }

    /// Reads all frames from the client before polling the tunnel: a lane writes its queue before it reads, and would otherwise
    /// write each frame separately.
    fn poll_frames(&mut self, cx: &mut Context<'_>) -> Result<bool, Done> {
        for frame in 0..FRAMES_PER_ROUND {
            if !self.poll_client(cx)? {
                return Ok(frame > 0);
            }
            if !matches!(self.state, CallState::Open { .. }) {
                break;
            }
        }
        Ok(true)
    }

    /// Client -> tunnel. Not read while the endpoint is full, so that the client's HTTP/2 window fills.
    fn poll_client(&mut self, cx: &mut Context<'_>) -> Result<bool, Done> {
        if let CallState::Open {
            endpoint,
            closing: false,
            ..
        } = &mut self.state
            && endpoint.poll_ready(cx).is_pending()
        {
            self.events.held_up();
            self.wait(true);
            return Ok(false);
        }
        self.events.not_held_up();
        self.wait(false);
        let data = match self.call.poll_data(cx) {
            Poll::Pending => return Ok(false),
            Poll::Ready(None) => {
                return Err(match self.decoder.finish() {
                    Ok(()) => Done::ClientFinished,
                    Err(truncated) => {
                        self.events.read_failed(tonic::Code::Internal);
                        Done::Broken(truncated)
                    }
                });
            }
            Poll::Ready(Some(Err(end))) => {
                self.events.read_failed(code_of_end(end));
                return Err(Done::Gone);
            }
            Poll::Ready(Some(Ok(data))) => data,
        };
        self.call.release(data.len());
        if let Some(window) = &self.window {
            window.moved(data.len());
        }
        self.decoder.push(data);
        loop {
            match self.decoder.next() {
                Ok(Some(received)) => {
                    if let Err(end) = self.handle(cx, received) {
                        self.events.write_failed(code_of_end(end));
                        return Err(Done::Gone);
                    }
                }
                Ok(None) => return Ok(true),
                Err(error) => {
                    self.events.read_failed(tonic::Code::Internal);
                    return Err(Done::Broken(error));
                }
            }
        }
    }

    fn wait(&mut self, is_waiting: bool) {
        if let Some(window) = &mut self.window {
            window.wait(is_waiting);
        }
    }

    fn handle(&mut self, cx: &mut Context<'_>, received: Received) -> Result<(), StreamEnd> {
        let packet = match received {
            Received::Packet(packet) => packet,
            Received::Unknown(number) => {
                self.events.packet_in(Err(number));
                return Ok(());
            }
            Received::Violation(violation) => {
                self.events.offence(violation);
                if let Violation::Oversize(_) = violation {
                    self.events.read_failed(tonic::Code::ResourceExhausted);
                    // Earlier packets go before the reset.
                    self.flush(cx);
                    return self.give_up(
                        "message above 4 MiB (16 KiB if no DATA)",
                        EndReason::Oversize,
                    );
                }
                return Ok(());
            }
        };
        if !self.decoder.is_inside_data() {
            self.events.packet_in(Ok(packet.kind()));
        }
        if matches!(self.state, CallState::Over) {
            return Ok(());
        }
        match packet {
            Packet::DialReq {
                dial,
                protocol,
                address,
                ..
            } => self.handle_dial(dial, protocol, address),
            Packet::Data { conn, bytes } => match &mut self.state {
                CallState::Open { closing: true, .. } => Ok(()),
                CallState::Open {
                    conn: ours,
                    endpoint,
                    ..
                } if *ours == conn => {
                    endpoint.send(bytes);
                    Ok(())
                }
                CallState::Open { conn: ours, .. } => {
                    let ours = *ours;
                    self.close_rsp(conn, "mismatched connection IDs")?;
                    self.close_rsp(ours, "mismatched connection IDs")?;
                    self.leave(true, EndReason::ClientProtocol);
                    Ok(())
                }
                CallState::Fresh | CallState::Dialing { .. } => {
                    self.close_rsp(conn, "backend not initialized")?;
                    self.leave(false, EndReason::ClientProtocol);
                    Ok(())
                }
                CallState::Over => Ok(()),
            },
            Packet::CloseReq { conn } => match &mut self.state {
                CallState::Open {
                    endpoint,
                    closing,
                    conn: ours,
                } if *ours == conn => {
                    if !*closing {
                        *closing = true;
                        endpoint.close();
                    }
                    Ok(())
                }
                CallState::Open { .. } => self.rebuke(conn, "mismatched connection IDs"),
                _ => self.rebuke(conn, "backend uninitialized"),
            },
            Packet::DialCls { dial } => {
                if matches!(&self.state, CallState::Dialing { dial: ours, .. } if *ours == dial) {
                    self.leave(false, EndReason::ClientGone);
                }
                Ok(())
            }
            // Types that clients do not send.
            Packet::DialRsp { .. }
            | Packet::CloseRsp { .. }
            | Packet::Keys(_)
            | Packet::Drain
            | Packet::Window { .. }
            | Packet::Fin { .. }
            | Packet::Reset { .. } => Ok(()),
        }
    }

    fn handle_dial(
        &mut self,
        dial: DialId,
        protocol: String,
        address: String,
    ) -> Result<(), StreamEnd> {
        if !matches!(self.state, CallState::Fresh) {
            self.count_rebuke()?;
            let error = String::from("this stream has dialed before; open a stream per connection");
            return self.send(Packet::DialRsp {
                dial,
                conn: ConnId(0),
                error,
                window: 0,
            });
        }
        let asked = self.events.tunnel.dialing(&address, &self.admission);
        if self.is_refusing {
            let is_leaving = self.router.refuses_dials();
            let failure = if is_leaving {
                DialFailure::ShuttingDown
            } else {
                DialFailure::NoMemory
            };
            return self.finish_dial(dial, Err(failure));
        }
        if let Err(failure) = self.admission.check(&protocol, &address) {
            return self.finish_dial(dial, Err(failure));
        }
        if let Some(windows) = &self.windows {
            self.window = windows.open();
            if self.window.is_none() {
                return self.finish_dial(dial, Err(DialFailure::NoMemory));
            }
        }
        let router = Arc::clone(&self.router);
        let work = Box::pin(async move { router.dial(dial, &protocol, &address, &asked).await });
        self.state = CallState::Dialing { dial, work };
        Ok(())
    }

    fn poll_tunnel(&mut self, cx: &mut Context<'_>) -> Result<bool, StreamEnd> {
        match &mut self.state {
            CallState::Fresh | CallState::Over => Ok(false),
            CallState::Dialing { dial, work } => {
                let Poll::Ready(outcome) = work.as_mut().poll(cx) else {
                    return Ok(false);
                };
                let dial = *dial;
                self.finish_dial(dial, outcome)?;
                Ok(true)
            }
            CallState::Open { conn, endpoint, .. } => {
                let conn = *conn;
                match self.out.poll_payload(cx, conn, endpoint, &mut self.call) {
                    // A client that takes nothing must not hide an abort of the tunnel.
                    Poll::Pending if endpoint.poll_aborted(cx) => match endpoint.last_end() {
                        Some(end) => {
                            self.sent(Sent::Event(Incoming::Ended(end)), conn)?;
                            Ok(true)
                        }
                        None => Ok(false),
                    },
                    Poll::Pending => Ok(false),
                    Poll::Ready(sent) => {
                        self.sent(sent?, conn)?;
                        Ok(true)
                    }
                }
            }
        }
    }

    fn sent(&mut self, sent: Sent, conn: ConnId) -> Result<(), StreamEnd> {
        let event = match sent {
            Sent::Payload { event } => {
                self.events.packet_out(PacketType::Data);
                event
            }
            Sent::Event(event) => Some(event),
        };
        match event {
            None | Some(Incoming::Data(_)) => Ok(()),
            // The Go client does not support half-close: the target's EOF closes both directions.
            Some(Incoming::PeerFin) => {
                self.close_rsp(conn, "")?;
                self.leave(true, EndReason::TargetClosed);
                Ok(())
            }
            Some(Incoming::Ended(end)) => {
                let text = match &end {
                    TunnelEnd::Closed { error } => error.clone(),
                    TunnelEnd::PeerClosing | TunnelEnd::Confirmed | TunnelEnd::Unconfirmed => {
                        String::new()
                    }
                    other => {
                        let reason = self.events.tunnel.reason(EndReason::from(other));
                        format!("tunnel closed by the server: {reason}")
                    }
                };
                self.close_rsp(conn, &text)?;
                self.leave(false, EndReason::from(&end));
                Ok(())
            }
        }
    }

    fn finish_dial(
        &mut self,
        dial: DialId,
        outcome: Result<OpenTunnel, DialFailure>,
    ) -> Result<(), StreamEnd> {
        self.events.dialed(outcome.as_ref());
        match outcome {
            Ok(OpenTunnel {
                carrier: mut endpoint,
                conn,
                ..
            }) => {
                self.events.tunnel.watch(&mut endpoint);
                self.state = CallState::Open {
                    conn,
                    endpoint,
                    closing: false,
                };
                let answer = Packet::DialRsp {
                    dial,
                    conn,
                    error: String::new(),
                    window: 0,
                };
                self.send(answer)
                    .inspect_err(|_| self.events.tunnel.answer_lost())
            }
            Err(DialFailure::Closed) => {
                (self.state, self.window) = (CallState::Over, None);
                self.send(Packet::DialCls { dial })
            }
            Err(failure) => {
                (self.state, self.window) = (CallState::Over, None);
                let error = failure.to_string();
                self.send(Packet::DialRsp {
                    dial,
                    conn: ConnId(0),
                    error,
                    window: 0,
                })
            }
        }
    }

    fn give_up(&mut self, text: &str, reason: EndReason) -> Result<(), StreamEnd> {
        if let CallState::Open { conn, .. } = self.state {
            self.close_rsp(conn, text)?;
        }
        self.leave(false, reason);
        Ok(())
    }

    fn rebuke(&mut self, conn: ConnId, error: &str) -> Result<(), StreamEnd> {
        self.count_rebuke()?;
        self.close_rsp(conn, error)
    }

    fn count_rebuke(&mut self) -> Result<(), StreamEnd> {
        self.rebukes += 1;
        if self.rebukes > REBUKES_MAX {
            return Err(StreamEnd::Reset(code::ENHANCE_YOUR_CALM));
        }
        Ok(())
    }

    fn close_rsp(&mut self, conn: ConnId, error: &str) -> Result<(), StreamEnd> {
        self.send(Packet::CloseRsp {
            conn,
            error: error.to_owned(),
        })
    }

    fn send(&mut self, packet: Packet) -> Result<(), StreamEnd> {
        let kind = packet.kind();
        self.call.send(MessageBuf::packet(packet));
        self.events.packet_out(kind);
        Ok(())
    }
}
