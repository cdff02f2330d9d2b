//! State shared by all links of an agent, with the dials that they count.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use adit_core::ids::{AgentId, ServerId};
use adit_core::session::{Isolation, ProcessBudget};
use adit_core::wire::packet::Keys;

use adit_net::dial::{DialError, Dialer};
use adit_net::tasks::Tasks;
use adit_telemetry::labels::Path;
use adit_telemetry::{AgentMetrics, TunnelEntry, TunnelFacts, TunnelSide};
use adit_tls::stream::Socket;
use adit_tunnel::lane::LaneRoom;
use adit_tunnel::{LaneWatch, RawLaneRelay};

/// A running dial.
pub type Dialing<'a> = Pin<Box<dyn Future<Output = Result<Socket, DialError>> + Send + 'a>>;

/// Opens connections to targets.
pub trait TargetDialer: Send + Sync {
    /// Connects to `address`, a host and a port as sent by the client. `protocol` is the dial's; Konnectivity has only `tcp`. A
    /// dropped call has no effect.
    fn dial<'a>(&'a self, protocol: &'a str, address: &'a str) -> Dialing<'a>;
}

/// Dials over TCP, to names and addresses on the allow-list.
impl TargetDialer for Dialer {
    fn dial<'a>(&'a self, protocol: &'a str, address: &'a str) -> Dialing<'a> {
        Box::pin(async move { Ok(Socket::Tcp(Self::dial(self, protocol, address).await?)) })
    }
}

/// Counts the dials of a process; an agent that drains waits for them.
#[derive(Debug, Default)]
pub struct Dials {
    under_way: AtomicUsize,
    begun: AtomicU64,
}

impl Dials {
    /// Counts one dial until the guard is dropped: its target counts as open, or it has failed.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        self.begun.fetch_add(1, Relaxed);
        self.under_way.fetch_add(1, Relaxed);
        UnderWay(Arc::clone(self))
    }

    /// Number of pending dials.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.under_way.load(Relaxed)
    }

    /// Number of dials since the process began; comparing two readings also reveals short dials.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.begun.load(Relaxed)
    }
}

/// A pending dial.
#[derive(Debug)]
pub struct UnderWay(Arc<Dials>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Relaxed);
    }
}

/// What a link tells its owner where both ends are servers: this one asks the other for tunnels, and dials nothing for it.
pub trait AskerEvents: Send + Sync {
    /// The other server has announced keys. Must not block.
    fn keys(&self, keys: Keys);
    /// The other server asks for a dial, by this packet or frame. The link must end.
    fn asked(&self, by: &'static str);
}

/// State shared by all links of an agent.
#[derive(Clone)]
pub struct LinkContext {
    /// The id of this agent.
    pub agent: AgentId,
    /// Dials targets.
    pub dialer: Arc<dyn TargetDialer>,
    /// How far one tunnel may affect the others.
    pub isolation: Isolation,
    /// Budget of bytes held in the whole process.
    pub budget: Arc<ProcessBudget>,
    /// Log when the queue towards a target is full.
    pub warn_on_channel_limit: bool,
    /// Counters.
    pub metrics: AgentMetrics,
    /// Runs dials and tunnels.
    pub tasks: Tasks,
    /// Counts dials of targets, over links and lanes.
    pub dials: Arc<Dials>,
    /// Slots for lanes in the whole process.
    pub lane_room: Arc<LaneRoom>,
    /// Checks stalled lanes and lanes without a link.
    pub lane_watch: Arc<LaneWatch>,
    /// Relays tunnels on raw lanes; `None` without lanes.
    pub relay: Option<Arc<RawLaneRelay>>,
    /// The owner of a link between servers.
    pub asker: Option<Arc<dyn AskerEvents>>,
}

impl LinkContext {
    /// Adds a tunnel to a target to the table of open tunnels.
    pub fn enter(&self, server: &ServerId, destination: &str, path: Path) -> TunnelEntry {
        let table = self.metrics.adit().open_tunnels();
        table.enter(&TunnelFacts {
            side: TunnelSide::Target,
            peer: server.as_str(),
            principal: None,
            link: 0,
            destination,
            path,
        })
    }
}
