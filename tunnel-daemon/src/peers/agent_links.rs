//! To how many servers agents are told to connect: fewer than all while every server reaches every agent anyway.

use std::sync::Arc;
use std::time::Duration;

use adit_core::registry::Registry;
use adit_server::backend::AgentLinks;
use adit_server::router::Router;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Agents are told the smaller number once all servers have been peers for this long.
const ALL_LIVE_FOR: Duration = Duration::from_secs(60);
/// A server that leaves is replaced within this time of its signal, or agents are told to connect to all again.
pub(super) const REPLACED_WITHIN: Duration = Duration::from_secs(60);
/// A server that has started repeats for so long what its peers tell agents.
const REPEATS_FOR: Duration = Duration::from_secs(120);
/// Agents of a server that has started wait for so long until its peers have told it.
const TOLD_WITHIN: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct AnnouncedCount {
    pub(super) configured: i64,
    pub(super) leases: watch::Receiver<usize>,
    /// Servers that each agent connects to while all are live.
    pub(super) links: i64,
    /// Number of servers that ask this one.
    pub(super) asking: Box<dyn Fn() -> usize + Send>,
    /// Number of servers that have left in the last [`REPLACED_WITHIN`] and are not replaced.
    pub(super) left: Box<dyn Fn() -> usize + Send>,
    pub(super) told: watch::Sender<AgentLinks>,
}

/// What [`AnnouncedCount`] remembers.
struct Seen {
    started: Instant,
    /// Since when all servers have been peers.
    all_since: Option<Instant>,
    /// When all others asked this one.
    asked_by_all: Option<Instant>,
    /// All peers told agents to connect to few when they were linked.
    peers_told_few: bool,
}

impl AnnouncedCount {
    /// Looks every second. A server that leaves in order changes nothing while it is replaced, and one that has started says what all
    /// others say: else agents would look for a further server with each one that is replaced.
    pub(super) async fn follow(self, router: Arc<Router>) {
        const EVERY: Duration = Duration::from_secs(1);
        const SOON: Duration = Duration::from_millis(50);
        let mut seen = Seen {
            started: Instant::now(),
            all_since: None,
            asked_by_all: None,
            peers_told_few: false,
        };
        loop {
            let links = self.look(&router, &mut seen);
            let told = &self.told;
            told.send_if_modified(|told| std::mem::replace(told, links) != links);
            sleep(if links == AgentLinks::Unknown {
                SOON
            } else {
                EVERY
            })
            .await;
        }
    }

    fn look(&self, router: &Router, seen: &mut Seen) -> AgentLinks {
        let leases = i64::try_from(*self.leases.borrow()).unwrap_or(i64::MAX);
        let servers = self.configured.max(leases);
        let are_all =
            |others: usize| i64::try_from(others).is_ok_and(|others| others + 1 >= servers);
        let now = Instant::now();
        let is_recent = |at: Instant, within: Duration| now.duration_since(at) < within;

        let live = router.with_registry(Registry::complete_peers);
        let reaches_all = live > 0 && are_all(live + (self.left)());
        // Both ways: agents that keep this server must be reachable from the others. One that leaves asks no more.
        if are_all((self.asking)()) {
            seen.asked_by_all = Some(now);
        }
        let is_reached = seen
            .asked_by_all
            .is_some_and(|at| is_recent(at, REPLACED_WITHIN));
        seen.all_since = (reaches_all && is_reached).then(|| seen.all_since.unwrap_or(now));
        let have_lasted = seen
            .all_since
            .is_some_and(|since| !is_recent(since, ALL_LIVE_FOR));

        // The others ask this server as soon as they know that it is back.
        let tell_few = router.peers().iter().all(|peer| peer.agent_links.is_some());
        seen.peers_told_few = reaches_all
            && is_recent(seen.started, REPEATS_FOR)
            && (tell_few || seen.peers_told_few);

        let is_unknown = *self.told.borrow() == AgentLinks::Unknown;
        if have_lasted || seen.peers_told_few {
            AgentLinks::ToFew(self.links)
        } else if is_unknown && tell_few && is_recent(seen.started, TOLD_WITHIN) {
            AgentLinks::Unknown
        } else {
            AgentLinks::ToAll
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use adit_core::ids::ServerId;
    use adit_core::peer::Forward;
    use adit_core::registry::Strategies;
    use adit_net::tasks::Tasks;
    use adit_server::router::{Asking, DialLimits, PeerAnswer, PeerOpener, RegisteredPeer};
    use adit_telemetry::ServerMetrics;
    use adit_telemetry::labels::PeerDirection;

    use super::*;

    const FEW: AgentLinks = AgentLinks::ToFew(2);

    /// A peer whose dials nobody makes.
    struct Nobody;

    impl PeerOpener for Nobody {
        fn open<'a>(&'a self, _: &'a str, _: &'a str, _: Forward) -> Asking<'a> {
            Box::pin(std::future::ready(PeerAnswer::NotAsked))
        }
    }

    /// One of five servers, which four others ask.
    struct World {
        router: Arc<Router>,
        leases: watch::Sender<usize>,
        asking: Arc<AtomicUsize>,
        left: Arc<AtomicUsize>,
        told: watch::Receiver<AgentLinks>,
        _tasks: Tasks,
    }

    impl World {
        fn start() -> Self {
            let limits = DialLimits {
                pending_max: 1,
                timeout: None,
                dead_after: Duration::from_secs(8),
            };
            let router = Router::new(Registry::new(Strategies::default()), limits);
            let (leases, leased) = watch::channel(5);
            let (telling, told) = watch::channel(AgentLinks::Unknown);
            let (asking, left) = (Arc::new(AtomicUsize::new(4)), Arc::default());
            let reads = |number: &Arc<AtomicUsize>| {
                let number = Arc::clone(number);
                Box::new(move || number.load(Relaxed))
            };
            let count = AnnouncedCount {
                configured: 1,
                leases: leased,
                links: 2,
                asking: reads(&asking),
                left: reads(&left),
                told: telling,
            };
            let tasks = Tasks::new(1);
            tasks.spawn_always("peer-count", count.follow(Arc::clone(&router)));
            Self {
                router,
                leases,
                asking,
                left,
                told,
                _tasks: tasks,
            }
        }

        /// Peers, the last of which tells agents this.
        fn join(&self, names: &[&str], last: Option<i64>) -> Vec<RegisteredPeer> {
            let metrics = ServerMetrics::new(&["default"]);
            let join = |(number, name): (usize, &&str)| {
                let series = metrics.adit().peer(name, PeerDirection::To);
                let tells = if number + 1 == names.len() {
                    last
                } else {
                    Some(2)
                };
                let peer = self.router.register_peer(
                    ServerId::new(name),
                    false,
                    tells,
                    Arc::new(Nobody),
                    series,
                );
                let peer = peer.expect("there is room");
                peer.announced(std::iter::empty(), 0, true)
                    .expect("no keys");
                peer
            };
            names.iter().enumerate().map(join).collect()
        }

        async fn tells(&self, expected: AgentLinks, why: &str) {
            sleep(Duration::from_secs(2)).await;
            assert_eq!(*self.told.borrow(), expected, "{why}");
        }
    }

    /// Agents connect to two of five servers once all five have known each other for a minute, and to all again as soon as one
    /// is missing, but for one that has left to be replaced.
    ///
    /// Limit (times): A server that shuts down, until peers tell agents to connect to all | 60 s from its signal
    #[tokio::test(start_paused = true)]
    async fn agents_are_told_a_smaller_count_only_while_all_servers_are_peers() {
        let world = World::start();
        let mut peers = world.join(&["a", "b", "c"], None);
        sleep(2 * REPEATS_FOR).await;
        let all = AgentLinks::ToAll;
        world
            .tells(all, "one is no peer: it may be upstream's")
            .await;
        peers.extend(world.join(&["d"], None));
        sleep(ALL_LIVE_FOR / 2).await;
        world.tells(all, "not for long").await;
        sleep(ALL_LIVE_FOR).await;
        world.tells(FEW, "all have known each other").await;
        world.leases.send_replace(6);
        world.tells(all, "a sixth server is no peer yet").await;
        world.leases.send_replace(5);
        sleep(2 * ALL_LIVE_FOR).await;
        world.tells(FEW, "the lease has ended").await;

        world.asking.store(3, Relaxed);
        world.tells(FEW, "it shuts down").await;
        world.left.store(1, Relaxed);
        peers.pop();
        world.tells(FEW, "it is being replaced").await;
        sleep(REPLACED_WITHIN).await;
        world.tells(all, "nobody asks in its place").await;
        world.asking.store(4, Relaxed);
        sleep(2 * ALL_LIVE_FOR).await;
        world.tells(FEW, "it asks again").await;
        world.left.store(0, Relaxed);
        world.tells(all, "it does not answer").await;
    }

    /// A server that has started says what its peers say, once all of them are linked, and for two minutes. Until then agents wait,
    /// for a second at most, and not where a peer says something else.
    ///
    /// Limit (times): Agents of a server that has just started | wait up to 1 s for what its peers tell agents, which it repeats for
    /// 2 min
    #[tokio::test(start_paused = true)]
    async fn a_new_server_tells_agents_the_count_of_its_peers() {
        let world = World::start();
        world.asking.store(0, Relaxed);
        let mut peers = world.join(&["a", "b", "c"], Some(2));
        sleep(TOLD_WITHIN / 2).await;
        assert_eq!(*world.told.borrow(), AgentLinks::Unknown);
        peers.extend(world.join(&["d"], Some(2)));
        sleep(TOLD_WITHIN / 4).await;
        assert_eq!(*world.told.borrow(), FEW);
        peers.pop();
        world.left.store(1, Relaxed);
        world.tells(FEW, "it is being replaced").await;
        peers.extend(world.join(&["e"], None));
        world.left.store(0, Relaxed);
        world.tells(FEW, "as before").await;
        sleep(REPEATS_FOR).await;
        world
            .tells(AgentLinks::ToAll, "the others do not reach it")
            .await;

        let world = World::start();
        let _peers = world.join(&["a", "b", "c"], None);
        sleep(TOLD_WITHIN / 4).await;
        assert_eq!(*world.told.borrow(), AgentLinks::ToAll);

        let world = World::start();
        sleep(TOLD_WITHIN / 2).await;
        assert_eq!(*world.told.borrow(), AgentLinks::Unknown);
        sleep(TOLD_WITHIN * 3 / 4).await;
        assert_eq!(*world.told.borrow(), AgentLinks::ToAll);
    }
}
