//! A tunnel's path over a connection of its own to a server, without frames: that of a process between clients and servers. The
//! task of the client's socket reads and writes the connection, only as fast as that socket takes bytes.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::session::{ProcessBudget, QUEUE_MIN_BYTES, TunnelEnd};
use adit_relay::{BufferSizes, tcp_state, unacknowledged_bytes};
use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use crate::closing::{end_on_close, reset_on_close};
use crate::incoming::Incoming;
use crate::path_state::PathState;
use crate::watch::LaneWatch;
use adit_net::socket::LANE_SILENCE_MAX;
use adit_telemetry::tunnels::PathQuality;
use adit_tls::blocks::BlockReader;
use adit_tls::nested::Nested;
use adit_tls::outbox::Outbox;

/// Pieces that an endpoint may queue: each takes memory beside its bytes.
const QUEUE_PIECES_MAX: usize = 4096;

/// A connection to a server that has become a tunnel.
pub struct ServerConnection {
    /// The connection. Dropped before its end it is reset.
    pub stream: Box<dyn Nested>,
    /// What the target has sent already.
    pub early: Bytes,
    /// How long a half-closed tunnel may be silent.
    pub silence_max: Duration,
    /// Budget of bytes held in the whole process.
    pub budget: Arc<ProcessBudget>,
    /// Wakes the tunnel when its socket should be checked, and when this process ends.
    pub watch: Arc<LaneWatch>,
}

/// How far this side's end has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fin {
    No,
    /// It goes behind the queued bytes.
    Due,
    Sent,
}

/// See [`ServerConnection`]. Dropping it before its end resets the connection.
pub(super) struct ServerPath {
    connection: ServerConnection,
    reader: BlockReader,
    out: Outbox,
    pub(super) state: PathState,
    peer_fin: bool,
    fin: Fin,
}

impl ServerPath {
    pub(super) fn new(mut connection: ServerConnection) -> Self {
        if let Some(socket) = connection.stream.tcp() {
            reset_on_close(socket);
        }
        let early = std::mem::take(&mut connection.early);
        let probe = connection.watch.enter(CancellationToken::new());
        let mut state = PathState::new(&connection.budget, probe);
        state.hold(&early);
        state.waiting = (!early.is_empty()).then_some(Incoming::Data(early));
        Self {
            reader: BlockReader::default(),
            out: Outbox::default(),
            state,
            peer_fin: false,
            fin: Fin::No,
            connection,
        }
    }

    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let full = |path: &Self| {
            path.state.end.is_none() && (path.room() == 0 || path.out.pieces() >= QUEUE_PIECES_MAX)
        };
        if full(self) {
            self.poll_flush(cx);
        }
        let is_full = full(self);
        self.state.poll_room(is_full)
    }

    /// Fits the connection's socket.
    pub(super) fn fit_buffers(&mut self, sizes: BufferSizes) {
        self.state.fit_buffers(self.connection.stream.tcp(), sizes);
    }

    /// Bytes that the endpoint may send now. After the tunnel's end all are accepted and dropped.
    pub(super) fn room(&self) -> usize {
        let share = self.state.budget.queue_share();
        share.saturating_sub(self.out.bytes())
    }

    pub(super) fn send(&mut self, bytes: Bytes) {
        self.state.sends();
        if self.state.end.is_none() && !self.state.write_failed {
            self.out.push(bytes);
        }
    }

    pub(super) fn fin(&mut self) {
        self.state.end_waits = false;
        if self.fin == Fin::No {
            self.fin = Fin::Due;
        }
    }

    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) {
        if let Err(error) = self.poll_write(cx) {
            tracing::debug!(%error, "a server connection takes no more");
            // Reading comes first: the peer may have sent an answer before it stopped reading.
            self.state.write_failed = true;
            self.out.clear();
            if self.peer_fin {
                self.finish(TunnelEnd::LaneLost);
            }
            cx.waker().wake_by_ref();
        }
        self.state.queued.set(self.out.bytes() as u64);
        self.poll_silence(cx);
        self.poll_watch(cx);
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.state.write_failed || self.state.end.is_some() {
            return Ok(());
        }
        let stream = &mut self.connection.stream;
        while !self.out.is_empty() {
            match self.out.poll_write(cx, stream)? {
                Poll::Ready(_written) => self.state.timer.moved(),
                Poll::Pending => return Ok(()),
            }
        }
        if self.out.poll_flush(cx, stream)?.is_pending() {
            return Ok(());
        }
        self.out.rest();
        if self.fin == Fin::Due
            && tokio::io::AsyncWrite::poll_shutdown(std::pin::Pin::new(stream), cx)?.is_ready()
        {
            self.fin = Fin::Sent;
            if let Some(socket) = self.connection.stream.tcp() {
                end_on_close(socket);
            }
            if self.peer_fin {
                let error = String::new();
                self.finish(TunnelEnd::Closed { error });
                cx.waker().wake_by_ref();
            }
        }
        Ok(())
    }

    /// Quality of the connection; one system call.
    pub(super) fn quality(&self) -> Option<PathQuality> {
        let state = tcp_state(self.connection.stream.tcp()?).ok()?;
        Some(PathQuality {
            rtt: state.rtt,
            retransmits: state.retransmits,
        })
    }

    /// When the watch asks: ends the tunnel with this process, or has the endpoint check its own socket.
    fn poll_watch(&mut self, cx: &mut Context<'_>) {
        self.state.probe.register(cx.waker());
        if !self.state.probe.is_due() {
            return;
        }
        if self.state.end.is_none() {
            if self.connection.watch.is_shutting_down() {
                self.cut(TunnelEnd::Shutdown);
            } else if (self.state.is_full() || self.state.probe.is_troubled())
                && self.peer_is_gone()
            {
                self.cut(TunnelEnd::LaneLost);
            }
        }
        self.state
            .checked(|| bytes_on_the_way(&self.connection, &self.out));
        cx.waker().wake_by_ref();
    }

    /// For a connection that is not read at the moment, or takes nothing. A peer that lives but does not read answers window
    /// probes, however rare they are.
    fn peer_is_gone(&self) -> bool {
        let Some(socket) = self.connection.stream.tcp() else {
            return false;
        };
        let is_silent = tcp_state(socket)
            .is_ok_and(|state| state.is_unanswered && state.silent_for > LANE_SILENCE_MAX);
        is_silent || !matches!(socket.take_error(), Ok(None))
    }

    pub(super) fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        if let Some(waiting) = self.state.waiting.take() {
            return Poll::Ready(waiting);
        }
        if let Some(end) = &self.state.end {
            return Poll::Ready(Incoming::Ended(end.clone()));
        }
        if self.peer_fin || self.state.reads_later() {
            return Poll::Pending;
        }
        let most = if self.state.budget.is_half_full() {
            QUEUE_MIN_BYTES
        } else {
            usize::MAX
        };
        match self.reader.poll_read(cx, &mut self.connection.stream, most) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(bytes)) if bytes.is_empty() => {
                self.peer_fin = true;
                if self.state.write_failed {
                    self.finish(TunnelEnd::LaneLost);
                    return self.poll_recv(cx);
                }
                if self.fin == Fin::Sent {
                    let error = String::new();
                    self.finish(TunnelEnd::Closed { error });
                }
                Poll::Ready(Incoming::PeerFin)
            }
            Poll::Ready(Ok(bytes)) => {
                self.state.hold(&bytes);
                Poll::Ready(Incoming::Data(bytes))
            }
            Poll::Ready(Err(error)) => {
                let error = error.to_string();
                self.cut(TunnelEnd::Reset { error });
                self.poll_recv(cx)
            }
        }
    }

    pub(super) fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.state.waiting.is_none() {
            match self.poll_recv(cx) {
                Poll::Ready(incoming) => self.state.waiting = Some(incoming),
                Poll::Pending => {
                    self.poll_flush(cx);
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.state.waiting.is_none()
    }

    pub(super) fn poll_aborted(&mut self, cx: &mut Context<'_>) -> bool {
        let (connection, out) = (&self.connection, &self.out);
        self.state
            .poll_aborted(cx, || bytes_on_the_way(connection, out))
    }

    /// Ends a half-closed tunnel without a byte for too long: a close may look like a half-close.
    fn poll_silence(&mut self, cx: &mut Context<'_>) {
        let is_half_closed = self.state.end_waits || self.peer_fin || self.fin != Fin::No;
        if is_half_closed
            && self.state.end.is_none()
            && self.has_run_out(cx, self.connection.silence_max)
        {
            self.cut(TunnelEnd::HalfClosedIdle);
            cx.waker().wake_by_ref();
        }
    }

    /// As [`ProgressTimer::has_run_out`].
    fn has_run_out(&mut self, cx: &mut Context<'_>, limit: Duration) -> bool {
        let (connection, out) = (&self.connection, &self.out);
        self.state
            .timer
            .has_run_out(cx, limit, || bytes_on_the_way(connection, out))
    }

    /// The tunnel is over before its end: the server sees a reset.
    fn cut(&mut self, end: TunnelEnd) {
        if let Some(socket) = self.connection.stream.tcp() {
            reset_on_close(socket);
        }
        self.finish(end);
    }

    fn finish(&mut self, end: TunnelEnd) {
        self.state.timer.stop();
        self.out.clear();
        self.state.queued.set(0);
        self.state.end = Some(end);
    }
}

/// Bytes that the server's kernel has not acknowledged, with those queued here.
fn bytes_on_the_way(connection: &ServerConnection, out: &Outbox) -> usize {
    let socket = connection.stream.tcp();
    let sent = socket.and_then(|socket| unacknowledged_bytes(socket).ok());
    out.bytes() + sent.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use adit_tls::stream::{ByteStream, PeerAddr, Socket};
    use futures_util::poll;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::Instant;

    use super::*;
    use crate::endpoint::Endpoint;

    /// An endpoint, and the server's end of its connection.
    async fn pair(early: &'static [u8]) -> (Endpoint, TcpStream, Arc<ProcessBudget>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap());
        let (near, far) = tokio::join!(near, listener.accept());
        let (near, (far, _address)) = (near.unwrap(), far.unwrap());
        let peer = PeerAddr::Tcp(near.peer_addr().unwrap());
        let budget = Arc::new(ProcessBudget::new(1 << 30));
        let endpoint = Endpoint::on_server(ServerConnection {
            stream: Box::new(ByteStream::Plain(Socket::Tcp(near), peer)),
            early: Bytes::from_static(early),
            silence_max: Duration::from_secs(300),
            budget: Arc::clone(&budget),
            watch: Arc::default(),
        });
        (endpoint, far, budget)
    }

    /// The next event, while the endpoint's timers and writes run as in a copy.
    async fn next(endpoint: &mut Endpoint) -> Incoming {
        std::future::poll_fn(|cx| {
            let event = endpoint.poll_recv(cx);
            endpoint.poll_flush(cx);
            event
        })
        .await
    }

    #[tokio::test]
    async fn both_ends_come_in_order_and_early_bytes_first() {
        let (mut endpoint, mut far, budget) = pair(b"220 ").await;
        far.write_all(b"ready").await.unwrap();
        let mut received = Vec::new();
        while received.len() < 9 {
            match next(&mut endpoint).await {
                Incoming::Data(bytes) => {
                    received.extend_from_slice(&bytes);
                    endpoint.drained(bytes.len());
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(received, b"220 ready");
        far.shutdown().await.unwrap();
        assert_eq!(next(&mut endpoint).await, Incoming::PeerFin);
        endpoint.send(Bytes::from_static(b"quit"));
        endpoint.fin();
        let closed = TunnelEnd::Closed {
            error: String::new(),
        };
        assert_eq!(next(&mut endpoint).await, Incoming::Ended(closed));
        let mut rest = Vec::new();
        far.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"quit");
        drop(endpoint);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[tokio::test]
    async fn an_endpoint_that_is_dropped_resets_the_server_and_a_reset_is_no_end_of_file() {
        let (endpoint, mut far, budget) = pair(b"early").await;
        drop(endpoint);
        assert!(far.read(&mut [0]).await.is_err());
        assert_eq!(budget.used_bytes(), 0);

        let (mut endpoint, far, _budget) = pair(b"").await;
        reset_on_close(&far);
        drop(far);
        let end = next(&mut endpoint).await;
        assert!(
            matches!(&end, Incoming::Ended(TunnelEnd::Reset { .. })),
            "{end:?}"
        );
    }

    /// A server that reads nothing: the endpoint takes no more at some point, and what it holds is counted.
    #[tokio::test]
    async fn a_server_that_reads_nothing_holds_up_the_endpoint() {
        let (mut endpoint, _far, budget) = pair(b"").await;
        let mut sent = 0;
        while poll!(std::future::poll_fn(|cx| endpoint.poll_ready(cx))).is_ready() {
            endpoint.send(Bytes::from(vec![0; 64 * 1024]));
            std::future::poll_fn(|cx| {
                endpoint.poll_flush(cx);
                Poll::Ready(())
            })
            .await;
            sent += 1;
            assert!(sent < 1000, "no end of it");
        }
        assert!(
            budget.queued_bytes() >= 256 * 1024,
            "{}",
            budget.queued_bytes()
        );
        drop(endpoint);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_closed_tunnel_without_a_byte_ends_after_its_time() {
        let (mut endpoint, mut far, _budget) = pair(b"").await;
        far.shutdown().await.unwrap();
        assert_eq!(next(&mut endpoint).await, Incoming::PeerFin);
        let start = Instant::now();
        assert_eq!(
            next(&mut endpoint).await,
            Incoming::Ended(TunnelEnd::HalfClosedIdle)
        );
        assert!(start.elapsed() >= Duration::from_secs(300));
    }
}
