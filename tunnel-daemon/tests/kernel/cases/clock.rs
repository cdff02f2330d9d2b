//! Jumps of the system clock: durations use the monotonic clock, so tunnels survive and new dials work.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use adit_relay::{Preference, probe};
use rustix::time::{ClockId, clock_gettime, clock_settime};

use super::privileges::linked_agent;
use crate::support::daemon::{Daemon, User};
use crate::support::privilege::{say, skip};
use crate::support::target::target;
use crate::support::world::World;

/// Environment variable that permits the test to set the clock. `xtask/src/vm/init.sh` sets it in virtual machines.
const OWN_CLOCK: &str = "ADIT_OWN_CLOCK";
/// An hour less than a day, because throw-away certificates are valid for one day.
const JUMP_SECONDS: i64 = 23 * 3600;
/// How long the tunnels are observed after each jump. It covers several pings of the link.
const WATCHED: Duration = Duration::from_secs(3);
/// Minimum bytes on each tunnel within [`WATCHED`].
const WATCHED_BYTES: u64 = 64 * 1024;
/// Tunnels that stay open through both jumps. They outnumber the lanes, so some use the link.
const TUNNELS: usize = 6;
const LANES: &str = "--lanes=4";
const PLAINTEXT: &str = "--lane-security=plaintext";
/// Dials after each jump.
const DIALS: usize = 5;
const BLOCK_BYTES: usize = 4096;
/// Bytes of a burst in each direction. A relay copies a tunnel's first 256 KiB and splices larger amounts after them.
const BURST_BYTES: usize = 4 << 20;
const SPLICED: &str = "adit_relay_bytes_total{mover=\"splice\"}";
/// Longest wait for one answer, also under emulation.
const PATIENCE: Duration = Duration::from_secs(60);

/// The machine's clock. Dropping it restores the time.
#[derive(Default)]
struct Clock {
    ahead_seconds: i64,
}

impl Clock {
    fn jump(&mut self, seconds: i64) {
        let mut time = clock_gettime(ClockId::Realtime);
        let before = time.tv_sec;
        time.tv_sec += seconds;
        clock_settime(ClockId::Realtime, time).expect("root sets the clock of its own machine");
        self.ahead_seconds += seconds;
        let jumped = clock_gettime(ClockId::Realtime).tv_sec - before;
        assert!((jumped - seconds).abs() < 60, "{jumped} s");
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        let mut time = clock_gettime(ClockId::Realtime);
        time.tv_sec -= self.ahead_seconds;
        let _as_it_was = clock_settime(ClockId::Realtime, time);
    }
}

/// Opens a tunnel.
fn open(world: &World, target: SocketAddr) -> UnixStream {
    let mut stream = UnixStream::connect(world.dir().join("c")).expect("the frontend listens");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let head = until(&mut stream, b"\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    stream
}

/// Reads up to and including `end`, and no byte more.
fn until(stream: &mut UnixStream, end: &[u8]) -> String {
    let (mut read, mut byte) = (Vec::new(), [0]);
    while !read.ends_with(end) {
        stream.read_exact(&mut byte).expect("an answer");
        read.extend_from_slice(&byte);
    }
    String::from_utf8(read).expect("text")
}

/// Closes a tunnel cleanly.
fn close(mut stream: UnixStream) {
    stream.shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("an end in order");
    assert!(rest.is_empty(), "{} bytes more", rest.len());
}

/// A tunnel that echoes patterned bytes until it is stopped.
struct Tunnel {
    stop: Arc<AtomicBool>,
    moved: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Tunnel {
    fn start(mut stream: UnixStream) -> Self {
        let (stop, moved) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&moved));
        let thread = thread::spawn(move || {
            // The target sends a greeting.
            until(&mut stream, b"\n");
            // The pattern repeats after 251 bytes, so a missing or duplicated block is detected.
            let mut bytes = (0..=250_u8).cycle();
            let mut back = vec![0; BLOCK_BYTES];
            while !stopped.load(Relaxed) {
                let said: Vec<u8> = bytes.by_ref().take(BLOCK_BYTES).collect();
                stream.write_all(&said).expect("the tunnel takes bytes");
                stream.read_exact(&mut back).expect("the tunnel lives");
                assert!(back == said, "other bytes came back");
                count.fetch_add(BLOCK_BYTES as u64, Relaxed);
            }
            close(stream);
        });
        Self {
            stop,
            moved,
            thread,
        }
    }

    fn moved(&self) -> u64 {
        self.moved.load(Relaxed)
    }

    fn end(self) {
        self.stop.store(true, Relaxed);
        self.thread.join().expect("its bytes are right to the end");
    }
}

/// A tunnel that is idle between bursts.
struct Bursts {
    stream: UnixStream,
    bytes: Vec<u8>,
}

impl Bursts {
    fn start(mut stream: UnixStream) -> Self {
        // The target sends a greeting.
        until(&mut stream, b"\n");
        let bytes = (0..=250_u8).cycle().take(BURST_BYTES).collect();
        Self { stream, bytes }
    }

    /// Writes and reads at the same time, so that no socket buffer stays full.
    fn burst(&self) {
        let (mut there, mut back) = (&self.stream, &self.stream);
        let mut came = vec![0; self.bytes.len()];
        thread::scope(|scope| {
            scope.spawn(move || {
                there
                    .write_all(&self.bytes)
                    .expect("the tunnel takes bytes")
            });
            back.read_exact(&mut came).expect("the tunnel lives");
        });
        assert!(came == self.bytes, "other bytes came back");
    }
}

/// A target for one connection. After EOF it waits for a signal before it answers.
fn late_target() -> (SocketAddr, mpsc::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
    let address = listener.local_addr().expect("bound");
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let (mut stream, _caller) = listener.accept().expect("a caller");
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).expect("a half-close");
        if told.recv().is_ok() {
            stream.write_all(b"late").expect("the caller listens");
        }
    });
    (address, tell)
}

/// Values of a field in all access events.
fn events(log: &str, field: &str) -> Vec<f64> {
    let name = format!("{field}=");
    let ends = log.lines().filter(|line| line.contains("tunnel ended"));
    ends.map(|line| {
        let (_, rest) = line.split_once(&name).expect("an event has it");
        let value = rest.split(' ').next().expect("a word");
        value.parse().expect("a number")
    })
    .collect()
}

/// Samples of a metric family that are not zero.
fn counted(metrics: &str, family: &str) -> Vec<String> {
    let lines = metrics.lines().filter(|line| line.starts_with(family));
    lines
        .filter(|line| !line.ends_with(" 0"))
        .map(str::to_owned)
        .collect()
}

/// Starts an additional agent.
fn another_agent(world: &World, server: &Daemon, flags: &[String], number: usize) -> Daemon {
    let mut args = world.agent_args(server.address("agents"));
    args.retain(|arg| !arg.starts_with("--agent-id="));
    args.push(format!("--agent-id=another-{number}"));
    args.extend_from_slice(flags);
    Daemon::start(User::Root, &format!("agent-{number}"), &args, world.dir())
}

/// `flags` go to server and agents. `path` is the expected path of the first tunnels.
fn nothing_is_cut(flags: &[&str], path: &str) {
    let begun = Instant::now();
    let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let world = World::new();
    let args = world.server_args(&[&flags[..], &["--keepalive-time=1s".to_owned()]].concat());
    let server = Daemon::start(User::Root, "server", &args, world.dir());
    let agent_flags = [&flags[..], &[LANES.to_owned()]].concat();
    let mut agents = vec![linked_agent(&world, User::Root, &server, &agent_flags)];
    server.until("all lanes", |server| {
        server.metric("adit_lanes{state=\"idle\"}") == 4.0
    });
    let target = target("127.0.0.1");
    // First, so that it gets a lane.
    let bursts = Bursts::start(open(&world, target));
    let (late, speak) = late_target();
    let mut half_closed = open(&world, late);
    half_closed.shutdown(Shutdown::Write).unwrap();
    let tunnels: Vec<Tunnel> = (0..TUNNELS)
        .map(|_tunnel| Tunnel::start(open(&world, target)))
        .collect();
    for path in ["link", path] {
        let opened = format!("adit_tunnels_opened_total{{path=\"{path}\"}}");
        assert!(server.metric(&opened) > 0.0, "{path}");
    }

    // The first burst makes the relay of a raw lane splice. The next burst runs while the clock jumps.
    bursts.burst();
    let mut clock = Clock::default();
    for seconds in [JUMP_SECONDS, -JUMP_SECONDS] {
        thread::scope(|scope| {
            scope.spawn(|| bursts.burst());
            clock.jump(seconds);
        });
        let goals: Vec<u64> = tunnels
            .iter()
            .map(|tunnel| tunnel.moved() + WATCHED_BYTES)
            .collect();
        let jumped = Instant::now();
        server.until("bytes go on", |_server| {
            let mut all = tunnels.iter().zip(&goals);
            all.all(|(tunnel, goal)| {
                assert!(!tunnel.thread.is_finished(), "a tunnel was cut");
                tunnel.moved() >= *goal
            }) && jumped.elapsed() >= WATCHED
        });
        for _dial in 0..DIALS {
            let mut stream = open(&world, target);
            until(&mut stream, b"\n");
            close(stream);
        }
        // Another agent's handshakes for its link and lanes succeed at the current time.
        let (links, opened) = (
            server.metric("adit_links{peer=\"adit\"}"),
            server.lanes_opened(),
        );
        agents.push(another_agent(&world, &server, &agent_flags, agents.len()));
        server.until("one link more, and its lanes", |server| {
            server.metric("adit_links{peer=\"adit\"}") == links + 1.0
                && server.lanes_opened() > opened
        });
    }

    for tunnel in tunnels {
        tunnel.end();
    }
    close(bursts.stream);
    // By the clock, this tunnel was half-closed for two days.
    speak.send(()).expect("the target waits");
    let mut rest = Vec::new();
    half_closed.read_to_end(&mut rest).expect("an end in order");
    assert_eq!(rest, b"late");
    drop(half_closed);
    server.until("the end of all tunnels", |server| {
        server.metric("konnectivity_network_proxy_server_established_connections") == 0.0
    });
    let metrics = server.get("/metrics");
    let ends = counted(&metrics, "adit_tunnels_closed_total{");
    assert!(
        matches!(&ends[..], [clean] if clean.contains("reason=\"clean\"")),
        "{ends:?}"
    );
    for end in counted(&metrics, "adit_lanes_closed_total{") {
        let in_order = ["used", "drained"].map(|reason| format!("reason=\"{reason}\""));
        assert!(in_order.iter().any(|reason| end.contains(reason)), "{end}");
    }
    assert_eq!(server.metric("adit_links{peer=\"adit\"}"), 3.0);
    let spliced = server.metric(SPLICED);
    assert_eq!(spliced > 0.0, path == "raw-lane", "{spliced} bytes");

    let all = 2 + TUNNELS + 2 * DIALS;
    server.until("access events", |server| {
        events(&server.log(), "life_seconds").len() == all
    });
    let (log, age) = (server.log(), begun.elapsed().as_secs_f64());
    let (lives, dials) = (events(&log, "life_seconds"), events(&log, "dial_seconds"));
    for time in lives.iter().chain(&dials) {
        assert!((0.0..=age).contains(time), "{time} s of {age}");
    }
    let through_both = lives
        .iter()
        .filter(|life| **life >= 2.0 * WATCHED.as_secs_f64());
    assert!(through_both.count() >= 2 + TUNNELS, "{lives:?}");
}

/// Whether the test may set this machine's clock.
fn own_clock(test: &str) -> bool {
    let own = std::env::var_os(OWN_CLOCK).is_some();
    if !own {
        say(
            test,
            format!("it sets the clock, and {OWN_CLOCK} is not set"),
        );
    }
    own
}

#[test]
fn a_clock_jump_cuts_no_tunnel_on_raw_lanes_or_the_link_with_epoll() {
    if own_clock("a clock that jumps, with pipes") {
        nothing_is_cut(&[PLAINTEXT, "--relay-engine=epoll"], "raw-lane");
    }
}

#[test]
fn a_clock_jump_cuts_no_tunnel_on_raw_lanes_or_the_link_with_io_uring() {
    let test = "a clock that jumps, with pipes by io_uring";
    if !own_clock(test) {
        return;
    }
    match probe(Preference::IoUring) {
        Ok(_) => nothing_is_cut(&[PLAINTEXT, "--relay-engine=io-uring"], "raw-lane"),
        Err(error) => skip(test, error),
    }
}

#[test]
fn a_clock_jump_cuts_no_tunnel_on_lanes_or_the_link() {
    if own_clock("a clock that jumps, with lanes") {
        nothing_is_cut(&["--lane-security=tls"], "lane");
    }
}
