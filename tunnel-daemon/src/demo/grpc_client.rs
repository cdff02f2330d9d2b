//! A small gRPC client of the `Proxy` method, built on tonic: it does what kube-apiserver's library does.
//!
//! It shares no code with the server's packet streams, so that the two check each other.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{self, Poll, ready};
use std::time::Duration;

use adit_core::wire::packets as raw;
use adit_core::wire::packets::packet::Payload;
use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures_util::stream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::StreamReader;
use tokio_util::sync::PollSender;
use tonic::IntoStreamingRequest as _;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_prost::ProstCodec;

/// Packets queued towards the server.
const QUEUE_PACKETS: usize = 16;
/// Payload of one packet.
const PACKET_BYTES: usize = 32 * 1024;
/// Longest wait for any answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why a tunnel could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server or agent refused the dial; carries its text.
    #[error("dial failed: {0}")]
    Dial(String),
    /// The call failed, carried an unexpected packet, or no answer came in time.
    #[error(transparent)]
    Broken(#[from] anyhow::Error),
}

/// Connects to a server's unix socket. One connection may carry many tunnels.
///
/// # Errors
/// The server cannot be reached.
pub async fn connect(path: &Path) -> anyhow::Result<Channel> {
    let socket = path.to_path_buf();
    let connector = tower::service_fn(move |_uri: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connector).await;
    channel.with_context(|| format!("cannot reach {}", path.display()))
}

/// One open tunnel.
pub struct GrpcTunnel {
    writer: PacketWriter,
    answers: tonic::Streaming<raw::Packet>,
}

impl GrpcTunnel {
    /// Dials `address` through the server.
    ///
    /// # Errors
    /// [`ClientError`]; a refused dial carries the agent's text.
    pub async fn open(channel: Channel, address: &str) -> Result<Self, ClientError> {
        let (packets, queue) = mpsc::channel(QUEUE_PACKETS);
        let random = rand::random::<i64>() & i64::MAX;
        let request = raw::DialRequest {
            protocol: "tcp".to_owned(),
            address: address.to_owned(),
            random,
            window: 0,
        };
        // Queue the dial before the call: the server answers the call together with the dial.
        let dial = packet(raw::PacketType::DialReq, Payload::DialRequest(request));
        packets.send(dial).await.context("the queue is closed")?;
        let mut client = tonic::client::Grpc::new(channel);
        let call = async {
            let unready = |error: tonic::transport::Error| {
                tonic::Status::unknown(format!("Service was not ready: {error}"))
            };
            client.ready().await.map_err(unready)?;
            let path = PathAndQuery::from_static("/ProxyService/Proxy");
            let packets = ReceiverStream::new(queue).into_streaming_request();
            let codec = ProstCodec::<raw::Packet, raw::Packet>::default();
            client.streaming(packets, path, codec).await
        };
        let mut answers = patient(call).await?.into_inner();
        let answer = patient(answers.message()).await?;
        let Some(Payload::DialResponse(answer)) = answer.and_then(|packet| packet.payload) else {
            return Err(anyhow::anyhow!("no answer to the dial").into());
        };
        if answer.random != random {
            return Err(anyhow::anyhow!("answer to another dial").into());
        }
        if !answer.error.is_empty() {
            return Err(ClientError::Dial(answer.error));
        }
        let writer = PacketWriter {
            packets: PollSender::new(packets),
            conn: answer.connect_id,
            closed: false,
        };
        Ok(Self { writer, answers })
    }

    /// The id the agent chose.
    #[must_use]
    pub fn conn(&self) -> i64 {
        self.writer.conn
    }

    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// The call has ended.
    pub async fn write(&mut self, bytes: Bytes) -> anyhow::Result<()> {
        Ok(self.writer.write_all(&bytes).await?)
    }

    /// The next bytes; `None` once the peer has closed the tunnel.
    ///
    /// # Errors
    /// The call fails, or no answer comes in time.
    pub async fn read(&mut self) -> anyhow::Result<Option<Bytes>> {
        patient(next_data(&mut self.answers, self.writer.conn)).await
    }

    /// Closes the tunnel and waits for the confirmation; returns its text.
    ///
    /// # Errors
    /// The call fails, or no answer comes in time.
    pub async fn close(mut self) -> anyhow::Result<String> {
        self.writer.shutdown().await?;
        while let Some(packet) = patient(self.answers.message()).await? {
            if let Some(Payload::CloseResponse(answer)) = packet.payload {
                return Ok(answer.error);
            }
        }
        bail!("the call ended before the close was confirmed")
    }

    /// Turns the tunnel into a stream of bytes, for byte protocols. The protocol has no half-close: shutting down closes the
    /// tunnel. Dropping the stream without a shutdown ends the call, which also closes the tunnel.
    #[must_use]
    pub fn into_io(self) -> impl AsyncRead + AsyncWrite + Send + Unpin {
        let conn = self.writer.conn;
        let pieces = stream::unfold(self.answers, move |mut answers| async move {
            let piece = next_data(&mut answers, conn).await;
            Some((piece.map_err(io::Error::other).transpose()?, answers))
        });
        tokio::io::join(StreamReader::new(Box::pin(pieces)), self.writer)
    }
}

async fn patient<T>(answer: impl Future<Output = Result<T, tonic::Status>>) -> anyhow::Result<T> {
    let answer = tokio::time::timeout(PATIENCE, answer).await;
    Ok(answer.with_context(|| format!("no answer within {PATIENCE:?}"))??)
}

/// The next bytes; `None` once the peer has closed the tunnel, or the call ended.
async fn next_data(
    answers: &mut tonic::Streaming<raw::Packet>,
    conn: i64,
) -> Result<Option<Bytes>, tonic::Status> {
    while let Some(packet) = answers.message().await? {
        match packet.payload {
            Some(Payload::Data(data)) if data.connect_id == conn => return Ok(Some(data.data)),
            Some(Payload::CloseResponse(_)) => return Ok(None),
            _ => (),
        }
    }
    Ok(None)
}

fn packet(kind: raw::PacketType, payload: Payload) -> raw::Packet {
    raw::Packet {
        r#type: kind.into(),
        payload: Some(payload),
    }
}

/// The writing side of a tunnel.
struct PacketWriter {
    packets: PollSender<raw::Packet>,
    /// The id the agent chose.
    conn: i64,
    closed: bool,
}

impl PacketWriter {
    fn poll_send(
        &mut self,
        cx: &mut task::Context<'_>,
        make: impl FnOnce(i64) -> raw::Packet,
    ) -> Poll<io::Result<()>> {
        let gone = |_closed| io::Error::new(io::ErrorKind::BrokenPipe, "the call is over");
        ready!(self.packets.poll_reserve(cx)).map_err(gone)?;
        self.packets.send_item(make(self.conn)).map_err(gone)?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PacketWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let piece = bytes.get(..PACKET_BYTES).unwrap_or(bytes);
        ready!(self.poll_send(cx, |connect_id| {
            let data = raw::Data {
                connect_id,
                error: String::new(),
                data: Bytes::copy_from_slice(piece),
            };
            packet(raw::PacketType::Data, Payload::Data(data))
        }))?;
        Poll::Ready(Ok(piece.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        // The call takes packets in order; this side buffers none.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        if !self.closed {
            ready!(self.poll_send(cx, |connect_id| {
                let request = raw::CloseRequest { connect_id };
                packet(raw::PacketType::CloseReq, Payload::CloseRequest(request))
            }))?;
            self.closed = true;
        }
        Poll::Ready(Ok(()))
    }
}
