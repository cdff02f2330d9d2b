//! Tests of TLS listeners: which handshake begins, which one waits, and which one is ended.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    sync::Notify,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{Counts, Script};
use crate::{
    accept::{AcceptEvents, AcceptTls, Incoming, accept_loop},
    handshakes::{HandshakeLimits, SlotError},
    listen::{ListenAddr, Listener},
    tasks::Tasks,
};
use adit_config::limits::SPEAKS_WITHIN;
use adit_config::tls_policy::TlsPolicy;
use adit_testkit::certificates::ThrowawayFiles;
use adit_tls::{
    reload::Reloadable,
    stream::PeerAddr,
    tls::{Alpn, ServerTls},
};

/// Limits that no test reaches.
const LIMITS: HandshakeLimits = HandshakeLimits {
    handshakes_max: 16,
    silent_max: 16,
    waiting_max: 16,
    answers_within: PATIENCE,
};
/// Far longer than any test with real sockets.
const PATIENCE: Duration = Duration::from_secs(600);

/// Accepts until `stop`, and closes connections after their handshakes.
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
        client_crl: None,
        client_may_be_anonymous: false,
        policy: TlsPolicy::default(),
        alpn: Alpn::http11(),
    };
    let tls = AcceptTls {
        tls: Reloadable::load(spec).unwrap(),
        limits,
        deadline,
        balancers: Arc::default(),
    };
    accept_loop(incoming, Some(tls), tasks, events, stop, |_stream| async {})
}

/// As [`greeting`], for scripted peers until the returned tasks are stopped.
fn greeting_scripted(
    script: Script,
    limits: HandshakeLimits,
    deadline: Duration,
    events: Arc<dyn AcceptEvents>,
) -> Tasks {
    let tasks = Tasks::new(16);
    let stop = tasks.stopping();
    let accepting = greeting(script, limits, deadline, tasks.clone(), events, stop);
    tasks.spawn_always("accept", async move { drop(accepting.await) });
    tasks
}

/// A listener with that many handshake slots, and its address.
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
        let any = ListenAddr::Tcp((Ipv4Addr::LOCALHOST, 0).into());
        let listener = Listener::bind_with(&any, |_socket| ()).unwrap();
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

    /// Connects from an address of this host, and sends nothing.
    async fn connect(&self, from: [u8; 4]) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    /// Connects and sends a ClientHello; the first byte of the answer shows that the handshake has begun.
    async fn hello(&self, from: [u8; 4]) -> TcpStream {
        let mut stream = self.connect(from).await;
        stream.write_all(&client_hello()).await.unwrap();
        stream
    }

    fn counts(&self) -> [usize; 2] {
        [&self.counts.handshakes, &self.counts.rejected].map(|count| count.load(Ordering::SeqCst))
    }
}

/// The ClientHello of a TLS client.
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

/// Limit (times): TLS handshake, with the wait for the first byte and a slot | 10 s; 120 s in compat mode
#[tokio::test(start_paused = true)]
async fn excess_silent_peers_are_closed_at_once_and_the_rest_at_the_deadline() {
    let (_theirs, script) = Script::of(Vec::new(), 5);
    let counts = Arc::new(Counts::default());
    let limits = HandshakeLimits {
        silent_max: 3,
        ..LIMITS
    };
    let deadline = Duration::from_secs(10);
    let events = Arc::<Counts>::clone(&counts);
    let _tasks = greeting_scripted(script, limits, deadline, events);
    let started = Instant::now();
    counts.until(&counts.rejected, 2).await;
    assert_eq!(*counts.reasons.lock().unwrap(), [SlotError::CrowdedOut; 2]);
    assert_eq!(started.elapsed(), Duration::ZERO);
    counts.until(&counts.rejected, 5).await;
    assert_eq!(counts.reasons.lock().unwrap()[2..], [SlotError::Silent; 3]);
    assert_eq!(started.elapsed(), deadline);
    assert_eq!(counts.handshakes.load(Ordering::SeqCst), 0);
}

/// Has room for two connections.
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

    fn no_slot(&self, _peer: PeerAddr, _why: SlotError) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn without_room_the_oldest_silent_peer_makes_room_for_the_next() {
    let (_theirs, script) = Script::of(Vec::new(), 9);
    let room = Arc::new(RoomForTwo::default());
    let events = Arc::<RoomForTwo>::clone(&room);
    let _tasks = greeting_scripted(script, LIMITS, PATIENCE, events);
    let started = Instant::now();
    while room.accepted.load(Ordering::SeqCst) < 9 {
        room.changed.notified().await;
    }
    // Two at a time, once each has had its time to send the first byte.
    assert_eq!(started.elapsed(), 4 * SPEAKS_WITHIN);
    assert!(room.open.load(Ordering::SeqCst) <= 2);
}

/// Further connections wait in the kernel's queue, as without TLS.
///
/// Limit (peers): TLS connections before their handshake
#[tokio::test(start_paused = true)]
async fn without_room_no_just_accepted_peer_is_closed() {
    let (mut theirs, script) = Script::of(Vec::new(), 3);
    for peer in &mut theirs {
        peer.write_all(b"no TLS at all").await.unwrap();
    }
    let room = Arc::new(RoomForTwo::default());
    let events = Arc::<RoomForTwo>::clone(&room);
    let _tasks = greeting_scripted(script, LIMITS, PATIENCE, events);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let counts = [&room.accepted, &room.open, &room.pauses];
    let counts = counts.map(|count| count.load(Ordering::SeqCst));
    assert_eq!(counts, [2, 2, 1]);
}

#[tokio::test]
async fn handshakes_are_capped_and_silent_peers_do_not_count() {
    let served = Served::start(1);
    let _silent = served.connect(ONE).await;
    let mut first = served.hello(ONE).await;
    first.read_u8().await.unwrap();
    let mut second = served.connect(ONE).await;
    second.write_all(b"no TLS at all").await.unwrap();
    while served.tasks.running() < 4 {
        tokio::task::yield_now().await;
    }
    // The second connection waits for a slot; otherwise it would fail within these rounds of the runtime.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(served.counts(), [0, 0]);
    drop(first);
    served.counts.until(&served.counts.handshakes, 2).await;
}

/// It has a second to read its alert. Several attempts: a busy machine may take as long for a handshake.
#[tokio::test]
async fn a_refused_peer_that_stays_holds_no_slot() {
    let served = Served::start(1);
    for _attempt in 0..5 {
        let mut refused = served.connect(ONE).await;
        refused.write_all(b"no TLS at all").await.unwrap();
        refused.read_u8().await.unwrap();
        let started = Instant::now();
        let mut next = served.hello(ONE).await;
        next.read_u8().await.unwrap();
        if started.elapsed() < Duration::from_millis(900) {
            return;
        }
    }
    panic!("each handshake waited for the refused peer before it");
}

#[tokio::test]
async fn an_address_at_its_half_of_the_slots_waits_without_blocking_others() {
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

/// Limit (times): A stalled TLS handshake while others wait for a slot | ends after 2 s
#[tokio::test]
async fn a_stalled_handshake_is_ended_for_a_waiting_one() {
    let served = Served::start_with(HandshakeLimits {
        handshakes_max: 1,
        answers_within: Duration::ZERO,
        ..LIMITS
    });
    let mut stalled = served.hello(OTHER).await;
    stalled.read_u8().await.unwrap();
    let mut next = served.hello(ONE).await;
    next.read_u8().await.unwrap();
    served.counts.until(&served.counts.rejected, 1).await;
    assert_eq!(*served.counts.reasons.lock().unwrap(), [SlotError::Stalled]);
    assert_eq!(served.counts(), [0, 1]);
}

#[tokio::test]
async fn a_stop_closes_waiting_peers_and_running_handshakes() {
    let served = Served::start(1);
    let mut first = served.hello(ONE).await;
    first.read_u8().await.unwrap();
    let others = [served.hello(ONE).await, served.connect(ONE).await];
    while served.tasks.running() < 4 {
        tokio::task::yield_now().await;
    }
    served.stop.cancel();
    for mut peer in others.into_iter().chain([first]) {
        // EOF, or a reset if the server left bytes unread.
        let mut rest = Vec::new();
        let closed = peer.read_to_end(&mut rest);
        let closed = tokio::time::timeout(Duration::from_secs(10), closed).await;
        assert!(closed.is_ok(), "still open, far within the time for it");
    }
    assert_eq!(served.counts(), [0, 0]);
}
