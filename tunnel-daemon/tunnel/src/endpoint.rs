//! One side of a tunnel, as a frontend or a target holds it.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use adit_core::session::{Moment, ProcessBudget, Promise, TunnelEnd};
use adit_net::buffer_growth::{BufferGrowth, SocketKind};
use adit_relay::BufferSizes;
use bytes::Bytes;

use crate::channel::{Channel, DirtyList};
use crate::clock::moment;
use crate::incoming::Incoming;
use crate::lane::{Lane, RawLane};
use crate::lane_path::{LaneOwner, LanePath};
use crate::link_path::LinkPath;
use crate::server_path::{ServerConnection, ServerPath};
use adit_telemetry::labels::{Path as PathLabel, ServiceMethod};
use adit_telemetry::tunnels::PathQuality;
use adit_telemetry::{GaugeGuard, LiveTunnel, PeerSeries, ServerMetrics};

/// What observes that an endpoint's socket or stream takes bytes slower than they come.
#[derive(Clone, Debug)]
pub enum EndpointWatch {
    /// A client: its writes are measured.
    Client(ServerMetrics),
    /// A target, by its address: named in the log, once.
    Target(Arc<str>),
}

/// A write to the socket or stream that waits.
struct Stalled {
    since: Moment,
    _counted: GaugeGuard,
}

/// What carries a tunnel, for a side that supports raw lanes.
pub enum Carrier {
    /// The tunnel's bytes pass through this process.
    Endpoint(Endpoint),
    /// A lane's connection without frames, to be relayed by the kernel or a relay thread.
    RawLane(RawLane),
}

impl Carrier {
    /// Keeps the memory reserved for this tunnel until its end.
    pub fn keep(&mut self, promise: Promise) {
        match self {
            Self::Endpoint(endpoint) => endpoint.keep(promise),
            Self::RawLane(raw_lane) => raw_lane.kept.promise = Some(promise),
        }
    }

    /// The path that the tunnel takes.
    #[must_use]
    pub fn path(&self) -> PathLabel {
        match self {
            Self::Endpoint(endpoint) => endpoint.path(),
            Self::RawLane(raw_lane) => raw_lane.path(),
        }
    }
}

/// One side of a tunnel, over a link, a lane or a connection to a server. Dropping it without [`Endpoint::close`] resets the tunnel.
pub struct Endpoint {
    path: Path,
    /// Memory reserved for this tunnel.
    promise: Option<Promise>,
    growth: BufferGrowth,
    sent_bytes: u64,
    delivered_bytes: u64,
    watch: Option<EndpointWatch>,
    stalled: Option<Stalled>,
    /// Bytes in the kernel for a peer that does not read, as counted in the budget.
    kernel_bytes: u32,
    live: Option<Arc<LiveTunnel>>,
}

enum Path {
    Link(LinkPath),
    Lane(Box<LanePath>),
    Server(Box<ServerPath>),
}

impl Path {
    fn budget(&self) -> Option<&Arc<ProcessBudget>> {
        match self {
            Self::Link(link) => link.budget(),
            Self::Lane(lane) => Some(&lane.state.budget),
            Self::Server(server) => Some(&server.state.budget),
        }
    }
}

impl Endpoint {
    /// An endpoint on the link that owns `dirty_list`, and the channel for that link.
    #[must_use]
    pub fn new(dirty_list: &Arc<DirtyList>) -> (Self, Arc<Channel>) {
        let channel = Channel::new(Arc::clone(dirty_list));
        let path = Path::Link(LinkPath::new(Arc::clone(&channel)));
        (Self::over(path), channel)
    }

    /// An endpoint on a lane whose tunnel is open. `owner` gets the lane back.
    #[must_use]
    pub fn on_lane(lane: Lane, owner: Arc<dyn LaneOwner>) -> Self {
        Self::over(Path::Lane(Box::new(LanePath::new(lane, owner))))
    }

    /// An endpoint on a connection of its own to a server.
    #[must_use]
    pub fn on_server(connection: ServerConnection) -> Self {
        Self::over(Path::Server(Box::new(ServerPath::new(connection))))
    }

    /// Counts a tunnel between servers, from now to its end.
    #[must_use]
    pub fn of_peer(mut self, peer: Arc<PeerSeries>) -> Self {
        if let Path::Lane(lane) = &mut self.path {
            peer.tunnels.inc();
            lane.peer = Some(peer);
        }
        self
    }

    fn over(path: Path) -> Self {
        Self {
            path,
            promise: None,
            growth: BufferGrowth::default(),
            sent_bytes: 0,
            delivered_bytes: 0,
            watch: None,
            stalled: None,
            kernel_bytes: 0,
            live: None,
        }
    }

    /// Keeps the memory reserved for this tunnel until its end.
    pub fn keep(&mut self, promise: Promise) {
        self.promise = Some(promise);
    }

    /// The path that the tunnel takes.
    #[must_use]
    pub fn path(&self) -> PathLabel {
        match &self.path {
            Path::Link(_) => PathLabel::Link,
            Path::Lane(lane) if lane.peer.is_some() => PathLabel::Peer,
            Path::Lane(_) => PathLabel::Lane,
            Path::Server(_) => PathLabel::Server,
        }
    }

    /// Ready when the endpoint accepts more bytes. An ended tunnel is always ready.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.path {
            Path::Link(link) => link.poll_ready(cx),
            Path::Lane(lane) => lane.poll_ready(cx),
            Path::Server(server) => server.poll_ready(cx),
        }
    }

    /// Bytes that may be read for this endpoint at once; bounded only while the budget is short.
    #[must_use]
    pub fn read_max(&self) -> usize {
        if !self.is_short_of_memory() {
            return usize::MAX;
        }
        match &self.path {
            Path::Link(link) => link.room(),
            Path::Lane(lane) => lane.room(),
            Path::Server(server) => server.room(),
        }
    }

    /// Call it while [`Self::poll_ready`] is pending, if this side reads a socket. Ready every few seconds, when the socket
    /// should be checked; yields whether bytes were taken since the last check.
    pub fn poll_check(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        match &mut self.path {
            Path::Link(link) => link.poll_check(cx),
            Path::Lane(lane) => lane.state.poll_check(),
            Path::Server(server) => server.state.poll_check(),
        }
    }

    /// The socket has ended behind bytes not read yet: from here on the tunnel counts as half-closed.
    pub fn end_waits(&mut self) {
        match &mut self.path {
            Path::Link(link) => link.end_waits(),
            Path::Lane(lane) => lane.state.end_waits = true,
            Path::Server(server) => server.state.end_waits = true,
        }
    }

    /// Hands over bytes. Call [`Self::poll_ready`] first; the bound is advisory. Call [`Self::poll_flush`] before the task
    /// sleeps.
    pub fn send(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.sent_bytes += bytes.len() as u64;
            self.report_bytes();
            match &mut self.path {
                Path::Link(link) => link.send(bytes),
                Path::Lane(lane) => lane.send(bytes),
                Path::Server(server) => server.send(bytes),
            }
        }
    }

    /// Sends what was handed over, as far as possible now, and handles the tunnel's timers. Call it whenever the task that owns
    /// the endpoint is polled.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) {
        let sizes = self.buffer_sizes(SocketKind::Tcp);
        match &mut self.path {
            // The link's task does all of that.
            Path::Link(_) => (),
            Path::Lane(lane) => {
                lane.fit_buffers(sizes);
                lane.poll_flush(cx);
            }
            Path::Server(server) => {
                server.fit_buffers(sizes);
                server.poll_flush(cx);
            }
        }
        self.growth
            .poll_idle(cx, self.sent_bytes + self.delivered_bytes);
        if let Some(live) = &self.live
            && live.is_asked()
            && let Some(quality) = self.quality()
        {
            live.report_quality(quality);
        }
    }

    /// Reports to the table of open tunnels: bytes as they move, and path quality in [`Self::poll_flush`] when requested.
    pub fn report_to(&mut self, live: Arc<LiveTunnel>) {
        self.live = Some(live);
        self.report_bytes();
    }

    /// Two plain stores: this task is the only writer.
    #[inline]
    fn report_bytes(&self) {
        if let Some(live) = &self.live {
            live.moved(self.sent_bytes, self.delivered_bytes);
        }
    }

    /// Quality of the path to the other end, if this tunnel has a connection of its own.
    fn quality(&self) -> Option<PathQuality> {
        match &self.path {
            Path::Link(_) => None,
            Path::Lane(lane) => lane.quality(),
            Path::Server(server) => server.quality(),
        }
    }

    /// Sends EOF: this side sends no more bytes.
    pub fn fin(&mut self) {
        match &mut self.path {
            Path::Link(link) => link.fin(),
            Path::Lane(lane) => lane.fin(),
            Path::Server(server) => server.fin(),
        }
    }

    /// Closes the tunnel once everything sent so far has reached the peer.
    pub fn close(&mut self) {
        self.close_with("");
    }

    /// Like [`Self::close`], with a text for the other end where the protocol carries one.
    pub fn close_with(&mut self, text: &str) {
        match &mut self.path {
            Path::Link(link) => link.close(text),
            Path::Lane(lane) => lane.close(text),
            Path::Server(server) => server.fin(),
        }
    }

    /// The next event for this side.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        match &mut self.path {
            Path::Link(link) => link.poll_recv(cx),
            Path::Lane(lane) => lane.poll_recv(cx),
            Path::Server(server) => server.poll_recv(cx),
        }
    }

    /// Whether this side should give up undelivered bytes. The task is woken when that changes.
    pub fn poll_aborted(&mut self, cx: &mut Context<'_>) -> bool {
        match &mut self.path {
            Path::Link(link) => link.poll_aborted(cx),
            Path::Lane(lane) => lane.poll_aborted(cx),
            Path::Server(server) => server.poll_aborted(cx),
        }
    }

    /// How the tunnel ended, if it has; an abort replaces a clean end.
    #[must_use]
    pub fn last_end(&self) -> Option<TunnelEnd> {
        match &self.path {
            Path::Link(link) => link.last_end(),
            Path::Lane(lane) => lane.state.end.clone(),
            Path::Server(server) => server.state.end.clone(),
        }
    }

    /// Reports stalls to `watch` from now on.
    pub fn watch(&mut self, watch: EndpointWatch) {
        self.watch = Some(watch);
    }

    /// Whether memory is short, so that tunnels get small buffers.
    #[must_use]
    pub fn is_short_of_memory(&self) -> bool {
        let budget = self.path.budget();
        budget.is_some_and(|budget| budget.is_half_full())
    }

    /// Buffer sizes for this tunnel's sockets, at the current use of the budget.
    pub fn buffer_sizes(&mut self, kind: SocketKind) -> BufferSizes {
        let moved = self.sent_bytes + self.delivered_bytes;
        self.path.budget().map_or(BufferSizes::Kernel, |budget| {
            self.growth.sizes(budget, moved, kind)
        })
    }

    /// Counts `bytes` waiting in the kernel in the budget.
    fn count_kernel(&mut self, bytes: u32) {
        let before = std::mem::replace(&mut self.kernel_bytes, bytes);
        if bytes != before
            && let Some(budget) = self.path.budget()
        {
            budget.enter_kernel(bytes.into());
            budget.leave_kernel(before.into());
        }
    }

    /// Bytes received earlier wait for this side's socket or stream, until [`Self::drained`] is called. Another `kernel_bytes`,
    /// which the socket has taken, wait in the kernel.
    pub fn stalled(&mut self, kernel_bytes: usize) {
        self.count_kernel(u32::try_from(kernel_bytes).unwrap_or(u32::MAX));
        match &self.path {
            Path::Link(_) => (),
            Path::Lane(lane) => lane.state.probe.set_stalled(true),
            Path::Server(server) => server.state.probe.set_stalled(true),
        }
        match &self.watch {
            Some(EndpointWatch::Client(metrics)) if self.stalled.is_none() => {
                // Upstream's gauge: such a client would block the reader of the agent's stream there.
                self.stalled = Some(Stalled {
                    since: moment(),
                    _counted: metrics
                        .full_receive_channels
                        .of(ServiceMethod::Connect)
                        .guard(),
                });
            }
            Some(EndpointWatch::Target(address)) => {
                tracing::warn!(
                    target_address = &**address,
                    "queue towards a target is full: it takes bytes slower than they come"
                );
                self.watch = None;
            }
            Some(EndpointWatch::Client(_)) | None => (),
        }
    }

    /// How long bytes have waited for this side's client without one being taken; zero if none wait, or without a watch.
    #[must_use]
    pub fn stalled_for(&self) -> Duration {
        let stalled = self.stalled.as_ref();
        stalled.map_or(Duration::ZERO, |stalled| moment().since(stalled.since))
    }

    /// This side's socket or stream took `bytes` received earlier.
    pub fn drained(&mut self, bytes: usize) {
        if let Some(EndpointWatch::Client(metrics)) = &self.watch
            && bytes > 0
        {
            // The clock is read only for a write that waited.
            let waited = self.stalled.take();
            let waited = waited.map_or(Duration::ZERO, |stalled| moment().since(stalled.since));
            metrics.frontend_write.observe(waited);
        }
        if bytes > 0 {
            self.delivered(bytes);
            self.count_kernel(0);
        }
        self.discarded(bytes);
    }

    /// Counts `bytes` received earlier as delivered, without making room: the tunnel is over.
    pub fn delivered(&mut self, bytes: usize) {
        self.delivered_bytes += bytes as u64;
        self.report_bytes();
    }

    /// `bytes` received earlier will not be delivered: this side's socket takes no more.
    pub fn discarded(&mut self, bytes: usize) {
        match &mut self.path {
            Path::Link(link) => link.drained(bytes),
            Path::Lane(lane) => lane.state.drained(bytes),
            Path::Server(server) => server.state.drained(bytes),
        }
    }

    /// Completes when [`Self::poll_recv`] has an event; takes none.
    pub async fn readable(&mut self) {
        std::future::poll_fn(|cx| match &mut self.path {
            Path::Link(link) => link.poll_readable(cx),
            Path::Lane(lane) => lane.poll_readable(cx),
            Path::Server(server) => server.poll_readable(cx),
        })
        .await;
    }

    /// Whether no event waits for this side.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        match &self.path {
            Path::Link(link) => link.is_idle(),
            Path::Lane(lane) => lane.is_idle(),
            Path::Server(server) => server.is_idle(),
        }
    }

    /// Bytes handed over, and bytes that this side's socket or stream took, so far.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.sent_bytes, self.delivered_bytes)
    }

    /// Waits for the next event.
    pub async fn recv(&mut self) -> Incoming {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Waits until the endpoint accepts more bytes.
    pub async fn ready(&mut self) {
        std::future::poll_fn(|cx| self.poll_ready(cx)).await;
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Path::Lane(lane) = &self.path
            && let Some(peer) = &lane.peer
        {
            peer.tunnels.dec();
            peer.bytes.inc_by(self.sent_bytes + self.delivered_bytes);
        }
        self.count_kernel(0);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;
    use adit_telemetry::tunnels::{OpenTunnels, TunnelFacts, TunnelSide};

    /// One poll may move a MiB, and another may follow at once.
    #[tokio::test]
    async fn moved_bytes_are_counted_at_once_not_at_the_end_of_a_poll() {
        let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
        endpoint.send(Bytes::from_static(b"early"));
        let entry = Arc::new(OpenTunnels::default()).enter(&TunnelFacts {
            side: TunnelSide::Target,
            peer: "server",
            principal: None,
            link: 0,
            destination: "a:1",
            path: endpoint.path(),
        });
        let live = entry.live();
        endpoint.report_to(Arc::clone(&live));
        assert_eq!(live.bytes(), (0, 5));
        endpoint.send(Bytes::from_static(b"more"));
        assert_eq!(live.bytes(), (0, 9));
        channel.deliver(Bytes::from_static(b"down"));
        assert!(matches!(endpoint.recv().await, Incoming::Data(_)));
        assert_eq!(live.bytes(), (0, 9), "the socket has taken none yet");
        endpoint.drained(3);
        assert_eq!(live.bytes(), (3, 9));
        endpoint.discarded(1);
        assert_eq!(live.bytes(), (3, 9));
    }

    /// Limit (memory): Bytes queued from an endpoint towards its link or lane
    #[tokio::test]
    async fn an_endpoint_may_be_256_kibibytes_ahead_of_its_link() {
        let dirty_list = Arc::new(DirtyList::default());
        let (mut endpoint, channel) = Endpoint::new(&dirty_list);
        let mut ahead = 0;
        while poll!(std::future::poll_fn(|cx| endpoint.poll_ready(cx))).is_ready() {
            endpoint.send(Bytes::from(vec![0; 4096]));
            ahead += 4096;
            assert!(ahead <= 1 << 20, "no end of it");
        }
        assert_eq!(ahead, 256 * 1024);
        let sent = channel.take_up().expect("queued").len();
        channel.release_up(sent, 1);
        let ready = poll!(std::future::poll_fn(|cx| endpoint.poll_ready(cx)));
        assert!(ready.is_ready(), "what the link sent makes room");
    }

    /// Limit (memory): Tunnels while `--process-budget` is in use
    /// Limit (memory): Kernel socket buffers of paused clients and targets | counted by `--process-budget`; 16 KiB each
    /// from half of it on
    #[tokio::test]
    async fn an_endpoint_may_be_16_kibibytes_ahead_while_memory_is_short() {
        let budget = Arc::new(ProcessBudget::new(1 << 20));
        let dirty_list = Arc::new(DirtyList::default());
        dirty_list.count_in(&budget);
        let (mut endpoint, channel) = Endpoint::new(&dirty_list);
        let ready = async |endpoint: &mut Endpoint| {
            poll!(std::future::poll_fn(|cx| endpoint.poll_ready(cx))).is_ready()
        };
        assert!(!endpoint.is_short_of_memory() && endpoint.read_max() == usize::MAX);
        budget.hold((1 << 19) + 1);
        assert!(endpoint.is_short_of_memory());
        assert_eq!(endpoint.read_max(), 16 * 1024);
        endpoint.send(Bytes::from(vec![0; 16 * 1024]));
        assert!(!ready(&mut endpoint).await);
        assert_eq!(budget.queued_bytes(), 16 * 1024);
        budget.release((1 << 19) + 1);
        assert!(ready(&mut endpoint).await, "there is room again");
        endpoint.send(Bytes::from_static(b"more"));
        let sent = channel.take_up().expect("queued").len();
        channel.release_up(sent, 1);
        // Queued bytes are the link's to count until its stream has taken them.
        assert_eq!(budget.queued_bytes(), 16 * 1024 + 4);
        budget.dequeue(sent as u64);
        endpoint.stalled(1000);
        endpoint.stalled(3000);
        assert_eq!(budget.kernel_bytes(), 3000);
        endpoint.drained(1);
        assert_eq!(budget.kernel_bytes(), 0);
        endpoint.stalled(1000);
        drop((endpoint, channel));
        dirty_list.close();
        assert_eq!(budget.used_bytes(), 0, "all is given back");
    }

    /// A chunk of one byte takes as much memory as 70 bytes.
    ///
    /// Limit (memory): Bytes queued from an endpoint towards its link or lane
    #[tokio::test]
    async fn an_endpoint_may_be_4096_pieces_ahead_of_its_link_however_small_they_are() {
        let (mut endpoint, channel) = Endpoint::new(&Arc::new(DirtyList::default()));
        let mut ahead = 0;
        while poll!(std::future::poll_fn(|cx| endpoint.poll_ready(cx))).is_ready() {
            endpoint.send(Bytes::from_static(b"x"));
            ahead += 1;
            assert!(ahead <= 1 << 20, "no end of it");
        }
        assert_eq!(ahead, 4096);
        channel.release_up(1, 1);
        let ready = poll!(std::future::poll_fn(|cx| endpoint.poll_ready(cx)));
        assert!(ready.is_ready(), "what the link sent makes room");
    }

    /// The time runs from the first write that waits until a write that does not, whatever happens in between.
    #[tokio::test(start_paused = true)]
    async fn the_stall_time_of_a_client_is_measured() {
        let (mut endpoint, _channel) = Endpoint::new(&Arc::new(DirtyList::default()));
        endpoint.stalled(0);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(endpoint.stalled_for(), Duration::ZERO, "nobody watches");
        endpoint.watch(EndpointWatch::Client(ServerMetrics::new(&["default"])));
        endpoint.stalled(0);
        tokio::time::advance(Duration::from_secs(3)).await;
        endpoint.stalled(0);
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(endpoint.stalled_for(), Duration::from_secs(7));
        endpoint.drained(1);
        assert_eq!(endpoint.stalled_for(), Duration::ZERO);
    }
}
