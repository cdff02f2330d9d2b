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

mod announced;
mod lane_turns;

use self::announced::Announced;
use self::lane_turns::LaneTurns;

/// Attempts without a new server that found held servers, after which the agent counts as connected to all. A balancer that
/// chooses at random among eight servers hides the last one for so long in one of fifty searches.
const DUPLICATES_MAX: u32 = 30;
/// Mean pause between attempts from then on, if the count was never met: it may be wrong for ever, and a thousand agents may
/// believe it.
const SLOW_PAUSE: Duration = Duration::from_secs(60);
/// Growth factor of the pause after failures (upstream's).
const BACKOFF_FACTOR: f64 = 1.5;
/// Random part of a pause (upstream's).
const JITTER: f64 = 0.1;
/// Time after a new server, a new lease or a lost link during which the agent does not give up, and links go before lanes.
const FRESH_FOR: Duration = Duration::from_secs(30);
/// Pause before a server is tried that has fallen silent a second time, doubled each further time, and the longest. Forgotten once
/// it has not been silent for so long.
const SUSPECTED_PAUSE: Duration = Duration::from_secs(1);
const SUSPECTED_PAUSE_MAX: Duration = Duration::from_secs(30);
const SUSPECTED_FOR: Duration = Duration::from_secs(60);

/// How often to attempt.
#[derive(Clone, Copy, Debug)]
pub struct SyncPolicy {
    /// Pause after an attempt that succeeded or was not needed.
    pub interval: Duration,
    /// Longest pause after failures.
    pub interval_cap: Duration,
    /// Continue after all servers are held, at most once per `interval_cap`.
    pub forever: bool,
    /// How counts are combined.
    pub rules: SearchRules,
}

/// Whose rules apply where they differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SearchRules {
    /// The largest count that a held server announces. A count that attempts do not confirm is pursued slowly.
    Native,
    /// The count that the last new link announced. Attempts are never rarer than once per `interval_cap`.
    Upstream,
}

/// How far the search is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// All known servers are held.
    Met,
    /// The agent tries every interval.
    Searching,
    /// No attempt finds the missing servers: the agent counts as connected to all, and tries rarely.
    Slow,
    /// The agent is going away.
    Draining,
}

/// The state of a search, for reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SearchView {
    /// Number of held servers.
    pub held: usize,
    /// Number of servers, as far as known.
    pub known: usize,
    /// How far the search is.
    pub progress: Progress,
    /// Where this number comes from; `None`: from no server that is held now.
    pub origin: Option<CountOrigin>,
}

/// What the number of servers comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CountOrigin {
    /// A held server announces it.
    Server(ServerId),
    /// So many servers have a lease.
    Leases,
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
    /// A server that is already held, which announces `count` servers now.
    Duplicate {
        /// The server that answered.
        server: ServerId,
        /// As for a new server.
        count: i64,
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
    /// The greatest number of servers held at once: a count up to it has been true.
    held_most: usize,
    announced: Announced,
    /// A server has announced more than an agent can hold.
    had_excess: bool,
    /// Servers with a lease, once known.
    leased: Option<BTreeSet<ServerId>>,
    source: CountSource,
    fresh_until: Option<Instant>,
    /// Attempts since the last news that found a held server while another was wanted.
    duplicates: u32,
    gave_up: bool,
    lane_turns: LaneTurns,
    next: usize,
    draining: bool,
    suspected: Vec<Suspected>,
}

/// A server that was silent.
#[derive(Debug)]
struct Suspected {
    server: ServerId,
    /// How often in a row, each time soon after the last.
    times: u32,
    /// When it is forgotten.
    until: Instant,
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
            held_most: 0,
            announced: Announced::new(policy.rules),
            had_excess: false,
            leased: None,
            source: CountSource::default(),
            fresh_until: None,
            duplicates: 0,
            gave_up: false,
            lane_turns: LaneTurns::default(),
            next: 0,
            draining: false,
            suspected: Vec::new(),
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
        let announced = self.announced.count(&self.held);
        match (&self.leased, self.source) {
            (None, _) => announced,
            (Some(leased), CountSource::Leases) => leased.len().max(1),
            (Some(leased), CountSource::Larger) => leased.len().max(announced),
        }
    }

    /// How far the search is.
    #[must_use]
    pub fn view(&self) -> SearchView {
        let known = self.known_count();
        let announced = self.announced.largest(&self.held);
        let announced = announced.filter(|(_, count)| *count == known);
        let leases = self.leased.as_ref().map_or(0, BTreeSet::len);
        SearchView {
            held: self.held.len(),
            known,
            progress: if self.draining {
                Progress::Draining
            } else if self.is_met() {
                Progress::Met
            } else if self.gave_up {
                Progress::Slow
            } else {
                Progress::Searching
            },
            origin: if leases == known {
                Some(CountOrigin::Leases)
            } else {
                announced.map(|(server, _)| CountOrigin::Server(server.clone()))
            },
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
            self.news(now);
            let soon = now + self.policy.interval.mul_f64(chance.clamp(0.0, 1.0));
            for address in &mut self.addresses {
                address.failures = 0;
                address.not_before = address.not_before.map(|at| at.min(soon));
            }
        }
        self.leased = Some(servers);
    }

    /// There is reason to expect a new server.
    fn news(&mut self, now: Instant) {
        self.fresh_until = Some(now + FRESH_FOR);
        self.duplicates = 0;
        self.gave_up = false;
        self.lane_turns.news();
    }

    /// Takes a turn for a lane. While servers are searched for, links go first, and later lanes get every second turn.
    ///
    /// # Errors
    /// The time at which to ask again; earlier if the search has changed.
    pub fn lane_turn(&mut self, now: Instant) -> Result<(), Instant> {
        if self.draining || self.gave_up || self.is_met() {
            return Ok(());
        }
        let fresh_until = self.fresh_until.unwrap_or(now);
        self.lane_turns.take(now, fresh_until)
    }

    /// Whether all known servers are held, or as many as an agent may hold.
    fn is_met(&self) -> bool {
        let all_leased = || {
            let held = |server: &ServerId| self.held.contains(server);
            self.leased
                .as_ref()
                .is_none_or(|leased| leased.iter().all(held))
        };
        let held = self.held.len();
        held >= SERVERS_HELD_MAX || held >= self.known_count() && all_leased()
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
        let leads_to = match outcome {
            Attempt::New { server, count } => {
                self.announced.linked(&server, count);
                self.held.push(server.clone());
                self.held_most = self.held_most.max(self.held.len());
                self.news(now);
                Some(server)
            }
            Attempt::Duplicate { server, count } => {
                self.announced.again(&server, count);
                let is_wanted = u32::from(!self.is_met());
                self.duplicates = self.duplicates.saturating_add(is_wanted);
                self.lane_turns.fruitless(chance);
                Some(server)
            }
            Attempt::Failed => {
                self.lane_turns.fruitless(chance);
                None
            }
        };
        let is_fresh = self.fresh_until.is_some_and(|until| now < until);
        self.gave_up = self.duplicates >= DUPLICATES_MAX && !is_fresh;
        let pause = leads_to.is_some().then(|| self.pause(chance));
        let policy = self.policy;
        let Some(address) = self.addresses.get_mut(at) else {
            return;
        };
        address.under_way = false;
        address.is_dead = leads_to.is_none();
        if leads_to.is_some() {
            address.leads_to = leads_to;
        }
        let pause = if let Some(pause) = pause {
            address.failures = 0;
            pause
        } else {
            let steps = i32::try_from(address.failures).unwrap_or(i32::MAX).min(64);
            address.failures = address.failures.saturating_add(1);
            let pause = policy
                .interval
                .mul_f64(BACKOFF_FACTOR.powi(steps).min(1e6))
                .min(policy.interval_cap);
            jittered(pause, chance)
        };
        address.not_before = Some(now + pause);
    }

    /// Pause after an attempt that reached a server.
    fn pause(&self, chance: f64) -> Duration {
        let policy = self.policy;
        let has_been_met = self.known_count() <= self.held_most;
        if self.is_met() || (self.gave_up && (has_been_met || self.goes_on())) {
            jittered(policy.interval_cap.max(policy.interval), chance)
        } else if !self.gave_up {
            jittered(policy.interval, chance)
        } else if policy.rules == SearchRules::Upstream {
            jittered(policy.interval_cap, chance)
        } else {
            // Spread far, since all agents of a server may have begun at once.
            let slow = SLOW_PAUSE.mul_f64(0.5 + chance.clamp(0.0, 1.0));
            slow.max(policy.interval)
        }
    }

    /// A held server is silent: its addresses are tried at once, as if it were gone, or after a pause if it was silent within the last
    /// minute. An overloaded server is silent on new connections, too, and handshakes of all its agents would keep it overloaded.
    /// `chance` spreads the pause.
    pub fn suspect(&mut self, server: &ServerId, now: Instant, chance: f64) {
        self.suspected.retain(|known| known.until > now);
        let known = self
            .suspected
            .iter()
            .position(|known| known.server == *server);
        let times = known.map_or(0, |at| self.suspected.swap_remove(at).times);
        let pause = match times {
            0 => Duration::ZERO,
            // Spread far: other agents have noticed the same at the same time.
            _ => SUSPECTED_PAUSE
                .saturating_mul(2_u32.saturating_pow(times - 1))
                .min(SUSPECTED_PAUSE_MAX)
                .mul_f64(0.5 + chance.clamp(0.0, 1.0)),
        };
        self.suspected.push(Suspected {
            server: server.clone(),
            times: times.saturating_add(1),
            until: now + pause + SUSPECTED_FOR,
        });
        self.release(server, now, 0.0);
        for address in &mut self.addresses {
            if !address.is_dead {
                address.not_before = Some(now + pause);
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
        self.announced.forget(server);
        self.release(server, now, chance);
    }

    fn release(&mut self, server: &ServerId, now: Instant, chance: f64) {
        self.held.retain(|held| held != server);
        self.news(now);
        let soon = now + jittered(self.policy.interval, chance);
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

/// The pause with its random part; `chance` is uniform in `0..1`.
fn jittered(pause: Duration, chance: f64) -> Duration {
    pause.mul_f64(1.0 + JITTER * chance.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests;
