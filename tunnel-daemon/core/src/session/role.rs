//! Dials: the server asks, the agent answers. Also what endpoints ask for.

use bytes::Bytes;

use super::budget::Queued;
use super::link::{Action, CancelledDial, Control, DialRequest, Event, Link, Role};
use super::tunnel::{OutEnd, Phase, Tunnel, TunnelEnd};
use super::{Moment, WINDOW_MIN_BYTES, WINDOW_START_BYTES};
use crate::failure::DialFailure;
use crate::ids::{ConnId, DialId, TunnelKey};
use crate::text::shortened;
use crate::wire::packet::Packet;

/// Deadlines of dials that are over, beside twice as many as there are dials.
pub(super) const OVER_DIALS_MAX: usize = 64;

impl Link {
    /// Server: starts a dial. The outcome comes as [`Action::DialDone`] or [`Action::DialFailed`].
    ///
    /// # Errors
    /// [`DialFailure::TooManyPending`] when the link's cap on dials in flight is reached,
    /// [`DialFailure::LinkBusy`] while the link is retired.
    pub fn dial(&mut self, request: DialRequest, now: Moment) -> Result<TunnelKey, DialFailure> {
        if self.retired {
            return Err(DialFailure::LinkBusy);
        }
        if self.dials.len() >= self.config.dials_max {
            return Err(DialFailure::TooManyPending { per_agent: true });
        }
        let mut dial = request.dial;
        if self.dials.contains_key(&dial) {
            dial = request.spare;
        }
        while self.dials.contains_key(&dial) {
            dial = DialId(dial.0.wrapping_add(1) & i64::MAX);
        }
        let deadline = self.config.dial_timeout.map(|timeout| now.after(timeout));
        let window = self.starting_window();
        let phase = Phase::Dialing {
            dial,
            deadline,
            written: false,
        };
        let queued = Queued::none(&self.budget);
        let tunnel = Tunnel::new(phase, queued, self.config.credit, window, now);
        let Some(key) = self.tunnels.insert(tunnel) else {
            self.ungrant(window);
            return Err(DialFailure::TooManyPending { per_agent: true });
        };
        self.dials.insert(dial, key);
        if let Some(deadline) = deadline {
            self.dial_order.push_back((deadline, key));
            self.prune_dial_order();
        }
        let DialRequest {
            protocol, address, ..
        } = request;
        let packet = Packet::DialReq {
            dial,
            protocol,
            address,
            window,
        };
        self.push_control(Control::Dial { key, packet });
        Ok(key)
    }

    /// Forgets the deadlines of dials that are over. They leave by themselves once they are at the front, but one dial into a black hole
    /// stays there until its own deadline. Costs a constant for each dial: the next time is after as many more.
    fn prune_dial_order(&mut self) {
        let most = 2 * self.dials.len() + OVER_DIALS_MAX;
        if self.dial_order.len() > most {
            let tunnels = &self.tunnels;
            self.dial_order.retain(|(_deadline, key)| {
                let phase = tunnels.get(*key).map(|tunnel| tunnel.phase);
                matches!(phase, Some(Phase::Dialing { .. }))
            });
            self.dial_order.shrink_to(most);
        }
    }

    pub(super) fn handle_dial_rsp(
        &mut self,
        dial: DialId,
        conn: ConnId,
        error: String,
        window: u64,
        now: Moment,
    ) {
        let Some(key) = self.dials.remove(&dial) else {
            let is_late = self.cancelled.take(dial, now);
            self.count(if is_late {
                Event::LateAnswer
            } else {
                Event::UnrecognizedResponse
            });
            if conn.0 != 0 && !self.conns.contains_key(&conn) && self.forget(conn) {
                self.control(Packet::CloseReq { conn });
            }
            return;
        };
        if !error.is_empty() {
            return self.fail_dial(key, DialFailure::Target(shortened(error)));
        }
        if conn.0 == 0 || self.conns.contains_key(&conn) {
            let text = format!(
                "agent answered with connection id {}, which is not free",
                conn.0
            );
            return self.fail_dial(key, DialFailure::Target(text));
        }
        self.conns.insert(conn, key);
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        tunnel.phase = Phase::Open { conn };
        tunnel.active_at = now;
        if let Some(credit) = &mut tunnel.out.credit {
            *credit = window;
        }
        let ends = tunnel.out.end != OutEnd::None;
        self.actions.push_back(Action::DialDone { key, conn });
        self.schedule(key);
        if ends {
            // It may have been half-closed before there was anything to watch.
            self.watch(key, now);
        }
    }

    pub(super) fn handle_dial_cls(&mut self, dial: DialId) {
        let Some(key) = self.dials.remove(&dial) else {
            return self.count(Event::Foreign);
        };
        match self.config.role {
            Role::Server => self.fail_dial(key, DialFailure::Closed),
            Role::Agent => {
                self.actions.push_back(Action::CancelDial { key });
                self.drop_dial(key);
            }
        }
    }

    /// Agent: a dial for a client of the server.
    pub(super) fn handle_dial_req(
        &mut self,
        dial: DialId,
        protocol: String,
        address: String,
        window: u64,
        now: Moment,
    ) {
        // Counted for failing dials too, as every agent does.
        self.conn_last = self.conn_last.wrapping_add(1).max(1);
        if self.dials.len() >= self.config.dials_max {
            let error = DialFailure::TooManyPending { per_agent: true }.to_string();
            return self.control(Packet::DialRsp {
                dial,
                conn: ConnId(0),
                error,
                window: 0,
            });
        }
        if self.dials.contains_key(&dial) {
            let error = String::from("a dial with this id is already pending");
            return self.control(Packet::DialRsp {
                dial,
                conn: ConnId(0),
                error,
                window: 0,
            });
        }
        let granted = self.starting_window();
        let mut tunnel = Tunnel::new(
            Phase::Dialing {
                dial,
                deadline: None,
                written: true,
            },
            Queued::none(&self.budget),
            self.config.credit,
            granted,
            now,
        );
        if let Some(credit) = &mut tunnel.out.credit {
            *credit = window;
        }
        tunnel.out.conn_reserved = self.conn_last;
        let Some(key) = self.tunnels.insert(tunnel) else {
            return self.ungrant(granted);
        };
        self.dials.insert(dial, key);
        self.actions.push_back(Action::StartDial {
            key,
            protocol,
            address,
        });
    }

    /// Agent: the outcome of [`Action::StartDial`]. Returns whether a connected socket is still wanted.
    pub fn dialed(&mut self, key: TunnelKey, outcome: Result<(), String>, now: Moment) -> bool {
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return false;
        };
        let Phase::Dialing { dial, .. } = tunnel.phase else {
            return false;
        };
        self.dials.remove(&dial);
        match outcome {
            Ok(()) => {
                let conn = ConnId(tunnel.out.conn_reserved);
                tunnel.phase = Phase::Open { conn };
                tunnel.active_at = now;
                let window = if self.config.credit {
                    tunnel.inc.granted
                } else {
                    0
                };
                self.conns.insert(conn, key);
                self.control(Packet::DialRsp {
                    dial,
                    conn,
                    error: String::new(),
                    window,
                });
                true
            }
            Err(error) => {
                self.control(Packet::DialRsp {
                    dial,
                    conn: ConnId(0),
                    error,
                    window: 0,
                });
                self.drop_dial(key);
                false
            }
        }
    }

    /// Bytes from the endpoint for the peer, which count as queued in the process budget: from now on they are this link's to take off.
    /// Returns `false` when the tunnel takes no more; they are dropped then.
    pub fn endpoint_data(&mut self, key: TunnelKey, bytes: Bytes) -> bool {
        let takes = |tunnel: &&mut Tunnel| {
            tunnel.out.end == OutEnd::None && !tunnel.ended && tunnel.phase != Phase::Done
        };
        let Some(tunnel) = self.tunnels.get_mut(key).filter(takes) else {
            self.budget.dequeue(bytes.len() as u64);
            return false;
        };
        // An empty piece would hold the end of the tunnel back and spin in the encoder.
        if !bytes.is_empty() {
            tunnel.out.push(bytes);
            self.schedule(key);
        }
        true
    }

    /// The endpoint sends no more bytes. Where the wire has no half-close this closes the tunnel.
    pub fn endpoint_fin(&mut self, key: TunnelKey, now: Moment) {
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if tunnel.out.end != OutEnd::None || tunnel.ended {
            return;
        }
        if !self.config.credit || tunnel.inc.fin {
            return self.close_outgoing(key, String::new(), now);
        }
        tunnel.out.end = OutEnd::Fin;
        tunnel.active_at = now;
        self.schedule(key);
        self.watch(key, now);
    }

    /// The endpoint will send no more than it has yet to hand over, for which there is no room. Repeats are harmless.
    pub fn endpoint_end_waits(&mut self, key: TunnelKey, now: Moment) {
        if let Some(tunnel) = self.tunnels.get_mut(key)
            && tunnel.out.end == OutEnd::None
            && !tunnel.ended
            && !tunnel.end_waits
        {
            tunnel.end_waits = true;
            tunnel.active_at = now;
            self.watch(key, now);
        }
    }

    /// The endpoint wants the tunnel closed once its bytes are sent. Agents may give the peer a text.
    pub fn endpoint_close(&mut self, key: TunnelKey, error: String, now: Moment) {
        self.close_outgoing(key, error, now);
    }

    /// The endpoint is gone. Without a close before it, its queued bytes are discarded and the peer is told at once.
    pub fn endpoint_gone(&mut self, key: TunnelKey, now: Moment) {
        let Some(tunnel) = self.tunnels.get_mut(key) else {
            return;
        };
        if tunnel.endpoint_gone {
            return;
        }
        tunnel.endpoint_gone = true;
        tunnel.ended = true;
        let phase = tunnel.phase;
        let closing = matches!(tunnel.out.end, OutEnd::CloseReq | OutEnd::CloseRsp(_));
        self.discard_held(key);
        match phase {
            Phase::Dialing { dial, written, .. } => {
                self.dials.remove(&dial);
                self.count(Event::DialAbandoned);
                if self.config.role == Role::Server && written {
                    self.call_off(dial, now);
                }
                self.drop_dial(key);
            }
            Phase::Open { .. } if !closing => {
                self.cut_outgoing(key);
                let text = match self.config.role {
                    Role::Server => String::new(),
                    Role::Agent => String::from("closed by the agent: target dropped"),
                };
                self.close_outgoing(key, text, now);
            }
            Phase::Open { .. } => {
                if let Some(tunnel) = self.tunnels.get_mut(key) {
                    tunnel.lingers = true;
                    self.lingering += 1;
                }
                self.watch(key, now);
            }
            Phase::Done => self.free_if_over(key),
        }
    }

    /// Agent: tells the server that this agent is going away.
    pub fn drain(&mut self) {
        self.control(Packet::Drain);
    }

    /// The link is gone: every dial fails and every tunnel ends, at once.
    pub fn lost(&mut self, now: Moment) {
        self.end_all(TunnelEnd::LinkLost, now);
    }

    /// As [`Self::lost`], because this process ends.
    pub fn shut_down(&mut self, now: Moment) {
        self.end_all(TunnelEnd::Shutdown, now);
    }

    fn end_all(&mut self, end: TunnelEnd, now: Moment) {
        for key in self.tunnels.keys() {
            let Some(tunnel) = self.tunnels.get(key) else {
                continue;
            };
            if let Phase::Dialing { .. } = tunnel.phase {
                match self.config.role {
                    Role::Server => self.fail_dial(key, DialFailure::LinkLost),
                    Role::Agent => {
                        self.actions.push_back(Action::CancelDial { key });
                        self.drop_dial(key);
                    }
                }
            } else {
                self.end_endpoint(key, end.clone(), now);
                if let Some(tunnel) = self.tunnels.get_mut(key) {
                    tunnel.phase = Phase::Done;
                    tunnel.out.clear();
                }
                self.free_if_over(key);
            }
        }
        self.conns.clear();
        self.dials.clear();
        self.control.clear();
    }

    /// Tells the agent that a dial is not wanted any more. Its answer may be on the way.
    pub(super) fn call_off(&mut self, dial: DialId, now: Moment) {
        self.cancelled.add(dial, now);
        self.control(Packet::DialCls { dial });
    }

    pub(super) fn fail_dial(&mut self, key: TunnelKey, failure: DialFailure) {
        let written = match self.tunnels.get(key).map(|t| t.phase) {
            Some(Phase::Dialing { written, .. }) => written,
            _ => true,
        };
        self.drop_dial(key);
        self.actions.push_back(Action::DialFailed {
            key,
            outcome: CancelledDial { failure, written },
        });
    }

    /// A dial waited its whole time for the stream to take it: the peer reads nothing. The dials behind it were
    /// not seen either and may be tried elsewhere at once.
    pub(super) fn retire(&mut self) {
        if std::mem::replace(&mut self.retired, true) {
            return;
        }
        self.actions.push_back(Action::Retired);
        let mut unseen = Vec::new();
        self.control.retain(|control| match control {
            Control::Dial { key, .. } => {
                unseen.push(*key);
                false
            }
            Control::Packet(_) => true,
        });
        for key in unseen {
            self.fail_dial(key, DialFailure::LinkBusy);
        }
    }

    pub(super) fn drop_dial(&mut self, key: TunnelKey) {
        if let Some(tunnel) = self.tunnels.remove(key) {
            self.ungrant(tunnel.inc.open_credit());
            if let Phase::Dialing {
                dial,
                written: false,
                ..
            } = tunnel.phase
            {
                self.dials.remove(&dial);
                self.control.retain(
                    |control| !matches!(control, Control::Dial { key: k, .. } if *k == key),
                );
            }
        }
    }

    /// Credit a new tunnel starts with; taken from the budgets. 0 where the peer knows no credit.
    fn starting_window(&mut self) -> u64 {
        if !self.config.credit {
            return 0;
        }
        let left = self
            .config
            .isolation
            .link_budget_bytes
            .saturating_sub(self.granted)
            .min(self.budget.credit_left());
        let window = if left >= WINDOW_START_BYTES && !self.budget.is_half_full() {
            WINDOW_START_BYTES
        } else {
            WINDOW_MIN_BYTES
        };
        self.grant(window);
        window
    }

    pub(super) fn grant(&mut self, bytes: u64) {
        self.granted += bytes;
        self.budget.grant(bytes);
    }
}
