//! The ends of tunnels: half close (FIN), close with confirmation, and reset.

use super::control_queue::Control;
use super::link::{Action, Event, Link};
use super::tunnel::{OutEnd, Phase, TunnelEnd};
use super::{Moment, Role};
use crate::ids::{ConnId, TunnelKey};
use crate::text::shortened;
use crate::wire::packet::{PacketType, Side, Violation};

impl Link {
    pub(super) fn handle_fin(&mut self, conn: ConnId, side: Side, now: Moment) {
        let Some(&key) = self.conns.get(&conn) else {
            return self.count(Event::LateCredit);
        };
        let ours = if self.config.role == Role::Server {
            Side::Client
        } else {
            Side::Target
        };
        if side == ours {
            self.count(Event::Offence(Violation::PayloadMismatch(
                PacketType::Fin.into(),
            )));
            return self.end_by_us(key, TunnelEnd::CreditViolation, now);
        }
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if tunnel.inc.fin || tunnel.ended {
            return;
        }
        tunnel.inc.fin = true;
        tunnel.active_at = now;
        let we_finished = tunnel.out.end == OutEnd::Fin;
        self.actions.push_back(Action::PeerFin { key });
        if we_finished {
            self.close_outgoing(key, String::new(), now);
        } else {
            self.watch(key, now);
        }
    }

    /// The server asks for a close: this end sends queued bytes as far as credit allows, then confirms.
    pub(super) fn handle_close_req(&mut self, conn: ConnId, now: Moment) {
        let Some(&key) = self.conns.get(&conn) else {
            return self.deny_close(conn);
        };
        // The id stays known until the CLOSE_RSP leaves. An immediate answer to a repeated request or to late data
        // would overtake the queued bytes.
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if tunnel.out.close_asked {
            tunnel.out.close_asked_again = true;
            return;
        }
        tunnel.out.close_asked = true;
        self.end_endpoint(key, TunnelEnd::PeerClosing, now);
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if let Some(credit) = tunnel.out.credit {
            tunnel.out.truncate(credit);
        }
        self.close_outgoing(key, String::new(), now);
    }

    /// The server reset the tunnel. Its CLOSE_REQ follows, which alone would look like a regular close.
    pub(super) fn handle_reset(&mut self, conn: ConnId, now: Moment) {
        match self.conns.get(&conn) {
            Some(&key) => {
                let error = String::new();
                self.end_endpoint(key, TunnelEnd::Reset { error }, now);
            }
            None => self.count(Event::LateCredit),
        }
    }

    pub(super) fn deny_close(&mut self, conn: ConnId) {
        self.push_control(Control::Deny(conn));
    }

    pub(super) fn handle_close_rsp(&mut self, conn: ConnId, error: String, now: Moment) {
        let Some(key) = self.conns.remove(&conn) else {
            if !self.forgotten.contains(conn) {
                self.count(Event::Foreign);
            }
            return;
        };
        let error = shortened(error);
        self.end_endpoint(key, TunnelEnd::Closed { error }, now);
        self.finish_protocol(key, conn);
    }

    /// Tells the endpoint once that the tunnel is over.
    pub(super) fn end_endpoint(&mut self, key: TunnelKey, end: TunnelEnd, now: Moment) {
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if tunnel.ended || tunnel.endpoint_gone {
            tunnel.ended = true;
            return;
        }
        tunnel.ended = true;
        // The linger time for bytes that the endpoint still holds starts now, even if the endpoint paused before.
        tunnel.inc.progress_at = now;
        let held = tunnel.held();
        let delivers = end.delivers_rest();
        self.actions.push_back(Action::Ended { key, end });
        if !delivers {
            self.discard_held(key);
        } else if held > 0 {
            self.watch(key, now);
        }
    }

    /// The endpoint drops its held bytes; releases them from the budgets.
    pub(super) fn discard_held(&mut self, key: TunnelKey) {
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        let held = tunnel.held();
        tunnel.inc.drained = tunnel.inc.received;
        self.release(held);
        self.ungrant(held);
    }

    /// Ends a tunnel from this side at once: queued bytes are discarded, the peer is asked to close.
    pub(super) fn end_by_us(&mut self, key: TunnelKey, end: TunnelEnd, now: Moment) {
        let text = match self.config.role {
            Role::Server => String::new(),
            Role::Agent => format!("closed by the agent: {}", end.reason()),
        };
        self.end_endpoint(key, end, now);
        self.cut_outgoing(key);
        self.close_outgoing(key, text, now);
    }

    /// Discards bytes queued for the peer. An agent must learn this from a RESET; a server learns it from the text of
    /// the agent's close.
    pub(super) fn cut_outgoing(&mut self, key: TunnelKey) {
        let tells = self.config.credit && self.config.role == Role::Server;
        if let Some(tunnel) = self.tunnels.get_mut(key) {
            tunnel.out.clear();
            tunnel.out.reset_due = tells;
        }
    }

    /// No packet for this connection is expected or sent any more.
    pub(super) fn finish_protocol(&mut self, key: TunnelKey, conn: ConnId) {
        self.forget(conn);
        if let Some(tunnel) = self.tunnels.get_mut(key) {
            tunnel.phase = Phase::Done;
            tunnel.out.clear();
            tunnel.close_deadline = None;
        }
        self.free_if_over(key);
    }

    pub(super) fn free_if_over(&mut self, key: TunnelKey) {
        let over = self
            .tunnels
            .get(key)
            .is_some_and(|t| t.phase == Phase::Done && t.endpoint_gone);
        if over && let Some(tunnel) = self.tunnels.remove(key) {
            self.lingering -= usize::from(tunnel.lingers);
            self.release(tunnel.held());
            self.ungrant(tunnel.inc.open_credit());
        }
    }

    /// Marks this id as answered or closed; false if it was marked recently.
    pub(super) fn forget(&mut self, conn: ConnId) -> bool {
        self.forgotten.insert(conn)
    }
}
