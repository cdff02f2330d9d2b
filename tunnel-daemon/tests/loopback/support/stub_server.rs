//! A server made of packets, for tests of the agent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use adit_config::limits;
use adit_core::lane::ALPN;
use adit_core::peer;
use adit_core::wire::metadata::LANE_SECRET_BYTES;
use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, Response};
use rustls::ServerConfig;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::peers::PeerFiles;
use super::raw::Call;
use super::tls;
use super::wait::within;
use super::world::World;

/// What a server of the default installation says of itself to another one.
pub(crate) const PEER_HEADERS: [(&str, &str); 3] = [
    ("adit-peer", "1"),
    ("adit-peer-group", limits::PEER_GROUP),
    ("adit-peer-incarnation", "7"),
];

/// Accepts agents in place of a server.
pub(crate) struct StubServer {
    listener: TcpListener,
    tls: TlsAcceptor,
    connections: JoinSet<()>,
}

/// An agent's call before its answer.
pub(crate) struct Caller {
    pub(crate) headers: HeaderMap,
    respond: SendResponse<Bytes>,
    recv: RecvStream,
}

impl StubServer {
    /// With the world's server certificate.
    pub(crate) async fn start(world: &World) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await;
        Self::start_on(listener.expect("a free port"), world)
    }

    /// The same on an existing listener.
    pub(crate) fn start_on(listener: TcpListener, world: &World) -> Self {
        Self::start_as(listener, tls::server_config(world, "server"), "h2")
    }

    /// In place of a peer with the certificate of this name.
    pub(crate) async fn peer(files: &PeerFiles, name: &str) -> Self {
        let (cert, key) = files.pair(name);
        let listener = TcpListener::bind("127.0.0.1:0").await;
        let config = tls::server_config_of(&cert, &key);
        Self::start_as(listener.expect("a free port"), config, peer::ALPN)
    }

    fn start_as(listener: TcpListener, mut config: ServerConfig, link: &str) -> Self {
        // The first that the other end offers, too: peers offer both for a lane.
        config.alpn_protocols = [ALPN, link].map(|name| name.as_bytes().to_vec()).to_vec();
        Self {
            listener,
            tls: TlsAcceptor::from(Arc::new(config)),
            connections: JoinSet::new(),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.address().port()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("bound")
    }

    /// The next agent's call. Its connection lives as long as this server.
    pub(crate) async fn accept(&mut self) -> Caller {
        self.accept_as(h2::server::Builder::new()).await
    }

    /// As [`Self::accept`], with a window that lets the agent send nothing.
    pub(crate) async fn accept_deaf(&mut self) -> Caller {
        let mut deaf = h2::server::Builder::new();
        deaf.initial_window_size(0);
        self.accept_as(deaf).await
    }

    async fn accept_as(&mut self, builder: h2::server::Builder) -> Caller {
        let (caller, called) = oneshot::channel();
        let tls = self.secured().await;
        self.connections.spawn(async move {
            let mut connection = builder.handshake(tls).await.expect("HTTP/2");
            if let Some(Ok((request, respond))) = connection.accept().await {
                let (parts, recv) = request.into_parts();
                let _test_over = caller.send(Caller {
                    headers: parts.headers,
                    respond,
                    recv,
                });
            }
            while connection.accept().await.is_some() {}
        });
        within("a call", called).await.expect("the agent calls")
    }

    /// The next connection of an agent for a lane, before its greeting.
    pub(crate) async fn accept_lane(&mut self) -> TlsStream<TcpStream> {
        let tls = self.secured().await;
        assert_eq!(tls.get_ref().1.alpn_protocol(), Some(ALPN.as_bytes()));
        tls
    }

    /// Sets the ALPN protocols from now on: h2 alone like a Go server, or none like a server without ALPN.
    pub(crate) fn speak_only(&mut self, protocols: &[&str]) {
        let mut config = ServerConfig::clone(self.tls.config());
        let names = protocols.iter().map(|name| name.as_bytes().to_vec());
        config.alpn_protocols = names.collect();
        self.tls = TlsAcceptor::from(Arc::new(config));
    }

    /// Accepts an agent's next connection for a lane, but agrees on no protocol. Returns the time of arrival.
    pub(crate) async fn turn_lane_away(&mut self) -> Instant {
        let stream = within("an attempt", self.listener.accept());
        let (stream, _) = stream.await.expect("a connection");
        let came = Instant::now();
        // Without a common protocol the handshake fails. A server without ALPN agrees on none, and the agent closes the
        // connection.
        if let Ok(mut tls) = within("a TLS handshake", self.tls.accept(stream)).await {
            assert_eq!(tls.get_ref().1.alpn_protocol(), None);
            let said = within("its end", tls.read(&mut [0])).await;
            assert!(!matches!(said, Ok(1..)), "it goes on without a protocol");
        }
        came
    }

    /// Accepts the next connection, and sends nothing.
    pub(crate) async fn accept_in_silence(&mut self) -> TcpStream {
        let stream = within("a connection", self.listener.accept());
        stream.await.expect("a connection").0
    }

    async fn secured(&mut self) -> TlsStream<TcpStream> {
        let stream = within("an agent", self.listener.accept());
        let (stream, _) = stream.await.expect("a connection");
        let tls = within("a TLS handshake", self.tls.accept(stream));
        tls.await.expect("an agent speaks TLS")
    }
}

impl Caller {
    /// Accepts the link, and grants one lane.
    pub(crate) fn greet_with_lane(self) -> Call {
        self.greet_with_lanes("1")
    }

    /// Accepts the link, and grants this many lanes.
    pub(crate) fn greet_with_lanes(self, max: &str) -> Call {
        self.greet_with(max, &[])
    }

    /// Accepts the link as a peer.
    pub(crate) fn greet_as_peer(self) -> Call {
        self.greet_with("4", &PEER_HEADERS)
    }

    fn greet_with(self, lanes: &str, more: &[(&'static str, &str)]) -> Call {
        let secret = "07".repeat(LANE_SECRET_BYTES);
        let of_lanes = [
            ("adit-link", "1"),
            ("adit-lanes", "1"),
            ("adit-lane-link", "1"),
            ("adit-lane-max", lanes),
            ("adit-lane-secret", secret.as_str()),
        ];
        self.greet(&[&of_lanes[..], more].concat())
    }

    /// Answers as a server does, with additional headers.
    pub(crate) fn greet(mut self, more: &[(&'static str, &str)]) -> Call {
        let mut answer = Response::builder()
            .header("content-type", "application/grpc")
            .header("serverid", "stub")
            .header("servercount", "1");
        for (name, value) in more {
            answer = answer.header(*name, *value);
        }
        let answer = answer.body(()).expect("headers");
        let send = self.respond.send_response(answer, false);
        Call::accepted(send.expect("the call lives"), self.recv)
    }
}
