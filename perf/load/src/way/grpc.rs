//! A gRPC tunnel as kube-apiserver opens it: an HTTP/2 connection and a `Proxy` stream per tunnel, closed by CLOSE_REQ and
//! CLOSE_RSP. Payload is copied once when sent, and not collected when received.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use adit_core::ids::{ConnId, DialId};
use adit_core::wire::decode::Decoder;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::{Packet, Received};
use bytes::Bytes;
use h2::{RecvStream, SendStream, client};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::JoinSet;

use super::Tunnel;

/// Payload of one packet: the size of io.Copy's writes in kube-apiserver.
const PACKET_BYTES: usize = 32 * 1024;
/// Upper bound of a message's head.
const HEAD_BYTES: usize = 64;
/// Receive window: the size to which the Go library's window grows.
const WINDOW_BYTES: u32 = 1 << 20;

/// An open tunnel. Dropping it cuts the connection.
pub(crate) struct GrpcTunnel {
    packets: SendStream<MessageBuf>,
    answers: RecvStream,
    decoder: Decoder,
    /// Payload received and not yet read.
    waiting: Bytes,
    conn: ConnId,
    ended: bool,
    asked_to_close: bool,
    /// The task that drives the connection.
    _connection: JoinSet<()>,
}

impl GrpcTunnel {
    /// Dials `address` on a connection to a frontend.
    ///
    /// # Errors
    /// The dial is refused, or the answer violates the protocol.
    pub(super) async fn open(stream: Tunnel, address: SocketAddr) -> io::Result<Self> {
        let (mut requests, connection) = client::Builder::new()
            .initial_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .enable_push(false)
            .handshake::<_, MessageBuf>(stream)
            .await
            .map_err(io::Error::other)?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            // The affected stream reports the connection's error.
            let _over = connection.await;
        });
        let request = http::Request::post("http://localhost/ProxyService/Proxy")
            .header(http::header::CONTENT_TYPE, "application/grpc")
            .header(http::header::TE, "trailers")
            .body(())
            .map_err(io::Error::other)?;
        let (response, mut packets) = requests
            .send_request(request, false)
            .map_err(io::Error::other)?;
        let dial = DialId(rand::random::<i64>() & i64::MAX);
        let ask = Packet::DialReq {
            dial,
            protocol: "tcp".to_owned(),
            address: address.to_string(),
            window: 0,
        };
        send(&mut packets, ask)?;
        let response = response.await.map_err(io::Error::other)?;
        if response.status() != http::StatusCode::OK {
            return Err(odd(format!("the call was answered {}", response.status())));
        }
        let mut tunnel = Self {
            packets,
            answers: response.into_body(),
            decoder: Decoder::default(),
            waiting: Bytes::new(),
            conn: ConnId(0),
            ended: false,
            asked_to_close: false,
            _connection: driver,
        };
        match std::future::poll_fn(|cx| tunnel.poll_packet(cx)).await? {
            Some(Packet::DialRsp {
                dial: answered,
                conn,
                error,
                ..
            }) if answered == dial => {
                if !error.is_empty() {
                    return Err(odd(format!("the dial was refused: {error}")));
                }
                tunnel.conn = conn;
                Ok(tunnel)
            }
            other => Err(odd(format!("instead of an answer to the dial: {other:?}"))),
        }
    }

    /// The next packet; `None` once the stream has ended.
    fn poll_packet(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Packet>>> {
        loop {
            match self.decoder.next().map_err(io::Error::other)? {
                Some(Received::Packet(packet)) => {
                    self.ended |= matches!(packet, Packet::CloseRsp { .. });
                    return Poll::Ready(Ok(Some(packet)));
                }
                Some(Received::Unknown(_)) => (),
                Some(other) => return Poll::Ready(Err(odd(format!("{other:?}")))),
                None => match ready!(self.answers.poll_data(cx)) {
                    None => {
                        self.ended = true;
                        return Poll::Ready(Ok(None));
                    }
                    Some(piece) => {
                        let piece = piece.map_err(io::Error::other)?;
                        self.answers
                            .flow_control()
                            .release_capacity(piece.len())
                            .map_err(io::Error::other)?;
                        self.decoder.push(piece);
                    }
                },
            }
        }
    }
}

/// The end of the tunnel reads as EOF.
impl AsyncRead for GrpcTunnel {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.waiting.is_empty() && !self.ended {
            if let Some(Packet::Data { conn, bytes }) = ready!(self.poll_packet(cx))?
                && conn == self.conn
            {
                self.waiting = bytes;
            }
        }
        let length = self.waiting.len().min(buffer.remaining());
        buffer.put_slice(&self.waiting.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for GrpcTunnel {
    /// Waits for HTTP/2 flow control, so that memory use is bounded: for half of the packet, since the server's window may be
    /// smaller than all of it.
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let piece = bytes.get(..PACKET_BYTES).unwrap_or(bytes);
        let wanted = piece.len() + HEAD_BYTES;
        self.packets.reserve_capacity(wanted);
        while self.packets.capacity() < wanted / 2 {
            match ready!(self.packets.poll_capacity(cx)) {
                Some(Ok(_more)) => (),
                Some(Err(error)) => return Poll::Ready(Err(io::Error::other(error))),
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            }
        }
        let data = Packet::Data {
            conn: self.conn,
            bytes: Bytes::copy_from_slice(piece),
        };
        send(&mut self.packets, data)?;
        Poll::Ready(Ok(piece.len()))
    }

    /// Packets are already handed to HTTP/2: this side buffers none.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Sends CLOSE_REQ and waits for CLOSE_RSP.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.ended && !self.asked_to_close {
            self.asked_to_close = true;
            let conn = self.conn;
            send(&mut self.packets, Packet::CloseReq { conn })?;
        }
        while !self.ended {
            ready!(self.poll_packet(cx))?;
        }
        Poll::Ready(Ok(()))
    }
}

fn send(packets: &mut SendStream<MessageBuf>, packet: Packet) -> io::Result<()> {
    packets
        .send_data(MessageBuf::packet(packet), false)
        .map_err(io::Error::other)
}

fn odd(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
