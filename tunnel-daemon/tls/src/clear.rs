//! A TCP connection that goes on in clear text after its TLS session. The handshake has told each end the other's identity.

use std::io;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::net::TcpStream;

use crate::blocks::BlockReader;
use crate::outbox::Outbox;

/// One end of such a connection.
#[derive(Debug)]
pub struct ClearStream {
    socket: TcpStream,
    reader: BlockReader,
    /// Bytes read after the end of the session.
    left: Bytes,
}

impl ClearStream {
    pub fn new(socket: TcpStream, left: Bytes) -> Self {
        Self {
            socket,
            reader: BlockReader::default(),
            left,
        }
    }

    /// The socket, for its options and state.
    #[must_use]
    pub fn tcp(&self) -> &TcpStream {
        &self.socket
    }

    /// The socket, and bytes read from it and not handed out.
    #[must_use]
    pub fn into_parts(self) -> (TcpStream, Bytes) {
        (self.socket, self.left)
    }

    /// The next bytes; empty at EOF. A read of the socket takes at most `most` bytes.
    ///
    /// # Errors
    /// The socket's error.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Bytes>> {
        if !self.left.is_empty() {
            return Poll::Ready(Ok(std::mem::take(&mut self.left)));
        }
        self.reader.poll_read(cx, &mut self.socket, most)
    }

    /// Writes the bytes of `out`. Ready when all are written.
    ///
    /// # Errors
    /// The socket's error.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>, out: &mut Outbox) -> Poll<io::Result<()>> {
        while !out.is_empty() {
            ready!(out.poll_write(cx, &mut self.socket))?;
        }
        Poll::Ready(Ok(()))
    }
}
