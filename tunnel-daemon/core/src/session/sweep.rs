//! Timeouts: dial deadlines, stalled, idle half-closed and lingering tunnels, unconfirmed closes.

use super::link::Link;
use super::tunnel::{OutEnd, Phase, TunnelEnd};
use super::{Moment, Role, SWEEP_EVERY};
use crate::failure::DialFailure;
use crate::ids::TunnelKey;

impl Link {
    /// When to call [`Self::handle_tick`] next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Moment> {
        let dial = self.dial_order.front().map(|(deadline, _)| *deadline);
        match (dial, self.sweep_at) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Acts on deadlines that have passed. Early calls are harmless.
    pub fn handle_tick(&mut self, now: Moment) {
        self.end_if_chosen();
        while let Some(&(deadline, key)) = self.dial_order.front() {
            let pending = matches!(
                self.tunnels.get(key).map(|t| t.phase),
                Some(Phase::Dialing { .. })
            );
            if pending && deadline > now {
                break;
            }
            self.dial_order.pop_front();
            if pending {
                self.time_out_dial(key, now);
            }
        }
        if self.sweep_at.is_some_and(|at| at <= now) {
            self.sweep(now);
        }
    }

    fn time_out_dial(&mut self, key: TunnelKey, now: Moment) {
        if let Some(Phase::Dialing { dial, written, .. }) = self.tunnels.get(key).map(|t| t.phase) {
            self.dials.remove(&dial);
            if !written {
                self.fail_dial(key, DialFailure::SendTimedOut);
                return self.retire();
            }
            self.fail_dial(key, DialFailure::TimedOut);
            if self.config.role == Role::Server {
                self.call_off(dial, now);
            }
        }
    }

    fn sweep(&mut self, now: Moment) {
        if let Some(holder) = self.holder.clone() {
            holder.publish(self.unread_bytes(now), self.held);
            if holder.take_question() {
                self.enforce_process_budget(now);
            }
        }
        let watched = std::mem::take(&mut self.watched);
        let share = self.share();
        for key in watched {
            let Some(tunnel) = self.tunnels.get_mut(key) else {
                continue;
            };
            tunnel.watched = false;
            if self.sweep_one(key, share, now) {
                self.watch(key, now);
            }
        }
        self.sweep_at = (!self.watched.is_empty()).then(|| now.after(SWEEP_EVERY));
    }

    /// Returns whether the tunnel must be checked again.
    fn sweep_one(&mut self, key: TunnelKey, share: u64, now: Moment) -> bool {
        let isolation = self.config.isolation;
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return false;
        };
        if tunnel
            .close_deadline
            .is_some_and(|deadline| deadline <= now)
        {
            if let Some(conn) = tunnel.conn() {
                self.conns.remove(&conn);
                self.end_endpoint(key, TunnelEnd::Unconfirmed, now);
                self.finish_protocol(key, conn);
            }
            return self.tunnels.get(key).is_some_and(|t| t.held() > 0);
        }
        let held = tunnel.held();
        if tunnel.ended {
            if held > 0 && now.since(tunnel.inc.progress_at) >= isolation.linger_timeout {
                self.abort(key, TunnelEnd::LingerExpired);
            }
        } else if !self.config.credit && held > share {
            if now.since(tunnel.inc.progress_at) >= isolation.stall_timeout {
                self.end_by_us(key, TunnelEnd::Stalled, now);
            }
        } else if tunnel.half_closed()
            && now.since(tunnel.active_at.max(tunnel.inc.progress_at))
                >= isolation.half_closed_timeout
        {
            self.end_by_us(key, TunnelEnd::HalfClosedIdle, now);
        }
        self.cut_lingering(key, now);
        let Some(tunnel) = self.tunnels.get(key) else {
            return false;
        };
        let held = tunnel.held() > 0;
        tunnel.is_closing()
            || tunnel.half_closed()
            || (held && (tunnel.ended || !self.config.credit))
    }

    /// Discards bytes queued before a close if the peer takes none, and tells the peer: a truncated stream must not
    /// look complete.
    fn cut_lingering(&mut self, key: TunnelKey, now: Moment) {
        let linger = self.config.isolation.linger_timeout;
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if !tunnel.is_closing()
            || tunnel.out.queue.is_empty()
            || now.since(tunnel.out.progress_at) < linger
        {
            return;
        }
        if let OutEnd::CloseRsp(error) = &mut tunnel.out.end
            && error.is_empty()
        {
            *error = String::from("closed by the agent: bytes not taken in time");
        }
        self.cut_outgoing(key);
        self.schedule(key);
    }
}
