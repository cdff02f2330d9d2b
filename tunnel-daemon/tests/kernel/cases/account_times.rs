//! Times that accounting exports, against what the test saw of its connections and what the kernel says of them itself.

use std::time::{Duration, Instant};

use adit::ebpf::account::Options;
use adit_relay::tcp_state;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::account::{CLIENT, LABELS, connect, exchange, listener};
use crate::support::accounting::Accounting;
use crate::support::privilege::ready;

const CONNECTIONS: u64 = 4;
/// How long each is used at least.
const USED: Duration = Duration::from_millis(60);
const LIMIT: Duration = Duration::from_secs(60);
/// In the exported time, which is a whole number of them.
const MICROSECOND: f64 = 1e-6;

/// Between what a sum has to be, in seconds.
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

/// Small messages there and back for so long; when the last of them began.
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

#[tokio::test]
async fn lifetimes_are_those_of_connections_and_round_trips_those_that_the_kernel_measured() {
    if !ready("times of connections") {
        return;
    }
    let accounting = Accounting::start(Options::with_series_max(10));
    let door = listener(&accounting.accounts);
    let address = door.local_addr().unwrap();
    let mut lifetimes = Bounds::default();
    // Of who connected, and of who accepted.
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
        let is_over = |cookie: &u64| accounting.accounts.live(*cookie).is_none();
        while !cookies.iter().all(is_over) {
            assert!(closing.elapsed() < LIMIT, "it does not end");
            tokio::task::yield_now().await;
        }
        let closed = Instant::now();
        lifetimes.add(
            (closing - open).as_secs_f64(),
            (closed - before).as_secs_f64(),
        );
        // An end adds at most a few measurements, an eighth each, of what was sent since the last round began.
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
