//! Times that accounting exports, compared with the test's own measurements and the kernel's `TCP_INFO`.

use std::time::{Duration, Instant};

use adit_account::Options;
use adit_relay::tcp_state;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::account_tunnels::{AGENT, World};
use crate::support::accounting::{Accounting, lines, of, open_rtt, sample};
use crate::support::named::{CLIENT, LABELS, TARGET, connect, exchange, listener};
use crate::support::privilege::ready;
use crate::support::wait::until;

const CONNECTIONS: u64 = 4;
/// Minimum time in which each connection moves bytes.
const USED: Duration = Duration::from_millis(60);
const LIMIT: Duration = Duration::from_secs(60);
/// Resolution of exported times, which are whole microseconds.
const MICROSECOND: f64 = 1e-6;
/// A cookie that no socket has.
const NOBODYS: u64 = 1 << 60;

/// Lower and upper bound of an expected sum, in seconds.
#[derive(Clone, Copy, Default, Debug)]
struct Bounds {
    least: f64,
    most: f64,
}

impl Bounds {
    fn add(&mut self, least: f64, most: f64) {
        self.least += least;
        self.most += most;
    }

    fn assert_hold(&self, what: &str, sum: f64) {
        assert!(
            self.least <= sum && sum <= self.most,
            "{what}: {sum} s is not within {self:?}"
        );
    }
}

/// Echoes small messages for `least`, and returns when the last round trip began.
async fn echo_for(least: Duration, ours: &mut TcpStream, theirs: &mut TcpStream) -> Instant {
    let (began, mut block) = (Instant::now(), [0; 100]);
    loop {
        let round = Instant::now();
        ours.write_all(&block).await.unwrap();
        theirs.read_exact(&mut block).await.unwrap();
        theirs.write_all(&block).await.unwrap();
        ours.read_exact(&mut block).await.unwrap();
        if began.elapsed() >= least {
            return round;
        }
    }
}

/// Limit (accounting): Lifetimes and round-trip times | lifetime of the connection; round-trip time of the kernel's
/// `TCP_INFO`
#[tokio::test]
async fn lifetimes_match_the_connections_and_round_trip_times_match_the_kernel() {
    if !ready("times of connections") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    let door = listener(&accounting.accounts);
    let address = door.local_addr().unwrap();
    let mut lifetimes = Bounds::default();
    // The connecting end first, then the accepting end.
    let mut trips = [Bounds::default(); 2];
    for _connection in 0..CONNECTIONS {
        let before = Instant::now();
        let connecting = connect(&accounting.accounts, address);
        let (mut ours, accepted) = tokio::join!(connecting, door.accept());
        let (mut theirs, _) = accepted.unwrap();
        accounting.accounts.accepted(&theirs, &CLIENT);
        let open = Instant::now();
        let last = echo_for(USED, &mut ours, &mut theirs).await;
        let measured = [&ours, &theirs].map(|end| tcp_state(end).unwrap().rtt.as_secs_f64());
        let cookies = [&ours, &theirs].map(|end| accounting.accounts.cookie(end).unwrap());
        let closing = Instant::now();
        let _both = tokio::join!(exchange(&mut ours, 0), exchange(&mut theirs, 0));
        drop((ours, theirs));
        let is_over = |cookie: &u64| accounting.table.live(*cookie).is_none();
        while !cookies.iter().all(is_over) {
            assert!(closing.elapsed() < LIMIT, "it does not end");
            tokio::task::yield_now().await;
        }
        let closed = Instant::now();
        lifetimes.add(
            (closing - open).as_secs_f64(),
            (closed - before).as_secs_f64(),
        );
        // Closing adds a few round-trip samples, each with weight 1/8. They cover bytes sent since the last round began.
        let since = (closed - last).as_secs_f64() * 1.01;
        for (bounds, measured) in trips.iter_mut().zip(measured) {
            assert!(measured > 0.0);
            let least = measured / 2.0 - MICROSECOND;
            bounds.add(least, measured.max(since) + MICROSECOND);
        }
    }
    let client = r#"agent="a",destination_class="""#;
    accounting.ended(LABELS, "target", CONNECTIONS).await;
    accounting.ended(client, "client", CONNECTIONS).await;
    assert!(lifetimes.least > USED.as_secs_f64());
    for (labels, role, trips) in [(LABELS, "target", trips[0]), (client, "client", trips[1])] {
        let lifetime = accounting.seconds("lifetime", labels, role);
        lifetimes.assert_hold(&format!("lifetimes of {role}"), lifetime);
        let rtt = accounting.seconds("rtt", labels, role);
        assert!(rtt > 0.0, "{role}");
        trips.assert_hold(&format!("round trips of {role}"), rtt);
    }
}

/// Mean of the round-trip times that the kernel recorded for the near ends, in seconds.
fn noted(accounting: &Accounting, connections: &[(TcpStream, TcpStream)]) -> f64 {
    let of = |near: &TcpStream| {
        let cookie = accounting.accounts.cookie(near).unwrap();
        accounting.table.live(cookie).unwrap().account.rtt_us
    };
    let micros: u32 = connections.iter().map(|(near, _far)| of(near)).sum();
    let connections = u32::try_from(connections.len()).unwrap();
    f64::from(micros) / f64::from(connections) * MICROSECOND
}

/// A connection without a measurement is left out of the mean. If it is the only open one, the series disappears.
///
/// Limit (accounting): Round-trip time of open connections, links and lanes
#[tokio::test]
async fn the_mean_round_trip_of_open_connections_is_exported_until_they_end() {
    if !ready("round trips of open connections") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    accounting.accounts.accepted_cookie(NOBODYS, &TARGET);
    let door = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = door.local_addr().unwrap();
    let mut open = Vec::new();
    for _connection in 0..CONNECTIONS {
        let connecting = connect(&accounting.accounts, address);
        let (mut near, accepted) = tokio::join!(connecting, door.accept());
        let (mut far, _) = accepted.unwrap();
        echo_for(USED, &mut near, &mut far).await;
        open.push((near, far));
    }
    for left in [CONNECTIONS, 1] {
        for (mut near, mut far) in open.drain(usize::try_from(left).unwrap()..) {
            let _both = tokio::join!(exchange(&mut near, 0), exchange(&mut far, 0));
        }
        accounting.ended(LABELS, "target", CONNECTIONS - left).await;
        // The connections are idle, so their recorded round-trip times do not change.
        accounting
            .until("the mean of open connections", |now| {
                let mean = noted(now, &open);
                let is_mean = |shown: f64| (shown - mean).abs() < MICROSECOND / 100.0;
                mean > 0.0 && now.open_rtt(LABELS, "target").is_some_and(is_mean)
            })
            .await;
    }
    drop(open);
    accounting.ended(LABELS, "target", CONNECTIONS).await;
    accounting
        .until("an end of the series", |now| {
            now.open_rtt(LABELS, "target").is_none()
        })
        .await;
    assert!(accounting.table.live(NOBODYS).is_some());
}

/// Checks round-trip times at both ends of links or lanes while a tunnel moves bytes on them.
async fn round_trips_of_what_carries_tunnels(lanes: &str, role: &str) {
    let world = World::start(lanes, &[]).await;
    let ends = [world.server.metrics.scrape(), world.agent.metrics.scrape()];
    let [server, agent] = &ends;
    let all = || lines(server) + &lines(agent);
    let idle = || role == "link" || sample(server, r#"adit_lanes{state="idle"}"#) >= Some(1);
    until("an idle lane", idle, String::new).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    let (client, accepted) = tokio::join!(world.open(&target), listener.accept());
    let ((mut client, _head), (mut target, _)) = (client, accepted.unwrap());
    let began = Instant::now();
    for end in &ends {
        let trip = loop {
            echo_for(USED, &mut client, &mut target).await;
            if let Some(trip) = open_rtt(end, AGENT, role) {
                break trip;
            }
            assert!(began.elapsed() < LIMIT, "no round trip: {}", all());
        };
        // A round trip on loopback takes less than a second.
        assert!(trip > 0.0 && trip < 1.0, "{role}: {trip} s");
    }
    drop((client, target));
    world.agent.stop().await;
    let over = || {
        of(server, "connections_total", AGENT, "", role) >= Some(1)
            && ends.iter().all(|end| open_rtt(end, AGENT, role).is_none())
    };
    until("an end of round trips", over, all).await;
    world.server.stop(Some(Duration::ZERO)).await;
}

/// Limit (accounting): Round-trip time of open connections, links and lanes
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_link_shows_its_round_trip() {
    if ready("round trips of an open link") {
        round_trips_of_what_carries_tunnels("0", "link").await;
    }
}

/// Limit (accounting): Round-trip time of open connections, links and lanes
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_lanes_show_their_round_trip() {
    if ready("round trips of open lanes") {
        round_trips_of_what_carries_tunnels("64", "lane").await;
    }
}
