//! DATA that a gRPC client sends in many HTTP/2 frames, on its path to the agent.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream as BlockingStream;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use adit_core::lane::LaneEvent;
use adit_core::wire::MESSAGE_BYTES_MAX;
use adit_core::wire::packets::PacketType;
use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinSet;

use crate::support::raw::{Call, Connection, data, encoded, framed};
use crate::support::stub_lane::{self, Stub, one_idle};
use crate::support::wait::{until, within};
use crate::support::world::World;

/// A TCP proxy that counts the TLS records that the server sends.
struct Counting {
    address: SocketAddr,
    records: Arc<AtomicUsize>,
    _relaying: JoinSet<()>,
}

impl Counting {
    async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let records = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&records);
        let mut relaying = JoinSet::new();
        relaying.spawn(async move {
            let (near, _peer) = listener.accept().await.expect("a connection");
            let far = TcpStream::connect(server).await.expect("it listens");
            let ((mut said, mut heard), (mut answers, mut questions)) =
                (near.into_split(), far.into_split());
            let asked = tokio::io::copy(&mut said, &mut questions);
            let answered = async {
                let mut bytes = BytesMut::new();
                while answers
                    .read_buf(&mut bytes)
                    .await
                    .is_ok_and(|read| read > 0)
                {
                    while let Some(&[_kind, _major, _minor, high, low]) = bytes.first_chunk() {
                        let length = 5 + usize::from(u16::from_be_bytes([high, low]));
                        let Some(record) = bytes.get(..length) else {
                            break;
                        };
                        counted.fetch_add(1, SeqCst);
                        heard.write_all(record).await.expect("it is read");
                        bytes.advance(length);
                    }
                }
            };
            let (_asked, ()) = tokio::join!(asked, answered);
        });
        Self {
            address,
            records,
            _relaying: relaying,
        }
    }
}

/// Bytes that a client has written while its writes are held back.
#[derive(Clone, Default)]
struct Held(Arc<Mutex<Option<Vec<u8>>>>);

impl Held {
    fn begin(&self) {
        *self.0.lock().expect("nobody panicked") = Some(Vec::new());
    }

    fn bytes(&self) -> usize {
        let held = self.0.lock().expect("nobody panicked");
        held.as_ref().map_or(0, Vec::len)
    }

    /// Writes all held bytes at once.
    fn end(&self, mut socket: &BlockingStream) {
        let mut held = self.0.lock().expect("nobody panicked");
        let bytes = held.take().expect("it is held");
        socket.write_all(&bytes).expect("the socket has room");
    }
}

/// A client's socket whose writes can be held back.
struct Gate {
    socket: UnixStream,
    held: Held,
}

impl AsyncRead for Gate {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, out)
    }
}

impl AsyncWrite for Gate {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let this = self.get_mut();
        let mut held = this.held.0.lock().expect("nobody panicked");
        match held.as_mut() {
            Some(held) => {
                held.extend_from_slice(bytes);
                Poll::Ready(Ok(bytes.len()))
            }
            None => Pin::new(&mut this.socket).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

/// A tunnel to the only lane of an agent. Writes of its client can be held back.
struct Tunnel {
    counting: Counting,
    lane: Stub,
    call: Call,
    conn: i64,
    held: Held,
    around: BlockingStream,
    _world: World,
    _link: Call,
    _connections: [Connection; 2],
}

impl Tunnel {
    async fn open() -> Self {
        let world = World::start(&[]).await;
        let agent = Connection::agent(&world).await;
        let (link, grant) = stub_lane::link(&world, &agent, "agent-1").await;
        let counting = Counting::to(world.server().agents).await;
        let tcp = TcpStream::connect(counting.address).await;
        let mut lane = Stub::connect_over(tcp.expect("it listens"), &world, "agent").await;
        assert!(lane.bind(&grant).await);
        one_idle(&world).await;

        let socket = BlockingStream::connect(world.grpc()).expect("the frontend listens");
        socket.set_nonblocking(true).expect("a socket");
        let around = socket.try_clone().expect("a descriptor");
        let held = Held::default();
        let client = Connection::over(Gate {
            socket: UnixStream::from_std(socket).expect("a socket"),
            held: held.clone(),
        })
        .await;
        let mut call = client.proxy().await;
        let (conn, ()) = tokio::join!(call.open(1, "10.0.0.1:80"), lane.accept());
        Self {
            counting,
            lane,
            call,
            conn,
            held,
            around,
            _world: world,
            _link: link,
            _connections: [agent, client],
        }
    }

    /// A DATA message of the client with these bytes.
    fn said(&self, bytes: &[u8]) -> Bytes {
        let payload = data(self.conn, bytes.to_vec());
        framed(&encoded(PacketType::Data.into(), Some(payload)))
    }

    /// Makes the client send these messages in one write, one frame each.
    async fn at_once(&mut self, messages: Vec<Bytes>) {
        const FRAME_HEAD_BYTES: usize = 9;
        self.held.begin();
        let mut bytes = 0;
        for message in messages {
            bytes += FRAME_HEAD_BYTES + message.len();
            self.call.bytes(message);
        }
        let held = &self.held;
        until("all of them to be written", || held.bytes() >= bytes).await;
        held.end(&self.around);
    }
}

/// The server coalesces frames that arrive together, so that they do not wake the agent one by one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_arrive_together_are_forwarded_together() {
    const FRAMES: usize = 400;
    let mut tunnel = Box::pin(Tunnel::open()).await;
    let before = tunnel.counting.records.load(SeqCst);
    let message = tunnel.said(&[7]);
    tunnel.at_once(vec![message; FRAMES]).await;
    let lane = &mut tunnel.lane;
    let arrived = async {
        let mut arrived = 0;
        while arrived < FRAMES {
            match lane.event().await.expect("the lane is open") {
                LaneEvent::Data(bytes) => arrived += bytes.len(),
                LaneEvent::Want(_) => (),
                other => panic!("instead of data: {other:?}"),
            }
        }
        arrived
    };
    assert_eq!(within("all of them", arrived).await, FRAMES);
    let records = tunnel.counting.records.load(SeqCst) - before;
    assert!(records <= FRAMES / 8, "{records} records");
}

/// Data that precedes the violation still reaches the agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_before_a_protocol_violation_is_delivered_before_the_reset() {
    let too_long = u32::try_from(MESSAGE_BYTES_MAX + 1).expect("some megabytes");
    // The first payload byte suffices: no DATA message begins with 0xff.
    let oversized = [&[0_u8][..], &too_long.to_be_bytes(), &[0xff]].concat();
    let compressed = vec![1, 0, 0, 0, 0];
    for offence in [oversized, compressed] {
        let mut tunnel = Box::pin(Tunnel::open()).await;
        let said = tunnel.said(b"said");
        tunnel.at_once(vec![said, offence.clone().into()]).await;
        let mut heard = Vec::new();
        loop {
            match tunnel.lane.event().await {
                Some(LaneEvent::Data(bytes)) => heard.extend_from_slice(&bytes),
                Some(LaneEvent::Want(_)) => (),
                Some(LaneEvent::PeerReset { .. }) => break,
                other => panic!("instead of a reset: {other:?}"),
            }
        }
        assert_eq!(heard, b"said", "{offence:?}");
    }
}
