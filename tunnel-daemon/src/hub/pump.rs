//! Moves bytes between a socket and a leg, both directions in one task, until the tunnel is over.
//!
//! An idle connection holds no buffer: small reads land in a scratch area of the thread and are copied out
//! in their own size; only a direction that reads in bulk allocates blocks of its own.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use adit_core::session::TunnelEnd;
use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::leg::{Incoming, Leg};

/// Bytes of one read; two packets towards a Go peer.
const READ_BYTES: usize = 64 * 1024;
/// Reads of at least this many bytes make a direction bulk.
const BULK_BYTES: usize = 16 * 1024;
/// Bytes taken from the leg before the socket gets them.
const WRITE_BATCH_BYTES: usize = 256 * 1024;
/// Slices of one vectored write.
const WRITE_SLICES: usize = 64;
/// Rounds before the task lets others run.
const ROUNDS_PER_POLL: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into_boxed_slice());
}

/// Who ended a pump, and how.
#[derive(Debug)]
pub enum PumpEnd {
    /// The tunnel ended; everything that was to be delivered is written.
    Tunnel(TunnelEnd),
    /// The socket failed while it was read.
    ReadFailed(io::Error),
    /// The socket failed while it was written.
    WriteFailed(io::Error),
}

/// Always returned, also for failures.
#[derive(Debug)]
#[must_use = "an outcome carries the byte counts for metrics and the access log"]
pub struct PumpOutcome {
    /// Bytes read from the socket and handed to the tunnel.
    pub from_socket: u64,
    /// Bytes of the tunnel written to the socket.
    pub to_socket: u64,
    /// How it ended.
    pub end: PumpEnd,
}

struct Pump<'a, S> {
    socket: &'a mut S,
    leg: &'a mut Leg,
    /// Block reads go to; kept only while the direction is bulk.
    block: BytesMut,
    bulk: bool,
    read_done: bool,
    pending: VecDeque<Bytes>,
    pending_bytes: usize,
    /// TLS takes bytes into a buffer of its own and may keep the last of them until it is flushed.
    flush_due: bool,
    peer_fin: bool,
    write_shut: bool,
    /// The socket takes no more; what comes is dropped until reading finds the end.
    write_failed: Option<io::Error>,
    tunnel_end: Option<TunnelEnd>,
    from_socket: u64,
    to_socket: u64,
}

/// Runs until the tunnel has ended or the socket has failed. `first` are bytes already read from the socket.
///
/// On return the socket has taken all that the end allows, but may still buffer the last of it: the caller shuts it
/// down, with a limit. A cancelled call leaves the
/// leg to its `Drop`: the tunnel is reset.
pub async fn pump<S: AsyncRead + AsyncWrite + Unpin>(
    socket: &mut S,
    leg: &mut Leg,
    first: Bytes,
) -> PumpOutcome {
    let from_socket = first.len() as u64;
    leg.send(first);
    let mut pump = Pump {
        socket,
        leg,
        block: BytesMut::new(),
        bulk: false,
        read_done: false,
        pending: VecDeque::new(),
        pending_bytes: 0,
        flush_due: false,
        peer_fin: false,
        write_shut: false,
        write_failed: None,
        tunnel_end: None,
        from_socket,
        to_socket: 0,
    };
    let end = std::future::poll_fn(|cx| pump.poll(cx)).await;
    PumpOutcome {
        from_socket: pump.from_socket,
        to_socket: pump.to_socket,
        end,
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Pump<'_, S> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<PumpEnd> {
        for _round in 0..ROUNDS_PER_POLL {
            let wrote = match self.poll_to_socket(cx) {
                Ok(progress) => progress,
                Err(error) => {
                    // The other end may have answered before it stopped taking; read that first.
                    self.write_failed = Some(error);
                    self.write_shut = true;
                    true
                }
            };
            self.drop_unwritable();
            if self.read_done
                && let Some(error) = self.write_failed.take()
            {
                return Poll::Ready(PumpEnd::WriteFailed(error));
            }
            if let Some(end) = &self.tunnel_end
                && (self.pending.is_empty() || self.leg.poll_aborted(cx))
            {
                // What is cut off here did not end as it was told.
                let cut = (!self.pending.is_empty()).then(|| self.leg.last_end());
                let end = cut.flatten().unwrap_or_else(|| end.clone());
                return Poll::Ready(PumpEnd::Tunnel(end));
            }
            let read = match self.poll_from_socket(cx) {
                Ok(progress) => progress,
                Err(error) => return Poll::Ready(PumpEnd::ReadFailed(error)),
            };
            if !wrote && !read {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn drop_unwritable(&mut self) {
        if self.write_failed.is_some() {
            self.pending.clear();
            let dropped = std::mem::take(&mut self.pending_bytes);
            self.leg.drained(dropped);
        }
    }

    /// Returns whether another round may find something.
    fn poll_to_socket(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let mut more_from_leg = false;
        while self.tunnel_end.is_none() && self.pending_bytes < WRITE_BATCH_BYTES {
            match self.leg.poll_recv(cx) {
                Poll::Ready(Incoming::Data(bytes)) => {
                    self.pending_bytes += bytes.len();
                    self.pending.push_back(bytes);
                    more_from_leg = true;
                }
                Poll::Ready(Incoming::PeerFin) => self.peer_fin = true,
                Poll::Ready(Incoming::Ended(end)) => self.tunnel_end = Some(end),
                Poll::Pending => break,
            }
        }
        let mut progress = false;
        if self.write_failed.is_some() {
            return Ok(more_from_leg);
        }
        while !self.pending.is_empty() {
            let Poll::Ready(written) = self.write_some(cx)? else {
                self.leg.stalled();
                return Ok(progress);
            };
            progress = true;
            self.flush_due = true;
            self.to_socket += written as u64;
            self.pending_bytes -= written;
            self.leg.drained(written);
            self.pop_pending(written);
        }
        // Not after every write: while more is pending, the next write pushes the buffer out.
        if self.flush_due
            && let Poll::Ready(flushed) = Pin::new(&mut *self.socket).poll_flush(cx)
        {
            flushed?;
            self.flush_due = false;
        }
        if (self.peer_fin || self.tunnel_end.is_some())
            && !self.write_shut
            && let Poll::Ready(shut) = Pin::new(&mut *self.socket).poll_shutdown(cx)
        {
            self.write_shut = true;
            // The other side may be gone already; reading finds out.
            if self.tunnel_end.is_none() {
                shut?;
            }
        }
        // Whatever was written made room: the leg is asked again, or its waker would not be set.
        Ok(progress || more_from_leg)
    }

    fn write_some(&mut self, cx: &mut Context<'_>) -> io::Result<Poll<usize>> {
        let mut slices = [IoSlice::new(&[]); WRITE_SLICES];
        let mut used = 0;
        for (slot, piece) in slices.iter_mut().zip(&self.pending) {
            *slot = IoSlice::new(piece);
            used += 1;
        }
        let slices = slices.get(..used).unwrap_or_default();
        match Pin::new(&mut *self.socket).poll_write_vectored(cx, slices) {
            Poll::Ready(Ok(0)) => Err(io::ErrorKind::WriteZero.into()),
            Poll::Ready(Ok(written)) => Ok(Poll::Ready(written)),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Pending => Ok(Poll::Pending),
        }
    }

    fn pop_pending(&mut self, mut written: usize) {
        while written > 0 {
            let Some(front) = self.pending.front_mut() else {
                return;
            };
            if front.len() > written {
                return front.advance(written);
            }
            written -= front.len();
            self.pending.pop_front();
        }
    }

    fn poll_from_socket(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        if self.read_done || self.tunnel_end.is_some() || self.leg.poll_ready(cx).is_pending() {
            return Ok(false);
        }
        let Poll::Ready(bytes) = (if self.bulk {
            self.read_block(cx)?
        } else {
            self.read_scratch(cx)?
        }) else {
            return Ok(false);
        };
        if bytes.is_empty() {
            self.read_done = true;
            self.block = BytesMut::new();
            self.leg.fin();
            return Ok(true);
        }
        self.bulk = bytes.len() >= BULK_BYTES;
        if !self.bulk {
            self.block = BytesMut::new();
        }
        self.from_socket += bytes.len() as u64;
        self.leg.send(bytes);
        Ok(true)
    }

    fn read_scratch(&mut self, cx: &mut Context<'_>) -> io::Result<Poll<Bytes>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut buf = ReadBuf::new(scratch);
            match Pin::new(&mut *self.socket).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) => Ok(Poll::Ready(Bytes::copy_from_slice(buf.filled()))),
                Poll::Ready(Err(error)) => Err(error),
                Poll::Pending => Ok(Poll::Pending),
            }
        })
    }

    fn read_block(&mut self, cx: &mut Context<'_>) -> io::Result<Poll<Bytes>> {
        if self.block.capacity() < READ_BYTES / 2 {
            self.block = BytesMut::with_capacity(READ_BYTES * 4);
        }
        match tokio_util::io::poll_read_buf(Pin::new(&mut *self.socket), cx, &mut self.block) {
            Poll::Ready(Ok(_count)) => Ok(Poll::Ready(self.block.split().freeze())),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Pending => {
                // Nothing to read: an idle direction gives its block back.
                self.bulk = false;
                self.block = BytesMut::new();
                Ok(Poll::Pending)
            }
        }
    }
}
