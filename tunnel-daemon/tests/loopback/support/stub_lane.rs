//! Ends of lanes that follow the protocol as far as a test wants: the part of both ends, and the agent's end.

use std::net::SocketAddr;
use std::path::Path;

use adit_core::ids::LinkId;
use adit_core::lane::{
    ALPN, Bind, FrameReader, FrameType, Greeting, Header, Hello, LaneEnd, LaneEvent, LaneRole,
    OutFrame, PROOF_BYTES, Piece, Proof, Want, proof_input,
};
use adit_core::wire::metadata::{LaneGrant, ServerHello};
use aws_lc_rs::hmac;
use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::lanes::IDLE;
use super::peers::PeerFiles;
use super::raw::{Call, Connection};
use super::tls;
use super::wait::within;
use super::world::World;

/// Opens a link that offers lanes, and returns the server's grant.
pub(crate) async fn link(world: &World, connection: &Connection, id: &str) -> (Call, LaneGrant) {
    let mut call = ask(connection, id, &[]).await;
    let grant = grant(&mut call).await.expect("lanes are granted");
    assert!(world.server().links() > 0);
    (call, grant)
}

/// Asks for a link with lanes, with additional headers.
pub(crate) async fn ask(connection: &Connection, id: &str, more: &[(&str, &str)]) -> Call {
    let headers = [
        ("agentid", id),
        ("agentidentifiers", ""),
        ("adit-link", "1"),
        ("adit-lanes", "1"),
    ];
    let headers = [&headers[..], more].concat();
    connection.call("/AgentService/Connect", &headers).await
}

/// The server's grant of lanes; `None` if the answer has no grant, as when the server refuses the link.
pub(crate) async fn grant(call: &mut Call) -> Option<LaneGrant> {
    let answer = call.headers().await.expect("an answer");
    let pairs = answer
        .iter()
        .map(|(name, value)| (name.as_str(), value.to_str().expect("ASCII")));
    ServerHello::from_headers(pairs).ok()?.lane_grant
}

/// A frame without flags, valid or not.
pub(crate) fn frame(kind: FrameType, sequence: u16, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        kind,
        flags: 0,
        sequence,
        length: u32::try_from(payload.len()).expect("small"),
    };
    [&header.to_bytes()[..], payload].concat()
}

/// The BIND of an agent that supports no lanes but those with TLS.
pub(crate) fn bind(link: LinkId, proof: Proof) -> Bind {
    Bind {
        link,
        proof,
        clear: false,
        kernel_tls: false,
    }
}

/// One end of a lane on this connection.
pub(crate) struct Lane<S> {
    pub(crate) stream: S,
    frames: FrameReader,
    pub(crate) end: LaneEnd,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Lane<S> {
    pub(super) fn over(stream: S, role: LaneRole) -> Self {
        Self {
            stream,
            frames: FrameReader::default(),
            end: LaneEnd::new(role),
        }
    }

    /// The next piece; `None` when the peer has closed the connection.
    pub(crate) async fn piece(&mut self) -> Option<Piece> {
        loop {
            if let Some(piece) = self.frames.next_piece().expect("an honest peer") {
                return Some(piece);
            }
            let mut buffer = BytesMut::with_capacity(16 * 1024);
            let read = within("a frame", self.stream.read_buf(&mut buffer)).await;
            match read {
                Ok(0) | Err(_) => return None,
                Ok(_) => self.frames.push(buffer.freeze()),
            }
        }
    }

    pub(crate) async fn send(&mut self, frame: &OutFrame) {
        self.bytes(&frame.to_bytes()).await;
    }

    pub(crate) async fn bytes(&mut self, bytes: &[u8]) {
        // The peer may already have closed the connection; the next read reports that.
        let _gone = within("a write", self.stream.write_all(bytes)).await;
        let _gone = within("a write", self.stream.flush()).await;
    }

    /// Follows the protocol until an event arrives; `None` when the peer has closed the lane. The number of idle lanes to keep is
    /// no event: a stub keeps none.
    pub(crate) async fn event(&mut self) -> Option<LaneEvent> {
        loop {
            self.flush().await;
            match self.end.poll_event() {
                Some(LaneEvent::Want(Want::Keep(_))) => continue,
                Some(event) => return Some(event),
                None => (),
            }
            let piece = self.piece().await?;
            self.end.handle(piece).expect("an honest peer");
        }
    }

    pub(crate) async fn flush(&mut self) {
        while let Some(frame) = self.end.poll_frame() {
            self.send(&frame).await;
        }
    }
}

/// A connection to the agent port that speaks the lane protocol, with or without a certificate.
pub(crate) type Stub = Lane<TlsStream<TcpStream>>;

impl Stub {
    pub(crate) async fn connect(world: &World, name: &str) -> Self {
        let tcp = TcpStream::connect(world.server().agents).await;
        Self::connect_over(tcp.expect("it listens"), world, name).await
    }

    /// A bound lane of an agent's link.
    pub(crate) async fn granted(world: &World, grant: &LaneGrant) -> Self {
        let mut lane = Self::connect(world, "agent").await;
        assert!(lane.bind(grant).await);
        lane
    }

    /// The same over an existing connection.
    pub(crate) async fn connect_over(tcp: TcpStream, world: &World, name: &str) -> Self {
        let (cert, key) = (world.files.cert(name), world.files.key(name));
        Self::secured(tcp, &world.files.ca_file(), Some((&cert, &key))).await
    }

    /// A connection to the port for peers, with the certificate of this peer.
    pub(crate) async fn peer(server: SocketAddr, files: &PeerFiles, name: &str) -> Self {
        let tcp = TcpStream::connect(server).await.expect("it listens");
        let (cert, key) = files.pair(name);
        Self::secured(tcp, &files.ca(), Some((&cert, &key))).await
    }

    /// As [`Self::connect`] without a certificate, to any server with the world's certificates.
    pub(crate) async fn nobody(server: SocketAddr, world: &World) -> Self {
        let tcp = TcpStream::connect(server).await;
        Self::nobody_over(tcp.expect("it listens"), world).await
    }

    /// The same over an existing connection.
    pub(crate) async fn nobody_over(tcp: TcpStream, world: &World) -> Self {
        Self::secured(tcp, &world.files.ca_file(), None).await
    }

    async fn secured(tcp: TcpStream, ca: &Path, identity: Option<(&Path, &Path)>) -> Self {
        let secured = tls::over(tcp, ALPN.as_bytes(), ca, identity);
        let stream = within("a TLS handshake", secured).await.expect("welcome");
        Self::over(stream, LaneRole::Agent)
    }

    pub(crate) async fn hello(&mut self) -> Hello {
        match self.piece().await {
            Some(Piece::Frame(header, payload)) => match Greeting::read(header, payload) {
                Ok(Greeting::Hello(hello)) => hello,
                other => panic!("no hello but {other:?}"),
            },
            other => panic!("no hello but {other:?}"),
        }
    }

    pub(crate) fn proof(&self, hello: &Hello, link: LinkId, secret: &[u8]) -> [u8; PROOF_BYTES] {
        let (_, session) = self.stream.get_ref();
        let mut exported = [0; 32];
        session
            .export_keying_material(
                &mut exported,
                b"EXPORTER-adit-lane-1",
                Some(&hello.nonce[..]),
            )
            .expect("keying material");
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let tag = hmac::sign(&key, &proof_input(hello, link, &exported));
        tag.as_ref().try_into().expect("32 bytes")
    }

    pub(crate) async fn bind(&mut self, grant: &LaneGrant) -> bool {
        let hello = self.hello().await;
        let link = grant.link;
        let proof = self.proof(&hello, link, &grant.secret[..]);
        self.send(&bind(link, proof).to_frame()).await;
        self.is_ready().await
    }

    pub(crate) async fn is_ready(&mut self) -> bool {
        match self.piece().await {
            None => false,
            Some(Piece::Frame(header, _)) => header.kind == FrameType::Ready,
            Some(other) => panic!("no answer to a bind: {other:?}"),
        }
    }

    /// Accepts the next tunnel.
    pub(crate) async fn accept(&mut self) {
        while !matches!(
            self.event().await.expect("the lane lives"),
            LaneEvent::Open(_)
        ) {}
        self.end.accept();
        self.flush().await;
    }
}

/// An agent with the link `agent-1` that may have lanes.
pub(crate) async fn agent(world: &World) -> (Connection, Call, LaneGrant) {
    let connection = Connection::agent(world).await;
    let (call, grant) = link(world, &connection, "agent-1").await;
    (connection, call, grant)
}

/// An agent with one bound lane.
pub(crate) async fn bound(world: &World) -> (Connection, Call, Stub) {
    let (connection, call, grant) = agent(world).await;
    let lane = Stub::granted(world, &grant).await;
    (connection, call, lane)
}

pub(crate) async fn one_idle(world: &World) {
    world.server_metric(IDLE, 1.0).await;
}
