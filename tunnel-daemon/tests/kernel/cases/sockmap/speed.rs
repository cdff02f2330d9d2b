//! What is given up: a sockmap without any guard beside the copy of the relay, on the same sockets.

use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use adit_relay::{Pair, Preference, Relay, RelayConfig, Submitted, Thresholds, probe};

use super::UNGUARDED;
use crate::support::privilege::{ready, say};
use crate::support::sockmap::{Crossing, End, PATIENCE, Sizes, Sockmap, Stop, pull, push};

const ROUNDS: usize = 9;
const BULK: u64 = 512 << 20;
const ECHOES: usize = 4_000;
const ECHO: u64 = 64;
/// What tcp_rmem and tcp_wmem let a socket grow to on most systems.
const SIZES: Sizes = Sizes {
    receive: 2 << 20,
    send: 2 << 20,
};

/// Who moves the bytes of a crossing.
enum By {
    Copy(Relay, Submitted),
    Sockmap(Box<Sockmap>),
}

struct Row {
    bulk: Duration,
    echo: Duration,
    /// Of all CPUs, while the bulk moved.
    busy: Duration,
}

/// Time that CPUs were not idle since the machine began.
fn busy() -> Duration {
    let text = std::fs::read_to_string("/proc/stat").unwrap();
    let first = text.lines().next().unwrap().split_whitespace().skip(1);
    let ticks: Vec<u64> = first.filter_map(|word| word.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq
    let sum: u64 = [0, 1, 2, 5, 6].iter().map(|at| ticks[*at]).sum();
    Duration::from_millis(sum * 10)
}

fn start(is_copy: bool) -> (TcpStream, TcpStream, By, Vec<TcpStream>) {
    let Crossing {
        client,
        a,
        b,
        target,
    } = Crossing::sized(SIZES, SIZES);
    if is_copy {
        let mut config = RelayConfig::new(probe(Preference::Epoll).unwrap());
        config.threads = 1;
        config.thresholds = Thresholds::copy_only();
        let relay = Relay::start(&config).unwrap();
        let pair = Pair::new(a.into(), b.into());
        let submitted = relay.handle().submit(pair, Box::new(drop)).ok().unwrap();
        return (client, target, By::Copy(relay, submitted), Vec::new());
    }
    let mut sockmap = Sockmap::new();
    sockmap.join(&a, &b, UNGUARDED);
    sockmap.join(&b, &a, UNGUARDED);
    (client, target, By::Sockmap(Box::new(sockmap)), vec![a, b])
}

fn measure(is_copy: bool) -> Row {
    let (client, target, by, kept) = start(is_copy);
    let (before, begin) = (busy(), Instant::now());
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(push(&client, 0, BULK, PATIENCE), (BULK, Stop::All)));
        assert_eq!(pull(&target, 0, BULK, PATIENCE), (BULK, End::All));
    });
    let (bulk, busy) = (begin.elapsed(), busy().saturating_sub(before));
    let mut times = thread::scope(|scope| {
        scope.spawn(|| {
            for at in 0..ECHOES as u64 {
                assert_eq!(pull(&target, at * ECHO, ECHO, PATIENCE), (ECHO, End::All));
                push(&target, at * ECHO, ECHO, PATIENCE);
            }
        });
        let mut times = Vec::with_capacity(ECHOES);
        for at in 0..ECHOES as u64 {
            let begin = Instant::now();
            push(&client, at * ECHO, ECHO, PATIENCE);
            assert_eq!(pull(&client, at * ECHO, ECHO, PATIENCE), (ECHO, End::All));
            times.push(begin.elapsed());
        }
        times
    });
    times.sort_unstable();
    drop((client, target, kept));
    match by {
        By::Copy(relay, submitted) => drop((submitted, relay)),
        By::Sockmap(sockmap) => drop(sockmap),
    }
    Row {
        bulk,
        busy,
        echo: times[ECHOES / 2],
    }
}

fn median(rows: &[Row], of: impl Fn(&Row) -> Duration) -> Duration {
    let mut all: Vec<Duration> = rows.iter().map(of).collect();
    all.sort_unstable();
    all[all.len() / 2]
}

#[test]
#[ignore = "a measurement of a minute, by hand: -- --ignored what_a_sockmap_would_gain --nocapture"]
fn what_a_sockmap_would_gain() {
    if !ready("a measurement") {
        return;
    }
    let mut rows = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        rows[0].push(measure(true));
        rows[1].push(measure(false));
    }
    for (name, rows) in ["copy", "sockmap"].iter().zip(&rows) {
        let bulk = median(rows, |row| row.bulk).as_secs_f64();
        let busy = median(rows, |row| row.busy).as_secs_f64();
        let gib = BULK as f64 / f64::from(1 << 30);
        let gbits = BULK as f64 * 8.0 / bulk / 1e9;
        let line = format!(
            "{gbits:.1} Gbit/s, {:.2} CPU seconds of the machine per GiB, echo p50 {:.1} us",
            busy / gib,
            median(rows, |row| row.echo).as_secs_f64() * 1e6
        );
        say(name, &line);
    }
}
