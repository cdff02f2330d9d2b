//! A queue of bytes to be written to a stream, in as few system calls as possible.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::AsyncWrite;

/// Slices of one vectored write.
const WRITE_SLICES: usize = 64;

/// Capacity that is kept when all pieces are written.
const KEPT_PIECES: usize = 64;

/// Pieces in order; written pieces are removed.
#[derive(Debug, Default)]
pub struct Outbox {
    pieces: VecDeque<Bytes>,
    bytes: usize,
    /// TLS buffers bytes, and may keep the last of them until it is flushed.
    flush_due: bool,
}

impl Outbox {
    /// Adds a piece.
    pub fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.bytes += piece.len();
            self.pieces.push_back(piece);
        }
    }

    /// Bytes that wait.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Pieces that wait.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Frees unused memory before a wait that may be long.
    pub fn rest(&mut self) {
        if self.pieces.is_empty() {
            self.pieces = VecDeque::new();
        }
    }

    /// All waiting bytes in one piece; the queue is empty afterwards.
    #[must_use]
    pub fn take_bytes(&mut self) -> Bytes {
        self.bytes = 0;
        let pieces = std::mem::take(&mut self.pieces);
        let mut all = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
        pieces.iter().for_each(|piece| all.extend_from_slice(piece));
        all.freeze()
    }

    /// Drops the waiting bytes; returns how many.
    pub fn clear(&mut self) -> usize {
        self.pieces.clear();
        std::mem::take(&mut self.bytes)
    }

    /// Writes once; returns how many bytes the stream took. To be called only while bytes wait.
    ///
    /// # Errors
    /// The stream's error, or the stream takes nothing more.
    pub fn poll_write<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut S,
    ) -> Poll<io::Result<usize>> {
        let mut slices = [IoSlice::new(&[]); WRITE_SLICES];
        let mut used = 0;
        for (slot, piece) in slices.iter_mut().zip(&self.pieces) {
            *slot = IoSlice::new(piece);
            used += 1;
        }
        let slices = slices.get(..used).unwrap_or_default();
        let written = match Pin::new(stream).poll_write_vectored(cx, slices) {
            Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            Poll::Ready(Ok(written)) => written,
            other => return other,
        };
        self.flush_due = true;
        self.advance(written);
        Poll::Ready(Ok(written))
    }

    /// Moves as many bytes as fit into `room`; returns how many.
    pub(super) fn copy_to(&mut self, room: &mut [u8]) -> usize {
        let mut copied = 0;
        for piece in &self.pieces {
            let Some(room) = room.get_mut(copied..).filter(|room| !room.is_empty()) else {
                break;
            };
            let count = room.len().min(piece.len());
            let (to, from) = (room.get_mut(..count), piece.get(..count));
            if let (Some(to), Some(from)) = (to, from) {
                to.copy_from_slice(from);
            }
            copied += count;
        }
        self.advance(copied);
        copied
    }

    fn advance(&mut self, count: usize) {
        self.bytes -= count;
        let mut left = count;
        while let Some(front) = self.pieces.front_mut().filter(|_| left > 0) {
            let taken = left.min(front.len());
            front.advance(taken);
            left -= taken;
            if front.is_empty() {
                self.pieces.pop_front();
            }
        }
        if self.pieces.is_empty() && self.pieces.capacity() > KEPT_PIECES {
            self.pieces = VecDeque::new();
        }
    }

    /// Flushes the stream, unless it took nothing since the last flush.
    ///
    /// # Errors
    /// As the stream's own.
    pub fn poll_flush<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut S,
    ) -> Poll<io::Result<()>> {
        if !self.flush_due {
            return Poll::Ready(Ok(()));
        }
        let flushed = Pin::new(stream).poll_flush(cx);
        if let Poll::Ready(Ok(())) = flushed {
            self.flush_due = false;
        }
        flushed
    }
}
