//! Calls made of packets: clients and agents that send whatever a test wants.

use std::net::SocketAddr;
use std::path::Path;

use adit_core::wire::packets as wire;
use adit_core::wire::packets::packet::Payload;
use adit_core::wire::packets::{Packet, PacketType};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Method, Request};
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;

use super::tls;
use super::wait::within;
use super::world::World;

/// HTTP/2's default window of a stream and of a connection.
const WINDOW_BYTES: u32 = 65_535;
/// Payload of each packet of [`Call::upload`].
const UPLOAD_BLOCK_BYTES: usize = 64 * 1024;

/// An HTTP/2 connection on which calls can be made; dropping it cuts the socket.
pub(crate) struct Connection {
    calls: SendRequest<Bytes>,
    _driver: JoinSet<()>,
}

/// One raw call.
pub(crate) struct Call {
    pub(crate) send: SendStream<Bytes>,
    response: Option<ResponseFuture>,
    recv: Option<RecvStream>,
    buffer: BytesMut,
}

impl Connection {
    pub(crate) async fn over<S>(io: S) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (connection, _never_changed) = Self::with_windows(io, WINDOW_BYTES, 1 << 30).await;
        connection
    }

    /// With these windows for each stream and for the connection. A stream window of 0 lets the peer send nothing, until
    /// another one is sent through the returned channel.
    async fn with_windows<S>(io: S, window: u32, all: u32) -> (Self, oneshot::Sender<u32>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = h2::client::Builder::new();
        builder
            .initial_max_send_streams(4096)
            .initial_window_size(window)
            // The peer's window must limit sending, not the local buffer.
            .max_send_buffer_size(64 << 20)
            .initial_connection_window_size(all);
        let handshake = within("an HTTP/2 handshake", builder.handshake(io));
        let (calls, mut connection) = handshake.await.expect("the peer speaks HTTP/2");
        let (windows, other_window) = oneshot::channel();
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            let changed = tokio::select! {
                _over = &mut connection => return,
                changed = other_window => changed,
            };
            if let Ok(window) = changed {
                connection
                    .set_initial_window_size(window)
                    .expect("a window that HTTP/2 knows");
            }
            drop(connection.await);
        });
        let connection = Self {
            calls,
            _driver: driver,
        };
        (connection, windows)
    }

    /// A client of the gRPC frontend.
    pub(crate) async fn client(world: &World) -> Self {
        Self::client_at(&world.grpc()).await
    }

    /// A client of the gRPC frontend on that socket.
    pub(crate) async fn client_at(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).await;
        Self::over(stream.expect("the frontend listens")).await
    }

    /// As [`Self::client`], with the initial windows of Go's clients.
    pub(crate) async fn go_client(world: &World) -> Self {
        let stream = world.grpc_socket().await;
        let (connection, _never_changed) =
            Self::with_windows(stream, WINDOW_BYTES, WINDOW_BYTES).await;
        connection
    }

    /// As [`Self::client`], with this window for each stream.
    pub(crate) async fn small_window_client(world: &World, window: u32) -> Self {
        let stream = world.grpc_socket().await;
        let (connection, _never_changed) = Self::with_windows(stream, window, 1 << 30).await;
        connection
    }

    /// As [`Self::small_window_client`], until the returned channel ends all reads from the socket.
    pub(crate) async fn client_that_stops(
        world: &World,
        window: u32,
    ) -> (Self, oneshot::Sender<()>) {
        let mut stream = world.grpc_socket().await;
        let (near, mut far) = tokio::io::duplex(64 * 1024);
        let (stop, stopped) = oneshot::channel();
        let (mut connection, _never_changed) = Self::with_windows(near, window, 1 << 30).await;
        connection._driver.spawn(async move {
            tokio::select! {
                _over = tokio::io::copy_bidirectional(&mut stream, &mut far) => (),
                _told = stopped => std::future::pending().await,
            }
        });
        (connection, stop)
    }

    /// A peer with an agent's certificate.
    pub(crate) async fn agent(world: &World) -> Self {
        Self::agent_as(world, "agent").await
    }

    /// A peer with the certificate of this name.
    pub(crate) async fn agent_as(world: &World, name: &str) -> Self {
        Self::over(welcomed_at(world, world.server().agents, name).await).await
    }

    /// An agent whose window lets the server send nothing, until another window is sent through the channel.
    pub(crate) async fn deaf_agent(world: &World) -> (Self, oneshot::Sender<u32>) {
        Self::deaf_agent_at(world, world.server().agents).await
    }

    /// As [`Self::deaf_agent`], at a server in a process of its own.
    pub(crate) async fn deaf_agent_at(
        world: &World,
        agents: SocketAddr,
    ) -> (Self, oneshot::Sender<u32>) {
        Self::with_windows(welcomed_at(world, agents, "agent").await, 0, 1 << 30).await
    }

    /// A client of the gRPC frontend with one call.
    pub(crate) async fn proxied(world: &World) -> (Self, Call) {
        let connection = Self::client(world).await;
        let call = connection.proxy().await;
        (connection, call)
    }

    /// A peer with an agent's certificate and the only link of the server.
    pub(crate) async fn linked(world: &World, id: &str, identifiers: &str) -> (Self, Call) {
        let connection = Self::agent(world).await;
        let link = connection.link(id, identifiers).await;
        world.links(1).await;
        (connection, link)
    }

    pub(crate) async fn call(&self, path: &str, headers: &[(&str, &str)]) -> Call {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://localhost{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).expect("a request");
        let ready = within("a free stream", self.calls.clone().ready()).await;
        let (response, send) = ready
            .expect("the connection lives")
            .send_request(request, false)
            .expect("a call can start");
        Call {
            send,
            response: Some(response),
            recv: None,
            buffer: BytesMut::new(),
        }
    }

    /// A client's call.
    pub(crate) async fn proxy(&self) -> Call {
        self.call("/ProxyService/Proxy", &[]).await
    }

    /// An agent's call that the server has accepted. It offers no extensions, like a Go agent.
    pub(crate) async fn link(&self, id: &str, identifiers: &str) -> Call {
        let headers = [("agentid", id), ("agentidentifiers", identifiers)];
        let mut call = self.call("/AgentService/Connect", &headers).await;
        let answer = call.headers().await.expect("an answer");
        assert!(answer.contains_key("serverid"), "refused: {answer:?}");
        call
    }
}

async fn welcomed_at(world: &World, agents: SocketAddr, name: &str) -> TlsStream<TcpStream> {
    let dial = tls::dial_to(world, b"h2", agents, Some(name));
    within("a TLS handshake", dial).await.expect("welcome")
}

impl Call {
    /// The server's end of a call that was accepted.
    pub(crate) fn accepted(send: SendStream<Bytes>, recv: RecvStream) -> Self {
        Self {
            send,
            response: None,
            recv: Some(recv),
            buffer: BytesMut::new(),
        }
    }

    /// The response headers; may be awaited only once.
    pub(crate) async fn headers(&mut self) -> Option<HeaderMap> {
        let response = self.response.take().expect("asked once");
        let answer = within("response headers", response).await.ok()?;
        let (parts, body) = answer.into_parts();
        self.recv = Some(body);
        Some(parts.headers)
    }

    /// Queues bytes as they are; the peer may have ended the call.
    pub(crate) fn bytes(&mut self, bytes: impl Into<Bytes>) {
        let _call_over = self.send.send_data(bytes.into(), false);
    }

    /// Queues one gRPC message.
    pub(crate) fn message(&mut self, body: &[u8]) {
        self.bytes(framed(body));
    }

    pub(crate) fn packet(&mut self, kind: PacketType, payload: Payload) {
        self.message(&encoded(kind.into(), Some(payload)));
    }

    pub(crate) fn dial(&mut self, random: i64, address: &str) {
        self.packet(PacketType::DialReq, dial_request(random, address));
    }

    pub(crate) fn data(&mut self, conn: i64, bytes: impl Into<Bytes>) {
        self.packet(PacketType::Data, data(conn, bytes));
    }

    /// Queues an upload of this many blocks at once, however much of it can be sent. All payloads share the same memory.
    pub(crate) fn upload(&mut self, conn: i64, blocks: usize) {
        static BLOCK: [u8; UPLOAD_BLOCK_BYTES] = [7; UPLOAD_BLOCK_BYTES];
        let payload = Bytes::from_static(&BLOCK);
        let message = framed(&encoded(
            PacketType::Data.into(),
            Some(data(conn, payload.clone())),
        ));
        let (head, rest) = message.split_at(message.len() - payload.len());
        assert!(*rest == payload[..], "the payload is a packet's last field");
        let head = Bytes::copy_from_slice(head);
        for _block in 0..blocks {
            self.bytes(head.clone());
            self.bytes(payload.clone());
        }
    }

    pub(crate) fn dial_response(&mut self, random: i64, conn: i64) {
        let answer = wire::DialResponse {
            error: String::new(),
            connect_id: conn,
            random,
            window: 0,
        };
        self.packet(PacketType::DialRsp, Payload::DialResponse(answer));
    }

    /// Accepts the next dial of a link under this connection id. Returns the dial's id.
    pub(crate) async fn answer(&mut self, conn: i64) -> i64 {
        let random = self.dialed().await.random;
        self.dial_response(random, conn);
        random
    }

    /// Queues a CLOSE_REQ.
    pub(crate) fn close(&mut self, conn: i64) {
        self.packet(PacketType::CloseReq, close_request(conn));
    }

    /// Queues a CLOSE_RSP without an error.
    pub(crate) fn confirm_close(&mut self, conn: i64) {
        self.packet(PacketType::CloseRsp, close_response(conn, ""));
    }

    pub(crate) fn finish(&mut self) {
        let _call_over = self.send.send_data(Bytes::new(), true);
    }

    /// The next packet; `None` at the end of the call, however it ends.
    pub(crate) async fn next(&mut self) -> Option<Packet> {
        if self.recv.is_none() {
            self.headers().await?;
        }
        let recv = self.recv.as_mut().expect("answered");
        within("a packet", async {
            loop {
                if let Some(packet) = take(&mut self.buffer) {
                    return Some(packet);
                }
                let bytes = recv.data().await?.ok()?;
                let _gone = recv.flow_control().release_capacity(bytes.len());
                self.buffer.put(bytes);
            }
        })
        .await
    }

    /// Reads this many bytes of a call that was answered, and returns no window for them.
    pub(crate) async fn keep(&mut self, bytes: usize) {
        let recv = self.recv.as_mut().expect("answered");
        within("bytes to keep", async {
            let mut kept = 0;
            while kept < bytes {
                let data = recv.data().await.expect("more bytes");
                kept += data.expect("the call lives").len();
            }
        })
        .await;
    }

    /// Waits for the end of a call that was answered, and returns the reason of a reset.
    pub(crate) async fn reset(&mut self) -> Option<h2::Reason> {
        let recv = self.recv.as_mut().expect("answered");
        within("the end of the call", async {
            loop {
                if let Err(error) = recv.data().await? {
                    return error.reason();
                }
            }
        })
        .await
    }

    /// The next packet's payload.
    pub(crate) async fn payload(&mut self) -> Option<Payload> {
        self.next().await.and_then(|packet| packet.payload)
    }

    /// The next packet of a link, which must be a dial.
    pub(crate) async fn dialed(&mut self) -> wire::DialRequest {
        match self.payload().await {
            Some(Payload::DialRequest(dial)) => dial,
            other => panic!("no dial but {other:?}"),
        }
    }

    /// Dials, and returns the connection id.
    pub(crate) async fn open(&mut self, random: i64, address: &str) -> i64 {
        self.open_with_window(random, address, 0).await
    }

    /// The error of the next packet, which must be an answer to a dial.
    pub(crate) async fn dial_error(&mut self) -> String {
        match self.payload().await {
            Some(Payload::DialResponse(answer)) => answer.error,
            other => panic!("no answer to a dial but {other:?}"),
        }
    }

    /// As [`Self::open`], with credit for the target's side; Go peers ignore it.
    pub(crate) async fn open_with_window(
        &mut self,
        random: i64,
        address: &str,
        window: u64,
    ) -> i64 {
        let Payload::DialRequest(request) = dial_request(random, address) else {
            unreachable!("a dial request");
        };
        let request = wire::DialRequest { window, ..request };
        self.packet(PacketType::DialReq, Payload::DialRequest(request));
        match self.payload().await {
            Some(Payload::DialResponse(answer)) if answer.error.is_empty() => answer.connect_id,
            other => panic!("dialing {address}: {other:?}"),
        }
    }

    /// Sends `text` and expects it back.
    pub(crate) async fn echo(&mut self, conn: i64, text: &'static [u8]) {
        self.data(conn, text);
        self.echo_arrives(conn, text).await;
    }

    /// Expects `text` on the tunnel.
    pub(crate) async fn echo_arrives(&mut self, conn: i64, text: &[u8]) {
        let mut back = Vec::new();
        while back.len() < text.len() {
            match self.payload().await {
                Some(Payload::Data(data)) if data.connect_id == conn => back.extend(data.data),
                other => panic!("instead of an echo: {other:?}"),
            }
        }
        assert_eq!(back, text);
    }
}

/// Status and message of an answer without a body.
pub(crate) fn grpc_status(answer: &HeaderMap) -> (String, String) {
    let text = |name| {
        let value = answer.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    (text("grpc-status"), text("grpc-message"))
}

/// A message with its gRPC prefix.
pub(crate) fn framed(body: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(5 + body.len());
    out.put_u8(0);
    out.put_u32(u32::try_from(body.len()).expect("a short message"));
    out.put(body);
    out.freeze()
}

/// A packet whose type and payload may disagree.
pub(crate) fn encoded(kind: i32, payload: Option<Payload>) -> Vec<u8> {
    let packet = Packet {
        r#type: kind,
        payload,
    };
    packet.encode_to_vec()
}

pub(crate) fn dial_request(random: i64, address: &str) -> Payload {
    Payload::DialRequest(wire::DialRequest {
        protocol: "tcp".to_owned(),
        address: address.to_owned(),
        random,
        window: 0,
    })
}

/// The end of a dial with this id.
pub(crate) fn close_dial(random: i64) -> Payload {
    Payload::CloseDial(wire::CloseDial { random })
}

pub(crate) fn close_request(conn: i64) -> Payload {
    Payload::CloseRequest(wire::CloseRequest { connect_id: conn })
}

pub(crate) fn close_response(conn: i64, error: &str) -> Payload {
    Payload::CloseResponse(wire::CloseResponse {
        connect_id: conn,
        error: error.to_owned(),
    })
}

pub(crate) fn data(conn: i64, bytes: impl Into<Bytes>) -> Payload {
    Payload::Data(wire::Data {
        connect_id: conn,
        error: String::new(),
        data: bytes.into(),
    })
}

/// Takes one complete message from the front.
pub(crate) fn take(buffer: &mut BytesMut) -> Option<Packet> {
    let length = buffer.get(1..5)?.try_into().ok().map(u32::from_be_bytes)?;
    let length = usize::try_from(length).ok()?;
    if buffer.len() < 5 + length {
        return None;
    }
    buffer.advance(5);
    let body = buffer.split_to(length);
    Some(Packet::decode(body).expect("the server sends packets"))
}
