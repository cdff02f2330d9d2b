//! Moves bytes between a socket and an endpoint, both directions in one task, until the tunnel is over.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::{fmt, io};

use adit_core::session::TunnelEnd;
use adit_core::text::Excerpt;
use adit_relay::{BufferSizes, SocketBuffers, unacknowledged_bytes};
use bytes::Bytes;
use tokio::io::AsyncRead;

use crate::closing::{Closing, end_on_close, reset_on_close};
use crate::endpoint::Endpoint;
use crate::incoming::Incoming;
use crate::watch;
use adit_config::limits;
use adit_net::buffer_growth::SocketKind;
use adit_net::peer::{self, Peer};
use adit_telemetry::labels::EndReason;
use adit_tls::blocks::{self, BlockReader};
use adit_tls::outbox::Outbox;
use adit_tls::stream::Connection;

/// Bytes taken from the endpoint before the socket is written.
const WRITE_BATCH_BYTES: usize = 256 * 1024;
/// Pieces in one write batch: small chunks cost more than their bytes.
const WRITE_PIECES_MAX: usize = 1024;
/// Smaller pieces are copied when they have to wait, so that they do not keep their read buffer alive. The peer controls how
/// large that buffer is.
const SMALL_CHUNK_BYTES: usize = 2048;
/// Rounds before the task yields: under bulk a round moves 256 KiB and takes a quarter of a millisecond.
/// Measured in perf/results/history.md, "Echo beside bulk".
const ROUNDS_PER_POLL: usize = 4;
/// Checks in a row of a paused socket whose peer is gone, after which its unread bytes are given up: 30 s.
const LOOKS_MAX: u64 = limits::LINGER_TIMEOUT.as_secs() / watch::EVERY.as_secs();

/// Which side ended a copy, and how.
#[derive(Debug)]
pub enum CopyEnd {
    /// The tunnel ended; everything that was to be delivered is written.
    Tunnel(TunnelEnd),
    /// The socket failed while it was read.
    ReadFailed(io::Error),
    /// The socket failed while it was written.
    WriteFailed(io::Error),
}

impl fmt::Display for CopyEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tunnel(end) => {
                f.write_str(end.reason())?;
                match end {
                    TunnelEnd::Closed { error } | TunnelEnd::Reset { error }
                        if !error.is_empty() =>
                    {
                        write!(f, ": {}", Excerpt(error))
                    }
                    _ => Ok(()),
                }
            }
            Self::ReadFailed(error) => write!(f, "read failed: {error}"),
            Self::WriteFailed(error) => write!(f, "write failed: {error}"),
        }
    }
}

/// What a copy moved and how it ended; returned for failures, too.
#[derive(Debug)]
#[must_use = "an outcome carries the byte counts for metrics and the access log"]
pub struct CopyOutcome {
    /// Bytes read from the socket and handed to the tunnel.
    pub from_socket: u64,
    /// Bytes of the tunnel written to the socket.
    pub to_socket: u64,
    /// The socket's peer was sent FIN.
    pub sent_fin: bool,
    /// Nothing more comes from the socket's peer: it has sent FIN behind what was read or given up.
    pub read_fin: bool,
    /// How it ended.
    pub end: CopyEnd,
}

impl CopyOutcome {
    /// How to close the socket; `None` to drop it: it has failed, or has sent and read FIN.
    #[must_use]
    pub fn closing(&self) -> Option<Closing> {
        let CopyEnd::Tunnel(end) = &self.end else {
            return None;
        };
        Some(
            if end.is_in_order() || (self.sent_fin && end.delivers_rest()) {
                if self.sent_fin && self.read_fin {
                    // The kernel delivers the last bytes by itself.
                    return None;
                }
                // The socket has sent EOF before; only the bytes towards it can still fail.
                Closing::InOrder
            } else if self.sent_fin || end.delivers_rest() {
                // The direction towards the socket is complete, even if the other one is not.
                Closing::CutOff
            } else {
                Closing::Reset
            },
        )
    }

    /// The reason in metrics and the access log where the socket is a target's, so that the tunnel's peer is the client's end.
    #[must_use]
    pub fn reason_at_target(&self) -> EndReason {
        match &self.end {
            CopyEnd::Tunnel(end) => EndReason::from(end).at_target(),
            CopyEnd::ReadFailed(_) | CopyEnd::WriteFailed(_) => EndReason::TargetReset,
        }
    }

    /// The reason in metrics and the access log where the socket is a client's.
    #[must_use]
    pub fn reason_at_client(&self) -> EndReason {
        match &self.end {
            CopyEnd::Tunnel(end) => EndReason::from(end),
            CopyEnd::ReadFailed(_) | CopyEnd::WriteFailed(_) => EndReason::ClientGone,
        }
    }
}

/// The two sides that a copy connects.
struct Ends<'a, S> {
    socket: &'a mut S,
    endpoint: &'a mut Endpoint,
}

/// State of a copy. It owns neither socket nor endpoint, so that their owner need not move them.
pub(super) struct BidirectionalCopy {
    reader: BlockReader,
    read_done: bool,
    /// The socket has sent EOF while its input was dropped after the tunnel's end.
    drop_done: bool,
    pending: Outbox,
    peer_fin: bool,
    write_shut: bool,
    /// Checks in a row that found the peer gone without a byte moved.
    looks: u8,
    buffers: SocketBuffers,
    /// Writing to the socket failed; bytes for it are dropped until reading finds EOF or an error.
    write_failed: Option<io::Error>,
    tunnel_end: Option<TunnelEnd>,
    from_socket: u64,
    to_socket: u64,
}

/// Runs until the tunnel has ended or the socket has failed. `first` are bytes already read from the socket, which are handed
/// to the endpoint by the call itself, before the first poll.
///
/// On return the socket has taken all bytes that the end allows, but may still buffer the last of them: the caller closes it as
/// [`CopyOutcome::closing`] says, by [`crate::close_gracefully`]. A cancelled call leaves the endpoint to its `Drop`, which
/// resets the tunnel. A socket dropped then, or closed by the kernel when the process is killed, is reset, too, unless it was
/// sent FIN.
pub fn copy_bidirectional<'a, S: Connection>(
    socket: &'a mut S,
    endpoint: &'a mut Endpoint,
    first: Bytes,
) -> impl Future<Output = CopyOutcome> + use<'a, S> {
    if let Some(socket) = socket.tcp() {
        reset_on_close(socket);
    }
    let copy = Some(BidirectionalCopy::new(endpoint, first));
    // Not an `async` function: its future would hold the arguments twice, for the tunnel's lifetime.
    Copying {
        copy,
        socket,
        endpoint,
    }
}

/// See [`copy_bidirectional`].
struct Copying<'a, S: Connection> {
    /// `None` once the copy is over.
    copy: Option<BidirectionalCopy>,
    socket: &'a mut S,
    endpoint: &'a mut Endpoint,
}

impl<S: Connection> Future for Copying<'_, S> {
    type Output = CopyOutcome;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<CopyOutcome> {
        let this = self.get_mut();
        let Some(copy) = &mut this.copy else {
            unreachable!("a copy is polled again after its end");
        };
        let outcome = ready!(copy.poll(cx, this.socket, this.endpoint));
        this.copy = None;
        Poll::Ready(outcome)
    }
}

impl BidirectionalCopy {
    pub(super) fn new(endpoint: &mut Endpoint, first: Bytes) -> Self {
        let from_socket = first.len() as u64;
        endpoint.send(first);
        Self {
            reader: BlockReader::default(),
            read_done: false,
            drop_done: false,
            pending: Outbox::default(),
            peer_fin: false,
            write_shut: false,
            looks: 0,
            buffers: SocketBuffers::default(),
            write_failed: None,
            tunnel_end: None,
            from_socket,
            to_socket: 0,
        }
    }

    /// Call it with the same socket and endpoint each time, and not again once it is ready.
    pub(super) fn poll<S: Connection>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        endpoint: &mut Endpoint,
    ) -> Poll<CopyOutcome> {
        let kind = match socket.tcp() {
            Some(_) => SocketKind::Tcp,
            None => SocketKind::Unix,
        };
        let sizes = endpoint.buffer_sizes(kind);
        if sizes != self.buffers.sizes() {
            self.fit_buffers(socket, sizes);
        }
        self.poll_end(cx, &mut Ends { socket, endpoint })
            .map(|end| CopyOutcome {
                from_socket: self.from_socket,
                to_socket: self.to_socket,
                sent_fin: self.has_sent_fin(),
                read_fin: self.read_done || self.drop_done,
                end,
            })
    }

    /// Adapts the socket's kernel buffers: small while memory is short.
    #[cold]
    fn fit_buffers<S: Connection>(&mut self, socket: &S, sizes: BufferSizes) {
        let is_new = self.from_socket == 0 && self.to_socket == 0;
        match socket.descriptor() {
            Some(socket) => {
                if let Err(error) = self.buffers.fit(socket, sizes, is_new) {
                    tracing::debug!(%error, "the buffers of a socket stay as they are");
                }
            }
            None => self.buffers = SocketBuffers::without_socket(sizes),
        }
    }

    fn has_sent_fin(&self) -> bool {
        self.write_shut && self.write_failed.is_none()
    }

    fn poll_end<S: Connection>(
        &mut self,
        cx: &mut Context<'_>,
        ends: &mut Ends<'_, S>,
    ) -> Poll<CopyEnd> {
        for _round in 0..ROUNDS_PER_POLL {
            let wrote = match self.poll_to_socket(cx, ends) {
                Ok(progress) => progress,
                Err(error) => {
                    // The socket's peer may have sent an answer before it stopped reading; read that first.
                    self.write_failed = Some(error);
                    self.write_shut = true;
                    true
                }
            };
            self.drop_unwritable(ends.endpoint);
            if self.read_done
                && let Some(error) = self.write_failed.take()
            {
                return Poll::Ready(CopyEnd::WriteFailed(error));
            }
            if let Some(end) = &self.tunnel_end
                && (self.pending.is_empty() || ends.endpoint.poll_aborted(cx))
            {
                // Pending bytes are cut off here, so the end reported before may no longer hold.
                let cut = (!self.pending.is_empty()).then(|| ends.endpoint.last_end());
                let end = cut.flatten().unwrap_or_else(|| end.clone());
                return Poll::Ready(CopyEnd::Tunnel(end));
            }
            let read = match self.poll_from_socket(cx, ends) {
                Ok(progress) => progress,
                Err(error) => return Poll::Ready(CopyEnd::ReadFailed(error)),
            };
            if !wrote && !read {
                ends.endpoint.poll_flush(cx);
                self.pending.rest();
                return Poll::Pending;
            }
        }
        ends.endpoint.poll_flush(cx);
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn drop_unwritable(&mut self, endpoint: &mut Endpoint) {
        if self.write_failed.is_some() {
            endpoint.discarded(self.pending.clear());
        }
    }

    fn is_full(&self) -> bool {
        self.pending.bytes() >= WRITE_BATCH_BYTES || self.pending.pieces() >= WRITE_PIECES_MAX
    }

    /// Returns whether another round may find something.
    fn poll_to_socket<S: Connection>(
        &mut self,
        cx: &mut Context<'_>,
        Ends { socket, endpoint }: &mut Ends<'_, S>,
    ) -> io::Result<bool> {
        let mut more_from_endpoint = false;
        while self.tunnel_end.is_none() && !self.is_full() {
            match endpoint.poll_recv(cx) {
                Poll::Ready(Incoming::Data(bytes)) => {
                    let waits = !self.pending.is_empty();
                    self.pending
                        .push(if waits && bytes.len() < SMALL_CHUNK_BYTES {
                            Bytes::copy_from_slice(&bytes)
                        } else {
                            bytes
                        });
                    more_from_endpoint = true;
                }
                Poll::Ready(Incoming::PeerFin) => self.peer_fin = true,
                Poll::Ready(Incoming::Ended(end)) => self.tunnel_end = Some(end),
                Poll::Pending => break,
            }
        }
        // A socket that takes nothing must not hide an abort. After the loop: an endpoint that had data has not registered the
        // waker.
        if self.tunnel_end.is_none() && self.is_full() && endpoint.poll_aborted(cx) {
            self.tunnel_end = endpoint.last_end();
        }
        let mut progress = false;
        if self.write_failed.is_some() {
            return Ok(more_from_endpoint);
        }
        while !self.pending.is_empty() {
            let Poll::Ready(written) = self.pending.poll_write(cx, *socket)? else {
                let descriptor = socket.descriptor();
                let kernel = descriptor.and_then(|socket| unacknowledged_bytes(&socket).ok());
                endpoint.stalled(kernel.unwrap_or(0));
                return Ok(progress);
            };
            progress = true;
            self.to_socket += written as u64;
            endpoint.drained(written);
        }
        // Not after every write: while more is pending, the next write flushes the buffer.
        if let Poll::Ready(flushed) = self.pending.poll_flush(cx, *socket) {
            flushed?;
        }
        // A tunnel that was cut off must not look like EOF: the socket's owner closes it as the outcome says.
        let in_order = self.tunnel_end.as_ref().is_some_and(TunnelEnd::is_in_order);
        if (self.peer_fin || in_order)
            && !self.write_shut
            && let Poll::Ready(shut) = Pin::new(&mut **socket).poll_shutdown(cx)
        {
            self.write_shut = true;
            match shut {
                Ok(()) => {
                    if let Some(socket) = socket.tcp() {
                        end_on_close(socket);
                    }
                }
                // Once the tunnel is over, the socket's owner closes it.
                Err(_gone) if self.tunnel_end.is_some() => (),
                // The peer may be gone already; reading finds out.
                Err(gone) => return Err(gone),
            }
        }
        // Writing made room: poll the endpoint again, or its waker would not be registered.
        Ok(progress || more_from_endpoint)
    }

    fn poll_from_socket<S: Connection>(
        &mut self,
        cx: &mut Context<'_>,
        Ends { socket, endpoint }: &mut Ends<'_, S>,
    ) -> io::Result<bool> {
        if self.tunnel_end.is_some() {
            return Ok(self.poll_drop(cx, *socket));
        }
        if self.read_done {
            return Ok(false);
        }
        if endpoint.poll_ready(cx).is_pending() {
            return match endpoint.poll_check(cx) {
                Poll::Ready(moved) => self.check(&**socket, endpoint, moved),
                Poll::Pending => Ok(false),
            };
        }
        let most = endpoint.read_max();
        let Poll::Ready(bytes) = self.reader.poll_read(cx, *socket, most)? else {
            return Ok(false);
        };
        if bytes.is_empty() {
            self.read_done = true;
            // The kernel reports a reset once. After a write has met the reset, reading yields EOF. A write error of "broken
            // pipe" means that a real EOF came before.
            let failed = self.write_failed.as_ref();
            if failed.is_none_or(|error| error.kind() == io::ErrorKind::BrokenPipe) {
                endpoint.fin();
            }
            return Ok(true);
        }
        self.looks = 0;
        self.from_socket += bytes.len() as u64;
        endpoint.send(bytes);
        Ok(true)
    }

    /// Checks the peer of a socket that is not read because the tunnel takes no more: its EOF or error would stay hidden behind
    /// unread bytes. A failed peer is given up after a while without a byte. One that has closed in order is treated as
    /// half-closed. Returns whether another round may make progress.
    fn check<S: Connection>(
        &mut self,
        socket: &S,
        endpoint: &mut Endpoint,
        moved: bool,
    ) -> io::Result<bool> {
        let Some(socket) = socket.descriptor() else {
            return Ok(false);
        };
        let state = peer::state(socket);
        match state {
            Peer::There => return Ok(false),
            Peer::Failed => (),
            // Writing has met the error already.
            Peer::Closed if self.write_failed.is_some() => (),
            Peer::Silent | Peer::Closed => {
                endpoint.end_waits();
                return Ok(false);
            }
        }
        self.looks = if moved { 0 } else { self.looks + 1 };
        if u64::from(self.looks) < LOOKS_MAX {
            return Ok(false);
        }
        if state == Peer::Failed {
            return Err(peer::take_error(socket));
        }
        self.read_done = true;
        Ok(true)
    }

    /// Drops what the socket sends after the tunnel's end. A peer that answers as it reads stops reading until its answers are
    /// taken, so reading lets the remaining writes finish. Returns whether another round may drop more.
    fn poll_drop<S: AsyncRead + Unpin>(&mut self, cx: &mut Context<'_>, socket: &mut S) -> bool {
        if self.read_done || self.drop_done {
            return false;
        }
        let dropped = blocks::poll_discard(cx, socket);
        // Writing finds an error, too.
        self.drop_done = matches!(dropped, Poll::Ready(Ok(0) | Err(_)));
        dropped.is_ready() && !self.drop_done
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::Arc;
    use std::time::Duration;

    use socket2::SockRef;
    use tokio::net::TcpStream;

    use super::*;
    use crate::DirtyList;

    /// The peer chooses the size of the read buffer, and a budget counts only the chunks' own bytes.
    ///
    /// Limit (memory): Overhead of small chunks queued for a socket | none of the read buffer stays allocated
    #[tokio::test]
    async fn queued_small_chunks_do_not_keep_their_read_buffer() {
        let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
        let block = Bytes::from(vec![7; 256 * 1024]);
        channel.deliver(Bytes::from(vec![7; 100]));
        for _crumb in 0..64 {
            channel.deliver(block.slice(..100));
        }
        let (mut near, _far) = tokio::io::duplex(10);
        let mut copying = Box::pin(copy_bidirectional(&mut near, &mut endpoint, Bytes::new()));
        assert!(futures_util::poll!(&mut copying).is_pending());
        assert!(block.is_unique());
    }

    /// The endpoint returned a full batch, so it was not polled again and did not register a waker.
    #[tokio::test(start_paused = true)]
    async fn a_blocked_socket_does_not_hide_a_reset_of_its_tunnel() {
        let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
        channel.deliver(Bytes::from(vec![7; WRITE_BATCH_BYTES]));
        let (mut near, _far) = tokio::io::duplex(10);
        let mut copying = tokio::task::JoinSet::new();
        copying
            .spawn(async move { copy_bidirectional(&mut near, &mut endpoint, Bytes::new()).await });
        tokio::task::yield_now().await;
        let error = String::new();
        channel.finish(TunnelEnd::Reset { error });
        let outcome = tokio::time::timeout(Duration::from_secs(10), copying.join_next()).await;
        let end = outcome.unwrap().unwrap().unwrap().end;
        assert!(matches!(end, CopyEnd::Tunnel(_)), "{end:?}");
    }

    /// As when the task is aborted or the process killed: the kernel then applies SO_LINGER.
    #[tokio::test]
    async fn a_dropped_copy_loop_resets_its_socket_unless_fin_was_delivered() {
        for sent_fin in [false, true] {
            let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let address = listener.local_addr().unwrap();
            let mut near = TcpStream::connect(address).await.unwrap();
            let (mut far, _address) = listener.accept().unwrap();
            let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
            if sent_fin {
                channel.peer_fin();
            }
            let mut copying = Box::pin(copy_bidirectional(&mut near, &mut endpoint, Bytes::new()));
            assert!(futures_util::poll!(&mut copying).is_pending());
            drop(copying);
            let reset = SockRef::from(&near).linger().unwrap();
            assert_eq!(reset, (!sent_fin).then_some(Duration::ZERO));
            drop(near);
            let read = far.read(&mut [0]).map_err(|error| error.kind());
            let end = if sent_fin {
                Ok(0)
            } else {
                Err(io::ErrorKind::ConnectionReset)
            };
            assert_eq!(read, end);
        }
    }

    /// A tunnel that is over in both directions: nothing is left but to drop the socket, which then ends with FIN.
    #[tokio::test]
    async fn a_socket_that_has_sent_and_read_fin_is_dropped_in_order() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut near = TcpStream::connect(address).await.unwrap();
        let (mut far, _address) = listener.accept().unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        near.readable().await.unwrap();
        let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
        let mut copying = Box::pin(copy_bidirectional(&mut near, &mut endpoint, Bytes::new()));
        assert!(futures_util::poll!(&mut copying).is_pending());
        channel.deliver(Bytes::from_static(b"last"));
        channel.finish(TunnelEnd::Closed {
            error: String::new(),
        });
        let outcome = copying.await;
        assert!(outcome.sent_fin && outcome.read_fin, "{outcome:?}");
        assert_eq!(outcome.closing(), None);
        assert_eq!(SockRef::from(&near).linger().unwrap(), None);
        drop(near);
        let mut read = Vec::new();
        far.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"last");
    }
}
