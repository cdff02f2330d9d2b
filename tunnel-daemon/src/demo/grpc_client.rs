//! A small gRPC client of the `Proxy` method, built on tonic: it does what kube-apiserver's library does.
//!
//! It shares no code with the server's packet streams, so that the two check each other.

use std::path::{Path, PathBuf};
use std::time::Duration;

use adit_core::wire::packets as raw;
use adit_core::wire::packets::packet::Payload;
use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::IntoStreamingRequest as _;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_prost::ProstCodec;

use super::grpc_io::GrpcIo;

/// Packets queued towards the server.
const QUEUE_PACKETS: usize = 16;
/// Payload of one packet.
pub(super) const PACKET_BYTES: usize = 32 * 1024;
/// Longest wait for any answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why a tunnel could not be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection to the server.
    #[error("cannot reach {path}: {source}", path = path.display())]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// The cause.
        source: tonic::transport::Error,
    },
    /// The call failed.
    #[error("call failed: {0}")]
    Call(#[from] Box<tonic::Status>),
    /// The server or agent refused the dial; carries its text.
    #[error("dial failed: {0}")]
    Dial(String),
    /// The stream ended, or carried an unexpected packet.
    #[error("protocol: {0}")]
    Protocol(&'static str),
    /// No answer came in time.
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Silent,
}

impl From<tonic::Status> for ClientError {
    fn from(status: tonic::Status) -> Self {
        Self::Call(Box::new(status))
    }
}

/// Connects to a server's unix socket. One connection may carry many tunnels.
///
/// # Errors
/// [`ClientError::Connect`].
pub async fn connect(path: &Path) -> Result<Channel, ClientError> {
    let socket = path.to_path_buf();
    let connector = tower::service_fn(move |_uri: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .map_err(|source| ClientError::Connect {
            path: path.to_path_buf(),
            source,
        })
}

/// One open tunnel.
pub struct GrpcTunnel {
    packets: mpsc::Sender<raw::Packet>,
    answers: tonic::Streaming<raw::Packet>,
    conn: i64,
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
        packets
            .send(dial)
            .await
            .map_err(|_closed| ClientError::Protocol("the queue is closed"))?;
        let mut client = tonic::client::Grpc::new(channel);
        let call = async {
            let unready = |error: tonic::transport::Error| {
                tonic::Status::unknown(format!("Service was not ready: {error}"))
            };
            client.ready().await.map_err(unready)?;
            let path = PathAndQuery::from_static("/ProxyService/Proxy");
            let packets = ReceiverStream::new(queue).into_streaming_request();
            client.streaming(packets, path, ProstCodec::default()).await
        };
        let mut answers = tokio::time::timeout(PATIENCE, call)
            .await
            .map_err(|_elapsed| ClientError::Silent)??
            .into_inner();
        match next(&mut answers).await? {
            Some(Payload::DialResponse(answer)) if answer.random != random => {
                Err(ClientError::Protocol("answer to another dial"))
            }
            Some(Payload::DialResponse(answer)) if answer.error.is_empty() => Ok(Self {
                packets,
                answers,
                conn: answer.connect_id,
            }),
            Some(Payload::DialResponse(answer)) => Err(ClientError::Dial(answer.error)),
            _ => Err(ClientError::Protocol("no answer to the dial")),
        }
    }

    /// The id the agent chose.
    #[must_use]
    pub fn conn(&self) -> i64 {
        self.conn
    }

    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// The call has ended.
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), ClientError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let data = rest.split_to(rest.len().min(PACKET_BYTES));
            let data = raw::Data {
                connect_id: self.conn,
                error: String::new(),
                data,
            };
            self.send(packet(raw::PacketType::Data, Payload::Data(data)))
                .await?;
        }
        Ok(())
    }

    /// The next bytes; `None` once the peer has closed the tunnel.
    ///
    /// # Errors
    /// The call fails, or no answer comes in time.
    pub async fn read(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            match next(&mut self.answers).await? {
                Some(Payload::Data(data)) if data.connect_id == self.conn => {
                    return Ok(Some(data.data));
                }
                Some(Payload::CloseResponse(_)) | None => return Ok(None),
                Some(_) => (),
            }
        }
    }

    /// Closes the tunnel and waits for the confirmation; returns its text.
    ///
    /// # Errors
    /// The call fails, or no answer comes in time.
    pub async fn close(mut self) -> Result<String, ClientError> {
        let request = raw::CloseRequest {
            connect_id: self.conn,
        };
        self.send(packet(
            raw::PacketType::CloseReq,
            Payload::CloseRequest(request),
        ))
        .await?;
        loop {
            match next(&mut self.answers).await? {
                Some(Payload::CloseResponse(answer)) => return Ok(answer.error),
                None => {
                    return Err(ClientError::Protocol(
                        "the call ended before the close was confirmed",
                    ));
                }
                Some(_) => (),
            }
        }
    }

    /// Turns the tunnel into a stream of bytes, for byte protocols.
    #[must_use]
    pub fn into_io(self) -> GrpcIo {
        GrpcIo::new(self.packets, self.answers, self.conn)
    }

    async fn send(&mut self, packet: raw::Packet) -> Result<(), ClientError> {
        self.packets
            .send(packet)
            .await
            .map_err(|_closed| ClientError::Protocol("the call is over"))
    }
}

pub(super) fn packet(kind: raw::PacketType, payload: Payload) -> raw::Packet {
    raw::Packet {
        r#type: kind.into(),
        payload: Some(payload),
    }
}

async fn next(answers: &mut tonic::Streaming<raw::Packet>) -> Result<Option<Payload>, ClientError> {
    let message = tokio::time::timeout(PATIENCE, answers.message())
        .await
        .map_err(|_elapsed| ClientError::Silent)??;
    Ok(message.and_then(|packet| packet.payload))
}
