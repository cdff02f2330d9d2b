//! The server's end of a lane, which follows the protocol as far as a test wants.

use std::io::Write as _;

use adit_core::ids::ServerId;
use adit_core::lane::{
    FrameReader, FrameType, Greeting, Hello, LaneEnd, LaneEvent, LaneRole, NONCE_BYTES,
    OpenRequest, Piece,
};
use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::stub_server::StubServer;
use super::wait::within;

/// A lane of a [`StubServer`].
pub(crate) struct ServerLane {
    stream: TlsStream<TcpStream>,
    frames: FrameReader,
    pub(crate) end: LaneEnd,
}

/// The OPEN of a tunnel with frames.
pub(crate) fn request(address: &str) -> OpenRequest {
    OpenRequest {
        protocol: "tcp".to_owned(),
        address: address.to_owned(),
        raw: false,
        origin: None,
    }
}

/// The READY frame, which ends the greeting.
pub(crate) fn ready() -> Vec<u8> {
    Greeting::ready_frame(false, false).to_bytes().to_vec()
}

impl ServerLane {
    /// Accepts the next lane of an agent, and greets it up to its BIND. The caller sends READY.
    pub(crate) async fn greet(server: &mut StubServer) -> Self {
        let mut lane = Self {
            stream: server.accept_lane().await,
            frames: FrameReader::default(),
            end: LaneEnd::new(LaneRole::Server),
        };
        let hello = Hello {
            server: ServerId::new("stub"),
            nonce: [9; NONCE_BYTES],
        };
        lane.send(&hello.to_frame().to_bytes()).await;
        match lane.piece().await {
            Some(Piece::Frame(header, _)) => assert_eq!(header.kind, FrameType::Bind),
            other => panic!("no answer to a hello but {other:?}"),
        }
        lane
    }

    /// As [`Self::greet`], and sends READY.
    pub(crate) async fn bound(server: &mut StubServer) -> Self {
        let mut lane = Self::greet(server).await;
        lane.send(&ready()).await;
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

    /// The next piece; `None` when the agent has closed the connection.
    pub(crate) async fn piece(&mut self) -> Option<Piece> {
        loop {
            if let Some(piece) = self.frames.next_piece().expect("an honest agent") {
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

    /// Follows the protocol as a server until an event arrives; `None` when the agent has closed the lane.
    pub(crate) async fn event(&mut self) -> Option<LaneEvent> {
        loop {
            self.flush().await;
            if let Some(event) = self.end.poll_event() {
                return Some(event);
            }
            let piece = self.piece().await?;
            self.end.handle(piece).expect("an honest agent");
        }
    }

    pub(crate) async fn flush(&mut self) {
        for frame in self.waiting() {
            self.send(&frame).await;
        }
    }

    async fn send(&mut self, frame: &[u8]) {
        // The agent may already have closed the connection; the next read reports that.
        let _gone = within("a write", self.stream.write_all(frame)).await;
        let _gone = within("a write", self.stream.flush()).await;
    }
}
