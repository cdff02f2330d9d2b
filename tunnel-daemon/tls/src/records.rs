//! TLS 1.3 records (RFC 8446 section 5) over our own buffers, for a connection whose handshake rustls has made.
//!
//! rustls copies every received byte three times and keeps some kilobytes for each connection. Here a record is opened
//! where it was read, and its payload is a slice of that read. A batch of records is sealed into one borrowed buffer and
//! leaves in one write. A connection that waits holds only keys. The bytes on the wire are ordinary TLS, so the other end
//! may use any TLS library.

mod kernel;
mod keys;

use std::future::poll_fn;
use std::io::{self, Read as _};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use adit_core::tls13::{
    ALERT, APPLICATION_DATA, CLOSE_NOTIFY, ContentReader, HANDSHAKE, HEADER_BYTES,
    KEY_UPDATE_MESSAGE, Meaning, PLAIN_BYTES_MAX, TAG_BYTES, WARNING, sealed_bytes,
};
use bytes::{Buf as _, Bytes, BytesMut};
use rustls::ProtocolVersion;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;

pub(super) use self::keys::TrafficSecrets;
use self::keys::{Half, broken, violated};
use crate::blocks::Fill;
use crate::buffered::{Borrowed, borrow};
use crate::clear::ClearStream;
use crate::outbox::Outbox;
use crate::stream::{Connection as _, Socket};

/// What a record adds to its plain text: header, type, tag.
const RECORD_OVERHEAD: usize = HEADER_BYTES + 1 + TAG_BYTES;
/// Records sealed with one key: half of what RFC 8446 section 5.5 allows AES-GCM.
const RECORDS_PER_KEY: u64 = 1 << 23;
/// Why a connection cannot be taken over from rustls.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// It is not TLS 1.3.
    #[error("the connection is not TLS 1.3")]
    NotTls13,
    /// rustls does not release the keys, or holds bytes that would be lost.
    #[error("the TLS session cannot be taken over: {0}")]
    Session(&'static str),
    /// rustls refused.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
}

/// One end of a TLS connection after its handshake.
pub struct RecordStream {
    socket: Socket,
    rx: Half,
    tx: Half,
    read: Fill,
    /// Since the last call of `take_read_bytes`.
    read_bytes: usize,
    /// Sealed records to be written; `None` whenever nothing waits.
    sealed: Option<Borrowed>,
    contents: ContentReader,
    /// Kernel TLS is attached and would take keys.
    attached: bool,
    /// The peer asked for new keys of this end, or they are used up.
    update_due: bool,
    ended: bool,
}

impl RecordStream {
    /// Goes on where rustls stopped. `left` are bytes read from the socket that rustls has not seen. rustls must have seen
    /// whole records only.
    pub(super) fn take_over(
        socket: Socket,
        mut session: rustls::Connection,
        left: &[u8],
        secrets: &Arc<TrafficSecrets>,
    ) -> Result<Self, TakeOverError> {
        if session.protocol_version() != Some(ProtocolVersion::TLSv1_3) {
            return Err(TakeOverError::NotTls13);
        }
        if session.is_handshaking() || session.wants_write() {
            return Err(TakeOverError::Session("it is still busy"));
        }
        // Without bytes to read this is `WouldBlock`; at the end of the session it is zero bytes.
        if session.reader().read(&mut [0]).is_ok() {
            return Err(TakeOverError::Session("it holds bytes that were not read"));
        }
        let (is_client, own, other) = match &session {
            rustls::Connection::Client(_) => (true, &secrets.client, &secrets.server),
            rustls::Connection::Server(_) => (false, &secrets.server, &secrets.client),
        };
        let extracted = session.dangerous_extract_secrets()?;
        let rx = Half::new(extracted.rx, other.get())?;
        let tx = Half::new(extracted.tx, own.get())?;
        Ok(Self {
            socket,
            rx,
            tx,
            read: Fill::with(left),
            read_bytes: left.len(),
            sealed: None,
            contents: ContentReader::new(is_client),
            attached: false,
            update_due: false,
            ended: false,
        })
    }

    /// The TCP socket below, for its options and state; `None` on a unix socket.
    #[must_use]
    pub fn tcp(&self) -> Option<&TcpStream> {
        self.socket.tcp()
    }

    /// The payload of the next record; empty after the peer's close_notify. A read of the socket takes at most `most` bytes.
    ///
    /// # Errors
    /// The socket's error; a record that does not verify or is malformed; EOF without close_notify.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<io::Result<Bytes>> {
        self.poll_next(cx, false, most)
    }

    /// As [`Self::poll_read`], but reads no byte behind the record: the peer may be about to call
    /// [`Self::start_kernel_tls`], and this end then has to follow.
    ///
    /// # Errors
    /// As [`Self::poll_read`].
    pub fn poll_read_record(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        self.poll_next(cx, true, usize::MAX)
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        alone: bool,
        most: usize,
    ) -> Poll<io::Result<Bytes>> {
        loop {
            if self.ended {
                return Poll::Ready(Ok(Bytes::new()));
            }
            if let Some(record) = self.next_record()? {
                if let Some(payload) = self.handle(record)? {
                    return Poll::Ready(Ok(payload));
                }
                continue;
            }
            let filled = if alone {
                let missing = self.missing_bytes();
                self.read.poll_fill_at_most(cx, &mut self.socket, missing)
            } else if most < usize::MAX {
                self.read.poll_fill_at_most(cx, &mut self.socket, most)
            } else {
                self.read.poll_fill(cx, &mut self.socket)
            };
            let filled = ready!(filled)?;
            if filled == 0 {
                let end = io::ErrorKind::UnexpectedEof;
                return Poll::Ready(Err(io::Error::new(end, "the connection was cut off")));
            }
            self.read_bytes += filled;
        }
    }

    /// Bytes missing of the record that has begun, or of its header.
    fn missing_bytes(&self) -> usize {
        let there = self.read.bytes();
        let wanted = match there.first_chunk() {
            Some(&[_, _, _, high, low]) => {
                HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]))
            }
            None => HEADER_BYTES,
        };
        wanted.saturating_sub(there.len()).max(1)
    }

    /// A whole record, if one is there.
    fn next_record(&mut self) -> io::Result<Option<BytesMut>> {
        let Some(header) = self.read.bytes().first_chunk() else {
            return Ok(None);
        };
        let length = sealed_bytes(*header).map_err(violated)?;
        Ok(self.read.take(HEADER_BYTES + length))
    }

    /// Handles a record; returns its payload, if it has one.
    fn handle(&mut self, mut record: BytesMut) -> io::Result<Option<Bytes>> {
        let (kind, length) = self.rx.open(&mut record)?;
        record.advance(HEADER_BYTES);
        record.truncate(length);
        match self.contents.read(kind, &record).map_err(violated)? {
            Meaning::Payload => return Ok(Some(record.freeze())),
            Meaning::Nothing => (),
            Meaning::NewKeys { asks } => {
                self.rx.update()?;
                self.update_due |= asks;
            }
            Meaning::GoodBye => self.ended = true,
        }
        Ok(None)
    }

    /// Bytes read from the socket since the last call, including records without payload.
    #[must_use]
    pub fn take_read_bytes(&mut self) -> usize {
        std::mem::take(&mut self.read_bytes)
    }

    /// Bytes sealed and not yet taken by the socket.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        self.sealed
            .as_ref()
            .map_or(0, |sealed| sealed.bytes().len())
    }

    /// Seals the bytes of `out` and writes them. Ready when all are written.
    ///
    /// # Errors
    /// The socket's error.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>, out: &mut Outbox) -> Poll<io::Result<()>> {
        loop {
            if let Some(sealed) = &mut self.sealed {
                match Pin::new(&mut self.socket).poll_write(cx, sealed.bytes())? {
                    Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    Poll::Ready(written) => sealed.from += written,
                    Poll::Pending => {
                        sealed.shrink();
                        return Poll::Pending;
                    }
                }
                if sealed.from < sealed.to {
                    continue;
                }
            }
            self.sealed = None;
            if out.is_empty() {
                return Poll::Ready(Ok(()));
            }
            self.sealed = Some(self.seal(out)?);
        }
    }

    /// Ends the session at both ends and goes on in clear text. The peer has to do the same: each end waits for the other's
    /// close_notify, after which nothing is encrypted. A cancelled call closes the connection.
    ///
    /// # Errors
    /// The socket's error, or a record other than close_notify comes.
    pub async fn into_clear(mut self) -> io::Result<ClearStream> {
        let mut buffer = borrow();
        let to = self.seal_one(&mut buffer, ALERT, |plain| {
            let good_bye = [WARNING, CLOSE_NOTIFY];
            let room = plain.get_mut(..good_bye.len()).unwrap_or_default();
            room.copy_from_slice(&good_bye);
            good_bye.len()
        })?;
        self.sealed = Some(Borrowed {
            buffer,
            from: 0,
            to,
        });
        poll_fn(|cx| self.poll_flush(cx, &mut Outbox::default())).await?;
        if !poll_fn(|cx| self.poll_read(cx, usize::MAX))
            .await?
            .is_empty()
        {
            return Err(broken("payload where the session was to end"));
        }
        let socket = self.socket.into_tcp();
        let socket = socket.ok_or_else(|| broken("not a TCP connection"))?;
        Ok(ClearStream::new(socket, self.read.into_bytes()))
    }

    /// Seals as many records as fit into a buffer.
    fn seal(&mut self, out: &mut Outbox) -> io::Result<Borrowed> {
        let mut buffer = borrow();
        let mut to = 0;
        if self.update_due || self.tx.records >= RECORDS_PER_KEY {
            to += self.seal_one(&mut buffer, HANDSHAKE, |plain| {
                let room = plain.get_mut(..KEY_UPDATE_MESSAGE.len());
                room.unwrap_or_default()
                    .copy_from_slice(&KEY_UPDATE_MESSAGE);
                KEY_UPDATE_MESSAGE.len()
            })?;
            self.tx.update()?;
            self.update_due = false;
        }
        while !out.is_empty() {
            let room = buffer.get_mut(to..).unwrap_or_default();
            if room.len() < RECORD_OVERHEAD + PLAIN_BYTES_MAX.min(out.bytes()) {
                break;
            }
            to += self.seal_one(room, APPLICATION_DATA, |plain| out.copy_to(plain))?;
        }
        Ok(Borrowed {
            buffer,
            from: 0,
            to,
        })
    }

    /// Makes one record of what `write` puts into the room it is given; returns its length.
    fn seal_one(
        &mut self,
        room: &mut [u8],
        kind: u8,
        write: impl FnOnce(&mut [u8]) -> usize,
    ) -> io::Result<usize> {
        let most = PLAIN_BYTES_MAX.min(room.len() - RECORD_OVERHEAD);
        let plain = room.get_mut(HEADER_BYTES..HEADER_BYTES + most);
        let written = write(plain.unwrap_or_default());
        if let Some(byte) = room.get_mut(HEADER_BYTES + written) {
            *byte = kind;
        }
        let record = room.get_mut(..written + RECORD_OVERHEAD);
        self.tx.seal(record.unwrap_or_default())?;
        Ok(written + RECORD_OVERHEAD)
    }
}

impl std::fmt::Debug for RecordStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecordStream").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
