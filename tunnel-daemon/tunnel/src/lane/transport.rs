//! What carries a lane's bytes.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::net::TcpStream;

use adit_tls::clear::ClearStream;
use adit_tls::outbox::Outbox;
use adit_tls::records::RecordStream;

/// A connection behind its greeting.
#[derive(Debug)]
pub(super) enum Transport {
    /// Boxed: lanes are moved around.
    Tls(Box<RecordStream>),
    Clear(ClearStream),
}

impl Transport {
    /// `alone`: what is encrypted behind the next record may be for the kernel.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        alone: bool,
    ) -> Poll<io::Result<Bytes>> {
        match self {
            Self::Tls(records) if alone => records.poll_read_record(cx),
            Self::Tls(records) => records.poll_read(cx),
            Self::Clear(stream) => stream.poll_read(cx),
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

    /// How much the connection gave since this was last asked, for the payload that was read and for all else.
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
