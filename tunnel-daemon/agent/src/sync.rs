//! Decides when and where the agent opens its next link. Pure: time and random numbers are arguments.
//!
//! One address may lead to several servers (a load balancer), and several addresses may be given. The agent wants as many
//! distinct servers as were announced, and every address to lead to a server it holds.

use std::collections::BTreeSet;
use std::time::Duration;

use adit_core::ids::ServerId;
use tokio::time::Instant;

use adit_config::limits::SERVERS_HELD_MAX;
use adit_config::plan::CountSource;

/// Attempts in a row that found only held servers, before such attempts count as failures.
const DUPLICATES_FREE: u32 = 10;
/// Growth factor of the pause after failures (upstream's).
const BACKOFF_FACTOR: f64 = 1.5;
/// Random part of a pause (upstream's).
const JITTER: f64 = 0.1;
/// Time after a new lease during which attempts that find only held servers use the shortest pause.
const EAGER_FOR: Duration = Duration::from_secs(30);

/// How often to attempt.
#[derive(Clone, Copy, Debug)]
pub struct SyncPolicy {
    /// Pause after an attempt that succeeded or was not needed.
    pub interval: Duration,
    /// Longest pause after failures.
    pub interval_cap: Duration,
    /// Continue after all servers are held, at most once per `interval_cap`.
    pub forever: bool,
}

/// How an attempt ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Attempt {
    /// A server not held before, which announces `count` servers.
    New {
        /// The server that answered.
        server: ServerId,
        /// As announced; clamped to 1..=[`SERVERS_HELD_MAX`].
        count: i64,
    },
    /// A server that is already held.
    Duplicate {
        /// The server that answered.
        server: ServerId,
    },
    /// The connection failed.
    Failed,
}

#[derive(Debug, Default)]
struct Address {
    leads_to: Option<ServerId>,
    failures: u32,
    not_before: Option<Instant>,
    under_way: bool,
    /// The last attempt failed.
    is_dead: bool,
}

/// The state of one agent's search for servers.
#[derive(Debug)]
pub struct SyncState {
    policy: SyncPolicy,
    addresses: Vec<Address>,
    held: Vec<ServerId>,
    /// The last count that a server announced.
    announced: usize,
    /// A server has announced more than an agent can hold.
    had_excess: bool,
    /// Servers with a lease, once known.
    leased: Option<BTreeSet<ServerId>>,
    source: CountSource,
    eager_until: Option<Instant>,
    duplicates: u32,
    next: usize,
    draining: bool,
}

impl SyncState {
    /// State for `addresses` configured addresses (at least one).
    #[must_use]
    pub fn new(policy: SyncPolicy, addresses: usize) -> Self {
        let addresses = (0..addresses.max(1)).map(|_| Address::default()).collect();
        Self {
            policy,
            addresses,
            held: Vec::new(),
            announced: 1,
            had_excess: false,
            leased: None,
            source: CountSource::default(),
            eager_until: None,
            duplicates: 0,
            next: 0,
            draining: false,
        }
    }

    /// Sets how leases are counted, once known.
    #[must_use]
    pub fn counting(mut self, source: CountSource) -> Self {
        self.source = source;
        self
    }

    /// Number of servers, as far as known; at least 1.
    #[must_use]
    pub fn known_count(&self) -> usize {
        match (&self.leased, self.source) {
            (None, _) => self.announced,
            (Some(leased), CountSource::Leases) => leased.len().max(1),
            (Some(leased), CountSource::Larger) => leased.len().max(self.announced),
        }
    }

    /// Sets the servers with a lease. A new server is looked for soon: a lease tells that a server exists, not where. A server
    /// whose lease has ended keeps its link. `chance` is uniform in `0..1`: many agents learn of a lease at the same time.
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

    /// Whether all known servers are held.
    fn is_met(&self) -> bool {
        let all_leased = || {
            let held = |server: &ServerId| self.held.contains(server);
            self.leased
                .as_ref()
                .is_none_or(|leased| leased.iter().all(held))
        };
        self.held.len() >= self.known_count() && all_leased()
    }

    /// Whether to continue although all are held: by the flag, unless leases list all servers.
    fn goes_on(&self) -> bool {
        self.policy.forever && self.leased.as_ref().is_none_or(BTreeSet::is_empty)
    }

    /// Number of held servers.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Whether [`SyncState::drain`] was called.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Stops all attempts: lost links are not replaced.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// The next address and the time of its attempt, or `None` while no attempt is needed. Each address has one attempt at a
    /// time. An address that leads to no held server has its own timer, and delays no other address.
    #[must_use]
    pub fn next_attempt(&self, now: Instant) -> Option<(usize, Instant)> {
        if self.draining {
            return None;
        }
        let recent_servers = self.is_met() && !self.goes_on();
        let first = (0..self.addresses.len())
            .map(|step| (self.next + step) % self.addresses.len())
            .filter_map(|at| {
                let address = self.addresses.get(at)?;
                let satisfied = self.satisfied(at);
                let due = address.not_before.unwrap_or(now).max(now);
                let has_no_turn = address.under_way || (recent_servers && satisfied);
                (!has_no_turn).then_some((at, due, satisfied))
            })
            .min_by_key(|(_, due, satisfied)| (*due, *satisfied));
        first.map(|(at, due, _)| (at, due))
    }

    /// Like [`Self::next_attempt`]; also `None` at the limit on links, including those being opened. Counts links and not held
    /// servers: links to silent servers are replaced and stay.
    #[must_use]
    pub fn next_attempt_beside(&self, links: usize, now: Instant) -> Option<(usize, Instant)> {
        (links < SERVERS_HELD_MAX)
            .then(|| self.next_attempt(now))
            .flatten()
    }

    /// Whether this is the first announced count above the limit.
    pub fn is_first_excess(&mut self, count: i64) -> bool {
        let is_excess = usize::try_from(count).is_ok_and(|count| count > SERVERS_HELD_MAX);
        is_excess && !std::mem::replace(&mut self.had_excess, true)
    }

    fn satisfied(&self, at: usize) -> bool {
        self.addresses
            .get(at)
            .and_then(|address| address.leads_to.as_ref())
            .is_some_and(|server| self.held.contains(server))
    }

    /// Whether this server is held.
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

    /// Records an attempt's outcome; `chance` is uniform in `0..1`.
    pub fn attempted(&mut self, at: usize, outcome: Attempt, now: Instant, chance: f64) {
        self.next = (at + 1) % self.addresses.len();
        let mut failed = false;
        let leads_to = match outcome {
            Attempt::New { server, count } => {
                let most = i64::try_from(SERVERS_HELD_MAX).unwrap_or(i64::MAX);
                self.announced = usize::try_from(count.clamp(1, most)).unwrap_or(1);
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
        let recent_servers = self.is_met();
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
            if recent_servers {
                policy.interval_cap.max(policy.interval)
            } else {
                policy.interval
            }
        };
        address.not_before = Some(now + pause.mul_f64(1.0 + JITTER * chance.clamp(0.0, 1.0)));
    }

    /// A held server is silent: its addresses are tried at once, as if it were gone.
    pub fn suspect(&mut self, server: &ServerId, now: Instant) {
        self.lost(server, now, 0.0);
        for address in &mut self.addresses {
            if !address.is_dead {
                address.not_before = Some(now);
            }
        }
    }

    /// A silent server responds again.
    pub fn regain(&mut self, server: &ServerId) {
        if !self.held.contains(server) {
            self.held.push(server.clone());
        }
    }

    /// A held server is gone. Its addresses may be tried again after one interval at most, at once if their pause was over. So
    /// may every address whose last attempt succeeded: behind a balancer the next connection may reach the lost server.
    /// Duplicates found while the server was held no longer count.
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
mod tests;
