//! Payloads of OPEN and FAILED frames.

use std::net::{IpAddr, SocketAddr};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use super::frame::{CONTROL_BYTES_MAX, FrameType, Header, LaneViolation};
use crate::text::{PEER_TEXT_BYTES_MAX, beginning, shortened};

/// A request to open a tunnel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenRequest {
    /// Network name, passed on unchanged.
    pub protocol: String,
    /// `host:port`, passed on unchanged.
    pub address: String,
    /// After OPENED the lane is raw until both ends close it.
    pub raw: bool,
    /// The tunnelled connection's addresses, if the opener sends them.
    pub origin: Option<Origin>,
    /// Between servers: what the opener says of the dial that it forwards; see [`crate::peer::Forward`].
    pub forward: Option<Bytes>,
}

/// Addresses of the connection that the opener tunnels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Address that connected.
    pub source: SocketAddr,
    /// Address that was connected to.
    pub destination: SocketAddr,
}

/// Why an OPEN was refused. The numbers are those on the wire; unknown numbers read as [`Self::Failed`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum RefusalCode {
    /// The target could not be reached; the text is for the client.
    Failed = 0,
    /// Both ends opened at once and the other end's OPEN wins.
    Busy = 1,
    /// The other end does not allow the target.
    Denied = 2,
    /// The target refused the connection.
    Refused = 3,
    /// There is no route to the target.
    Unreachable = 4,
    /// The target did not answer in time.
    TimedOut = 5,
    /// The target's name has no address.
    NotFound = 6,
    /// The other end has reached a limit of tunnels, dials, descriptors or rate.
    Limit = 7,
    /// The other end is shutting down and opens no more tunnels.
    Leaving = 8,
    /// Between servers: no local agent under the key that was named; no target was asked.
    NotHere = 9,
}

impl RefusalCode {
    fn from_wire(number: u8) -> Self {
        match number {
            1 => Self::Busy,
            2 => Self::Denied,
            3 => Self::Refused,
            4 => Self::Unreachable,
            5 => Self::TimedOut,
            6 => Self::NotFound,
            7 => Self::Limit,
            8 => Self::Leaving,
            9 => Self::NotHere,
            _ => Self::Failed,
        }
    }
}

pub(super) fn cut(text: &str) -> &str {
    beginning(text, PEER_TEXT_BYTES_MAX)
}

pub(super) fn open_payload(request: &OpenRequest) -> Bytes {
    let mut payload = BytesMut::new();
    // Only the protocol needs a length. An address that is too long is cut; the other end refuses it.
    let protocol = cut(&request.protocol);
    payload.put_u16(u16::try_from(protocol.len()).unwrap_or(0));
    payload.put_slice(protocol.as_bytes());
    if let Some(origin) = &request.origin {
        put_address(&mut payload, origin.source);
        put_address(&mut payload, origin.destination);
    }
    if let Some(forward) = &request.forward {
        let length = u16::try_from(forward.len()).unwrap_or(0);
        payload.put_u16(length);
        payload.put_slice(forward.get(..length.into()).unwrap_or_default());
    }
    let room = CONTROL_BYTES_MAX - payload.len();
    let end = request.address.floor_char_boundary(room);
    payload.put_slice(request.address.get(..end).unwrap_or_default().as_bytes());
    payload.freeze()
}

/// Writes 4 or 6, the address and the port.
fn put_address(payload: &mut BytesMut, address: SocketAddr) {
    match address.ip() {
        IpAddr::V4(ip) => {
            payload.put_u8(4);
            payload.put_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            payload.put_u8(6);
            payload.put_slice(&ip.octets());
        }
    }
    payload.put_u16(address.port());
}

fn take_address(payload: &mut Bytes) -> Option<SocketAddr> {
    let ip = match payload.try_get_u8().ok()? {
        4 => {
            let mut octets = [0; 4];
            payload.try_copy_to_slice(&mut octets).ok()?;
            IpAddr::from(octets)
        }
        6 => {
            let mut octets = [0; 16];
            payload.try_copy_to_slice(&mut octets).ok()?;
            IpAddr::from(octets)
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, payload.try_get_u16().ok()?))
}

fn take_origin(payload: &mut Bytes) -> Option<Origin> {
    Some(Origin {
        source: take_address(payload)?,
        destination: take_address(payload)?,
    })
}

/// Header flags of an OPEN.
pub(super) fn open_flags(request: &OpenRequest) -> u8 {
    let raw = if request.raw { Header::RAW } else { 0 };
    let origin = request.origin.map_or(0, |_| Header::ORIGIN);
    let forward = request.forward.as_ref().map_or(0, |_| Header::FORWARD);
    raw | origin | forward
}

pub(super) fn refusal_payload(code: RefusalCode, text: &str) -> Bytes {
    let mut payload = BytesMut::new();
    payload.put_u8(code as u8);
    payload.put_slice(cut(text).as_bytes());
    payload.freeze()
}

pub(super) fn read_open(header: Header, mut payload: Bytes) -> Result<OpenRequest, LaneViolation> {
    let unreadable = LaneViolation::Unreadable(FrameType::Open);
    let length = payload.try_get_u16().map_err(|_short| unreadable)?;
    if payload.len() < usize::from(length) {
        return Err(unreadable);
    }
    let protocol = payload.split_to(usize::from(length));
    let mut origin = None;
    if header.flags & Header::ORIGIN != 0 {
        origin = Some(take_origin(&mut payload).ok_or(unreadable)?);
    }
    let mut forward = None;
    if header.flags & Header::FORWARD != 0 {
        let length = payload.try_get_u16().map_err(|_short| unreadable)?;
        if payload.len() < usize::from(length) {
            return Err(unreadable);
        }
        // Copied: it outlives the frame.
        forward = Some(Bytes::copy_from_slice(
            &payload.split_to(usize::from(length)),
        ));
    }
    let text = |bytes: &[u8]| {
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|_bad| unreadable)
    };
    Ok(OpenRequest {
        protocol: text(&protocol)?,
        address: text(&payload)?,
        raw: header.flags & Header::RAW != 0,
        origin,
        forward,
    })
}

pub(super) fn read_refusal(mut payload: Bytes) -> Result<(RefusalCode, String), LaneViolation> {
    let unreadable = LaneViolation::Unreadable(FrameType::Failed);
    let code = payload.try_get_u8().map_err(|_short| unreadable)?;
    Ok((RefusalCode::from_wire(code), read_text(&payload)))
}

/// A peer's text, cut to the limit.
pub(super) fn read_text(bytes: &[u8]) -> String {
    shortened(String::from_utf8_lossy(bytes).into_owned())
}

pub(super) fn read_u64(payload: &Bytes) -> Option<u64> {
    <[u8; 8]>::try_from(&payload[..])
        .ok()
        .map(u64::from_be_bytes)
}
