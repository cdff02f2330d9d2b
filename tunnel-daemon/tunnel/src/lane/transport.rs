//! The byte stream under a lane.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::net::TcpStream;

use adit_tls::clear::ClearStream;
use adit_tls::outbox::Outbox;
use adit_tls::records::RecordStream;

/// A connection after its greeting.
#[derive(Debug)]
pub(super) enum Transport {
    /// Boxed: lanes are moved around.
    Tls(Box<RecordStream>),
    Clear(ClearStream),
}

impl Transport {
    /// `alone`: read one record only, since the kernel may have to decrypt those behind it. At most `most` bytes are taken from
    /// the socket.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        alone: bool,
        most: usize,
    ) -> Poll<io::Result<Bytes>> {
        match self {
            Self::Tls(records) if alone => records.poll_read_record(cx),
            Self::Tls(records) => records.poll_read(cx, most),
            Self::Clear(stream) => stream.poll_read(cx, most),
        }
    }

    pub(super) fn poll_flush(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Outbox,
    ) -> Poll<io::Result<()>> {
        match self {
            Self::Tls(records) => records.poll_flush(cx, out),
            Self::Clear(stream) => stream.poll_flush(cx, out),
        }
    }

    /// Bytes that the connection returned since the last call, for `payload` and everything else.
    pub(super) fn take_read_bytes(&mut self, payload: &Bytes) -> usize {
        match self {
            Self::Tls(records) => records.take_read_bytes(),
            Self::Clear(_) => payload.len(),
        }
    }

    pub(super) fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Tls(records) => records.tcp(),
            Self::Clear(stream) => Some(stream.tcp()),
        }
    }

    pub(super) fn waiting_bytes(&self) -> usize {
        match self {
            Self::Tls(records) => records.waiting_bytes(),
            Self::Clear(_) => 0,
        }
    }
}
