//! Control packets of one link that wait for the stream. Those that a peer can cause at will take few bytes each.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Role;
use super::control_pool::ControlShare;
use crate::ids::{ConnId, DialId, TunnelKey};
use crate::wire::packet::Packet;

/// Bytes of one entry: a queue that grows has room for twice its entries.
const ENTRY_BYTES: u64 = 2 * size_of::<Control>() as u64;
/// Bytes of a separate allocation beside its content.
const ALLOCATION_BYTES: u64 = 16;
/// Entries for which an empty queue keeps room.
const ENTRIES_KEPT: usize = 64;

const _: () = assert!(size_of::<Control>() <= 16);

/// A packet that waits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Control {
    /// The close of a connection that this link does not have.
    Close(ConnId),
    /// Agent: the answer to a CLOSE_REQ for a connection that this link does not have.
    Deny(ConnId),
    /// Server: a dial's cancellation.
    Cancel(DialId),
    /// A dial, which can be taken back as long as it waits.
    Dial(Box<(TunnelKey, Packet)>),
    Packet(Box<Packet>),
}

/// The queue; its bytes count in the pool of the process.
#[derive(Debug)]
pub(super) struct ControlQueue {
    entries: VecDeque<Control>,
    bytes: u64,
    share: Arc<ControlShare>,
}

impl Control {
    fn bytes(&self) -> u64 {
        let boxed = match self {
            Self::Close(_) | Self::Deny(_) | Self::Cancel(_) => return ENTRY_BYTES,
            Self::Dial(dial) => size_of::<(TunnelKey, Packet)>() as u64 + text_bytes(&dial.1),
            Self::Packet(packet) => size_of::<Packet>() as u64 + text_bytes(packet),
        };
        ENTRY_BYTES + ALLOCATION_BYTES + boxed
    }

    /// The packet, and the tunnel of a dial.
    pub(super) fn into_packet(self, role: Role) -> (Packet, Option<TunnelKey>) {
        let packet = match self {
            Self::Close(conn) => match role {
                Role::Server => Packet::CloseReq { conn },
                Role::Agent => Packet::CloseRsp {
                    conn,
                    error: String::from("unrecognized connectID"),
                },
            },
            Self::Deny(conn) => Packet::CloseRsp {
                conn,
                error: String::from("Unknown connectID"),
            },
            Self::Cancel(dial) => Packet::DialCls { dial },
            Self::Dial(dial) => return (dial.1, Some(dial.0)),
            Self::Packet(packet) => *packet,
        };
        (packet, None)
    }
}

fn text_bytes(packet: &Packet) -> u64 {
    let texts = match packet {
        Packet::DialReq {
            protocol, address, ..
        } => [protocol.capacity(), address.capacity()],
        Packet::DialRsp { error, .. } | Packet::CloseRsp { error, .. } => [error.capacity(), 0],
        _ => [0, 0],
    };
    let allocations = texts.into_iter().filter(|bytes| *bytes > 0);
    allocations
        .map(|bytes| bytes as u64 + ALLOCATION_BYTES)
        .sum()
}

impl ControlQueue {
    pub(super) fn new(share: Arc<ControlShare>) -> Self {
        Self {
            entries: VecDeque::new(),
            bytes: 0,
            share,
        }
    }

    pub(super) fn share(&self) -> &Arc<ControlShare> {
        &self.share
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn push(&mut self, control: Control) {
        let bytes = control.bytes();
        self.entries.push_back(control);
        self.bytes += bytes;
        self.share.add(bytes);
    }

    pub(super) fn pop(&mut self) -> Option<Control> {
        let control = self.entries.pop_front();
        if let Some(control) = &control {
            self.subtract(control.bytes());
        }
        self.shrink();
        control
    }

    /// Keeps the packets for which `keeps` says so.
    pub(super) fn retain(&mut self, keeps: impl FnMut(&Control) -> bool) {
        self.entries.retain(keeps);
        let bytes = self.entries.iter().map(Control::bytes).sum();
        self.subtract(self.bytes.saturating_sub(bytes));
        self.shrink();
    }

    pub(super) fn clear(&mut self) {
        self.entries = VecDeque::new();
        self.subtract(self.bytes);
    }

    fn subtract(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.share.subtract(bytes);
    }

    fn shrink(&mut self) {
        if self.entries.is_empty() && self.entries.capacity() > ENTRIES_KEPT {
            self.entries = VecDeque::new();
        }
    }
}

impl Drop for ControlQueue {
    fn drop(&mut self) {
        self.clear();
    }
}
