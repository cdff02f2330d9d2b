//! The accept loop over scripts and over real listeners.

use super::*;
use crate::config::limits::SPEAKS_WITHIN;
use crate::config::tls_policy::TlsPolicy;
use crate::net::{
    listen::{ListenAddr, StaleFile},
    reload::Reloadable,
    selfsigned::ThrowawayFiles,
    tls::{Alpn, ServerTls},
};
use std::{
    collections::VecDeque,
    future::pending,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream, UnixStream},
    sync::{Notify, mpsc},
};

/// Fails as scripted, then delivers its connections, then waits for ever.
struct Script {
    errors: VecDeque<i32>,
    connections: VecDeque<UnixStream>,
}

impl Script {
    /// So many connections, and their other ends.
    fn of(errors: Vec<i32>, connections: usize) -> (Vec<UnixStream>, Self) {
        let pairs = (0..connections).map(|_| UnixStream::pair().unwrap());
        let (theirs, ours): (_, VecDeque<_>) = pairs.unzip();
        let script = Self {
            errors: errors.into(),
            connections: ours,
        };
        (theirs, script)
    }
}

impl Incoming for Script {
    async fn accept(&mut self) -> io::Result<(Socket, PeerAddr)> {
        if let Some(errno) = self.errors.pop_front() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        match self.connections.pop_front() {
            Some(stream) => Ok((Socket::Unix(stream), PeerAddr::Unix)),
            None => pending().await,
        }
    }
}

#[derive(Default)]
struct Counts {
    failed: AtomicUsize,
    handshakes: AtomicUsize,
    refused: AtomicUsize,
    turned_away: AtomicUsize,
    reasons: Mutex<Vec<NoTurn>>,
    changed: Notify,
}

impl Counts {
    async fn until(&self, counter: &AtomicUsize, value: usize) {
        while counter.load(Ordering::SeqCst) < value {
            self.changed.notified().await;
        }
    }

    fn count(&self, counter: &AtomicUsize) {
        counter.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_one();
    }
}

impl AcceptEvents for Counts {
    fn accept_failed(&self, _error: &io::Error) {
        self.count(&self.failed);
    }

    fn handshake_failed(&self, _peer: PeerAddr, _error: &HandshakeError) {
        self.count(&self.handshakes);
    }

    fn no_turn(&self, _peer: PeerAddr, why: NoTurn) {
        self.reasons.lock().unwrap().push(why);
        self.count(&self.turned_away);
    }

    fn connection_refused(&self, _peer: PeerAddr, _overloaded: Overloaded) {
        self.count(&self.refused);
    }
}

/// Runs a script to its connection; how long that took and how often it backed off.
async fn run_script(errors: Vec<i32>) -> (Duration, usize) {
    let (_theirs, script) = Script::of(errors, 1);
    let (tasks, counts) = (Tasks::new(4), Arc::new(Counts::default()));
    let (arrived, mut arrivals) = mpsc::channel(1);
    let handle = move |_stream: ByteStream| {
        let arrived = arrived.clone();
        async move { arrived.send(()).await.unwrap() }
    };
    let started = Instant::now();
    let events: Arc<dyn AcceptEvents> = Arc::<Counts>::clone(&counts);
    let accepting = accept_loop(
        script,
        None,
        tasks.clone(),
        events,
        tasks.stopping(),
        handle,
    );
    tasks.spawn_always("accept", async move { drop(accepting.await) });
    arrivals.recv().await.unwrap();
    (started.elapsed(), counts.failed.load(Ordering::SeqCst))
}

#[tokio::test(start_paused = true)]
async fn missing_descriptors_back_off_from_5_to_100_ms_and_are_counted() {
    let (elapsed, failed) = run_script(vec![libc::EMFILE; 7]).await;
    assert_eq!(
        elapsed,
        Duration::from_millis(5 + 10 + 20 + 40 + 80 + 100 + 100)
    );
    assert_eq!(failed, 7);
    let (elapsed, _failed) = run_script(vec![libc::ENFILE]).await;
    assert_eq!(elapsed, BACKOFF_MIN);
}

#[tokio::test(start_paused = true)]
async fn connections_that_vanished_before_accept_cost_no_wait() {
    let (elapsed, failed) = run_script(vec![libc::ECONNABORTED, libc::EINTR, libc::EPROTO]).await;
    assert_eq!((elapsed, failed), (Duration::ZERO, 0));
}

#[tokio::test(start_paused = true)]
async fn endless_passing_errors_back_off_as_well() {
    let (elapsed, failed) = run_script(vec![libc::ECONNABORTED; 66]).await;
    assert_eq!((elapsed, failed), (Duration::from_millis(5 + 10), 2));
}

/// Room for nobody until told.
#[derive(Default)]
struct Room {
    asked: AtomicUsize,
    there: AtomicBool,
    pauses: AtomicUsize,
    accepted: AtomicUsize,
}

impl AcceptEvents for Room {
    fn has_room(&self) -> bool {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.there.load(Ordering::SeqCst)
    }

    fn paused(&self) {
        self.pauses.fetch_add(1, Ordering::SeqCst);
    }

    fn accepted(&self) {
        self.accepted.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn without_room_nobody_is_accepted_and_room_is_asked_for_now_and_then() {
    let (_theirs, script) = Script::of(Vec::new(), 1);
    let (tasks, room) = (Tasks::new(4), Arc::new(Room::default()));
    let (arrived, mut arrivals) = mpsc::channel(1);
    let handle = move |_stream: ByteStream| {
        let arrived = arrived.clone();
        async move { arrived.send(()).await.unwrap() }
    };
    let events: Arc<dyn AcceptEvents> = Arc::<Room>::clone(&room);
    let accepting = accept_loop(
        script,
        None,
        tasks.clone(),
        events,
        tasks.stopping(),
        handle,
    );
    tasks.spawn_always("accept", async move { drop(accepting.await) });
    let waited = tokio::time::timeout(Duration::from_secs(10), arrivals.recv()).await;
    waited.expect_err("there is no room");
    let counts = [&room.accepted, &room.pauses].map(|count| count.load(Ordering::SeqCst));
    assert_eq!(counts, [0, 1]);
    assert!(room.asked.load(Ordering::SeqCst) <= 203, "it spins");
    room.there.store(true, Ordering::SeqCst);
    arrivals.recv().await.unwrap();
    assert_eq!(room.accepted.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn connection_beyond_the_task_limit_is_closed_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let listener = Listener::bind(&ListenAddr::Unix(path.clone(), StaleFile::Keep)).unwrap();
    let (tasks, counts) = (Tasks::new(1), Arc::new(Counts::default()));
    let handle = |stream: ByteStream| async move {
        let _open = stream;
        pending::<()>().await;
    };
    let events: Arc<dyn AcceptEvents> = Arc::<Counts>::clone(&counts);
    let accepting = accept_loop(
        listener,
        None,
        tasks.clone(),
        events,
        tasks.stopping(),
        handle,
    );
    tasks.spawn_always("accept", async move { drop(accepting.await) });
    let _first = UnixStream::connect(&path).await.unwrap();
    let mut second = UnixStream::connect(&path).await.unwrap();
    assert_eq!(second.read(&mut [0]).await.unwrap(), 0, "closed at once");
    counts.until(&counts.refused, 1).await;
}

#[tokio::test]
async fn stop_gives_the_listener_back_and_leaves_connections_alone() {
    let listener = Listener::bind(&ListenAddr::Tcp((Ipv4Addr::LOCALHOST, 0).into())).unwrap();
    let address = listener.tcp_addr().unwrap();
    let (tasks, stop) = (Tasks::new(4), CancellationToken::new());
    let handle = |mut stream: ByteStream| async move {
        let byte = stream.read_u8().await.unwrap();
        stream.write_u8(byte).await.unwrap();
    };
    let (returned, mut returns) = mpsc::channel(1);
    let accepting = accept_loop(
        listener,
        None,
        tasks.clone(),
        Arc::new(()),
        stop.clone(),
        handle,
    );
    tasks.spawn_always("accept", async move {
        drop(returned.send(accepting.await).await)
    });
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_u8(1).await.unwrap();
    assert_eq!(client.read_u8().await.unwrap(), 1);
    let mut open = TcpStream::connect(address).await.unwrap();
    while tasks.running() < 2 {
        tokio::task::yield_now().await;
    }
    stop.cancel();
    assert_eq!(returns.recv().await.unwrap().tcp_addr(), Some(address));
    open.write_u8(2).await.unwrap();
    assert_eq!(open.read_u8().await.unwrap(), 2);
}

/// Bounds that no test reaches.
const LIMITS: HandshakeLimits = HandshakeLimits {
    handshakes_max: 16,
    silent_max: 16,
    waiting_max: 16,
    answers_within: PATIENCE,
};
/// Far beyond any test on real sockets.
const PATIENCE: Duration = Duration::from_secs(600);

/// Accepts until `stop`, and lets whoever finishes a handshake go.
fn greeting<I: Incoming>(
    incoming: I,
    limits: HandshakeLimits,
    deadline: Duration,
    tasks: Tasks,
    events: Arc<dyn AcceptEvents>,
    stop: CancellationToken,
) -> impl Future<Output = I> {
    let files = ThrowawayFiles::create(&["localhost".to_owned()]).unwrap();
    let spec = ServerTls {
        cert: files.cert("server"),
        key: files.key("server"),
        client_ca: None,
        policy: TlsPolicy::default(),
        alpn: Alpn::http11(),
    };
    let tls = AcceptTls {
        tls: Reloadable::load(spec).unwrap(),
        limits,
        deadline,
    };
    accept_loop(incoming, Some(tls), tasks, events, stop, |_stream| async {})
}

/// A listener with so many slots for handshakes, and its address.
struct Served {
    address: SocketAddr,
    tasks: Tasks,
    counts: Arc<Counts>,
    stop: CancellationToken,
}

impl Served {
    fn start(handshakes_max: usize) -> Self {
        Self::start_with(HandshakeLimits {
            handshakes_max,
            ..LIMITS
        })
    }

    fn start_with(limits: HandshakeLimits) -> Self {
        let listener = Listener::bind(&ListenAddr::Tcp((Ipv4Addr::LOCALHOST, 0).into())).unwrap();
        let served = Self {
            address: listener.tcp_addr().unwrap(),
            tasks: Tasks::new(16),
            counts: Arc::default(),
            stop: CancellationToken::new(),
        };
        let events: Arc<dyn AcceptEvents> = Arc::<Counts>::clone(&served.counts);
        let stop = served.stop.clone();
        let tasks = served.tasks.clone();
        let accepting = greeting(listener, limits, PATIENCE, tasks, events, stop);
        let accept = async move { drop(accepting.await) };
        served.tasks.spawn_always("accept", accept);
        served
    }

    /// Connected from an address of this host, and silent.
    async fn connect(&self, from: [u8; 4]) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    /// The same, and its hello is sent: the answer's first byte says that its handshake has begun.
    async fn hello(&self, from: [u8; 4]) -> TcpStream {
        let mut stream = self.connect(from).await;
        stream.write_all(&client_hello()).await.unwrap();
        stream
    }

    fn counts(&self) -> [usize; 2] {
        [&self.counts.handshakes, &self.counts.turned_away]
            .map(|count| count.load(Ordering::SeqCst))
    }
}

/// The first words of a TLS client.
fn client_hello() -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

const ONE: [u8; 4] = [127, 0, 0, 1];
const OTHER: [u8; 4] = [127, 0, 0, 2];

#[tokio::test(start_paused = true)]
async fn of_too_many_silent_peers_the_oldest_are_closed_at_once_and_the_rest_at_the_deadline() {
    let (_theirs, script) = Script::of(Vec::new(), 5);
    let (tasks, counts) = (Tasks::new(16), Arc::new(Counts::default()));
    let limits = HandshakeLimits {
        silent_max: 3,
        ..LIMITS
    };
    let deadline = Duration::from_secs(10);
    let events: Arc<dyn AcceptEvents> = Arc::<Counts>::clone(&counts);
    let stop = tasks.stopping();
    let accepting = greeting(script, limits, deadline, tasks.clone(), events, stop);
    tasks.spawn_always("accept", async move { drop(accepting.await) });
    let started = Instant::now();
    counts.until(&counts.turned_away, 2).await;
    assert_eq!(*counts.reasons.lock().unwrap(), [NoTurn::CrowdedOut; 2]);
    assert_eq!(started.elapsed(), Duration::ZERO);
    counts.until(&counts.turned_away, 5).await;
    assert_eq!(counts.reasons.lock().unwrap()[2..], [NoTurn::Silent; 3]);
    assert_eq!(started.elapsed(), deadline);
    assert_eq!(counts.handshakes.load(Ordering::SeqCst), 0);
}

/// Room for two connections.
#[derive(Default)]
struct RoomForTwo {
    open: AtomicUsize,
    accepted: AtomicUsize,
    pauses: AtomicUsize,
    changed: Notify,
}

impl AcceptEvents for RoomForTwo {
    fn has_room(&self) -> bool {
        self.open.load(Ordering::SeqCst) < 2
    }

    fn paused(&self) {
        self.pauses.fetch_add(1, Ordering::SeqCst);
    }

    fn accepted(&self) {
        self.open.fetch_add(1, Ordering::SeqCst);
        self.accepted.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_one();
    }

    fn no_turn(&self, _peer: PeerAddr, _why: NoTurn) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn without_room_the_oldest_silent_peer_makes_room_for_the_next() {
    let (_theirs, script) = Script::of(Vec::new(), 9);
    let (tasks, room) = (Tasks::new(16), Arc::new(RoomForTwo::default()));
    let events: Arc<dyn AcceptEvents> = Arc::<RoomForTwo>::clone(&room);
    let stop = tasks.stopping();
    let accepting = greeting(script, LIMITS, PATIENCE, tasks.clone(), events, stop);
    tasks.spawn_always("accept", async move { drop(accepting.await) });
    let started = Instant::now();
    while room.accepted.load(Ordering::SeqCst) < 9 {
        room.changed.notified().await;
    }
    // Two at a time, once they have had the time to speak.
    assert_eq!(started.elapsed(), 4 * SPEAKS_WITHIN);
    assert!(room.open.load(Ordering::SeqCst) <= 2);
}

/// Those behind them wait in the kernel's queue, as they do without TLS.
#[tokio::test(start_paused = true)]
async fn without_room_nobody_is_sent_away_who_was_just_accepted() {
    let (mut theirs, script) = Script::of(Vec::new(), 3);
    for peer in &mut theirs {
        peer.write_all(b"no TLS at all").await.unwrap();
    }
    let (tasks, room) = (Tasks::new(16), Arc::new(RoomForTwo::default()));
    let events: Arc<dyn AcceptEvents> = Arc::<RoomForTwo>::clone(&room);
    let stop = tasks.stopping();
    let accepting = greeting(script, LIMITS, PATIENCE, tasks.clone(), events, stop);
    tasks.spawn_always("accept", async move { drop(accepting.await) });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let counts = [&room.accepted, &room.open, &room.pauses];
    let counts = counts.map(|count| count.load(Ordering::SeqCst));
    assert_eq!(counts, [2, 2, 1]);
}

#[tokio::test]
async fn handshakes_in_flight_are_capped_and_silent_peers_are_none() {
    let served = Served::start(1);
    let _silent = served.connect(ONE).await;
    let mut first = served.hello(ONE).await;
    first.read_u8().await.unwrap();
    let mut second = served.connect(ONE).await;
    second.write_all(b"no TLS at all").await.unwrap();
    while served.tasks.running() < 4 {
        tokio::task::yield_now().await;
    }
    // The second waits its turn; otherwise it would fail within these rounds of the runtime.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(served.counts(), [0, 0]);
    drop(first);
    served.counts.until(&served.counts.handshakes, 2).await;
}

#[tokio::test]
async fn an_address_with_its_half_of_the_handshakes_waits_and_keeps_no_other_out() {
    let served = Served::start(2);
    let mut slow = served.hello(OTHER).await;
    slow.read_u8().await.unwrap();
    let mut waiting = served.hello(OTHER).await;
    while served.tasks.running() < 3 {
        tokio::task::yield_now().await;
    }
    let mut first = served.hello(ONE).await;
    first.read_u8().await.unwrap();
    let early = waiting.try_read(&mut [0]).unwrap_err();
    assert_eq!(early.kind(), io::ErrorKind::WouldBlock);
    drop(slow);
    waiting.read_u8().await.unwrap();
    assert_eq!(served.counts(), [1, 0]);
}

#[tokio::test]
async fn a_handshake_that_stalls_is_ended_for_one_that_waits() {
    let served = Served::start_with(HandshakeLimits {
        handshakes_max: 1,
        answers_within: Duration::ZERO,
        ..LIMITS
    });
    let mut stalled = served.hello(OTHER).await;
    stalled.read_u8().await.unwrap();
    let mut next = served.hello(ONE).await;
    next.read_u8().await.unwrap();
    served.counts.until(&served.counts.turned_away, 1).await;
    assert_eq!(*served.counts.reasons.lock().unwrap(), [NoTurn::Stalled]);
    assert_eq!(served.counts(), [0, 1]);
}

#[tokio::test]
async fn a_stop_closes_those_who_wait_and_leaves_handshakes_alone() {
    let served = Served::start(1);
    let mut first = served.hello(ONE).await;
    first.read_u8().await.unwrap();
    let mut others = [served.hello(ONE).await, served.connect(ONE).await];
    while served.tasks.running() < 4 {
        tokio::task::yield_now().await;
    }
    served.stop.cancel();
    for other in &mut others {
        // Reset, if there are bytes that nobody has read.
        assert!(!matches!(other.read(&mut [0]).await, Ok(1)));
    }
    assert_eq!(served.counts(), [0, 0]);
    drop(first);
    served.counts.until(&served.counts.handshakes, 1).await;
}
