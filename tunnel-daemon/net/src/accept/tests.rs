//! Tests of the accept loop with scripts and with real listeners.

mod handshakes;

use super::*;
use crate::listen::{ListenAddr, StaleFile};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use std::{
    collections::VecDeque,
    future::pending,
    net::Ipv4Addr,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    sync::{Notify, mpsc},
};

/// Counts nothing.
impl AcceptEvents for () {}

/// Fails as scripted, then delivers its connections, then waits forever.
struct Script {
    errors: VecDeque<i32>,
    connections: VecDeque<UnixStream>,
}

impl Script {
    /// A script with that many connections, and their client ends.
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
    rejected: AtomicUsize,
    reasons: Mutex<Vec<SlotError>>,
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

    fn no_slot(&self, _peer: PeerAddr, why: SlotError) {
        self.reasons.lock().unwrap().push(why);
        self.count(&self.rejected);
    }

    fn connection_refused(&self, _peer: PeerAddr, _overloaded: Overloaded) {
        self.count(&self.refused);
    }
}

/// A handler that reports each connection.
fn reporting() -> (
    impl Fn(ByteStream) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    mpsc::Receiver<()>,
) {
    let (arrived, arrivals) = mpsc::channel(1);
    let handle = move |_stream: ByteStream| {
        let arrived = arrived.clone();
        async move { arrived.send(()).await.unwrap() }.boxed()
    };
    (handle, arrivals)
}

/// Runs a script until its connection arrives; returns the time that took, and the number of backoffs.
async fn run_script(errors: Vec<i32>) -> (Duration, usize) {
    let (_theirs, script) = Script::of(errors, 1);
    let (tasks, counts) = (Tasks::new(4), Arc::new(Counts::default()));
    let (handle, mut arrivals) = reporting();
    let started = Instant::now();
    let (events, stop): (Arc<dyn AcceptEvents>, _) =
        (Arc::<Counts>::clone(&counts), tasks.stopping());
    let accepting = accept_loop(script, None, tasks.clone(), events, stop, handle);
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
async fn endless_transient_errors_back_off_as_well() {
    let (elapsed, failed) = run_script(vec![libc::ECONNABORTED; 66]).await;
    assert_eq!((elapsed, failed), (Duration::from_millis(5 + 10), 2));
}

/// Has no room until `there` is set.
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
async fn without_room_no_connection_is_accepted_and_room_is_polled() {
    let (_theirs, script) = Script::of(Vec::new(), 1);
    let (tasks, room) = (Tasks::new(4), Arc::new(Room::default()));
    let (handle, mut arrivals) = reporting();
    let (events, stop): (Arc<dyn AcceptEvents>, _) = (Arc::<Room>::clone(&room), tasks.stopping());
    let accepting = accept_loop(script, None, tasks.clone(), events, stop, handle);
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
    let listener = Listener::bind_with(
        &ListenAddr::Unix(path.clone(), StaleFile::Keep),
        |_socket| (),
    )
    .unwrap();
    let (tasks, counts) = (Tasks::new(1), Arc::new(Counts::default()));
    let handle = |stream: ByteStream| async move {
        let _open = stream;
        pending::<()>().await;
    };
    let (events, stop): (Arc<dyn AcceptEvents>, _) =
        (Arc::<Counts>::clone(&counts), tasks.stopping());
    let accepting = accept_loop(listener, None, tasks.clone(), events, stop, handle);
    tasks.spawn_always("accept", async move { drop(accepting.await) });
    let _first = UnixStream::connect(&path).await.unwrap();
    let mut second = UnixStream::connect(&path).await.unwrap();
    assert_eq!(second.read(&mut [0]).await.unwrap(), 0, "closed at once");
    counts.until(&counts.refused, 1).await;
}

#[tokio::test]
async fn stop_gives_the_listener_back_and_leaves_connections_alone() {
    let listener = Listener::bind_with(
        &ListenAddr::Tcp((Ipv4Addr::LOCALHOST, 0).into()),
        |_socket| (),
    )
    .unwrap();
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
