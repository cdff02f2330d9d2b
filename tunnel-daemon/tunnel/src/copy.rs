//! Moves bytes between a socket and an endpoint, both directions in one task, until the tunnel is over.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use adit_core::session::TunnelEnd;
use adit_relay::{BufferSizes, SocketBuffers, unacknowledged_bytes};
use bytes::Bytes;
use tokio::io::AsyncRead;

use crate::closing::Closing;
use crate::endpoint::{Endpoint, Incoming};
use crate::target::{end_on_close, reset_on_close};
use crate::watch;
use adit_config::limits;
use adit_net::peer::{self, Peer};
use adit_telemetry::labels::EndReason;
use adit_tls::blocks::{self, BlockReader};
use adit_tls::outbox::Outbox;
use adit_tls::stream::Connection;

/// Bytes taken from the endpoint before the socket gets them.
const WRITE_BATCH_BYTES: usize = 256 * 1024;
/// Pieces of them: small chunks cost more than their bytes.
const WRITE_PIECES_MAX: usize = 1024;
/// Pieces below this are copied where they have to wait, so that they keep nothing of what they came in, of which the peer
/// decides how much it is.
const SMALL_CHUNK_BYTES: usize = 2048;
/// Rounds before the task lets others run: under bulk a round moves 256 KiB and takes a quarter of a millisecond.
/// Measured in perf/results/history.md, "Echo beside bulk".
const ROUNDS_PER_POLL: usize = 4;
/// Looks in a row at a socket that nobody reads after which the bytes of a peer that is gone are given up: those of 30 s.
const LOOKS_MAX: u64 = limits::LINGER_TIMEOUT.as_secs() / watch::EVERY.as_secs();

/// Who ended a copy, and how.
#[derive(Debug)]
pub enum CopyEnd {
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
pub struct CopyOutcome {
    /// Bytes read from the socket and handed to the tunnel.
    pub from_socket: u64,
    /// Bytes of the tunnel written to the socket.
    pub to_socket: u64,
    /// The socket was told that these are all.
    pub said_all: bool,
    /// How it ended.
    pub end: CopyEnd,
}

impl CopyOutcome {
    /// How the socket is to be closed; `None` if it has failed.
    #[must_use]
    pub fn closing(&self) -> Option<Closing> {
        let CopyEnd::Tunnel(end) = &self.end else {
            return None;
        };
        Some(
            if end.is_in_order() || (self.said_all && end.delivers_rest()) {
                // Behind the end of its own half, only what this side has still to say can fail.
                Closing::InOrder
            } else if self.said_all || end.delivers_rest() {
                // That half is whole, whatever became of the other.
                Closing::CutOff
            } else {
                Closing::Reset
            },
        )
    }

    /// The reason in metrics and the access log where the socket is a target's, so that the peer is the client's end.
    #[must_use]
    pub fn reason_at_target(&self) -> EndReason {
        match &self.end {
            CopyEnd::Tunnel(end) => EndReason::from(end).at_target(),
            CopyEnd::ReadFailed(_) | CopyEnd::WriteFailed(_) => EndReason::TargetReset,
        }
    }

    /// The same where the socket is a client's.
    #[must_use]
    pub fn reason_at_client(&self) -> EndReason {
        match &self.end {
            CopyEnd::Tunnel(end) => EndReason::from(end),
            CopyEnd::ReadFailed(_) | CopyEnd::WriteFailed(_) => EndReason::ClientGone,
        }
    }
}

/// What a copy joins.
struct Ends<'a, S> {
    socket: &'a mut S,
    endpoint: &'a mut Endpoint,
}

/// What has moved, and what is on its way. It owns neither socket nor endpoint, so that whoever does needs no second place for them.
pub(super) struct BidirectionalCopy {
    reader: BlockReader,
    read_done: bool,
    /// What came after the tunnel's end, and was dropped, has ended, too.
    drop_done: bool,
    pending: Outbox,
    peer_fin: bool,
    write_shut: bool,
    /// Looks that found the peer gone, since something moved.
    looks: u8,
    buffers: SocketBuffers,
    /// The socket takes no more; what comes is dropped until reading finds the end.
    write_failed: Option<io::Error>,
    tunnel_end: Option<TunnelEnd>,
    from_socket: u64,
    to_socket: u64,
}

/// Runs until the tunnel has ended or the socket has failed. `first` are bytes already read from the socket, which the call
/// itself hands over.
///
/// On return the socket has taken all that the end allows, but may still buffer the last of it: the caller closes it as
/// [`CopyOutcome::closing`] says, by [`crate::close_gracefully`]. A cancelled call leaves the endpoint to its `Drop`: the tunnel is reset. So is
/// the socket when it is dropped then, unless it was told that these are all; and by the kernel, for a process that is killed.
pub fn copy_bidirectional<'a, S: Connection>(
    socket: &'a mut S,
    endpoint: &'a mut Endpoint,
    first: Bytes,
) -> impl Future<Output = CopyOutcome> + use<'a, S> {
    if let Some(socket) = socket.tcp() {
        reset_on_close(socket);
    }
    let copy = Some(BidirectionalCopy::new(endpoint, first));
    // Not an `async` function: that keeps what it was called with twice, for days.
    Copying {
        copy,
        socket,
        endpoint,
    }
}

/// See [`copy_bidirectional`].
struct Copying<'a, S: Connection> {
    /// Until it is over.
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

    /// To be asked with the same socket and the same endpoint, and not again once it is ready.
    pub(super) fn poll<S: Connection>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        endpoint: &mut Endpoint,
    ) -> Poll<CopyOutcome> {
        let sizes = endpoint.buffer_sizes();
        if sizes != self.buffers.sizes() {
            self.fit_buffers(socket, sizes);
        }
        self.poll_end(cx, &mut Ends { socket, endpoint })
            .map(|end| CopyOutcome {
                from_socket: self.from_socket,
                to_socket: self.to_socket,
                said_all: self.has_said_all(),
                end,
            })
    }

    /// Where memory is short, what a tunnel has in the kernel is small, too.
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

    fn has_said_all(&self) -> bool {
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
                    // The other end may have answered before it stopped taking; read that first.
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
                // What is cut off here did not end as it was told.
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
        // A socket that takes nothing must not hide that there is no more use in waiting for it. After the loop: an endpoint that
        // had something has not been told whom to wake.
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
        // Not after every write: while more is pending, the next write pushes the buffer out.
        if let Poll::Ready(flushed) = self.pending.poll_flush(cx, *socket) {
            flushed?;
        }
        // What was cut off is not to look like an end: the owner of the socket says how it goes.
        let in_order = self.tunnel_end.as_ref().is_some_and(TunnelEnd::is_in_order);
        if (self.peer_fin || in_order)
            && !self.write_shut
            && let Poll::Ready(shut) = Pin::new(&mut **socket).poll_shutdown(cx)
        {
            self.write_shut = true;
            // Of a tunnel that is over, the owner of the socket closes it.
            if self.tunnel_end.is_none() {
                // The other side may be gone already; reading finds out.
                shut?;
                if let Some(socket) = socket.tcp() {
                    end_on_close(socket);
                }
            }
        }
        // Whatever was written made room: the endpoint is asked again, or its waker would not be set.
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
            // The kernel tells of a reset once. Who has met it in writing seems to read an end; if there was one before, it
            // says "broken pipe".
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

    /// Asks after the peer of a socket that is not read, since the tunnel takes no more: its end would stay behind its bytes
    /// for as long as they do. One that is gone is given up after a while without a byte; one that has ended in order has
    /// the time of a half-closed tunnel. Returns whether another round may find something.
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

    /// What the socket says after the tunnel's end is for nobody, but may have to be read before it takes the rest: one
    /// that answers as it reads does not read on until its answer is taken. Returns whether another round may find more.
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

    /// The peer decides what is around them, and a budget counts only their own bytes.
    ///
    /// Limit (memory): Overhead of small chunks queued for a socket | none of the read buffer stays allocated
    #[tokio::test]
    async fn small_chunks_that_wait_keep_nothing_of_what_they_came_in() {
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

    /// The endpoint had so much at once that it was not asked again, which would have told it whom to wake.
    #[tokio::test(start_paused = true)]
    async fn a_socket_that_takes_nothing_hides_no_reset_of_its_tunnel() {
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

    /// As when its task is cut off, or its process is killed: then the kernel goes by this option.
    #[tokio::test]
    async fn a_socket_whose_pump_is_dropped_is_reset_unless_it_was_told_all() {
        for said_all in [false, true] {
            let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let address = listener.local_addr().unwrap();
            let mut near = TcpStream::connect(address).await.unwrap();
            let (mut far, _address) = listener.accept().unwrap();
            let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
            if said_all {
                channel.peer_fin();
            }
            let mut copying = Box::pin(copy_bidirectional(&mut near, &mut endpoint, Bytes::new()));
            assert!(futures_util::poll!(&mut copying).is_pending());
            drop(copying);
            let reset = SockRef::from(&near).linger().unwrap();
            assert_eq!(reset, (!said_all).then_some(Duration::ZERO));
            drop(near);
            let read = far.read(&mut [0]).map_err(|error| error.kind());
            let end = if said_all {
                Ok(0)
            } else {
                Err(io::ErrorKind::ConnectionReset)
            };
            assert_eq!(read, end);
        }
    }
}
