//! A bound lane: the core's lane machine over a byte stream.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use adit_core::lane::{FrameReader, FrameType, LaneEnd, LaneEvent, LaneRole, LaneViolation};
use adit_core::session::QUEUE_MIN_BYTES;
use adit_relay::{KernelTls, KernelTlsError, tcp_state, unacknowledged_bytes};
use bytes::Bytes;
use tokio::net::TcpStream;

use crate::lane::raw::{LaneResources, LaneRights, RawLane};
use crate::lane::room::Slot;
use crate::lane::transport::Transport;
use adit_net::socket;
use adit_telemetry::labels::LaneCloseReason;
use adit_telemetry::{AditMetrics, GaugeGuard};
use adit_tls::clear::ClearStream;
use adit_tls::outbox::Outbox;

/// Bytes of frames in one write batch.
const WRITE_BATCH_BYTES: usize = 256 * 1024;
/// Pieces in one write batch: small frames cost more than their bytes.
const WRITE_PIECES_MAX: usize = 512;
/// Pieces read without an event before the task yields.
const PIECES_PER_POLL: usize = 1024;
/// Payload that may be in flight without proof that the peer has read it: less than the peer's endpoint buffers anyway.
const UNPROVEN_BYTES_MAX: u64 = 32 * 1024;
/// Number of the first ping that proves more payload was read; these count down. A pool's pings count up, from one.
const PROOF: u64 = u64::MAX;
/// Frames up to this size are written as one piece: copying is cheaper than a slice.
const JOIN_BYTES_MAX: usize = 2048;
/// Other bytes that a tunnel's bytes may keep in memory beyond their own size: twice what one read returns.
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

impl From<&LaneFailure> for LaneCloseReason {
    fn from(failure: &LaneFailure) -> Self {
        match failure {
            LaneFailure::Io(_) | LaneFailure::Closed => Self::Lost,
            LaneFailure::Violation(_) => Self::Violation,
        }
    }
}

/// State of kernel TLS on an encrypted lane, which a raw lane needs.
#[derive(Debug)]
enum KernelUse {
    /// Kernel TLS is not available.
    No,
    /// Both ends support kernel TLS.
    Agreed,
    /// The kernel has taken over the TLS session.
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
    /// Number of the unanswered ping.
    ping: Option<u64>,
    /// Payload written since the peer was last known to have read everything.
    unproven: u64,
    /// Number of the next ping that proves this payload was read.
    proof: u64,
    /// Bytes read in excess of twice the tunnels' own bytes. See [`Self::alone`].
    beside: usize,
    /// Memory is short: a read takes no more than [`QUEUE_MIN_BYTES`].
    reads_little: bool,
}

impl Lane {
    /// A lane whose greeting is over; `frames` holds what was read behind the greeting.
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
            reads_little: false,
        }
    }

    /// A lane in clear text. `frames` and `left` hold what was read behind its greeting and behind its TLS session. Public for
    /// tests, which tunnel through it.
    #[must_use]
    pub fn in_clear(socket: TcpStream, role: LaneRole, frames: FrameReader, left: Bytes) -> Self {
        let transport = Transport::Clear(ClearStream::new(socket, left));
        Self::bound(transport, role, frames, false)
    }

    /// The lane's state machine, to open, send and close. Call [`Self::poll_flush`] afterwards.
    pub fn end(&mut self) -> &mut LaneEnd {
        &mut self.end
    }

    /// The lane's state machine, read only.
    #[must_use]
    pub fn state(&self) -> &LaneEnd {
        &self.end
    }

    /// Counts the lane in another gauge from now on.
    pub fn count_as(&mut self, guard: GaugeGuard) {
        self.kept.counted = Some(guard);
    }

    /// Keeps a slot for as long as the lane lives.
    pub fn hold(&mut self, slot: Slot) {
        self.kept.held = Some(slot);
    }

    /// Ends tunnels once `rights` are revoked.
    pub fn depend_on(&mut self, rights: Arc<dyn LaneRights>) {
        self.kept.rights = Some(rights);
    }

    /// Whether the agent has lost its right to tunnels.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.kept
            .rights
            .as_ref()
            .is_some_and(|rights| rights.are_revoked())
    }

    /// Whether a tunnel on this lane may use it as a raw lane: it is in clear text, or both ends support kernel TLS.
    #[must_use]
    pub fn may_be_raw(&self) -> bool {
        matches!(self.transport, Transport::Clear(_))
            || matches!(self.kernel_tls, KernelUse::Agreed)
    }

    /// Opener: takes the steps that are impossible once the answer has arrived. False when the tunnel needs frames.
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

    /// Answers an OPEN that asks for a raw lane. False when the tunnel keeps its frames because the kernel did not take over
    /// the lane's TLS; then nothing else has changed.
    ///
    /// # Errors
    /// The kernel took over only a part of the session: drop the lane.
    pub fn accept_raw(&mut self) -> Result<bool, LaneFailure> {
        if let Transport::Tls(records) = &mut self.transport {
            match records.start_kernel_tls() {
                // From here on the kernel seals queued bytes, the answer included.
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

    /// The connection itself, once it carries no more frames ([`LaneEnd::is_raw`]). `metrics` count its close.
    ///
    /// # Errors
    /// The lane cannot be a raw lane, or its peer sent a frame that is not allowed in this state; the lane is closed then.
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
        self.kept.closes = Some((metrics.clone(), LaneCloseReason::Used));
        Ok(RawLane {
            socket,
            unsent,
            received,
            tls,
            kept: self.kept,
        })
    }

    /// Closes the connection with RST, so that the peer's kernel drops undelivered bytes.
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

    /// Bytes that the peer's kernel has not acknowledged, including bytes queued here.
    #[must_use]
    pub fn unacknowledged_bytes(&self) -> usize {
        let tcp = self.transport.tcp();
        let on_the_way = tcp.and_then(|tcp| unacknowledged_bytes(tcp).ok());
        self.queued_bytes() + on_the_way.unwrap_or(0)
    }

    /// The error of a peer that is gone, from the socket's state without reading. For a lane that is not read at the moment, or
    /// whose link is gone. A peer that lives but does not read answers window probes, however rare they are. Without bytes in
    /// flight TCP keepalive detects the loss, and the socket has an error.
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

    /// Whether the kernel has unread bytes, of which the runtime may not know yet.
    #[must_use]
    pub fn has_unread(&self) -> bool {
        let tcp = self.transport.tcp();
        tcp.is_some_and(|tcp| rustix::io::ioctl_fionread(tcp).is_ok_and(|bytes| bytes > 0))
    }

    /// Bytes queued for the stream.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.end.queued_bytes() + self.out.bytes() + self.transport.waiting_bytes()
    }

    /// Whether buffered input may yield events without reading the stream.
    #[must_use]
    pub fn has_input(&self) -> bool {
        self.frames.has_input()
    }

    /// The next event. The state machine's answers are written meanwhile.
    ///
    /// # Errors
    /// The lane failed.
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
        // Yield: a peer that sends frames without events must not starve other tasks.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// The tunnel's bytes, copied out of their read buffer where that holds mostly other data: ignored frames or records
    /// without payload. The peer controls the size of that data, and the budget counts only the tunnel's own bytes.
    fn alone(&mut self, bytes: Bytes) -> Bytes {
        self.beside = self.beside.saturating_sub(2 * bytes.len());
        if self.beside > BESIDE_BYTES_MAX {
            Bytes::copy_from_slice(&bytes)
        } else {
            bytes
        }
    }

    /// Whether the peer has read all payload written, up to a small remainder. After both ends have sent FIN, megabytes may
    /// still be in the kernels' buffers, and the next OPEN would queue behind them.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.unproven <= UNPROVEN_BYTES_MAX
    }

    /// Ready once [`Self::is_proven`] holds: a ping behind the payload is answered, or the peer has opened the next tunnel. For
    /// a lane without a tunnel; all events except those of the next tunnel are dropped.
    ///
    /// # Errors
    /// The lane failed.
    pub fn poll_proven(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LaneFailure>> {
        for _piece in 0..PIECES_PER_POLL {
            while let Some(event) = self.end.peek_event() {
                match event {
                    // The peer opens the next tunnel, or is about to: leave the event to the lane's owner.
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

    /// The peer has read all payload so far. A pending proof ping is obsolete, whether it is answered or not.
    fn all_read(&mut self) {
        self.unproven = 0;
        if self.ping == Some(self.proof) {
            self.ping = None;
            self.proof -= 1;
        }
    }

    /// Writes queued bytes and reads once; false when there is nothing to read.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Result<bool, LaneFailure> {
        // What the peer sent before it stopped reading comes before the write error.
        let flushed = self.poll_flush(cx);
        let most = if self.reads_little {
            QUEUE_MIN_BYTES
        } else {
            usize::MAX
        };
        match self
            .transport
            .poll_read(cx, self.end.may_turn_raw(), most)?
        {
            Poll::Ready(bytes) if bytes.is_empty() => Err(LaneFailure::Closed),
            Poll::Ready(bytes) => {
                let read = self.transport.take_read_bytes(&bytes);
                // Capped, so that half a mebibyte of tunnel bytes makes up for it.
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

    /// Whether reads take no more than [`QUEUE_MIN_BYTES`] from now on.
    pub fn read_little(&mut self, little: bool) {
        self.reads_little = little;
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// The lane failed.
    pub async fn event(&mut self) -> Result<LaneEvent, LaneFailure> {
        std::future::poll_fn(|cx| self.poll_event(cx)).await
    }

    /// Writes queued bytes. Ready when all of them are written.
    ///
    /// # Errors
    /// The stream's error; the lane is over.
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

    /// Pings the peer, once per round `number`; false when a ping of an earlier round is unanswered.
    pub fn ping(&mut self, number: u64) -> bool {
        match self.ping {
            // Already pinged in this round.
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
