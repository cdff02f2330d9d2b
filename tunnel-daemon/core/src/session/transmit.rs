//! Endpoint -> peer: the order of packets. Control first, then credit, then ends of tunnels without queued data, then
//! data of all tunnels in turn. An end follows its own tunnel's data and overtakes that of other tunnels.

use std::collections::VecDeque;

use bytes::Bytes;

use super::link::{Action, Link};
use super::tunnel::{OutEnd, Outgoing, Phase, TunnelEnd};
use super::{CLOSE_CONFIRM_TIMEOUT, Moment, Role};
use crate::ids::{ConnId, TunnelKey};
use crate::wire::packet::{Packet, PacketType, Side};

/// One message for the peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Transmit {
    /// A small packet.
    Control(Packet),
    /// Payload of one tunnel, in pieces as the endpoint gave them.
    Data {
        /// The tunnel; its endpoint may queue this number of bytes again.
        key: TunnelKey,
        /// The tunnel's connection id.
        conn: ConnId,
        /// Never empty.
        parts: VecDeque<Bytes>,
        /// Sum of the parts' lengths.
        bytes: usize,
        /// Number of endpoint pieces that these parts complete; the last part may be the start of an incomplete piece.
        pieces: usize,
    },
}

impl Transmit {
    /// The type of the packet.
    #[must_use]
    pub fn kind(&self) -> PacketType {
        match self {
            Self::Control(packet) => packet.kind(),
            Self::Data { .. } => PacketType::Data,
        }
    }
}

impl Outgoing {
    pub(super) fn push(&mut self, bytes: Bytes) {
        self.bytes.adopt(bytes.len() as u64);
        self.queue.push_back(bytes);
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.bytes.take(self.bytes.bytes());
    }

    pub(super) fn truncate(&mut self, max: u64) {
        while self.bytes.bytes() > max {
            let Some(last) = self.queue.back_mut() else {
                return;
            };
            let excess = usize::try_from(self.bytes.bytes() - max).unwrap_or(usize::MAX);
            if last.len() > excess {
                last.truncate(last.len() - excess);
                self.bytes.take(self.bytes.bytes() - max);
            } else {
                self.bytes.take(last.len() as u64);
                self.queue.pop_back();
            }
        }
    }

    fn sendable(&self) -> u64 {
        let bytes = self.bytes.bytes();
        self.credit.map_or(bytes, |credit| credit.min(bytes))
    }

    /// The next bytes, their number, and the number of pieces that they complete.
    fn take(&mut self, max: usize) -> (VecDeque<Bytes>, usize, usize) {
        let mut parts = VecDeque::new();
        let (mut taken, mut pieces) = (0, 0);
        while taken < max {
            let Some(front) = self.queue.front_mut() else {
                break;
            };
            let room = max - taken;
            let part = if front.len() > room {
                front.split_to(room)
            } else {
                pieces += 1;
                self.queue.pop_front().unwrap_or_default()
            };
            taken += part.len();
            parts.push_back(part);
        }
        self.bytes.take(taken as u64);
        if let Some(credit) = &mut self.credit {
            *credit -= taken as u64;
        }
        (parts, taken, pieces)
    }
}

impl Link {
    /// Whether [`Self::poll_transmit`] may return a message.
    #[must_use]
    pub fn wants_transmit(&self) -> bool {
        // A retired link is polled even without messages, to notice that its stream accepts packets again.
        self.retired
            || !(self.control.is_empty()
                && self.windows.is_empty()
                && self.ends.is_empty()
                && self.ready.is_empty())
    }

    /// The next message for the peer, if any. Call only when the stream can accept a message.
    pub fn poll_transmit(&mut self, now: Moment) -> Option<Transmit> {
        if std::mem::take(&mut self.retired) {
            self.actions.push_back(Action::Revived);
        }
        if let Some(control) = self.control.pop() {
            let (packet, dial) = control.into_packet(self.config.role);
            if let Some(tunnel) = dial.and_then(|key| self.tunnels.get_mut(key))
                && let Phase::Dialing { written, .. } = &mut tunnel.phase
            {
                *written = true;
            }
            return Some(Transmit::Control(packet));
        }
        while let Some(key) = self.windows.pop_front() {
            if let Some(tunnel) = self.tunnels.get_mut(key) {
                let bytes = std::mem::take(&mut tunnel.inc.window_due);
                if let Some(conn) = tunnel.conn()
                    && bytes > 0
                {
                    return Some(Transmit::Control(Packet::Window { conn, bytes }));
                }
            }
        }
        while let Some(key) = self.ends.pop_front() {
            if let Some(packet) = self.transmit_end(key, now) {
                return Some(Transmit::Control(packet));
            }
        }
        while let Some(key) = self.ready.pop_front() {
            if let Some(data) = self.transmit_data(key, now) {
                return Some(data);
            }
        }
        None
    }

    fn transmit_data(&mut self, key: TunnelKey, now: Moment) -> Option<Transmit> {
        let tunnel = self.tunnels.get_mut(key)?;
        tunnel.out.in_ready = false;
        let conn = tunnel.conn()?;
        let max = self
            .config
            .packet_bytes_max
            .min(usize::try_from(tunnel.out.sendable()).unwrap_or(usize::MAX));
        if max == 0 {
            return None;
        }
        let (parts, bytes, pieces) = tunnel.out.take(max);
        tunnel.active_at = now;
        tunnel.out.progress_at = now;
        self.schedule(key);
        Some(Transmit::Data {
            key,
            conn,
            parts,
            bytes,
            pieces,
        })
    }

    fn transmit_end(&mut self, key: TunnelKey, now: Moment) -> Option<Packet> {
        let tunnel = self.tunnels.get_mut(key)?;
        tunnel.out.in_ends = false;
        let conn = tunnel.conn()?;
        if tunnel.out.end_sent || !tunnel.out.queue.is_empty() {
            return None;
        }
        tunnel.out.end_sent = true;
        match &mut tunnel.out.end {
            OutEnd::None => None,
            OutEnd::Fin => {
                let side = if self.config.role == Role::Server {
                    Side::Client
                } else {
                    Side::Target
                };
                Some(Packet::Fin { conn, side })
            }
            OutEnd::CloseReq if tunnel.out.reset_due => {
                tunnel.out.reset_due = false;
                tunnel.out.end_sent = false;
                tunnel.out.in_ends = true;
                self.ends.push_front(key);
                Some(Packet::Reset { conn })
            }
            OutEnd::CloseReq => {
                tunnel.close_deadline = Some(now.after(CLOSE_CONFIRM_TIMEOUT));
                self.watch(key, now);
                Some(Packet::CloseReq { conn })
            }
            OutEnd::CloseRsp(error) => {
                let error = std::mem::take(error);
                let again = tunnel.out.close_asked_again;
                self.conns.remove(&conn);
                self.end_endpoint(key, TunnelEnd::Confirmed, now);
                self.finish_protocol(key, conn);
                if again {
                    self.deny_close(conn);
                }
                Some(Packet::CloseRsp { conn, error })
            }
        }
    }

    /// Schedules the tunnel's sendable data or end.
    pub(super) fn schedule(&mut self, key: TunnelKey) {
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if tunnel.conn().is_none() {
            return;
        }
        let out = &mut tunnel.out;
        if out.sendable() > 0 {
            if !out.in_ready {
                out.in_ready = true;
                self.ready.push_back(key);
            }
        } else if out.queue.is_empty() && out.end != OutEnd::None && !out.end_sent && !out.in_ends {
            out.in_ends = true;
            self.ends.push_back(key);
        }
    }

    /// Queues the close after the tunnel's data. Further calls have no effect.
    pub(super) fn close_outgoing(&mut self, key: TunnelKey, error: String, now: Moment) {
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if matches!(tunnel.out.end, OutEnd::CloseReq | OutEnd::CloseRsp(_))
            || tunnel.phase == Phase::Done
        {
            self.schedule(key);
            return;
        }
        tunnel.out.end = match self.config.role {
            Role::Server => OutEnd::CloseReq,
            Role::Agent => OutEnd::CloseRsp(error),
        };
        tunnel.out.end_sent = false;
        tunnel.out.progress_at = now;
        tunnel.active_at = now;
        self.schedule(key);
        self.watch(key, now);
    }

    pub(super) fn abort(&mut self, key: TunnelKey, end: TunnelEnd) {
        self.discard_held(key);
        self.actions.push_back(Action::Abort { key, end });
    }
}
