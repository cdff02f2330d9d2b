//! A clock that jumps: whatever lasts is measured by another one, so nothing is cut, and dials go on.

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

/// Set where nobody else has to live with the clock: by `xtask/src/vm/init.sh`.
const OWN_CLOCK: &str = "ADIT_OWN_CLOCK";
/// A day, but for what certificates made for a test do not outlive.
const JUMP_SECONDS: i64 = 23 * 3600;
/// The tunnels are looked at for so long after each jump: several pings of the link.
const WATCHED: Duration = Duration::from_secs(3);
/// So much has to pass on each tunnel meanwhile.
const WATCHED_BYTES: u64 = 64 * 1024;
/// Tunnels through both jumps: more than there are lanes, so that some ride the link.
const TUNNELS: usize = 6;
const LANES: &str = "--lanes=4";
const PLAINTEXT: &str = "--lane-security=plaintext";
/// Dials after each jump.
const DIALS: usize = 5;
const BLOCK_BYTES: usize = 4096;
/// At once there and back: a relay copies the first quarter of a MiB of a tunnel and splices what comes behind in large pieces.
const BURST_BYTES: usize = 4 << 20;
const SPLICED: &str = "adit_relay_bytes_total{mover=\"splice\"}";
/// For one answer, also under emulation.
const PATIENCE: Duration = Duration::from_secs(60);

/// The machine's clock, which is as it was once this is dropped.
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

/// An open tunnel.
fn open(world: &World, target: SocketAddr) -> UnixStream {
    let mut stream = UnixStream::connect(world.dir().join("c")).expect("the frontend listens");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let head = until(&mut stream, b"\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    stream
}

/// Reads up to this and no byte more.
fn until(stream: &mut UnixStream, end: &[u8]) -> String {
    let (mut read, mut byte) = (Vec::new(), [0]);
    while !read.ends_with(end) {
        stream.read_exact(&mut byte).expect("an answer");
        read.extend_from_slice(&byte);
    }
    String::from_utf8(read).expect("text")
}

/// Ends a tunnel in order.
fn close(mut stream: UnixStream) {
    stream.shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("an end in order");
    assert!(rest.is_empty(), "{} bytes more", rest.len());
}

/// A tunnel through which patterned bytes go there and back until it is told to end.
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
            // The target greets.
            until(&mut stream, b"\n");
            // A block that is missing or comes twice shows: nothing else repeats after 251 bytes.
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

/// A tunnel that is quiet between bursts.
struct Bursts {
    stream: UnixStream,
    bytes: Vec<u8>,
}

impl Bursts {
    fn start(mut stream: UnixStream) -> Self {
        // The target greets.
        until(&mut stream, b"\n");
        let bytes = (0..=250_u8).cycle().take(BURST_BYTES).collect();
        Self { stream, bytes }
    }

    /// There and back at the same time, so that no socket's buffer stays full.
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

/// A target of one connection, which answers its caller's end when told to.
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

/// A field of all access events.
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

/// Lines of a family that count something.
fn counted(metrics: &str, family: &str) -> Vec<String> {
    let lines = metrics.lines().filter(|line| line.starts_with(family));
    lines
        .filter(|line| !line.ends_with(" 0"))
        .map(str::to_owned)
        .collect()
}

/// An agent beside those that are there.
fn another_agent(world: &World, server: &Daemon, flags: &[String], number: usize) -> Daemon {
    let mut args = world.agent_args(server.address("agents"));
    args.retain(|arg| !arg.starts_with("--agent-id="));
    args.push(format!("--agent-id=another-{number}"));
    args.extend_from_slice(flags);
    Daemon::start(User::Root, &format!("agent-{number}"), &args, world.dir())
}

/// `flags` are those of server and agents, `path` is what the first tunnels travel on.
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
    // First, so that it has a lane.
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

    // The second one finds it as the first left it: spliced, where it is a pipe.
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
        // The handshakes of another agent, of its link and of its lanes, at the time it is now.
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
    // Half-closed for two days by the clock.
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

/// Whether this machine's clock is the test's own.
fn own_clock(test: &str) -> bool {
    let own = std::env::var_os(OWN_CLOCK).is_some();
    if !own {
        say(
            test,
            &format!("it sets the clock, and {OWN_CLOCK} is not set"),
        );
    }
    own
}

#[test]
fn a_clock_that_jumps_cuts_no_tunnel_on_pipes_or_the_link_with_epoll() {
    if own_clock("a clock that jumps, with pipes") {
        nothing_is_cut(&[PLAINTEXT, "--relay-engine=epoll"], "raw-lane");
    }
}

#[test]
fn a_clock_that_jumps_cuts_no_tunnel_on_pipes_or_the_link_with_io_uring() {
    let test = "a clock that jumps, with pipes by io_uring";
    if !own_clock(test) {
        return;
    }
    match probe(Preference::IoUring) {
        Ok(_) => nothing_is_cut(&[PLAINTEXT, "--relay-engine=io-uring"], "raw-lane"),
        Err(error) => skip(test, &error.to_string()),
    }
}

#[test]
fn a_clock_that_jumps_cuts_no_tunnel_on_lanes_or_the_link() {
    if own_clock("a clock that jumps, with lanes") {
        nothing_is_cut(&["--lane-security=tls"], "lane");
    }
}
