//! Peer -> endpoint: bytes, credit, and which tunnel ends when a budget is exceeded.

use bytes::Bytes;

use super::control_queue::Control;
use super::link::{Action, Event, Link};
use super::tunnel::TunnelEnd;
use super::{
    DEFERS_FOR, Moment, WINDOW_AT_LEAST_EVERY, WINDOW_GROWS_WITHIN, WINDOW_MAX_BYTES,
    WINDOW_MIN_BYTES,
};
use crate::ids::{ConnId, TunnelKey};

impl Link {
    pub(super) fn handle_data(&mut self, conn: ConnId, bytes: Bytes, now: Moment) {
        if bytes.is_empty() {
            return;
        }
        let Some(&key) = self.conns.get(&conn) else {
            return self.unknown_conn(conn);
        };
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        let length = bytes.len() as u64;
        if self.config.credit && tunnel.inc.received + length > tunnel.inc.granted && !tunnel.ended
        {
            return self.end_by_us(key, TunnelEnd::CreditViolation, now);
        }
        if tunnel.ended || tunnel.inc.fin {
            // Bytes that crossed our close; no endpoint takes them.
            return;
        }
        // A slice would pin its whole read buffer for an unknown time, and the peer decides how large a share of the
        // buffer it uses.
        let bytes = if tunnel.is_unread(now) {
            Bytes::copy_from_slice(&bytes)
        } else {
            bytes
        };
        if tunnel.held() == 0 {
            tunnel.inc.progress_at = now;
        }
        tunnel.inc.received += length;
        tunnel.active_at = now;
        self.held += length;
        self.budget.hold(length);
        self.actions.push_back(Action::Deliver { key, bytes });
        if !self.config.credit {
            self.enforce_budgets(key, now);
        }
    }

    fn unknown_conn(&mut self, conn: ConnId) {
        if !self.forget(conn) {
            return;
        }
        self.count(Event::Foreign);
        self.push_control(Control::Close(conn));
    }

    /// Held bytes guaranteed to each tunnel; the shares never add up to more than the link's budget.
    pub(super) fn share(&self) -> u64 {
        let tunnels = (self.tunnels.len() as u64).max(1);
        let isolation = &self.config.isolation;
        isolation
            .tunnel_share_bytes
            .min(isolation.link_budget_bytes / tunnels)
    }

    fn enforce_budgets(&mut self, key: TunnelKey, now: Moment) {
        let share = self.share();
        // The tunnel may exceed its share later, when more tunnels divide the budget.
        self.watch(key, now);
        if let Some(holder) = &self.holder {
            holder.publish_held(self.held);
        }
        while self.held > self.config.isolation.link_budget_bytes {
            if !self.end_largest(share, now) {
                break;
            }
        }
        self.enforce_process_budget(now);
    }

    /// While the process is over its budget, the peer that holds most loses tunnels, even if another peer exceeded the budget.
    /// The heaviest link ends tunnels at its next sweep, within a second. Far over the budget this link ends its own tunnels
    /// that exceed their shares.
    pub(super) fn enforce_process_budget(&mut self, now: Moment) {
        while self.budget.over() {
            let Some(holder) = self.holder.clone() else {
                return;
            };
            let is_far_over = self.budget.far_over();
            if now < self.defers_until && !is_far_over {
                return;
            }
            holder.publish(self.unread_bytes(now), self.held);
            let floor = if self.budget.holders.is_heaviest(&holder) {
                0
            } else if is_far_over {
                self.share()
            } else {
                // This compares all links, which is too expensive for every packet.
                self.defers_until = now.after(DEFERS_FOR);
                return;
            };
            if !self.end_largest(floor, now) {
                return;
            }
        }
    }

    /// Bytes held for endpoints that do not read.
    pub(super) fn unread_bytes(&self, now: Moment) -> u64 {
        let unread = self.tunnels.iter().filter(|(_, t)| t.is_unread(now));
        unread.map(|(_, t)| t.held()).sum()
    }

    /// Ends the largest tunnel that holds more than `floor` bytes. Tunnels whose endpoints read go last, even if they hold
    /// more. Returns whether there was one.
    fn end_largest(&mut self, floor: u64, now: Moment) -> bool {
        let over = self.tunnels.iter().filter(|(_, t)| t.held() > floor);
        let Some((largest, tunnel)) = over.max_by_key(|(_, t)| (t.is_unread(now), t.held())) else {
            return false;
        };
        if tunnel.ended {
            // Bytes that linger after a close count too; otherwise closing would bypass the budget.
            self.abort(largest, TunnelEnd::Budget);
        } else {
            self.end_by_us(largest, TunnelEnd::Budget, now);
        }
        true
    }

    /// The endpoint has written `total` bytes since the tunnel opened. Cumulative, so repeats are harmless.
    pub fn endpoint_drained(&mut self, key: TunnelKey, total: u64, now: Moment) {
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        let total = total.min(tunnel.inc.received);
        let fresh = total.saturating_sub(tunnel.inc.drained);
        if fresh == 0 {
            return;
        }
        tunnel.inc.drained = total;
        tunnel.inc.progress_at = now;
        let over = tunnel.ended || tunnel.inc.fin;
        self.drained += fresh;
        self.release(fresh);
        self.ungrant(fresh);
        if self.config.credit && !over {
            self.refill(key, now);
        }
    }

    /// Refills the window. Credit is announced once half of the window is drained, or after a long wait of the peer.
    /// The window grows for endpoints that wait for more bytes. Only the smallest window may exceed the budgets.
    fn refill(&mut self, key: TunnelKey, now: Moment) {
        let link_left = self
            .config
            .isolation
            .link_budget_bytes
            .saturating_sub(self.granted);
        let left = link_left.min(self.budget.credit_left());
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        let inc = &mut tunnel.inc;
        // On a path of high latency a window arrives as one burst: while half of it is drained, the rest has already arrived.
        inc.was_hungry |= (inc.received - inc.drained).saturating_mul(8) <= inc.window;
        let open = inc.granted - inc.drained;
        let peer_waits = now.since(inc.window_at) >= WINDOW_AT_LEAST_EVERY
            && (inc.granted - inc.received).saturating_mul(2) <= inc.window;
        if open.saturating_mul(2) > inc.window && !peer_waits {
            return;
        }
        if inc.was_hungry
            && now.since(inc.window_at) < WINDOW_GROWS_WITHIN
            && left >= inc.window * 2
        {
            inc.window = (inc.window * 2).min(WINDOW_MAX_BYTES);
        }
        // Other tunnels may have been granted the credit that this window had grown to; the window grows again once
        // there is room.
        let most = open.saturating_add(left).max(WINDOW_MIN_BYTES);
        inc.window = inc.window.min(most);
        inc.window_at = now;
        inc.was_hungry = false;
        let more = inc.window.saturating_sub(open);
        if more == 0 {
            return;
        }
        inc.granted += more;
        let queued = inc.window_due > 0;
        inc.window_due += more;
        self.grant(more);
        if !queued {
            self.windows.push_back(key);
        }
    }

    pub(super) fn handle_window(&mut self, conn: ConnId, bytes: u64, now: Moment) {
        let Some(&key) = self.conns.get(&conn) else {
            return self.count(Event::LateCredit);
        };
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        let Some(credit) = tunnel.out.credit else {
            return;
        };
        match credit
            .checked_add(bytes)
            .filter(|sum| bytes > 0 && *sum <= WINDOW_MAX_BYTES)
        {
            Some(sum) => {
                tunnel.out.credit = Some(sum);
                self.schedule(key);
            }
            None => self.end_by_us(key, TunnelEnd::CreditViolation, now),
        }
    }
}
