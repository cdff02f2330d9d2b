//! The connection of a gRPC client, with kernel buffers that fit the memory: it may carry many tunnels.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use adit_core::session::ProcessBudget;
use adit_net::buffer_growth::{BufferGrowth, SocketKind, sizes_at_rest};
use adit_relay::{BufferSizes, SocketBuffers};
use adit_tls::stream::{ByteStream, Connection as _};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that may wait in a client's socket: more than two writes, so that the client is not woken for each write. See
/// [`ByteStream::widen`].
const SOCKET_BYTES: usize = 512 * 1024;

/// A client's connection. Where memory is bounded its buffers are small until the client takes bytes.
#[derive(Debug)]
pub struct ClientSocket {
    stream: ByteStream,
    budget: Arc<ProcessBudget>,
    buffers: SocketBuffers,
    growth: BufferGrowth,
    moved: u64,
}

impl ClientSocket {
    /// Sizes the buffers of a new connection.
    #[must_use]
    pub fn new(stream: ByteStream, budget: &Arc<ProcessBudget>) -> Self {
        let mut socket = Self {
            stream,
            budget: Arc::clone(budget),
            buffers: SocketBuffers::default(),
            growth: BufferGrowth::default(),
            moved: 0,
        };
        if socket.kind().starts_small(budget) {
            socket.fit(BufferSizes::Small, true);
        } else {
            // Not made smaller later: its tunnels share it.
            match sizes_at_rest(budget) {
                BufferSizes::Kernel => socket.stream.widen(SOCKET_BYTES),
                sizes => socket.fit(sizes, true),
            }
        }
        socket
    }

    fn kind(&self) -> SocketKind {
        match self.stream.tcp() {
            Some(_) => SocketKind::Tcp,
            None => SocketKind::Unix,
        }
    }

    fn fit(&mut self, sizes: BufferSizes, is_new: bool) {
        if let Some(socket) = self.stream.descriptor()
            && let Err(error) = self.buffers.fit(socket, sizes, is_new)
        {
            tracing::debug!(%error, "a client's socket keeps its buffers");
        }
        if sizes == BufferSizes::Kernel {
            self.stream.widen(SOCKET_BYTES);
        }
    }

    fn moved(&mut self, bytes: usize) {
        let kind = self.kind();
        if !kind.starts_small(&self.budget) {
            return;
        }
        self.moved += bytes as u64;
        let sizes = self.growth.sizes(&self.budget, self.moved, kind);
        if sizes != self.buffers.sizes() {
            self.fit(sizes, false);
        }
    }

    fn wrote(&mut self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &written {
            self.moved(*bytes);
        }
        written
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, out);
        let read = out.filled().len() - before;
        // A connection without anything to read is polled last here: the timer wakes its task.
        this.growth.poll_idle(cx, this.moved);
        this.moved(read);
        polled
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.wrote(written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.wrote(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
