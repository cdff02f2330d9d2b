//! Frames: a fixed header of 8 bytes (type 1, flags 1, tunnel sequence 2, length 4, big-endian), then the payload.
//!
//! The payload of DATA is passed on as it arrives; payloads of other frames are small and passed on whole.

use std::fmt;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 8;
/// Most payload of one DATA frame.
pub const DATA_BYTES_MAX: usize = 1 << 20;
/// Most payload of any other frame, including unknown types.
pub const CONTROL_BYTES_MAX: usize = 16 * 1024;

/// The type of a frame. The numbers are those on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameType {
    /// Open a tunnel: protocol and address.
    Open = 1,
    /// The tunnel is open.
    Opened = 2,
    /// The tunnel did not open: code and text.
    Failed = 3,
    /// Bytes of the tunnel.
    Data = 4,
    /// The sender sends no more data. With [`Header::CLOSE`] the sender takes no more data either; the payload may give
    /// the reason.
    Fin = 5,
    /// The tunnel is reset; data in flight is discarded.
    Reset = 6,
    /// Answers a [`FrameType::Reset`]: the lane is free again.
    ResetAck = 7,
    /// Asks for a [`FrameType::Pong`] with the same payload.
    Ping = 8,
    /// Answers a ping.
    Pong = 9,
    /// Server: asks for this number of additional lanes; with [`Header::KEEP`] for this number of idle lanes at all times.
    Want = 10,
    /// No further tunnel may be opened on this lane.
    Drain = 11,
    /// Server, first frame: the server's id and a nonce.
    Hello = 16,
    /// Agent, second frame: the lane's link, with proof.
    Bind = 17,
    /// Server, third frame: the lane is bound.
    Ready = 18,
}

impl FrameType {
    fn from_wire(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Open,
            2 => Self::Opened,
            3 => Self::Failed,
            4 => Self::Data,
            5 => Self::Fin,
            6 => Self::Reset,
            7 => Self::ResetAck,
            8 => Self::Ping,
            9 => Self::Pong,
            10 => Self::Want,
            11 => Self::Drain,
            16 => Self::Hello,
            17 => Self::Bind,
            18 => Self::Ready,
            _ => return None,
        })
    }
}

/// The name in the protocol page.
impl fmt::Display for FrameType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "OPEN",
            Self::Opened => "OPENED",
            Self::Failed => "FAILED",
            Self::Data => "DATA",
            Self::Fin => "FIN",
            Self::Reset => "RESET",
            Self::ResetAck => "RESET_ACK",
            Self::Ping => "PING",
            Self::Pong => "PONG",
            Self::Want => "WANT",
            Self::Drain => "DRAIN",
            Self::Hello => "HELLO",
            Self::Bind => "BIND",
            Self::Ready => "READY",
        })
    }
}

/// A frame's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The frame's type.
    pub kind: FrameType,
    /// Meaning depends on the type; unknown bits are ignored.
    pub flags: u8,
    /// The frame's tunnel: a number that both ends count; wraps. 0 in frames about the lane.
    pub sequence: u16,
    /// Payload bytes that follow.
    pub length: u32,
}

impl Header {
    /// On FIN: the sender takes no more bytes either.
    pub const CLOSE: u8 = 1;
    /// On OPEN: after OPENED the lane is raw. After OPEN the sender writes nothing until the answer.
    pub const RAW: u8 = 1;
    /// On OPENED, in answer to an OPEN with RAW: the tunnel is open, but framed.
    pub const FRAMED: u8 = 1;
    /// Flag of [`FrameType::Want`]: the number of idle lanes to keep, not of lanes to open.
    pub const KEEP: u8 = 1;
    /// On OPEN: source and destination of the tunnelled connection precede the target address.
    pub const ORIGIN: u8 = 2;
    /// On OPEN, between servers: what the opener says of the dial that it forwards precedes the target address.
    pub const FORWARD: u8 = 4;
    /// On BIND: the sender offers plaintext. On READY: both ends continue in plaintext, each after a TLS close_notify.
    pub const CLEAR: u8 = 1;
    /// On BIND: the sender's kernel supports kTLS for this lane. On READY: both kernels do, and OPEN may have RAW.
    pub const KERNEL_TLS: u8 = 2;

    /// The header on the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let [s0, s1] = self.sequence.to_be_bytes();
        let [l0, l1, l2, l3] = self.length.to_be_bytes();
        [self.kind as u8, self.flags, s0, s1, l0, l1, l2, l3]
    }
}

/// A protocol violation of the peer; the lane must be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LaneViolation {
    /// A frame longer than its type allows.
    #[error("a frame of type {kind} with {length} bytes, which is too long")]
    TooLong {
        /// Number of the type.
        kind: u8,
        /// Payload bytes that the header announced.
        length: u32,
    },
    /// A frame that is not allowed in the lane's state.
    #[error("{0} frame is not allowed in this state of the lane")]
    OutOfTurn(FrameType),
    /// The peer keeps sending frames and does not read ours.
    #[error("more than {0} frames wait to be read, and the peer goes on sending")]
    Unread(usize),
    /// A payload that cannot be parsed.
    #[error("{0} frame has an invalid payload")]
    Unreadable(FrameType),
}

/// A piece of the frame stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Piece {
    /// A whole frame that is not DATA.
    Frame(Header, Bytes),
    /// Some bytes of a DATA frame; never empty.
    Data {
        /// The tunnel of these bytes.
        sequence: u16,
        /// In order, without gaps.
        bytes: Bytes,
    },
    /// A frame of a type this version does not know, skipped.
    Unknown(u8),
}

#[derive(Debug)]
enum Reading {
    Header,
    /// A whole control frame.
    Control(Header),
    /// The rest of a DATA frame.
    Data {
        sequence: u16,
        left: usize,
    },
    /// The rest of a frame to skip.
    Skip {
        kind: u8,
        left: usize,
    },
}

/// Cuts a byte stream into pieces. Holds at most one control frame in addition to the last pushed bytes.
#[derive(Debug)]
pub struct FrameReader {
    reading: Reading,
    /// Bytes of an incomplete header or control frame.
    partial: BytesMut,
    input: Bytes,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self {
            reading: Reading::Header,
            partial: BytesMut::new(),
            input: Bytes::new(),
        }
    }
}

impl FrameReader {
    /// Adds bytes of the stream. Call [`Self::next_piece`] until it returns `None` before pushing more.
    pub fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.input.is_empty(), "pieces were left");
        self.input = bytes;
    }

    /// Whether pushed bytes are not processed yet.
    #[must_use]
    pub fn has_input(&self) -> bool {
        !self.input.is_empty()
    }

    /// Bytes missing to the end of the current header or payload, for callers that must not read beyond it.
    #[must_use]
    pub fn wanted_bytes(&self) -> usize {
        let whole = match &self.reading {
            Reading::Header => HEADER_BYTES,
            Reading::Control(header) => header.length as usize,
            Reading::Data { left, .. } | Reading::Skip { left, .. } => *left,
        };
        whole - self.partial.len()
    }

    /// All unprocessed bytes, for a lane that becomes raw; `None` in the middle of a frame.
    #[must_use]
    pub fn take_rest(&mut self) -> Option<Bytes> {
        let between = matches!(self.reading, Reading::Header) && self.partial.is_empty();
        between.then(|| std::mem::take(&mut self.input))
    }

    /// Whether the reader is between two frames and has no unprocessed bytes.
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        matches!(self.reading, Reading::Header) && self.partial.is_empty() && self.input.is_empty()
    }

    /// The next piece, or `None` until more bytes are pushed.
    ///
    /// # Errors
    /// A frame is too long; the rest of the stream cannot be parsed.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, LaneViolation> {
        loop {
            match self.reading {
                Reading::Header => {
                    let Some(bytes) = self.take(HEADER_BYTES) else {
                        return Ok(None);
                    };
                    self.begin(bytes)?;
                }
                Reading::Control(header) => {
                    let Some(payload) = self.take(header.length as usize) else {
                        return Ok(None);
                    };
                    self.reading = Reading::Header;
                    return Ok(Some(Piece::Frame(header, payload)));
                }
                Reading::Data { sequence, left } => {
                    let taken = left.min(self.input.len());
                    let rest = left - taken;
                    self.reading = if rest == 0 {
                        Reading::Header
                    } else {
                        Reading::Data {
                            sequence,
                            left: rest,
                        }
                    };
                    if taken > 0 {
                        let bytes = self.input.split_to(taken);
                        return Ok(Some(Piece::Data { sequence, bytes }));
                    }
                    if rest > 0 {
                        return Ok(None);
                    }
                }
                Reading::Skip { kind, left } => {
                    let taken = left.min(self.input.len());
                    self.input.advance(taken);
                    if taken < left {
                        self.reading = Reading::Skip {
                            kind,
                            left: left - taken,
                        };
                        return Ok(None);
                    }
                    self.reading = Reading::Header;
                    return Ok(Some(Piece::Unknown(kind)));
                }
            }
        }
    }

    fn begin(&mut self, mut bytes: Bytes) -> Result<(), LaneViolation> {
        let number = bytes.get_u8();
        let flags = bytes.get_u8();
        let sequence = bytes.get_u16();
        let length = bytes.get_u32();
        let kind = FrameType::from_wire(number);
        let max = match kind {
            Some(FrameType::Data) => DATA_BYTES_MAX,
            _ => CONTROL_BYTES_MAX,
        };
        if length as usize > max {
            let kind = number;
            return Err(LaneViolation::TooLong { kind, length });
        }
        let left = length as usize;
        self.reading = match kind {
            Some(FrameType::Data) => Reading::Data { sequence, left },
            Some(kind) => Reading::Control(Header {
                kind,
                flags,
                sequence,
                length,
            }),
            None => Reading::Skip { kind: number, left },
        };
        Ok(())
    }

    /// Exactly `count` bytes, joined if they arrived in several reads.
    fn take(&mut self, count: usize) -> Option<Bytes> {
        if self.partial.is_empty() {
            if self.input.len() >= count {
                return Some(self.input.split_to(count));
            }
            self.partial.put(std::mem::take(&mut self.input));
            return None;
        }
        let missing = count - self.partial.len();
        let taken = missing.min(self.input.len());
        self.partial.put(self.input.split_to(taken));
        if taken < missing {
            return None;
        }
        Some(std::mem::take(&mut self.partial).freeze())
    }
}

/// A frame to write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OutFrame {
    /// The frame's header.
    pub header: Header,
    /// The payload; its length is that in the header.
    pub payload: Bytes,
}

impl OutFrame {
    pub(super) fn new(kind: FrameType, flags: u8, sequence: u16, payload: Bytes) -> Self {
        debug_assert!(payload.len() <= DATA_BYTES_MAX, "cut by the caller");
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let header = Header {
            kind,
            flags,
            sequence,
            length,
        };
        Self { header, payload }
    }

    /// Header and payload in one buffer, for small frames.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + self.payload.len());
        bytes.put_slice(&self.header.to_bytes());
        bytes.put_slice(&self.payload);
        bytes.freeze()
    }
}
