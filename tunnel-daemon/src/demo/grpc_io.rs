//! A gRPC tunnel as a stream of bytes. The protocol has no half-close: shutting down closes the tunnel.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use adit_core::wire::packets as raw;
use adit_core::wire::packets::packet::Payload;
use bytes::Bytes;
use futures_util::stream::{self, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio_util::io::StreamReader;
use tokio_util::sync::PollSender;

use super::grpc_client::{PACKET_BYTES, packet};

type Pieces = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// A gRPC tunnel as a byte stream. Dropping it without a shutdown ends the call, which also closes the tunnel.
pub struct GrpcIo {
    answers: StreamReader<Pieces, Bytes>,
    packets: PollSender<raw::Packet>,
    conn: i64,
    closed: bool,
}

impl GrpcIo {
    pub(super) fn new(
        packets: mpsc::Sender<raw::Packet>,
        answers: tonic::Streaming<raw::Packet>,
        conn: i64,
    ) -> Self {
        let pieces = stream::unfold(answers, move |mut answers| async move {
            let piece = next_piece(&mut answers, conn).await?;
            Some((piece, answers))
        });
        Self {
            answers: StreamReader::new(Box::pin(pieces)),
            packets: PollSender::new(packets),
            conn,
            closed: false,
        }
    }

    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        make: impl FnOnce(i64) -> raw::Packet,
    ) -> Poll<io::Result<()>> {
        let gone = |_closed| io::Error::new(io::ErrorKind::BrokenPipe, "the call is over");
        ready!(self.packets.poll_reserve(cx)).map_err(gone)?;
        self.packets.send_item(make(self.conn)).map_err(gone)?;
        Poll::Ready(Ok(()))
    }
}

/// `None`: the tunnel was closed by the peer, or the call ended.
async fn next_piece(
    answers: &mut tonic::Streaming<raw::Packet>,
    conn: i64,
) -> Option<io::Result<Bytes>> {
    loop {
        match answers.message().await {
            Err(status) => return Some(Err(io::Error::other(status))),
            Ok(None) => return None,
            Ok(Some(packet)) => match packet.payload {
                Some(Payload::Data(data)) if data.connect_id == conn => return Some(Ok(data.data)),
                Some(Payload::CloseResponse(answer)) if answer.error.is_empty() => return None,
                Some(Payload::CloseResponse(answer)) => {
                    return Some(Err(io::Error::other(answer.error)));
                }
                _ => (),
            },
        }
    }
}

impl AsyncRead for GrpcIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.answers).poll_read(cx, buffer)
    }
}

impl AsyncWrite for GrpcIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
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

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The call takes packets in order; this side buffers none.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
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
