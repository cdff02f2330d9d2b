//! Tests of when and where an agent connects, with simulated time.

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
async fn no_server_is_tried_once_the_count_is_met() {
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
async fn every_address_is_tried_even_when_the_count_is_met() {
    let now = Instant::now();
    let mut sync = SyncState::new(POLICY, 2);
    sync.attempted(0, new("a", 1), now, 0.0);
    assert_eq!(sync.next_attempt(now), Some((1, now)));
    sync.attempted(1, new("b", 1), now, 0.0);
    assert_eq!(sync.next_attempt(now), None);
    // A failing address has its own backoff and does not delay the other address.
    sync.lost(&server("b"), now, 0.0);
    sync.attempted(1, Attempt::Failed, now, 0.0);
    assert_eq!(
        sync.next_attempt(now),
        Some((1, now + Duration::from_secs(1)))
    );
}

/// An unanswered attempt uses its own full timeout, without delaying other addresses.
#[tokio::test(start_paused = true)]
async fn an_attempt_does_not_delay_other_addresses() {
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

/// One address is a balancer, the other never answers: an attempt there is in progress or in backoff at all times.
#[tokio::test(start_paused = true)]
async fn a_dead_address_does_not_hide_servers_behind_a_balancer() {
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

/// As in a rolling restart: the previous connection reached the restarted server, and another server restarts now.
#[tokio::test(start_paused = true)]
async fn a_server_lost_behind_a_balancer_is_retried_soon() {
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

/// With `--sync-forever` an agent with all servers keeps connecting, and reaches servers that it already holds.
#[tokio::test(start_paused = true)]
async fn a_server_lost_after_many_duplicates_is_retried_soon() {
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
async fn an_unreachable_server_count_backs_off_to_the_cap() {
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

/// Behind a balancer a lease only shows that the server exists.
#[tokio::test(start_paused = true)]
async fn the_server_of_a_new_lease_is_tried_until_it_has_a_link() {
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
    // The end of a lease closes no link and starts no attempts.
    sync.leased(ids(&["a"]), now, 0.0);
    assert_eq!((sync.next_attempt(now), sync.held()), (None, 2));
}

/// Two servers have leases; the link to a third server, without a lease, must not count for them.
#[tokio::test(start_paused = true)]
async fn links_to_other_servers_do_not_count_for_a_leased_server() {
    let now = Instant::now();
    let mut sync = SyncState::new(POLICY, 1);
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
    // Without leases the number of servers is unknown.
    sync.leased(ids(&[]), now, 0.0);
    assert!(sync.next_attempt(now).is_some());
}

#[tokio::test(start_paused = true)]
async fn sync_forever_retries_slowly_and_draining_stops_attempts() {
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

/// A malicious server could otherwise make the agent connect without limit.
///
/// Limit (peers): Servers and links of an agent
#[tokio::test(start_paused = true)]
async fn an_agent_has_at_most_64_servers_and_links() {
    let now = Instant::now();
    let mut sync = SyncState::new(POLICY, 1);
    assert!(!sync.is_first_excess(64) && sync.is_first_excess(65) && !sync.is_first_excess(65));
    for (announced, known) in [(i64::MAX, 64), (64, 64), (63, 63), (0, 1), (i64::MIN, 1)] {
        sync.attempted(0, new("a", announced), now, 0.0);
        assert_eq!(sync.known_count(), known);
        sync.lost(&server("a"), now, 0.0);
    }
    assert!(sync.next_attempt_beside(63, now).is_some());
    assert_eq!(sync.next_attempt_beside(64, now), None);
}
