//! A bound lane: the core's machine over a byte stream.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use adit_core::lane::{FrameReader, FrameType, LaneEnd, LaneEvent, LaneRole, LaneViolation};
use adit_relay::{KernelTls, KernelTlsError, tcp_state, unacknowledged_bytes};
use bytes::Bytes;
use tokio::net::TcpStream;

use crate::lane::raw::{LaneResources, LaneRights, RawLane};
use crate::lane::room::Slot;
use crate::lane::transport::Transport;
use adit_net::socket;
use adit_telemetry::labels::LaneEnd as LaneEndLabel;
use adit_telemetry::{AditMetrics, GaugeGuard};
use adit_tls::clear::ClearStream;
use adit_tls::outbox::Outbox;

/// Bytes of frames handed to the stream before it has to take some.
const WRITE_BATCH_BYTES: usize = 256 * 1024;
/// Pieces of them: small frames cost more than their bytes.
const WRITE_PIECES_MAX: usize = 512;
/// Pieces read without an event before the task lets others run.
const PIECES_PER_POLL: usize = 1024;
/// Payload that may be on its way without proof that the peer has read it: less than its end of the tunnel takes in anyhow.
const UNPROVEN_BYTES_MAX: u64 = 32 * 1024;
/// The number of the first ping behind more than that; they count down. Pings of a pool count up, from one.
const PROOF: u64 = u64::MAX;
/// Frames up to this size are written from one piece: a copy is cheaper than a slice.
const JOIN_BYTES_MAX: usize = 2048;
/// Bytes that a tunnel's may keep in memory beside as many again, for as long as they wait: twice what one read brings.
const BESIDE_BYTES_MAX: usize = 512 * 1024;

/// Why a lane is over.
#[derive(Debug, thiserror::Error)]
pub enum LaneFailure {
    /// The connection failed.
    #[error("lane failed: {0}")]
    Io(#[from] io::Error),
    /// The peer closed the connection.
    #[error("the peer closed the lane")]
    Closed,
    /// The peer broke the protocol.
    #[error("the peer broke the lane's protocol: {0}")]
    Violation(#[from] LaneViolation),
}

impl From<&LaneFailure> for LaneEndLabel {
    fn from(failure: &LaneFailure) -> Self {
        match failure {
            LaneFailure::Io(_) | LaneFailure::Closed => Self::Lost,
            LaneFailure::Violation(_) => Self::Violation,
        }
    }
}

/// How far an encrypted lane is on its way to being a raw lane.
#[derive(Debug)]
enum KernelUse {
    /// It cannot be one.
    No,
    /// Both ends would.
    Agreed,
    /// The kernel has taken the session over.
    Started(KernelTls),
}

/// One end of a bound lane. Dropping it closes the connection; a tunnel on it is lost.
#[derive(Debug)]
pub struct Lane {
    transport: Transport,
    kernel_tls: KernelUse,
    end: LaneEnd,
    frames: FrameReader,
    out: Outbox,
    kept: LaneResources,
    /// The number of a ping without an answer.
    ping: Option<u64>,
    /// Payload written since the peer was last known to have read all.
    unproven: u64,
    /// The number of the next ping behind it.
    proof: u64,
    /// Bytes read beside those of tunnels and as many again. See [`Self::alone`].
    beside: usize,
}

impl Lane {
    /// A lane whose greeting is over, with what was read behind it.
    pub(super) fn bound(
        transport: Transport,
        role: LaneRole,
        frames: FrameReader,
        kernel_tls: bool,
    ) -> Self {
        Self {
            transport,
            kernel_tls: if kernel_tls {
                KernelUse::Agreed
            } else {
                KernelUse::No
            },
            end: LaneEnd::new(role),
            frames,
            out: Outbox::default(),
            kept: LaneResources::default(),
            ping: None,
            unproven: 0,
            proof: PROOF,
            beside: 0,
        }
    }

    /// A lane in clear text, with what was read behind its greeting and behind its TLS session. Tests tunnel through it.
    #[must_use]
    pub fn in_clear(socket: TcpStream, role: LaneRole, frames: FrameReader, left: Bytes) -> Self {
        let transport = Transport::Clear(ClearStream::new(socket, left));
        Self::bound(transport, role, frames, false)
    }

    /// The lane's state, to open, send and close. Call [`Self::poll_flush`] afterwards.
    pub fn end(&mut self) -> &mut LaneEnd {
        &mut self.end
    }

    /// The lane's state, to look at.
    #[must_use]
    pub fn state(&self) -> &LaneEnd {
        &self.end
    }

    /// Has the lane counted as something else from now on.
    pub fn count_as(&mut self, guard: GaugeGuard) {
        self.kept.counted = Some(guard);
    }

    /// Keeps a slot for as long as the lane lives.
    pub fn hold(&mut self, slot: Slot) {
        self.kept.held = Some(slot);
    }

    /// Ends tunnels once these are revoked.
    pub fn depend_on(&mut self, rights: Arc<dyn LaneRights>) {
        self.kept.rights = Some(rights);
    }

    /// Whether the other end may have no tunnel any more.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.kept
            .rights
            .as_ref()
            .is_some_and(|rights| rights.are_revoked())
    }

    /// Whether a tunnel on it may be a raw lane: its bytes are in clear text, or both ends' kernels can do its TLS.
    #[must_use]
    pub fn may_be_raw(&self) -> bool {
        matches!(self.transport, Transport::Clear(_))
            || matches!(self.kernel_tls, KernelUse::Agreed)
    }

    /// Opener: does now what cannot be done any more once the answer is there. False when the tunnel needs frames.
    #[must_use]
    pub fn prepare_raw(&mut self) -> bool {
        let Transport::Tls(records) = &mut self.transport else {
            return true;
        };
        match records.attach_kernel_tls() {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "a lane stays with the TLS of this process");
                self.kernel_tls = KernelUse::No;
                false
            }
        }
    }

    /// Answers an OPEN that asks for a raw lane. False when the tunnel has frames after all, since the kernel did not take the
    /// lane's TLS over: then nothing else has changed.
    ///
    /// # Errors
    /// The kernel took a part of it: the lane is to be dropped.
    pub fn accept_raw(&mut self) -> Result<bool, LaneFailure> {
        if let Transport::Tls(records) = &mut self.transport {
            match records.start_kernel_tls() {
                // From here on what waits is sealed by the kernel, the answer with it.
                Ok(tls) => self.kernel_tls = KernelUse::Started(tls),
                Err(KernelTlsError::Untouched(error)) => {
                    tracing::debug!(%error, "a tunnel keeps its frames");
                    self.end.accept_framed();
                    return Ok(false);
                }
                Err(KernelTlsError::HalfWay(error)) => return Err(error.into()),
            }
        }
        self.end.accept();
        Ok(true)
    }

    /// The connection itself, once frames are over on it ([`LaneEnd::is_raw`]). `metrics` hear when it is no more.
    ///
    /// # Errors
    /// The lane cannot be one, or its peer spoke out of turn; it is closed then.
    pub fn into_raw(mut self, metrics: &AditMetrics) -> Result<RawLane, LaneFailure> {
        if let Some(tcp) = self.transport.tcp() {
            reset_on_close(tcp);
        }
        let received = self.frames.take_rest();
        let mut received = received.ok_or(LaneViolation::OutOfTurn(FrameType::Data))?;
        self.fill();
        let unsent = self.out.take_bytes();
        let (socket, tls) = match self.transport {
            Transport::Clear(stream) => {
                let (socket, left) = stream.into_parts();
                if !left.is_empty() {
                    received = [received, left].concat().into();
                }
                (socket, None)
            }
            Transport::Tls(mut records) => {
                let tls = match self.kernel_tls {
                    KernelUse::Started(tls) => tls,
                    KernelUse::Agreed => records.start_kernel_tls().map_err(io::Error::other)?,
                    KernelUse::No => {
                        return Err(LaneViolation::OutOfTurn(FrameType::Open).into());
                    }
                };
                let socket = records.into_tcp().ok_or(LaneFailure::Closed)?;
                (socket, Some(tls))
            }
        };
        self.kept.closes = Some((metrics.clone(), LaneEndLabel::Used));
        Ok(RawLane {
            socket,
            unsent,
            received,
            tls,
            kept: self.kept,
        })
    }

    /// Closes the connection so that the peer's kernel drops what it has not delivered yet.
    pub fn reset_connection(self) {
        if let Some(tcp) = self.transport.tcp() {
            reset_on_close(tcp);
        }
    }

    /// The connection's socket.
    #[must_use]
    pub fn tcp(&self) -> Option<&TcpStream> {
        self.transport.tcp()
    }

    /// Bytes that the peer's kernel has not acknowledged, those that wait here included.
    #[must_use]
    pub fn unacknowledged_bytes(&self) -> usize {
        let tcp = self.transport.tcp();
        let on_the_way = tcp.and_then(|tcp| unacknowledged_bytes(tcp).ok());
        self.queued_bytes() + on_the_way.unwrap_or(0)
    }

    /// What the socket says of a peer that is gone, without reading; for a lane that is not read at the moment, or whose
    /// link is gone. A peer that lives and does not read answers probes, however rare they have become. Without bytes on
    /// their way keepalive finds out, and the socket has its error.
    #[must_use]
    pub fn peer_is_gone(&self) -> Option<LaneFailure> {
        let tcp = self.transport.tcp()?;
        if let Some(error) = tcp.take_error().unwrap_or_else(Some) {
            return Some(error.into());
        }
        let silent = tcp_state(tcp)
            .is_ok_and(|state| state.is_unanswered && state.silent_for > socket::LANE_SILENCE_MAX);
        silent.then(|| io::Error::from(io::ErrorKind::TimedOut).into())
    }

    /// Whether the kernel has bytes that nobody has read yet, which the runtime may not have heard of.
    #[must_use]
    pub fn has_unread(&self) -> bool {
        let tcp = self.transport.tcp();
        tcp.is_some_and(|tcp| rustix::io::ioctl_fionread(tcp).is_ok_and(|bytes| bytes > 0))
    }

    /// Bytes that wait for the stream.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.end.queued_bytes() + self.out.bytes() + self.transport.waiting_bytes()
    }

    /// Whether events can be had without reading the stream.
    #[must_use]
    pub fn has_input(&self) -> bool {
        self.frames.has_input()
    }

    /// The next event. Answers of the machine are written on the way.
    ///
    /// # Errors
    /// The lane is over.
    pub fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Result<LaneEvent, LaneFailure>> {
        for _piece in 0..PIECES_PER_POLL {
            while let Some(event) = self.end.poll_event() {
                match event {
                    LaneEvent::Pong(number) => self.answered(number),
                    LaneEvent::Data(bytes) => {
                        let bytes = self.alone(bytes);
                        return Poll::Ready(Ok(LaneEvent::Data(bytes)));
                    }
                    event => {
                        if matches!(
                            event,
                            LaneEvent::Open(_) | LaneEvent::Opened | LaneEvent::Failed { .. }
                        ) {
                            self.all_read();
                        }
                        return Poll::Ready(Ok(event));
                    }
                }
            }
            if let Some(piece) = self.frames.next_piece()? {
                self.end.handle(piece)?;
                continue;
            }
            if !self.poll_input(cx)? {
                return Poll::Pending;
            }
        }
        // A peer that keeps us busy with nothing to tell does not keep others from their turn.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Bytes of a tunnel, without what they were read with where that is mostly something else: frames without a meaning, records
    /// without payload. The peer decides how much it is, and a budget counts the tunnel's own bytes only.
    fn alone(&mut self, bytes: Bytes) -> Bytes {
        self.beside = self.beside.saturating_sub(2 * bytes.len());
        if self.beside > BESIDE_BYTES_MAX {
            Bytes::copy_from_slice(&bytes)
        } else {
            bytes
        }
    }

    /// Whether the peer has read all payload that was written, but for so little that it holds nobody up. A tunnel whose ends
    /// have both said that they send no more may have megabytes left in the kernels, and the next one's OPEN would be behind
    /// them.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.unproven <= UNPROVEN_BYTES_MAX
    }

    /// Ready once that is so: a ping behind the payload is answered, or the peer has opened the next tunnel. For a lane
    /// without a tunnel; events but those of the next one are dropped.
    ///
    /// # Errors
    /// The lane is over.
    pub fn poll_proven(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LaneFailure>> {
        for _piece in 0..PIECES_PER_POLL {
            while let Some(event) = self.end.peek_event() {
                match event {
                    // The peer opens the next tunnel, or is about to: its owner is to hear of it.
                    LaneEvent::Open(_) | LaneEvent::Want(_) => {
                        self.all_read();
                        break;
                    }
                    LaneEvent::Pong(number) => {
                        let number = *number;
                        self.answered(number);
                    }
                    _ => (),
                }
                let _over = self.end.poll_event();
            }
            if self.is_proven() {
                return Poll::Ready(Ok(()));
            }
            if self.ping != Some(self.proof) {
                self.ping = Some(self.proof);
                self.end.ping(self.proof);
            }
            if let Some(piece) = self.frames.next_piece()? {
                self.end.handle(piece)?;
            } else if !self.poll_input(cx)? {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn answered(&mut self, number: u64) {
        if number == self.proof {
            self.all_read();
        }
        self.ping.take_if(|ping| *ping == number);
    }

    /// The peer has read all payload so far. A ping that asked for that has no use any more, whether its answer comes or not.
    fn all_read(&mut self) {
        self.unproven = 0;
        if self.ping == Some(self.proof) {
            self.ping = None;
            self.proof -= 1;
        }
    }

    /// Writes what waits and reads once; false when there is nothing to read.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Result<bool, LaneFailure> {
        // What the peer said before it stopped reading comes first.
        let flushed = self.poll_flush(cx);
        match self.transport.poll_read(cx, self.end.may_turn_raw())? {
            Poll::Ready(bytes) if bytes.is_empty() => Err(LaneFailure::Closed),
            Poll::Ready(bytes) => {
                let read = self.transport.take_read_bytes(&bytes);
                // However much it is, half a mebibyte of a tunnel makes up for it.
                self.beside = (self.beside + read).min(2 * BESIDE_BYTES_MAX);
                self.frames.push(bytes);
                Ok(true)
            }
            Poll::Pending => {
                if let Poll::Ready(flushed) = flushed {
                    flushed?;
                    self.end.rest();
                    self.out.rest();
                }
                Ok(false)
            }
        }
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// The lane is over.
    pub async fn event(&mut self) -> Result<LaneEvent, LaneFailure> {
        std::future::poll_fn(|cx| self.poll_event(cx)).await
    }

    /// Writes what waits. Ready when all of it has left.
    ///
    /// # Errors
    /// The stream's; the lane is over.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            self.fill();
            ready!(self.transport.poll_flush(cx, &mut self.out))?;
            if !self.end.has_frames() {
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn fill(&mut self) {
        while self.out.bytes() < WRITE_BATCH_BYTES && self.out.pieces() < WRITE_PIECES_MAX {
            let Some(frame) = self.end.poll_frame() else {
                return;
            };
            if frame.header.kind == FrameType::Data {
                self.unproven += frame.payload.len() as u64;
            }
            if frame.header.kind != FrameType::Data || frame.payload.len() <= JOIN_BYTES_MAX {
                self.out.push(frame.to_bytes());
            } else {
                let header = Bytes::copy_from_slice(&frame.header.to_bytes());
                self.out.push(header);
                self.out.push(frame.payload);
            }
        }
    }

    /// Asks the peer for a sign of life, once in each round of that number; false when one of before has not come.
    pub fn ping(&mut self, number: u64) -> bool {
        match self.ping {
            // Asked in this very round.
            Some(asked) if asked == number => true,
            Some(_) => false,
            None => {
                self.ping = Some(number);
                self.end.ping(number);
                true
            }
        }
    }
}

fn reset_on_close(tcp: &TcpStream) {
    if let Err(error) = socket::set_reset_on_close(tcp) {
        tracing::debug!(%error, "cannot reset a lane");
    }
}

#[cfg(test)]
mod tests;
