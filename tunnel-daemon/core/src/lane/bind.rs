//! How a new lane proves that it belongs to a link: HELLO, BIND, READY.
//!
//! The proof is an HMAC-SHA256 with the link's secret over a single-use nonce of the server, both ids, and exported
//! keying material of the lane's TLS session (RFC 5705, RFC 8446 section 7.5). So neither a replayed BIND nor a lane
//! relayed by a man in the middle is accepted. The caller computes the HMAC; this module defines its input.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use super::frame::{FrameType, Header, LaneViolation, OutFrame};
use crate::ids::{LinkId, ServerId};

/// Bytes of a server's nonce.
pub const NONCE_BYTES: usize = 32;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;
/// Longest server id on a lane.
const SERVER_ID_BYTES_MAX: usize = 1024;

/// The proof in a BIND; compare in constant time.
pub type Proof = [u8; PROOF_BYTES];

/// The server's first frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The server's id. Behind a load balancer this may be another server than the agent wanted.
    pub server: ServerId,
    /// Used for this lane only.
    pub nonce: [u8; NONCE_BYTES],
}

/// The agent's answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bind {
    /// The lane's link, by the server's id of the link.
    pub link: LinkId,
    /// HMAC over [`proof_input`].
    pub proof: Proof,
    /// The agent offers plaintext.
    pub clear: bool,
    /// The agent's kernel supports kTLS for this lane.
    pub kernel_tls: bool,
}

/// A frame of the greeting, as read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Greeting {
    /// From the server.
    Hello(Hello),
    /// From the agent.
    Bind(Bind),
    /// From the server: tunnels may be opened.
    Ready {
        /// The lane continues in plaintext after a close_notify of both ends.
        clear: bool,
        /// kTLS raw tunnels may be opened: both ends support kTLS.
        kernel_tls: bool,
    },
}

/// The input of the proof's HMAC. Unambiguous, since only the last part has a variable length.
#[must_use]
pub fn proof_input(hello: &Hello, link: LinkId, exported: &[u8; 32]) -> Vec<u8> {
    let mut input = Vec::with_capacity(128);
    input.extend_from_slice(b"adit lane bind 1");
    input.extend_from_slice(&hello.nonce);
    input.extend_from_slice(exported);
    input.extend_from_slice(&link.0.to_be_bytes());
    input.extend_from_slice(hello.server.as_str().as_bytes());
    input
}

fn flags(clear: bool, kernel_tls: bool) -> u8 {
    let clear = if clear { Header::CLEAR } else { 0 };
    clear | if kernel_tls { Header::KERNEL_TLS } else { 0 }
}

impl Hello {
    /// Encodes the HELLO frame.
    #[must_use]
    pub fn to_frame(&self) -> OutFrame {
        let mut payload = BytesMut::new();
        payload.put_slice(&self.nonce);
        payload.put_slice(self.server.as_str().as_bytes());
        OutFrame::new(FrameType::Hello, 0, 0, payload.freeze())
    }
}

impl Bind {
    /// Encodes the BIND frame.
    #[must_use]
    pub fn to_frame(&self) -> OutFrame {
        let mut payload = BytesMut::new();
        payload.put_u64(self.link.0);
        payload.put_slice(&self.proof);
        let flags = flags(self.clear, self.kernel_tls);
        OutFrame::new(FrameType::Bind, flags, 0, payload.freeze())
    }
}

impl Greeting {
    /// Encodes a READY frame.
    #[must_use]
    pub fn ready_frame(clear: bool, kernel_tls: bool) -> OutFrame {
        OutFrame::new(FrameType::Ready, flags(clear, kernel_tls), 0, Bytes::new())
    }

    /// Parses a frame of the greeting.
    ///
    /// # Errors
    /// The frame is not of the greeting, or cannot be parsed.
    pub fn read(header: Header, mut payload: Bytes) -> Result<Self, LaneViolation> {
        let unreadable = LaneViolation::Unreadable(header.kind);
        let clear = header.flags & Header::CLEAR != 0;
        let kernel_tls = header.flags & Header::KERNEL_TLS != 0;
        match header.kind {
            FrameType::Hello => {
                let mut nonce = [0; NONCE_BYTES];
                if payload.len() > NONCE_BYTES + SERVER_ID_BYTES_MAX {
                    return Err(unreadable);
                }
                payload
                    .try_copy_to_slice(&mut nonce)
                    .map_err(|_short| unreadable)?;
                let server = std::str::from_utf8(&payload).map_err(|_bad| unreadable)?;
                let server = ServerId::new(server);
                Ok(Self::Hello(Hello { server, nonce }))
            }
            FrameType::Bind => {
                let link = payload.try_get_u64().map_err(|_short| unreadable)?;
                let proof = Proof::try_from(&payload[..]).map_err(|_bad| unreadable)?;
                let link = LinkId(link);
                Ok(Self::Bind(Bind {
                    link,
                    proof,
                    clear,
                    kernel_tls,
                }))
            }
            FrameType::Ready => Ok(Self::Ready { clear, kernel_tls }),
            other => Err(LaneViolation::OutOfTurn(other)),
        }
    }
}
