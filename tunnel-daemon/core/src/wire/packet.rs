//! Typed packets, and the validation of untrusted messages.

use bytes::Bytes;

use super::packets as raw;
use super::packets::packet::Payload;
pub use super::packets::{KeyChange, Keys, PacketType, Side};
use crate::ids::{ConnId, DialId};

/// One packet of the protocol. Payload and type agree by construction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Packet {
    /// Open a connection to `address` (`host:port`).
    DialReq {
        /// The dial's id, copied into the answer.
        dial: DialId,
        /// Network name; peers send `tcp`.
        protocol: String,
        /// Destination as the client gave it.
        address: String,
        /// Adit only: initial credit of the target side, bytes; 0 from other peers.
        window: u64,
    },
    /// Outcome of a dial: `error` empty means `conn` is open.
    DialRsp {
        /// The dial this answers.
        dial: DialId,
        /// Id of the new connection, 0 on failure.
        conn: ConnId,
        /// Error text; empty on success.
        error: String,
        /// Adit only: initial credit of the client side, bytes; 0 from other peers.
        window: u64,
    },
    /// Ask to close a connection.
    CloseReq {
        /// The connection.
        conn: ConnId,
    },
    /// A connection is closed; also sent without CLOSE_REQ when the target closes.
    CloseRsp {
        /// The connection.
        conn: ConnId,
        /// Reason; usually empty.
        error: String,
    },
    /// Bytes of a connection; never empty.
    Data {
        /// The connection.
        conn: ConnId,
        /// The bytes.
        bytes: Bytes,
    },
    /// Abandon a dial that has no connection id yet.
    DialCls {
        /// The dial.
        dial: DialId,
    },
    /// The agent is shutting down.
    Drain,
    /// Adit only: the sender of this packet grants credit for more bytes.
    Window {
        /// Which connection.
        conn: ConnId,
        /// Additional bytes.
        bytes: u64,
    },
    /// Adit only: `side` will send no more bytes.
    Fin {
        /// Which connection.
        conn: ConnId,
        /// The side that has finished.
        side: Side,
    },
    /// Adit only: the server reset the connection, so its data is incomplete. A close follows.
    Reset {
        /// Which connection.
        conn: ConnId,
    },
    /// Between servers only: changes of the keys under which the sender's agents can be asked.
    Keys(Keys),
}

// The generated code leaves it out for messages with lists.
impl Eq for Keys {}

/// The result of decoding one message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Received {
    /// A well-formed packet.
    Packet(Packet),
    /// A packet type of a newer peer: counted and skipped.
    Unknown(i32),
    /// A protocol violation: counted; closes at most the connection it names.
    Violation(Violation),
}

/// How a message broke the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Violation {
    /// The message is not protobuf of this schema.
    Malformed,
    /// The payload is missing or does not match the type.
    PayloadMismatch(i32),
    /// `DATA` with connection id 0.
    DataWithoutConn,
    /// `DATA` longer than [`super::MESSAGE_BYTES_MAX`], with its connection, or another message longer than
    /// [`super::COLLECTED_BYTES_MAX`].
    Oversize(Option<ConnId>),
}

impl Packet {
    /// This packet's type.
    #[must_use]
    pub fn kind(&self) -> PacketType {
        match self {
            Self::DialReq { .. } => PacketType::DialReq,
            Self::DialRsp { .. } => PacketType::DialRsp,
            Self::CloseReq { .. } => PacketType::CloseReq,
            Self::CloseRsp { .. } => PacketType::CloseRsp,
            Self::Data { .. } => PacketType::Data,
            Self::DialCls { .. } => PacketType::DialCls,
            Self::Drain => PacketType::Drain,
            Self::Window { .. } => PacketType::Window,
            Self::Fin { .. } => PacketType::Fin,
            Self::Reset { .. } => PacketType::Reset,
            Self::Keys(_) => PacketType::Keys,
        }
    }

    /// The protobuf message, with the payload that matches the type.
    #[must_use]
    pub fn into_raw(self) -> raw::Packet {
        let kind = self.kind();
        let payload = match self {
            Self::DialReq {
                dial,
                protocol,
                address,
                window,
            } => Payload::DialRequest(raw::DialRequest {
                protocol,
                address,
                random: dial.0,
                window,
            }),
            Self::DialRsp {
                dial,
                conn,
                error,
                window,
            } => Payload::DialResponse(raw::DialResponse {
                error,
                connect_id: conn.0,
                random: dial.0,
                window,
            }),
            Self::CloseReq { conn } => {
                Payload::CloseRequest(raw::CloseRequest { connect_id: conn.0 })
            }
            Self::CloseRsp { conn, error } => Payload::CloseResponse(raw::CloseResponse {
                error,
                connect_id: conn.0,
            }),
            Self::Data { conn, bytes } => Payload::Data(raw::Data {
                connect_id: conn.0,
                error: String::new(),
                data: bytes,
            }),
            Self::DialCls { dial } => Payload::CloseDial(raw::CloseDial { random: dial.0 }),
            Self::Drain => Payload::Drain(raw::Drain {}),
            Self::Window { conn, bytes } => Payload::Window(raw::Window {
                connect_id: conn.0,
                bytes,
            }),
            Self::Fin { conn, side } => Payload::Fin(raw::Fin {
                connect_id: conn.0,
                side: side.into(),
            }),
            Self::Reset { conn } => Payload::Reset(raw::Reset { connect_id: conn.0 }),
            Self::Keys(keys) => Payload::Keys(keys),
        };
        raw::Packet {
            r#type: kind.into(),
            payload: Some(payload),
        }
    }

    /// Validates an untrusted message. As in upstream, the type decides, not the payload.
    #[must_use]
    pub fn from_raw(message: raw::Packet) -> Received {
        let number = message.r#type;
        let Ok(kind) = PacketType::try_from(number) else {
            return Received::Unknown(number);
        };
        let packet = match (kind, message.payload) {
            (PacketType::DialReq, Some(Payload::DialRequest(p))) => Self::DialReq {
                dial: DialId(p.random),
                protocol: p.protocol,
                address: p.address,
                window: p.window,
            },
            (PacketType::DialRsp, Some(Payload::DialResponse(p))) => Self::DialRsp {
                dial: DialId(p.random),
                conn: ConnId(p.connect_id),
                error: p.error,
                window: p.window,
            },
            (PacketType::CloseReq, Some(Payload::CloseRequest(p))) => Self::CloseReq {
                conn: ConnId(p.connect_id),
            },
            (PacketType::CloseRsp, Some(Payload::CloseResponse(p))) => Self::CloseRsp {
                conn: ConnId(p.connect_id),
                error: p.error,
            },
            (PacketType::Data, Some(Payload::Data(p))) if p.connect_id == 0 => {
                return Received::Violation(Violation::DataWithoutConn);
            }
            (PacketType::Data, Some(Payload::Data(p))) => Self::Data {
                conn: ConnId(p.connect_id),
                bytes: p.data,
            },
            (PacketType::DialCls, Some(Payload::CloseDial(p))) => Self::DialCls {
                dial: DialId(p.random),
            },
            // The payload is an empty message, so proto3 peers may send the type alone.
            (PacketType::Drain, Some(Payload::Drain(_)) | None) => Self::Drain,
            (PacketType::Window, Some(Payload::Window(p))) => Self::Window {
                conn: ConnId(p.connect_id),
                bytes: p.bytes,
            },
            (PacketType::Fin, Some(Payload::Fin(p))) => {
                let Ok(side) = Side::try_from(p.side) else {
                    return Received::Violation(Violation::PayloadMismatch(number));
                };
                Self::Fin {
                    conn: ConnId(p.connect_id),
                    side,
                }
            }
            (PacketType::Reset, Some(Payload::Reset(p))) => Self::Reset {
                conn: ConnId(p.connect_id),
            },
            (PacketType::Keys, Some(Payload::Keys(p))) => Self::Keys(p),
            (_, _) => return Received::Violation(Violation::PayloadMismatch(number)),
        };
        Received::Packet(packet)
    }
}
