//! The server's end of a lane, which follows the protocol as far as a test wants.

use std::io::Write as _;

use adit_core::ids::ServerId;
use adit_core::lane::{FrameType, Greeting, Hello, LaneRole, NONCE_BYTES, OpenRequest, Piece};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::stub_lane::Lane;
use super::stub_server::StubServer;
use super::wait::within;

/// A lane of a [`StubServer`].
pub(crate) type ServerLane = Lane<TlsStream<TcpStream>>;

/// The OPEN of a tunnel with frames.
pub(crate) fn request(address: &str) -> OpenRequest {
    OpenRequest {
        protocol: "tcp".to_owned(),
        address: address.to_owned(),
        raw: false,
        origin: None,
        forward: None,
    }
}

/// The READY frame, which ends the greeting.
pub(crate) fn ready() -> Vec<u8> {
    Greeting::ready_frame(false, false).to_bytes().to_vec()
}

impl ServerLane {
    /// Accepts the next lane of an agent, and greets it up to its BIND. The caller sends READY.
    pub(crate) async fn greet(server: &mut StubServer) -> Self {
        let mut lane = Self::over(server.accept_lane().await, LaneRole::Server);
        let hello = Hello {
            server: ServerId::new("stub"),
            nonce: [9; NONCE_BYTES],
        };
        lane.send(&hello.to_frame()).await;
        match lane.piece().await {
            Some(Piece::Frame(header, _)) => assert_eq!(header.kind, FrameType::Bind),
            other => panic!("no answer to a hello but {other:?}"),
        }
        lane
    }

    /// As [`Self::greet`], and sends READY.
    pub(crate) async fn bound(server: &mut StubServer) -> Self {
        let mut lane = Self::greet(server).await;
        lane.bytes(&ready()).await;
        lane
    }

    /// The frames that are queued.
    pub(crate) fn waiting(&mut self) -> Vec<Vec<u8>> {
        let frames = std::iter::from_fn(|| self.end.poll_frame());
        frames.map(|frame| frame.to_bytes().to_vec()).collect()
    }

    /// TLS records of this plaintext: one for each element, or several for a long one.
    pub(crate) fn sealed(&mut self, records: &[Vec<u8>]) -> Vec<u8> {
        let (_, session) = self.stream.get_mut();
        let mut sealed = Vec::new();
        for record in records {
            session.writer().write_all(record).expect("it has room");
            while session.wants_write() {
                session.write_tls(&mut sealed).expect("a buffer takes all");
            }
        }
        sealed
    }

    /// Writes sealed records to the connection at once.
    pub(crate) async fn write_sealed(&mut self, sealed: &[u8]) {
        let (tcp, _) = self.stream.get_mut();
        within("a write", tcp.write_all(sealed))
            .await
            .expect("the agent is there");
    }
}
