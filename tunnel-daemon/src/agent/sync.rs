//! When and where the agent tries for another server connection. Pure: time and chance are arguments.
//!
//! One address may lead to several servers (a load balancer), and several addresses may be given. The agent
//! wants as many distinct servers as it was told there are, and every address to lead to a server it holds.

use std::collections::BTreeSet;
use std::time::Duration;

use adit_core::ids::ServerId;
use tokio::time::Instant;

use crate::config::plan::CountSource;

/// Attempts in a row that found only known servers before they are treated like failures.
const DUPLICATES_FREE: u32 = 10;
/// Failures grow the pause by this factor (upstream's).
const BACKOFF_FACTOR: f64 = 1.5;
/// Share of a pause that is added at random (upstream's).
const JITTER: f64 = 0.1;
/// For so long after a lease has appeared, attempts that find only known servers come at the shortest pause (rule 54).
const EAGER_FOR: Duration = Duration::from_secs(30);

/// How often attempts may come.
#[derive(Clone, Copy, Debug)]
pub struct SyncPolicy {
    /// Pause after an attempt that worked or found nothing to do.
    pub interval: Duration,
    /// Longest pause after failures.
    pub interval_cap: Duration,
    /// Go on trying after the count is met, at most once per `interval_cap`.
    pub forever: bool,
}

/// How an attempt ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Attempt {
    /// A server not held before; it says there are `count` of them.
    New {
        /// Who answered.
        server: ServerId,
        /// As announced; below 1 counts as 1.
        count: i64,
    },
    /// A server that is held already.
    Duplicate {
        /// Who answered.
        server: ServerId,
    },
    /// No connection.
    Failed,
}

#[derive(Debug, Default)]
struct Address {
    leads_to: Option<ServerId>,
    failures: u32,
    not_before: Option<Instant>,
    under_way: bool,
    /// The last attempt met nobody.
    is_dead: bool,
}

/// The state of one agent's search for servers.
#[derive(Debug)]
pub struct SyncState {
    policy: SyncPolicy,
    addresses: Vec<Address>,
    held: Vec<ServerId>,
    /// As a server announced it last.
    announced: usize,
    /// Servers with a lease, once they are known.
    leased: Option<BTreeSet<ServerId>>,
    source: CountSource,
    eager_until: Option<Instant>,
    duplicates: u32,
    next: usize,
    draining: bool,
}

impl SyncState {
    /// For `addresses` configured addresses (at least one).
    #[must_use]
    pub fn new(policy: SyncPolicy, addresses: usize) -> Self {
        let addresses = (0..addresses.max(1)).map(|_| Address::default()).collect();
        Self {
            policy,
            addresses,
            held: Vec::new(),
            announced: 1,
            leased: None,
            source: CountSource::default(),
            eager_until: None,
            duplicates: 0,
            next: 0,
            draining: false,
        }
    }

    /// Counts leases in this way, once they are known.
    #[must_use]
    pub fn counting(mut self, source: CountSource) -> Self {
        self.source = source;
        self
    }

    /// Servers there are, as far as known; at least 1.
    #[must_use]
    pub fn known_count(&self) -> usize {
        match (&self.leased, self.source) {
            (None, _) => self.announced,
            (Some(leased), CountSource::Leases) => leased.len().max(1),
            (Some(leased), CountSource::Larger) => leased.len().max(self.announced),
        }
    }

    /// These servers have a lease. One that is new is looked for soon: a lease says that a server is there, and not where.
    /// Whose lease has ended keeps its link. `chance` is uniform in `0..1`: many agents learn of a lease at the same time.
    pub fn leased(&mut self, servers: BTreeSet<ServerId>, now: Instant, chance: f64) {
        let is_news = |server: &ServerId| {
            let known = self
                .leased
                .as_ref()
                .is_some_and(|leased| leased.contains(server));
            !known && !self.held.contains(server)
        };
        if servers.iter().any(is_news) {
            self.eager_until = Some(now + EAGER_FOR);
            self.duplicates = 0;
            let soon = now + self.policy.interval.mul_f64(chance.clamp(0.0, 1.0));
            for address in &mut self.addresses {
                address.failures = 0;
                address.not_before = address.not_before.map(|at| at.min(soon));
            }
        }
        self.leased = Some(servers);
    }

    /// Whether there is no server left to look for.
    fn is_met(&self) -> bool {
        let all_leased = || {
            let held = |server: &ServerId| self.held.contains(server);
            self.leased
                .as_ref()
                .is_none_or(|leased| leased.iter().all(held))
        };
        self.held.len() >= self.known_count() && all_leased()
    }

    /// Whether to go on although all are held: by the flag, unless leases say that these are all.
    fn goes_on(&self) -> bool {
        self.policy.forever && self.leased.as_ref().is_none_or(BTreeSet::is_empty)
    }

    /// Servers held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Whether [`SyncState::drain`] was called.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// No further attempts: lost connections are not replaced.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// The address to try next and when, or `None` while there is nothing to try: each has one attempt at a time. One that
    /// leads to no server held keeps its own time, and none of the others waits for it.
    #[must_use]
    pub fn next_attempt(&self, now: Instant) -> Option<(usize, Instant)> {
        if self.draining {
            return None;
        }
        let met = self.is_met() && !self.goes_on();
        let first = (0..self.addresses.len())
            .map(|step| (self.next + step) % self.addresses.len())
            .filter_map(|at| {
                let address = self.addresses.get(at)?;
                let satisfied = self.satisfied(at);
                let due = address.not_before.unwrap_or(now).max(now);
                let has_no_turn = address.under_way || (met && satisfied);
                (!has_no_turn).then_some((at, due, satisfied))
            })
            .min_by_key(|(_, due, satisfied)| (*due, *satisfied));
        first.map(|(at, due, _)| (at, due))
    }

    fn satisfied(&self, at: usize) -> bool {
        self.addresses
            .get(at)
            .and_then(|address| address.leads_to.as_ref())
            .is_some_and(|server| self.held.contains(server))
    }

    /// Whether this server is held already.
    #[must_use]
    pub fn holds(&self, server: &ServerId) -> bool {
        self.held.contains(server)
    }

    /// An attempt at this address begins.
    pub fn begin(&mut self, at: usize) {
        if let Some(address) = self.addresses.get_mut(at) {
            address.under_way = true;
        }
    }

    /// Takes an attempt's outcome; `chance` is uniform in `0..1`.
    pub fn attempted(&mut self, at: usize, outcome: Attempt, now: Instant, chance: f64) {
        self.next = (at + 1) % self.addresses.len();
        let mut failed = false;
        let leads_to = match outcome {
            Attempt::New { server, count } => {
                self.announced = usize::try_from(count).unwrap_or(1).max(1);
                self.duplicates = 0;
                self.held.push(server.clone());
                Some(server)
            }
            Attempt::Duplicate { server } => {
                if self.eager_until.is_none_or(|until| now >= until) {
                    self.duplicates = self.duplicates.saturating_add(1);
                }
                failed = self.duplicates > DUPLICATES_FREE;
                Some(server)
            }
            Attempt::Failed => {
                failed = true;
                None
            }
        };
        let met = self.is_met();
        let policy = self.policy;
        let Some(address) = self.addresses.get_mut(at) else {
            return;
        };
        address.under_way = false;
        address.is_dead = leads_to.is_none();
        if leads_to.is_some() {
            address.leads_to = leads_to;
        }
        let pause = if failed {
            let steps = i32::try_from(address.failures).unwrap_or(i32::MAX).min(64);
            address.failures = address.failures.saturating_add(1);
            policy
                .interval
                .mul_f64(BACKOFF_FACTOR.powi(steps).min(1e6))
                .min(policy.interval_cap)
        } else {
            address.failures = 0;
            if met {
                policy.interval_cap.max(policy.interval)
            } else {
                policy.interval
            }
        };
        address.not_before = Some(now + pause.mul_f64(1.0 + JITTER * chance.clamp(0.0, 1.0)));
    }

    /// A held server is gone; its addresses may be tried again after one interval at most, at once if their pause was over.
    /// So may all whose last attempt led somewhere: behind a balancer the next connection may lead to it, whichever the last
    /// one led to. That others were met again and again while it was held says nothing against them now.
    pub fn lost(&mut self, server: &ServerId, now: Instant, chance: f64) {
        self.held.retain(|held| held != server);
        let soon = now
            + self
                .policy
                .interval
                .mul_f64(1.0 + JITTER * chance.clamp(0.0, 1.0));
        self.duplicates = 0;
        for address in &mut self.addresses {
            let led_there = address.leads_to.as_ref() == Some(server);
            if !address.is_dead {
                address.failures = 0;
            }
            if !address.is_dead || led_there {
                address.not_before = address.not_before.map(|at| at.min(soon));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: SyncPolicy = SyncPolicy {
        interval: Duration::from_secs(1),
        interval_cap: Duration::from_secs(10),
        forever: false,
    };

    fn server(name: &str) -> ServerId {
        ServerId::new(name)
    }

    fn new(name: &str, count: i64) -> Attempt {
        Attempt::New {
            server: server(name),
            count,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn once_the_count_is_met_nothing_is_tried() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 1);
        assert_eq!(sync.next_attempt(now), Some((0, now)));
        sync.attempted(0, new("a", 2), now, 0.0);
        assert_eq!(
            sync.next_attempt(now),
            Some((0, now + Duration::from_secs(1)))
        );
        sync.attempted(
            0,
            Attempt::Duplicate {
                server: server("a"),
            },
            now,
            0.0,
        );
        assert!(sync.next_attempt(now).is_some());
        sync.attempted(0, new("b", 2), now, 0.0);
        assert_eq!(sync.next_attempt(now), None);
        sync.lost(&server("a"), now, 0.5);
        assert!(sync.next_attempt(now).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn failures_back_off_to_the_cap_and_success_resets() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 1);
        let mut pauses = Vec::new();
        for _attempt in 0..8 {
            sync.attempted(0, Attempt::Failed, now, 0.0);
            let (_, at) = sync.next_attempt(now).unwrap();
            pauses.push((at - now).as_millis());
        }
        assert_eq!(pauses, [1000, 1500, 2250, 3375, 5062, 7593, 10_000, 10_000]);
        sync.attempted(0, new("a", 2), now, 1.0);
        assert_eq!(
            sync.next_attempt(now).unwrap().1 - now,
            Duration::from_millis(1100)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn every_address_gets_its_turn_even_when_the_count_is_met() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 2);
        sync.attempted(0, new("a", 1), now, 0.0);
        assert_eq!(sync.next_attempt(now), Some((1, now)));
        sync.attempted(1, new("b", 1), now, 0.0);
        assert_eq!(sync.next_attempt(now), None);
        // A dead address backs off by itself and does not disturb the other.
        sync.lost(&server("b"), now, 0.0);
        sync.attempted(1, Attempt::Failed, now, 0.0);
        assert_eq!(
            sync.next_attempt(now),
            Some((1, now + Duration::from_secs(1)))
        );
    }

    /// One that is never answered takes its whole time, which is not that of the others.
    #[tokio::test(start_paused = true)]
    async fn an_attempt_keeps_no_other_address_from_its_turn() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 2);
        sync.begin(0);
        assert_eq!(sync.next_attempt(now), Some((1, now)));
        sync.begin(1);
        assert_eq!(sync.next_attempt(now), None);
        sync.attempted(1, new("b", 3), now, 0.0);
        let soon = now + Duration::from_secs(1);
        assert_eq!(
            sync.next_attempt(now),
            Some((1, soon)),
            "there are two more"
        );
        sync.lost(&server("b"), now, 0.0);
        assert_eq!(sync.next_attempt(now), Some((1, soon)));
        sync.begin(1);
        sync.attempted(0, Attempt::Failed, now, 0.0);
        assert_eq!(sync.next_attempt(now), Some((0, soon)));
    }

    /// A balancer, and an address where nobody is: under way for most of the time, and behind its pauses for the rest.
    #[tokio::test(start_paused = true)]
    async fn a_dead_address_keeps_no_server_behind_a_balancer_from_being_found() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 2);
        sync.attempted(0, new("a", 3), now, 0.0);
        sync.attempted(1, Attempt::Failed, now, 0.0);
        sync.attempted(1, Attempt::Failed, now, 0.0);
        let soon = now + Duration::from_secs(1);
        assert_eq!(sync.next_attempt(now), Some((0, soon)));
        sync.begin(1);
        assert_eq!(sync.next_attempt(now), Some((0, soon)));
        sync.attempted(0, new("b", 3), now, 0.0);
        sync.attempted(0, new("c", 3), now, 0.0);
        assert_eq!(sync.next_attempt(now), None, "all are held");
    }

    /// As in a rolling restart: the connection before led to the server that is up again, and another one is restarted now.
    #[tokio::test(start_paused = true)]
    async fn a_server_lost_behind_a_balancer_is_looked_for_soon() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 2);
        for _attempt in 0..3 {
            sync.attempted(1, Attempt::Failed, now, 0.0);
        }
        sync.attempted(0, new("a", 2), now, 0.0);
        sync.attempted(0, new("b", 2), now, 0.0);
        sync.lost(&server("a"), now, 0.0);
        let soon = now + Duration::from_secs(1);
        assert_eq!(sync.next_attempt(now), Some((0, soon)));
        sync.begin(0);
        let paused = now + Duration::from_millis(2250);
        assert_eq!(
            sync.next_attempt(now),
            Some((1, paused)),
            "an address that led nowhere keeps its pause"
        );
    }

    /// With `--sync-forever` an agent that has all goes on looking, and meets those it has.
    #[tokio::test(start_paused = true)]
    async fn a_server_lost_after_many_met_again_is_looked_for_soon() {
        let now = Instant::now();
        let policy = SyncPolicy {
            forever: true,
            ..POLICY
        };
        let mut sync = SyncState::new(policy, 1);
        sync.attempted(0, new("a", 2), now, 0.0);
        sync.attempted(0, new("b", 2), now, 0.0);
        for _again in 0..20 {
            let server = server("b");
            sync.attempted(0, Attempt::Duplicate { server }, now, 0.0);
        }
        sync.lost(&server("a"), now, 0.0);
        for _attempt in 0..3 {
            let soon = now + Duration::from_secs(1);
            assert_eq!(sync.next_attempt(now), Some((0, soon)));
            let server = server("b");
            sync.attempted(0, Attempt::Duplicate { server }, now, 0.0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_count_that_cannot_be_met_does_not_become_a_storm() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 1);
        sync.attempted(0, new("a", 3), now, 0.0);
        for _attempt in 0..40 {
            sync.attempted(
                0,
                Attempt::Duplicate {
                    server: server("a"),
                },
                now,
                0.0,
            );
        }
        assert_eq!(
            sync.next_attempt(now).unwrap().1 - now,
            Duration::from_secs(10)
        );
    }

    fn ids(names: &[&str]) -> BTreeSet<ServerId> {
        names.iter().map(|name| server(name)).collect()
    }

    /// Behind a balancer: a lease says that there is a server, and no more.
    #[tokio::test(start_paused = true)]
    async fn a_lease_that_appears_has_its_server_looked_for_until_it_is_held() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 1);
        sync.attempted(0, new("a", 1), now, 0.0);
        assert_eq!(sync.next_attempt(now), None);
        sync.leased(ids(&["a", "b"]), now, 0.25);
        assert_eq!(sync.known_count(), 2);
        let again = Attempt::Duplicate {
            server: server("a"),
        };
        let (mut now, mut attempts) = (now, 0);
        let eager_until = now + EAGER_FOR;
        let first = sync.next_attempt(now).unwrap().1 - now;
        assert_eq!(first, Duration::from_millis(250), "spread over a pause");
        while now < eager_until {
            now = sync.next_attempt(now).unwrap().1;
            sync.attempted(0, again.clone(), now, 0.0);
            attempts += 1;
        }
        assert_eq!(attempts, 31, "once a second");
        for _attempt in 0..20 {
            now = sync.next_attempt(now).unwrap().1;
            sync.attempted(0, again.clone(), now, 0.0);
        }
        let pause = sync.next_attempt(now).unwrap().1 - now;
        assert_eq!(pause, Duration::from_secs(10), "and then rarely");
        sync.attempted(0, new("b", 1), now, 0.0);
        assert_eq!(sync.next_attempt(now), None);
        // Its end closes nothing, and is nothing to look for.
        sync.leased(ids(&["a"]), now, 0.0);
        assert_eq!((sync.next_attempt(now), sync.held()), (None, 2));
    }

    /// Three servers whose leases end and come back, of which one was lost meanwhile.
    #[tokio::test(start_paused = true)]
    async fn enough_links_to_others_are_no_reason_to_miss_a_leased_server() {
        let now = Instant::now();
        let mut sync = SyncState::new(POLICY, 1);
        sync.leased(ids(&["a", "b"]), now, 0.0);
        sync.attempted(0, new("a", 1), now, 0.0);
        sync.attempted(0, new("old", 1), now, 0.0);
        assert!(sync.next_attempt(now).is_some(), "b is not held");
        sync.attempted(0, new("b", 1), now, 0.0);
        assert_eq!(sync.next_attempt(now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_larger_count_counts_where_that_is_asked_for() {
        let now = Instant::now();
        for (source, count) in [(CountSource::Leases, 1), (CountSource::Larger, 3)] {
            let mut sync = SyncState::new(POLICY, 1).counting(source);
            sync.attempted(0, new("a", 3), now, 0.0);
            assert_eq!(sync.known_count(), 3, "leases are not known yet");
            sync.leased(ids(&["a"]), now, 0.0);
            assert_eq!(sync.known_count(), count, "{source:?}");
            assert_eq!(sync.next_attempt(now).is_some(), count == 3, "{source:?}");
            sync.leased(ids(&[]), now, 0.0);
            assert_eq!(sync.known_count(), count, "at least one");
        }
    }

    /// 17,000 trials a day and agent, each with a handshake and a review, were measured in public.
    #[tokio::test(start_paused = true)]
    async fn sync_forever_costs_nothing_once_every_leased_server_is_held() {
        let now = Instant::now();
        let policy = SyncPolicy {
            forever: true,
            ..POLICY
        };
        let mut sync = SyncState::new(policy, 2);
        sync.leased(ids(&["a", "b"]), now, 0.0);
        sync.attempted(0, new("a", 2), now, 0.0);
        assert!(sync.next_attempt(now).is_some());
        sync.attempted(1, new("b", 2), now, 0.0);
        assert_eq!(sync.next_attempt(now), None);
        // Without any lease nobody knows.
        sync.leased(ids(&[]), now, 0.0);
        assert!(sync.next_attempt(now).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn sync_forever_goes_on_slowly_and_draining_stops_everything() {
        let now = Instant::now();
        let mut sync = SyncState::new(
            SyncPolicy {
                forever: true,
                ..POLICY
            },
            1,
        );
        sync.attempted(0, new("a", 1), now, 0.0);
        assert_eq!(
            sync.next_attempt(now).unwrap().1 - now,
            Duration::from_secs(10)
        );
        sync.drain();
        assert_eq!(sync.next_attempt(now), None);
    }
}
