//! Relays, socket pairs, byte patterns, and the matrix of setups.

mod pattern;

pub(crate) use pattern::{Endless, Pattern, receive_all, receive_exactly, send_all};

use std::{
    fs,
    io::{self, Write},
    net::{TcpListener, TcpStream},
    process::Command,
    sync::{
        Mutex, Once,
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

use adit_relay::{
    Choice, Done, Engine, KernelTls, Outcome, Pair, Preference, Relay, RelayConfig, RelayHandle,
    Stats, Submitted, Thresholds, TrafficKeys, attach_kernel_tls, probe, probe_kernel_tls,
};
use bytes::Bytes;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

/// Longer than any step of these tests takes; shorter than a CI job.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp,
    Unix,
    /// Two pairs in series, with kernel TLS between them.
    KernelTls,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moves {
    Copy,
    Splice,
}

/// One row of the matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) engine: Engine,
    pub(crate) moves: Moves,
    pub(crate) transport: Transport,
}

impl Setup {
    pub(crate) fn config(&self) -> RelayConfig {
        let preference = match self.engine {
            Engine::IoUring => Preference::IoUring,
            Engine::Epoll => Preference::Epoll,
        };
        let choice: Choice = probe(preference).expect("this host allows both drivers");
        let mut config = RelayConfig::new(choice);
        config.threads = 1;
        config.thresholds = match self.moves {
            Moves::Copy => Thresholds::copy_only(),
            Moves::Splice => Thresholds {
                splice_into_tls: true,
                ..Thresholds::splice_at_once()
            },
        };
        config
    }

    pub(crate) fn start(&self) -> World {
        self.start_with(&self.config())
    }

    pub(crate) fn start_with(&self, config: &RelayConfig) -> World {
        let relay = Relay::start(config).unwrap();
        World {
            handle: relay.handle(),
            relay: Some(relay),
            setup: *self,
            socket_bytes: None,
            listener: Mutex::new(TcpListener::bind(("127.0.0.1", 0)).unwrap()),
        }
    }
}

/// Defines each named function as a test for both drivers and both movers; each runs over both transports.
macro_rules! matrix {
    ($($name:ident),+ $(,)?) => {
        crate::support::matrix!(@module epoll_copy, Epoll, Copy, $($name)+);
        crate::support::matrix!(@module epoll_splice, Epoll, Splice, $($name)+);
        crate::support::matrix!(@module ring_copy, IoUring, Copy, $($name)+);
        crate::support::matrix!(@module ring_splice, IoUring, Splice, $($name)+);
    };
    (@module $module:ident, $engine:ident, $moves:ident, $($name:ident)+) => {
        mod $module {
            $(#[test]
            fn $name() {
                if !crate::support::is_allowed(adit_relay::Engine::$engine, stringify!($name)) {
                    return;
                }
                for transport in [crate::support::Transport::Tcp, crate::support::Transport::Unix] {
                    super::$name(&crate::support::Setup {
                        engine: adit_relay::Engine::$engine,
                        moves: crate::support::Moves::$moves,
                        transport,
                    });
                }
            })+
        }
    };
}
pub(crate) use matrix;

/// Like [`matrix`], but each test runs in a separate process and over TCP.
macro_rules! matrix_alone {
    ($($name:ident),+ $(,)?) => {
        crate::support::matrix_alone!(@module alone_epoll_copy, Epoll, Copy, $($name)+);
        crate::support::matrix_alone!(@module alone_epoll_splice, Epoll, Splice, $($name)+);
        crate::support::matrix_alone!(@module alone_ring_copy, IoUring, Copy, $($name)+);
        crate::support::matrix_alone!(@module alone_ring_splice, IoUring, Splice, $($name)+);
    };
    (@module $module:ident, $engine:ident, $moves:ident, $($name:ident)+) => {
        mod $module {
            $(#[test]
            fn $name() {
                if !crate::support::is_allowed(adit_relay::Engine::$engine, stringify!($name)) {
                    return;
                }
                let path = concat!(module_path!(), "::", stringify!($name));
                crate::support::alone(path, || super::$name(&crate::support::Setup {
                    engine: adit_relay::Engine::$engine,
                    moves: crate::support::Moves::$moves,
                    transport: crate::support::Transport::Tcp,
                }));
            })+
        }
    };
}
pub(crate) use matrix_alone;

/// Whether this host allows the driver. If not, `test` is skipped with a message, and fails as root if `CI` is set.
pub(crate) fn is_allowed(engine: Engine, test: &str) -> bool {
    if engine == Engine::Epoll {
        return true;
    }
    let must = std::env::var_os("CI").is_some() && geteuid().is_root();
    if !must && let Some(limit) = short_locked_memory() {
        static SAID: Once = Once::new();
        // One message for all tests: the reason is the same.
        SAID.call_once(|| {
            let why = format!(
                "this user may lock {limit} bytes of memory, which tests at the same time use up"
            );
            writeln!(io::stderr(), "SKIPPED all tests with a ring: {why}").ok();
        });
        return false;
    }
    let Err(error) = probe(Preference::IoUring) else {
        return true;
    };
    assert!(!must, "{test}: {error}");
    writeln!(io::stderr(), "SKIPPED {test}: {error}").ok();
    false
}

/// The locked-memory limit of this user, if it is lower than concurrent tests and tests just before them may need for
/// their rings. With CAP_IPC_LOCK there is no limit.
fn short_locked_memory() -> Option<u64> {
    const ENOUGH: u64 = 64 << 20;
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let capabilities = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .unwrap();
    let capabilities = u64::from_str_radix(capabilities.trim(), 16).unwrap();
    let limit = getrlimit(Resource::Memlock).current?;
    (capabilities & CAP_IPC_LOCK == 0 && limit < ENOUGH).then_some(limit)
}

const CHILD: &str = "ADIT_RELAY_TEST_ALONE";

/// Runs the test with this path again in a child process, which executes `body`.
pub(crate) fn alone(path: &str, body: impl FnOnce()) {
    let test = path.split_once("::").unwrap().1;
    if std::env::var(CHILD).is_ok_and(|child| child == test) {
        return body();
    }
    run_as(test, test);
}

/// Like [`alone`], with one child for each setup, all at the same time: for tests that wait more than they compute.
pub(crate) fn each_alone(path: &str, setups: &[Setup], body: impl FnOnce(&Setup)) {
    let test = path.split_once("::").unwrap().1;
    let name = |setup: &Setup| format!("{test} {setup:?}");
    if let Ok(child) = std::env::var(CHILD) {
        let asked = setups.iter().find(|setup| name(setup) == child);
        return body(asked.expect("started for one of them"));
    }
    thread::scope(|scope| {
        for setup in setups {
            let child = name(setup);
            scope.spawn(move || run_as(test, &child));
        }
    });
}

/// Runs a test of this program in a child with this name, and fails if the child fails.
fn run_as(test: &str, child: &str) {
    let output = test_again(test).env(CHILD, child).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{child}: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A command that runs only that test of this program.
pub(crate) fn test_again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
}

/// A relay, and constructors for connections through it.
pub(crate) struct World {
    relay: Option<Relay>,
    pub(crate) handle: RelayHandle,
    setup: Setup,
    /// Fixed kernel buffers for each new socket; otherwise the kernel lets them grow to many MiB.
    pub(crate) socket_bytes: Option<usize>,
    listener: Mutex<TcpListener>,
}

/// One connection through the relay, as both peers see it.
pub(crate) struct Tunnel {
    pub(crate) client: Socket,
    pub(crate) target: Socket,
    pub(crate) submitted: Submitted,
    pub(crate) outcome: Receiver<Outcome>,
}

impl World {
    /// Creates further sockets with this transport.
    pub(crate) fn switch_to(&mut self, transport: Transport) {
        self.setup.transport = transport;
    }

    /// Two connected sockets: the test's end and the relay's end.
    pub(crate) fn sockets(&self) -> (Socket, Socket) {
        let (ours, relays) = match self.setup.transport {
            Transport::Tcp | Transport::KernelTls => {
                let listener = self.listener.lock().unwrap();
                let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                let (relays, peer) = listener.accept().unwrap();
                assert_eq!(peer, ours.local_addr().unwrap());
                relays.set_nodelay(true).unwrap();
                ours.set_nodelay(true).unwrap();
                (Socket::from(ours), Socket::from(relays))
            }
            Transport::Unix => Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap(),
        };
        for socket in [&ours, &relays] {
            if let Some(bytes) = self.socket_bytes {
                socket.set_send_buffer_size(bytes).unwrap();
                socket.set_recv_buffer_size(bytes).unwrap();
            }
        }
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        ours.set_write_timeout(Some(PATIENCE)).unwrap();
        (ours, relays)
    }

    pub(crate) fn open(&self) -> Tunnel {
        self.open_with(&[], &[])
    }

    pub(crate) fn open_with(&self, to_a: &[u8], to_b: &[u8]) -> Tunnel {
        if self.setup.transport == Transport::KernelTls {
            return self.open_two(to_a, to_b);
        }
        let (client, a) = self.sockets();
        let (target, b) = self.sockets();
        let (done, outcome) = promise();
        let pair = Pair {
            to_a: Bytes::copy_from_slice(to_a),
            to_b: Bytes::copy_from_slice(to_b),
            ..Pair::new(a.into(), b.into())
        };
        Tunnel {
            client,
            target,
            submitted: self.handle.submit(pair, done).unwrap(),
            outcome,
        }
    }

    /// A tunnel through two pairs, as between a server and an agent. The outcome is that of the first pair.
    fn open_two(&self, to_a: &[u8], to_b: &[u8]) -> Tunnel {
        let (client, a) = self.sockets();
        let (target, c) = self.sockets();
        let (one, other) = self.sockets();
        let tls = [
            start_tls(&one, &keys(1), &keys(2)),
            start_tls(&other, &keys(2), &keys(1)),
        ];
        let [near, far] = tls;
        let far = Pair {
            tls: Some(far),
            ..Pair::new(c.into(), other.into())
        };
        let (unheard, _far_outcome) = promise();
        let _far = self.handle.submit(far, unheard).unwrap();
        let (done, outcome) = promise();
        let near = Pair {
            to_a: Bytes::copy_from_slice(to_a),
            to_b: Bytes::copy_from_slice(to_b),
            tls: Some(near),
            ..Pair::new(a.into(), one.into())
        };
        Tunnel {
            client,
            target,
            submitted: self.handle.submit(near, done).unwrap(),
            outcome,
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        self.handle.stats()
    }

    /// Waits until the relay's statistics satisfy `holds`.
    pub(crate) fn until(&self, what: &str, mut holds: impl FnMut(&Stats) -> bool) {
        until(
            what,
            || holds(&self.stats()),
            || format!("{:?}", self.stats()),
        );
    }

    pub(crate) fn stop(mut self, deadline: Duration) {
        self.relay.take().unwrap().stop(deadline);
    }

    /// Waits until no resource of any pair is left.
    pub(crate) fn until_empty(&self) {
        self.until("nothing is left", |stats| {
            stats.active_pairs == 0
                && stats.slots == 0
                && stats.pipes_in_use == 0
                && stats.buffer_bytes == 0
        });
    }
}

/// Deterministic keys for AES-256; the probe uses keys for AES-128.
pub(crate) fn keys(seed: u8) -> TrafficKeys {
    TrafficKeys {
        key: vec![seed; 32],
        iv: [seed; 12],
        sequence: 3,
        records: 3,
    }
}

pub(crate) fn start_tls(
    socket: &Socket,
    sending: &TrafficKeys,
    receiving: &TrafficKeys,
) -> KernelTls {
    attach_kernel_tls(socket).unwrap();
    KernelTls::start(socket, sending, receiving).unwrap()
}

/// Whether this host has kernel TLS. If not, `test` is skipped with a message, and fails if `ADIT_NEEDS_KTLS` is set.
pub(crate) fn has_kernel_tls(test: &str) -> bool {
    let Err(error) = probe_kernel_tls() else {
        return true;
    };
    let needed = std::env::var_os("ADIT_NEEDS_KTLS").is_some();
    assert!(!needed, "{test}: no kernel TLS: {error}");
    writeln!(io::stderr(), "SKIPPED {test}: no kernel TLS: {error}").ok();
    false
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool, state: impl Fn() -> String) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}; {}", state());
        thread::yield_now();
    }
}

pub(crate) fn promise() -> (Done, Receiver<Outcome>) {
    let (tell, told) = mpsc::channel();
    let done = Box::new(move |outcome| {
        let _nobody_asks = tell.send(outcome);
    });
    (done, told)
}

impl Tunnel {
    pub(crate) fn outcome(&self) -> Outcome {
        heard(&self.outcome)
    }

    /// Sends bytes in both directions.
    pub(crate) fn echo(&self) {
        (&self.client).write_all(b"there").unwrap();
        assert_eq!(receive_exactly(&self.target, 5), b"there");
        (&self.target).write_all(b"back").unwrap();
        assert_eq!(receive_exactly(&self.client, 4), b"back");
    }
}

/// The outcome of a pair.
pub(crate) fn heard(outcome: &Receiver<Outcome>) -> Outcome {
    let outcome = outcome.recv_timeout(PATIENCE);
    outcome.expect("every pair has an outcome")
}

/// Waits until one of two tunnels has ended. Returns its outcome, and the other tunnel.
pub(crate) fn first_to_end<'a>(world: &World, tunnels: &'a [Tunnel; 2]) -> (Outcome, &'a Tunnel) {
    let mut ends = [None, None];
    let told = || {
        for (end, tunnel) in ends.iter_mut().zip(tunnels) {
            *end = end.take().or_else(|| tunnel.outcome.try_recv().ok());
        }
        ends.iter().any(Option::is_some)
    };
    until("a tunnel is told", told, || format!("{:?}", world.stats()));
    match ends {
        [Some(outcome), None] => (outcome, &tunnels[1]),
        [None, Some(outcome)] => (outcome, &tunnels[0]),
        both => panic!("both of them: {both:?}"),
    }
}

/// Closes with RST if the transport has one.
pub(crate) fn reset(socket: Socket) {
    socket.set_linger(Some(Duration::ZERO)).unwrap();
    drop(socket);
}

pub(crate) fn open_descriptors() -> usize {
    // The listing itself holds one descriptor.
    fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Raises the descriptor limit to its maximum, and returns it.
pub(crate) fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    limit.maximum.unwrap_or(u64::MAX)
}

pub(crate) fn resident_bytes() -> usize {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// Whether tests run at full length.
pub(crate) fn is_nightly() -> bool {
    std::env::var_os("ADIT_NIGHTLY").is_some()
}
