//! Tests of when and where an agent connects, with simulated time.

use super::*;

const POLICY: SyncPolicy = SyncPolicy {
    interval: Duration::from_secs(1),
    interval_cap: Duration::from_secs(10),
    forever: false,
    rules: SearchRules::Native,
};

const FOREVER: SyncPolicy = SyncPolicy {
    forever: true,
    ..POLICY
};

/// The state of an agent with this many addresses, and the current time.
fn fresh(addresses: usize) -> (SyncState, Instant) {
    (SyncState::new(POLICY, addresses), Instant::now())
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn server(name: &str) -> ServerId {
    ServerId::new(name)
}

/// A server that is held already, and announces this count now.
fn again(name: &str, count: i64) -> Attempt {
    Attempt::Duplicate {
        server: server(name),
        count,
    }
}

fn new(name: &str, count: i64) -> Attempt {
    Attempt::New {
        server: server(name),
        count,
    }
}

/// An attempt that reached a server, which may be held already.
fn reached(sync: &SyncState, name: &str, count: i64) -> Attempt {
    if sync.holds(&server(name)) {
        again(name, count)
    } else {
        new(name, count)
    }
}

#[tokio::test(start_paused = true)]
async fn no_server_is_tried_once_the_count_is_met() {
    let (mut sync, now) = fresh(1);
    assert_eq!(sync.next_attempt(now), Some((0, now)));
    sync.attempted(0, new("a", 2), now, 0.0);
    assert_eq!(sync.next_attempt(now), Some((0, now + seconds(1))));
    sync.attempted(0, again("a", 2), now, 0.0);
    assert!(sync.next_attempt(now).is_some());
    sync.attempted(0, new("b", 2), now, 0.0);
    assert_eq!(sync.next_attempt(now), None);
    sync.lost(&server("a"), now, 0.5);
    assert!(sync.next_attempt(now).is_some());
}

#[tokio::test(start_paused = true)]
async fn failures_back_off_to_the_cap_and_success_resets() {
    let (mut sync, now) = fresh(1);
    let mut pauses = Vec::new();
    for _attempt in 0..8 {
        sync.attempted(0, Attempt::Failed, now, 0.0);
        let (_, at) = sync.next_attempt(now).unwrap();
        pauses.push((at - now).as_millis());
    }
    assert_eq!(pauses, [1000, 1500, 2250, 3375, 5062, 7593, 10_000, 10_000]);
    sync.attempted(0, new("a", 2), now, 1.0);
    let pause = sync.next_attempt(now).unwrap().1 - now;
    assert_eq!(pause, Duration::from_millis(1100));
}

#[tokio::test(start_paused = true)]
async fn every_address_is_tried_even_when_the_count_is_met() {
    let (mut sync, now) = fresh(2);
    sync.attempted(0, new("a", 1), now, 0.0);
    assert_eq!(sync.next_attempt(now), Some((1, now)));
    sync.attempted(1, new("b", 1), now, 0.0);
    assert_eq!(sync.next_attempt(now), None);
    // A failing address has its own backoff and does not delay the other address.
    sync.lost(&server("b"), now, 0.0);
    sync.attempted(1, Attempt::Failed, now, 0.0);
    assert_eq!(sync.next_attempt(now), Some((1, now + seconds(1))));
}

/// An unanswered attempt uses its own full timeout, without delaying other addresses.
#[tokio::test(start_paused = true)]
async fn an_attempt_does_not_delay_other_addresses() {
    let (mut sync, now) = fresh(2);
    sync.begin(0);
    assert_eq!(sync.next_attempt(now), Some((1, now)));
    sync.begin(1);
    assert_eq!(sync.next_attempt(now), None);
    sync.attempted(1, new("b", 3), now, 0.0);
    let soon = now + seconds(1);
    let next = sync.next_attempt(now);
    assert_eq!(next, Some((1, soon)), "there are two more");
    sync.lost(&server("b"), now, 0.0);
    assert_eq!(sync.next_attempt(now), Some((1, soon)));
    sync.begin(1);
    sync.attempted(0, Attempt::Failed, now, 0.0);
    assert_eq!(sync.next_attempt(now), Some((0, soon)));
}

/// One address is a balancer, the other never answers: an attempt there is in progress or in backoff at all times.
#[tokio::test(start_paused = true)]
async fn a_dead_address_does_not_hide_servers_behind_a_balancer() {
    let (mut sync, now) = fresh(2);
    sync.attempted(0, new("a", 3), now, 0.0);
    sync.attempted(1, Attempt::Failed, now, 0.0);
    sync.attempted(1, Attempt::Failed, now, 0.0);
    let soon = now + seconds(1);
    assert_eq!(sync.next_attempt(now), Some((0, soon)));
    sync.begin(1);
    assert_eq!(sync.next_attempt(now), Some((0, soon)));
    sync.attempted(0, new("b", 3), now, 0.0);
    sync.attempted(0, new("c", 3), now, 0.0);
    assert_eq!(sync.next_attempt(now), None, "all are held");
}

/// As in a rolling restart: the previous connection reached the restarted server, and another server restarts now.
#[tokio::test(start_paused = true)]
async fn a_server_lost_behind_a_balancer_is_retried_soon() {
    let (mut sync, now) = fresh(2);
    for _attempt in 0..3 {
        sync.attempted(1, Attempt::Failed, now, 0.0);
    }
    sync.attempted(0, new("a", 2), now, 0.0);
    sync.attempted(0, new("b", 2), now, 0.0);
    sync.lost(&server("a"), now, 0.0);
    let soon = now + seconds(1);
    assert_eq!(sync.next_attempt(now), Some((0, soon)));
    sync.begin(0);
    let paused = now + Duration::from_millis(2250);
    let why = "an address that led nowhere keeps its pause";
    assert_eq!(sync.next_attempt(now), Some((1, paused)), "{why}");
}

/// With `--sync-forever` an agent with all servers keeps connecting, and reaches servers that it already holds.
#[tokio::test(start_paused = true)]
async fn a_server_lost_after_many_duplicates_is_retried_soon() {
    let now = Instant::now();
    let mut sync = SyncState::new(FOREVER, 1);
    sync.attempted(0, new("a", 2), now, 0.0);
    sync.attempted(0, new("b", 2), now, 0.0);
    for _again in 0..40 {
        sync.attempted(0, again("b", 2), now, 0.0);
    }
    sync.lost(&server("a"), now, 0.0);
    for _attempt in 0..3 {
        let soon = now + seconds(1);
        assert_eq!(sync.next_attempt(now), Some((0, soon)));
        sync.attempted(0, again("b", 2), now, 0.0);
    }
}

/// Makes every attempt that is due reach "a", which announces `count`, and returns the pause after each of them.
fn duplicates(sync: &mut SyncState, now: &mut Instant, attempts: u32, count: i64) -> Vec<Duration> {
    let one = |_attempt| {
        let (at, due) = sync.next_attempt(*now).expect("the search goes on");
        sync.attempted(at, again("a", count), due, 0.5);
        *now = due;
        sync.next_attempt(due).expect("the search goes on").1 - due
    };
    (0..attempts).map(one).collect()
}

/// Limit (times): Servers that 30 connections did not reach | tried once in 30 to 90 s; `--sync-interval-cap` if the count was met before
#[tokio::test(start_paused = true)]
async fn a_count_that_no_attempt_confirms_is_pursued_once_a_minute_until_something_changes() {
    let (mut sync, mut now) = fresh(1);
    sync.attempted(0, new("a", 3), now, 0.5);
    let pauses = duplicates(&mut sync, &mut now, 40, 3);
    let (eager, slow) = (Duration::from_millis(1050), seconds(60));
    assert_eq!(pauses[..29], [eager; 29]);
    assert_eq!(pauses[29..], [slow; 11]);
    assert_eq!(sync.view().progress, Progress::Slow);
    assert_eq!(sync.view().origin, Some(CountOrigin::Server(server("a"))));
    // A new server, a new lease and a lost link each make it search again.
    sync.attempted(0, new("b", 3), now, 0.5);
    assert_eq!(sync.view().progress, Progress::Searching);
    assert_eq!(duplicates(&mut sync, &mut now, 30, 3)[28..], [eager, slow]);
    sync.leased(ids(&["a", "b", "c"]), now, 0.0);
    assert_eq!(duplicates(&mut sync, &mut now, 30, 3)[28..], [eager, slow]);
    assert_eq!(sync.view().origin, Some(CountOrigin::Leases));
    sync.lost(&server("b"), now, 0.0);
    assert_eq!(duplicates(&mut sync, &mut now, 30, 3)[28..], [eager, slow]);
}

/// A server that restarts for longer than the agent searches eagerly should not be missed for minutes.
#[tokio::test(start_paused = true)]
async fn a_lost_server_is_tried_at_the_cap_if_the_count_has_been_met() {
    let (mut sync, mut now) = fresh(1);
    sync.attempted(0, new("a", 2), now, 0.5);
    sync.attempted(0, new("b", 2), now, 0.5);
    sync.lost(&server("b"), now, 0.5);
    let pauses = duplicates(&mut sync, &mut now, 40, 2);
    assert_eq!(pauses.last(), Some(&Duration::from_millis(10_500)));
    // A larger count was never met.
    let pauses = duplicates(&mut sync, &mut now, 1, 3);
    assert_eq!(pauses, [seconds(60)]);
}

/// Compat keeps to the cap where upstream tries each second.
#[tokio::test(start_paused = true)]
async fn by_upstreams_rules_attempts_are_never_rarer_than_the_cap() {
    let mut now = Instant::now();
    let rules = SearchRules::Upstream;
    let mut sync = SyncState::new(SyncPolicy { rules, ..POLICY }, 1);
    sync.attempted(0, new("a", 3), now, 0.5);
    let pauses = duplicates(&mut sync, &mut now, 40, 3);
    assert_eq!(pauses.last(), Some(&Duration::from_millis(10_500)));
}

/// During a rolling update of `--server-count` from 3 to 6, one server announces the old count.
#[tokio::test(start_paused = true)]
async fn one_stale_count_does_not_stop_the_search() {
    let (mut sync, now) = fresh(1);
    for (name, count) in [("a", 6), ("b", 6), ("stale", 3)] {
        sync.attempted(0, new(name, count), now, 0.0);
    }
    assert_eq!(sync.known_count(), 6);
    for name in ["d", "e", "f"] {
        assert!(sync.next_attempt(now).is_some());
        sync.attempted(0, new(name, 6), now, 0.0);
    }
    assert_eq!(sync.next_attempt(now), None);
}

/// Each server's count is its latest, also from a connection that is not kept, and goes with its link.
#[tokio::test(start_paused = true)]
async fn a_count_is_refreshed_by_duplicates_and_forgotten_with_its_link() {
    let (mut sync, now) = fresh(1);
    sync.attempted(0, new("a", 2), now, 0.0);
    sync.attempted(0, new("b", 5), now, 0.0);
    assert_eq!(sync.known_count(), 5);
    sync.attempted(0, again("b", 3), now, 0.0);
    assert_eq!(sync.known_count(), 3);
    sync.attempted(0, again("b", 65), now, 0.0);
    assert_eq!(sync.known_count(), 64);
    // A silent server does not count; its link may respond again.
    sync.suspect(&server("b"), now, 0.0);
    assert_eq!(sync.known_count(), 2);
    sync.regain(&server("b"));
    assert_eq!(sync.known_count(), 64);
    sync.lost(&server("b"), now, 0.0);
    assert_eq!(sync.known_count(), 2);
    sync.regain(&server("b"));
    assert_eq!(sync.known_count(), 2);
}

/// As of a server that has too much to do: it accepts each connection and is silent on it.
///
/// Limit (times): Pause before a server is tried that was silent within the last minute, too | 1 s, doubled up to 30 s, and half to one and a half of that
#[tokio::test(start_paused = true)]
async fn a_server_that_is_silent_again_and_again_is_tried_more_and_more_rarely() {
    let (mut sync, mut now) = fresh(1);
    let mut pauses = Vec::new();
    for _silence in 0..8 {
        sync.attempted(0, new("a", 1), now, 0.0);
        now += seconds(3);
        sync.suspect(&server("a"), now, 0.5);
        let (_address, at) = sync.next_attempt(now).unwrap();
        pauses.push((at - now).as_secs());
        now = at;
    }
    assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 30, 30]);
    // A minute without silence, and the next silence is a first one; a server that is gone is searched for at once.
    sync.attempted(0, new("a", 1), now, 0.0);
    now += seconds(91);
    sync.suspect(&server("a"), now, 0.5);
    assert_eq!(sync.next_attempt(now), Some((0, now)));
    sync.attempted(0, new("a", 1), now, 0.0);
    sync.suspect(&server("a"), now, 0.5);
    sync.lost(&server("a"), now, 0.0);
    let (_address, at) = sync.next_attempt(now).unwrap();
    assert!(at - now <= POLICY.interval, "{:?}", at - now);
}

/// Upstream (configuration): The server count is that of the last new connection.
#[tokio::test(start_paused = true)]
async fn by_upstreams_rules_the_last_new_link_has_the_count() {
    let now = Instant::now();
    let rules = SearchRules::Upstream;
    let mut sync = SyncState::new(SyncPolicy { rules, ..POLICY }, 1);
    assert_eq!(sync.known_count(), 1);
    sync.attempted(0, new("a", 6), now, 0.0);
    sync.attempted(0, new("b", 3), now, 0.0);
    assert_eq!(sync.known_count(), 3);
    sync.attempted(0, again("a", 6), now, 0.0);
    assert_eq!(sync.known_count(), 3);
    sync.lost(&server("b"), now, 0.0);
    assert_eq!(sync.known_count(), 3);
}

/// Random numbers that are the same in every run.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        u32::try_from(self.0 >> 32).unwrap()
    }

    /// Uniform in `0..1`.
    fn chance(&mut self) -> f64 {
        f64::from(self.next()) / f64::from(u32::MAX)
    }

    fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }
}

/// Three servers behind a balancer, one of which announces 64: a thousand agents that start at once search for half a minute,
/// and then burden the servers with 17 connections a second together.
#[test]
fn one_server_that_announces_64_costs_a_thousand_agents_no_storm() {
    const AGENTS: usize = 1000;
    const HOUR: Duration = Duration::from_secs(3600);
    const NAMES: [(&str, i64); 3] = [("a", 3), ("b", 3), ("liar", 64)];
    let (start, mut draws) = (Instant::now(), Draws(1));
    let mut per_second = vec![0_u32; 3601];
    for _agent in 0..AGENTS {
        let (mut sync, mut now) = (SyncState::new(POLICY, 1), start);
        let mut attempts = 0;
        while let Some((at, due)) = sync
            .next_attempt(now)
            .filter(|(_, due)| *due < start + HOUR)
        {
            now = due;
            attempts += 1;
            per_second[usize::try_from((now - start).as_secs()).unwrap()] += 1;
            let (name, count) = NAMES[draws.below(3)];
            let outcome = reached(&sync, name, count);
            sync.attempted(at, outcome, now, draws.chance());
        }
        // 60 in an hour, after a search that starts again with each of the three.
        assert!(attempts < 200, "{attempts}");
    }
    let later = &per_second[180..3600];
    let most = later.iter().max().unwrap();
    assert!(*most < 60, "{most} in a second");
    assert!(later.iter().sum::<u32>() < 3600 * 20);
}

/// An agent behind a balancer that goes round all servers, and lanes that always wait for a turn.
struct RoundRobin {
    sync: SyncState,
    now: Instant,
    draws: Draws,
    servers: usize,
    turn: usize,
    lanes: u32,
}

impl RoundRobin {
    fn of(servers: usize, seed: u64) -> Self {
        let (sync, now) = fresh(1);
        Self {
            sync,
            now,
            draws: Draws(seed),
            servers,
            turn: 0,
            lanes: 0,
        }
    }

    /// Waits for the next attempt, while lanes take each turn they may have, and makes it. False if none is needed.
    fn attempt(&mut self) -> bool {
        let Some((at, due)) = self.sync.next_attempt(self.now) else {
            return false;
        };
        // Once the agent has given up, as many lanes connect as are wanted.
        let is_free = self.sync.view().progress == Progress::Slow;
        let mut wanted = if is_free { self.draws.below(5) } else { 1000 };
        while self.now < due {
            match self.sync.lane_turn(self.now) {
                Ok(()) if wanted > 0 => {
                    self.turn += 1;
                    self.lanes += 1;
                    wanted -= 1;
                }
                Ok(()) => self.now = due,
                Err(when) => self.now = when.min(due),
            }
        }
        let name = (self.turn % self.servers).to_string();
        self.turn += 1;
        let count = i64::try_from(self.servers).unwrap();
        let outcome = reached(&self.sync, &name, count);
        self.sync
            .attempted(at, outcome, self.now, self.draws.chance());
        true
    }
}

#[test]
fn lanes_take_no_turn_of_a_balancer_before_all_servers_are_linked() {
    for servers in 2..=8 {
        let mut agent = RoundRobin::of(servers, 1);
        while agent.attempt() {}
        let state = (agent.sync.held(), agent.turn, agent.lanes);
        assert_eq!(state, (servers, servers, 0));
        assert_eq!(agent.sync.lane_turn(agent.now), Ok(()));
    }
}

/// With a fixed number of lanes for each attempt, the attempts could reach every second server only.
#[test]
fn lanes_hide_no_server_of_a_balancer_that_comes_back_late() {
    for servers in 2..=8 {
        for seed in 0..20 {
            let mut agent = RoundRobin::of(servers, seed);
            while agent.attempt() {}
            // Down for 20 attempts: its turns lead to the next server.
            let gone = server("0");
            agent.sync.lost(&gone, agent.now, 0.5);
            for _attempt in 0..20 {
                let (at, due) = agent.sync.next_attempt(agent.now).unwrap();
                agent.now = due;
                let other = again("1", i64::try_from(servers).unwrap());
                agent.sync.attempted(at, other, due, agent.draws.chance());
            }
            let mut attempts = 0;
            while agent.attempt() {
                attempts += 1;
            }
            assert!(
                agent.lanes > 0 && attempts < 100,
                "{servers} servers: {attempts}"
            );
        }
    }
}

/// One server announces three. Ten attempts go first; then lanes get every second turn, and all after the agent has given up.
///
/// Limit (times): Lanes while servers are searched for | wait 30 s or 10 connections at most; then every second connection is a lane
#[test]
fn a_count_that_is_too_high_does_not_starve_lanes() {
    let mut agent = RoundRobin::of(1, 7);
    agent.sync.attempted(0, new("0", 3), agent.now, 0.5);
    for _attempt in 0..10 {
        let (at, due) = agent.sync.next_attempt(agent.now).unwrap();
        assert!(agent.sync.lane_turn(due).is_err());
        agent
            .sync
            .attempted(at, again("0", 3), due, agent.draws.chance());
        agent.now = due;
    }
    for _attempt in 10..30 {
        let (at, due) = agent.sync.next_attempt(agent.now).unwrap();
        while agent.sync.lane_turn(agent.now).is_ok() {
            agent.lanes += 1;
        }
        agent.now = due;
        agent
            .sync
            .attempted(at, again("0", 3), due, agent.draws.chance());
    }
    assert!((10..=30).contains(&agent.lanes), "{} lanes", agent.lanes);
    assert_eq!(agent.sync.view().progress, Progress::Slow);
    for _lane in 0..100 {
        assert_eq!(agent.sync.lane_turn(agent.now), Ok(()));
    }
}

/// A dead server is tried rarely, which must not make lanes rare.
#[test]
fn a_lane_waits_no_longer_than_two_seconds_for_a_rare_attempt() {
    let (mut sync, start) = fresh(1);
    sync.attempted(0, new("a", 2), start, 0.0);
    assert_eq!(sync.lane_turn(start), Err(start + FRESH_FOR));
    let later = start + FRESH_FOR;
    assert_eq!(sync.lane_turn(later), Ok(()));
    let next = later + seconds(2);
    assert_eq!(sync.lane_turn(later), Err(next));
    assert_eq!(sync.lane_turn(next), Ok(()));
}

fn ids(names: &[&str]) -> BTreeSet<ServerId> {
    names.iter().map(|name| server(name)).collect()
}

/// Behind a balancer a lease only shows that the server exists.
#[tokio::test(start_paused = true)]
async fn the_server_of_a_new_lease_is_tried_until_it_has_a_link() {
    let (mut sync, now) = fresh(1);
    sync.attempted(0, new("a", 1), now, 0.0);
    assert_eq!(sync.next_attempt(now), None);
    sync.leased(ids(&["a", "b"]), now, 0.25);
    assert_eq!(sync.known_count(), 2);
    let again = again("a", 1);
    let (mut now, mut attempts) = (now, 0);
    let eager_until = now + FRESH_FOR;
    let first = sync.next_attempt(now).unwrap().1 - now;
    assert_eq!(first, Duration::from_millis(250), "spread over a pause");
    while now < eager_until {
        now = sync.next_attempt(now).unwrap().1;
        sync.attempted(0, again.clone(), now, 0.0);
        attempts += 1;
    }
    assert_eq!(attempts, 31, "once a second");
    let pause = sync.next_attempt(now).unwrap().1 - now;
    assert_eq!(pause, seconds(30), "and then rarely");
    sync.attempted(0, new("b", 1), now, 0.0);
    assert_eq!(sync.next_attempt(now), None);
    // The end of a lease closes no link and starts no attempts.
    sync.leased(ids(&["a"]), now, 0.0);
    assert_eq!((sync.next_attempt(now), sync.held()), (None, 2));
}

/// Two servers have leases; the link to a third server, without a lease, must not count for them.
#[tokio::test(start_paused = true)]
async fn links_to_other_servers_do_not_count_for_a_leased_server() {
    let (mut sync, now) = fresh(1);
    sync.leased(ids(&["a", "b"]), now, 0.0);
    sync.attempted(0, new("a", 1), now, 0.0);
    sync.attempted(0, new("old", 1), now, 0.0);
    assert!(sync.next_attempt(now).is_some(), "b is not held");
    sync.attempted(0, new("b", 1), now, 0.0);
    assert_eq!(sync.next_attempt(now), None);
}

/// Upstream (configuration): The server count is the larger one of leases and headers where that is configured.
#[tokio::test(start_paused = true)]
async fn the_larger_server_count_is_used_when_configured() {
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

/// Publicly reported without this rule: 17,000 attempts a day per agent, each with a TLS handshake and a TokenReview.
#[tokio::test(start_paused = true)]
async fn sync_forever_pauses_while_all_leased_servers_are_held() {
    let now = Instant::now();
    let mut sync = SyncState::new(FOREVER, 2);
    sync.leased(ids(&["a", "b"]), now, 0.0);
    sync.attempted(0, new("a", 2), now, 0.0);
    assert!(sync.next_attempt(now).is_some());
    sync.attempted(1, new("b", 2), now, 0.0);
    assert_eq!(sync.next_attempt(now), None);
    // Without leases the number of servers is unknown.
    sync.leased(ids(&[]), now, 0.0);
    assert!(sync.next_attempt(now).is_some());
}

#[tokio::test(start_paused = true)]
async fn sync_forever_retries_slowly_and_draining_stops_attempts() {
    let now = Instant::now();
    let mut sync = SyncState::new(FOREVER, 1);
    sync.attempted(0, new("a", 1), now, 0.0);
    assert_eq!(sync.next_attempt(now).unwrap().1 - now, seconds(10));
    sync.drain();
    assert_eq!(sync.next_attempt(now), None);
}

/// A malicious server could otherwise make the agent connect without limit.
///
/// Limit (peers): Servers and links of an agent
#[tokio::test(start_paused = true)]
async fn an_agent_has_at_most_64_servers_and_links() {
    let (mut sync, now) = fresh(1);
    assert!(!sync.is_first_excess(64) && sync.is_first_excess(65) && !sync.is_first_excess(65));
    for (announced, known) in [(i64::MAX, 64), (64, 64), (63, 63), (0, 1), (i64::MIN, 1)] {
        sync.attempted(0, new("a", announced), now, 0.0);
        assert_eq!(sync.known_count(), known);
        sync.lost(&server("a"), now, 0.0);
    }
    assert!(sync.next_attempt_beside(63, now).is_some());
    assert_eq!(sync.next_attempt_beside(64, now), None);
}
