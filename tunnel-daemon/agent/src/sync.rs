//! When and where the agent tries for another server connection. Pure: time and chance are arguments.
//!
//! One address may lead to several servers (a load balancer), and several addresses may be given. The agent
//! wants as many distinct servers as it was told there are, and every address to lead to a server it holds.

use std::collections::BTreeSet;
use std::time::Duration;

use adit_core::ids::ServerId;
use tokio::time::Instant;

use adit_config::limits::SERVERS_HELD_MAX;
use adit_config::plan::CountSource;

/// Attempts in a row that found only known servers before they are treated like failures.
const DUPLICATES_FREE: u32 = 10;
/// Failures grow the pause by this factor (upstream's).
const BACKOFF_FACTOR: f64 = 1.5;
/// Share of a pause that is added at random (upstream's).
const JITTER: f64 = 0.1;
/// For so long after a lease has appeared, attempts that find only known servers come at the shortest pause.
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
        /// As announced; below 1 counts as 1, and more than [`SERVERS_HELD_MAX`] as that.
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
    /// More than an agent holds were announced once.
    had_excess: bool,
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
            had_excess: false,
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

    /// As [`Self::next_attempt`]; `None` also while as many links are there, or on their way, as an agent may have. Links count and not
    /// servers held: those that are silent are replaced, and stay.
    #[must_use]
    pub fn next_attempt_beside(&self, links: usize, now: Instant) -> Option<(usize, Instant)> {
        (links < SERVERS_HELD_MAX)
            .then(|| self.next_attempt(now))
            .flatten()
    }

    /// Whether this is the first count of servers that is too large to be believed.
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

    /// A silent server is heard again.
    pub fn regain(&mut self, server: &ServerId) {
        if !self.held.contains(server) {
            self.held.push(server.clone());
        }
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
mod tests;
