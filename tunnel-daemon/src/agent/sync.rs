//! When and where the agent tries for another server connection. Pure: time and chance are arguments.
//!
//! One address may lead to several servers (a load balancer), and several addresses may be given. The agent
//! wants as many distinct servers as it was told there are, and every address to lead to a server it holds.

use std::time::Duration;

use adit_core::ids::ServerId;
use tokio::time::Instant;

/// Attempts in a row that found only known servers before they are treated like failures.
const DUPLICATES_FREE: u32 = 10;
/// Failures grow the pause by this factor (upstream's).
const BACKOFF_FACTOR: f64 = 1.5;
/// Share of a pause that is added at random (upstream's).
const JITTER: f64 = 0.1;

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
    count: usize,
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
            count: 1,
            duplicates: 0,
            next: 0,
            draining: false,
        }
    }

    /// Servers there are, as far as known; at least 1.
    #[must_use]
    pub fn known_count(&self) -> usize {
        self.count
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
        let met = self.held.len() >= self.count && !self.policy.forever;
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
                self.count = usize::try_from(count).unwrap_or(1).max(1);
                self.duplicates = 0;
                self.held.push(server.clone());
                Some(server)
            }
            Attempt::Duplicate { server } => {
                self.duplicates = self.duplicates.saturating_add(1);
                failed = self.duplicates > DUPLICATES_FREE;
                Some(server)
            }
            Attempt::Failed => {
                failed = true;
                None
            }
        };
        let met = self.held.len() >= self.count;
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
