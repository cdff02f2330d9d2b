//! What a server does now and then.

use std::pin::pin;

use adit_core::ids::AgentId;
use adit_core::lane::{FrameReader, LaneRole};
use adit_core::registry::Registry;
use adit_core::session::ProcessBudget;
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::PeerVersion;
use bytes::Bytes;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::*;
use adit_host::descriptors::Descriptors;
use adit_server::router::{DialLimits, LinkInfo};
use adit_tls::agent_identity::AgentIdentity;
use adit_tls::stream::PeerAddr;
use adit_tunnel::lane::{Lane, LaneRoom};
use adit_tunnel::{LanePlaces, PoolSettings};

/// The agent is asked for no lanes.
struct NoPlaces;

impl LanePlaces for NoPlaces {
    fn reserve(&self, _lanes: usize) -> usize {
        0
    }
}

/// Lanes of one link, at most one.
fn pool(metrics: &ServerMetrics, budget: &Arc<ProcessBudget>) -> Arc<LanePool> {
    LanePool::new(PoolSettings {
        identity: AgentIdentity::Unverified,
        rights: None,
        lanes_max: 1,
        dials_max: 1,
        silence_max: Duration::from_secs(1),
        room: Arc::new(LaneRoom::new(1, Arc::new(Descriptors::unlimited()))),
        tasks: Tasks::new(1),
        metrics: metrics.adit().clone(),
        watch: Arc::default(),
        budget: Arc::clone(budget),
        opens: None,
        places: Arc::new(NoPlaces),
    })
}

fn router() -> Arc<Router> {
    let dials = DialLimits {
        pending_max: 1,
        timeout: None,
        dead_after: Duration::from_secs(8),
    };
    Router::new(Registry::new("default".parse().unwrap()), dials)
}

/// One agent, for all of its links.
fn agent() -> LinkInfo {
    LinkInfo {
        agent: AgentId::new("agent"),
        identifiers: Identifiers::default(),
        identity: AgentIdentity::Unverified,
        credit: true,
        version: PeerVersion::default(),
        address: PeerAddr::Unix,
        dials: Arc::default(),
    }
}

/// A lane that owes the last answer is closed when the next one is asked for, so that both times are seen.
///
/// Limit (times): PING on an idle lane | every 30 s; closed if the last one is unanswered
#[tokio::test(start_paused = true)]
async fn idle_lanes_are_pinged_every_thirty_seconds() {
    let metrics = ServerMetrics::new(&[]);
    let budget = Arc::new(ProcessBudget::new(1 << 30));
    let pool = pool(&metrics, &budget);
    let router = router();
    let _link = router
        .register(agent(), 1, Some(Arc::clone(&pool)))
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap());
    let (dialed, accepted) = tokio::join!(dialed, listener.accept());
    // It never says a word.
    let _agent = dialed.unwrap();
    let (socket, frames) = (accepted.unwrap().0, FrameReader::default());
    let lane = Lane::in_clear(socket, LaneRole::Server, frames, Bytes::new());
    pool.add(lane, pool.slot().unwrap());

    // The first poll is at once, so the thirtieth is after 29 s and the sixtieth after 59 s.
    let mut keeping = pin!(idle_lanes::keep(router));
    let early = timeout(Duration::from_millis(58_500), keeping.as_mut()).await;
    assert!(early.is_err());
    assert_eq!(pool.idle_lanes(), 1);
    let late = timeout(Duration::from_secs(1), keeping.as_mut()).await;
    assert!(late.is_err());
    assert_eq!(pool.idle_lanes(), 0);
}

/// Ten thousand links would keep all else of their thread waiting for tens of milliseconds.
#[tokio::test(start_paused = true)]
async fn polling_lanes_of_many_links_yields_to_other_tasks() {
    const LINKS: usize = 65;
    let metrics = ServerMetrics::new(&[]);
    let budget = Arc::new(ProcessBudget::new(1 << 30));
    let router = router();
    let mut links = Vec::new();
    for _link in 0..LINKS {
        let entered = router.register(agent(), LINKS, Some(pool(&metrics, &budget)));
        links.push(entered.expect("it may have as many"));
    }
    let mut poll = pin!(idle_lanes::poll_all(&router, false));
    let is_pending = futures_util::poll!(poll.as_mut()).is_pending();
    assert!(is_pending, "it is in the middle of them");
    assert!(futures_util::poll!(poll.as_mut()).is_ready());
}
