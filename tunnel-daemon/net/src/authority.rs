//! A socket whose reader never sees an `:authority` that the `http` crate refuses.
//!
//! Owns the two small buffers between [`AuthorityRewriter`] and the socket. Everything but header blocks is read straight
//! into the caller's buffer and stays there: payload of DATA frames is not copied.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use adit_core::http2::{AuthorityRewriter, HandOver, Limits, RewriteError};
use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// Octets asked of the socket at a time while a header block is incomplete.
const BLOCK_READ_LEN: usize = 4096;

/// Filters what is read from `S`, one client's side of one HTTP/2 connection; writes go to `S` as they are.
///
/// Cancelling a read loses nothing: bytes taken from `S` stay here until the caller reads them.
#[derive(Debug)]
pub struct AuthorityIo<S> {
    inner: S,
    rewriter: AuthorityRewriter,
    /// Read from `inner` and not yet filtered: part of a frame header or of a header block. Empty when idle.
    held: BytesMut,
    /// Filtered and not yet read by the caller. Empty when idle.
    decided: BytesMut,
    /// All later reads fail with this.
    failed: Option<RewriteError>,
}

impl<S> AuthorityIo<S> {
    /// Wraps a socket from which nothing was read yet.
    pub fn new(inner: S, limits: Limits) -> Self {
        let rewriter = AuthorityRewriter::new(limits);
        Self {
            inner,
            rewriter,
            held: BytesMut::new(),
            decided: BytesMut::new(),
            failed: None,
        }
    }

    /// The socket, for its addresses and options.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Why the filter stopped rewriting and passes this client's bytes unchanged, if it did.
    pub fn handed_over(&self) -> Option<HandOver> {
        self.rewriter.handed_over()
    }

    /// Copies filtered bytes to the caller. Header blocks are rare, so the buffer is freed once it is empty.
    fn give(&mut self, buf: &mut ReadBuf<'_>) {
        let len = self.decided.len().min(buf.remaining());
        buf.put_slice(self.decided.get(..len).unwrap_or_default());
        self.decided.advance(len);
        if self.decided.is_empty() {
            self.decided = BytesMut::new();
        }
    }

    /// Filters as many of the held bytes as possible.
    fn decide(&mut self) -> io::Result<()> {
        let rewritten = self.rewriter.rewrite(&mut self.held, &mut self.decided);
        if self.held.is_empty() {
            self.held = BytesMut::new();
        }
        rewritten.map_err(|error| {
            self.failed = Some(error);
            refused(error)
        })
    }
}

impl<S: AsyncRead + Unpin> AuthorityIo<S> {
    /// Reads into the caller's buffer, and takes back everything from the start of a header block on. Held bytes go in
    /// front; the buffer must have room for them and at least one more. False at EOF.
    fn poll_in_place(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<bool>> {
        let start = buf.filled().len();
        buf.put_slice(&self.held);
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        if !matches!(polled, Poll::Ready(Ok(()))) {
            buf.set_filled(start);
            ready!(polled)?;
        }
        self.held.clear();
        if buf.filled().len() == before {
            // EOF inside a frame header: h2 gets it as it is.
            return Poll::Ready(Ok(false));
        }
        let chunk = buf.filled().get(start..).unwrap_or_default();
        let passed = self.rewriter.pass(chunk);
        if passed < chunk.len() {
            self.held
                .extend_from_slice(chunk.get(passed..).unwrap_or_default());
            buf.set_filled(start + passed);
            if let Err(error) = self.decide() {
                // The bytes before the error are valid and delivered first; the next read fails. A failing read must leave
                // the buffer unchanged.
                return Poll::Ready(if passed > 0 { Ok(true) } else { Err(error) });
            }
            self.give(buf);
        }
        Poll::Ready(Ok(true))
    }

    /// Reads more of a header block. False at EOF.
    fn poll_hold(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        let len = self.held.len();
        self.held.resize(len + BLOCK_READ_LEN, 0);
        let mut space = ReadBuf::new(self.held.get_mut(len..).unwrap_or_default());
        let polled = Pin::new(&mut self.inner).poll_read(cx, &mut space);
        let read = space.filled().len();
        self.held.truncate(len + read);
        ready!(polled)?;
        if read == 0 {
            // EOF inside a header block: h2 gets it as it is.
            self.decided.unsplit(std::mem::take(&mut self.held));
            return Poll::Ready(Ok(false));
        }
        self.decide()?;
        Poll::Ready(Ok(true))
    }

    /// Whether to read into the caller's buffer: no header block has begun, and the held bytes fit.
    fn reads_in_place(&self, buf: &ReadBuf<'_>) -> bool {
        !self.rewriter.is_in_block()
            && self.held.len() < FRAME_HEADER_LEN
            && self.held.len() < buf.remaining()
    }
}

/// Octets of a frame header. Between two frames, fewer than these are held.
const FRAME_HEADER_LEN: usize = 9;

fn refused(error: RewriteError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityIo<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(error) = this.failed {
            return Poll::Ready(Err(refused(error)));
        }
        let start = buf.filled().len();
        while buf.remaining() > 0 && buf.filled().len() == start {
            if !this.decided.is_empty() {
                this.give(buf);
            } else if this.reads_in_place(buf) {
                if !ready!(this.poll_in_place(cx, buf))? {
                    break;
                }
            } else if !ready!(this.poll_hold(cx))? {
                this.give(buf);
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorityIo<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

impl<S: Connected> Connected for AuthorityIo<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}

#[cfg(test)]
mod tests;
