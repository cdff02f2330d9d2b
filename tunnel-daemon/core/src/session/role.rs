//! Dials on the server and the agent, and the calls of endpoints.

use bytes::Bytes;

use super::budget::Queued;
use super::control_queue::Control;
use super::link::{Action, CancelledDial, DialRequest, Event, Link};
use super::tunnel::{OutEnd, Phase, Tunnel, TunnelEnd};
use super::{Moment, Role, WINDOW_MIN_BYTES, WINDOW_START_BYTES};
use crate::failure::DialFailure;
use crate::ids::{ConnId, DialId, TunnelKey};
use crate::text::shortened;
use crate::wire::packet::Packet;

/// Most deadlines of finished dials kept, in addition to twice the number of pending dials.
pub(super) const OVER_DIALS_MAX: usize = 64;

impl Link {
    /// Server: starts a dial. [`Action::DialDone`] or [`Action::DialFailed`] follows.
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
        self.push_control(Control::Dial(Box::new((key, packet))));
        Ok(key)
    }

    /// Removes the deadlines of finished dials. Otherwise a dial that gets no answer keeps later deadlines queued until its own
    /// deadline. Amortised O(1) per dial.
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
                self.push_control(Control::Close(conn));
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
            // The endpoint may have half-closed before the tunnel was open.
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

    /// Agent: answers a dial that opens no tunnel.
    fn refuse(&mut self, dial: DialId, error: String) {
        self.control(Packet::DialRsp {
            dial,
            conn: ConnId(0),
            error,
            window: 0,
        });
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
        // Counts failing dials too, as upstream's agent does.
        self.conn_last = self.conn_last.wrapping_add(1).max(1);
        if self.dials.len() >= self.config.dials_max {
            let error = DialFailure::TooManyPending { per_agent: true }.to_string();
            return self.refuse(dial, error);
        }
        if self.dials.contains_key(&dial) {
            let error = String::from("a dial with this id is already pending");
            return self.refuse(dial, error);
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
                self.refuse(dial, error);
                self.drop_dial(key);
                false
            }
        }
    }

    /// Queues bytes of the endpoint for the peer. The process budget already counts them as queued; the link takes over the
    /// accounting. Returns `false` and drops the bytes if the tunnel takes no more.
    pub fn endpoint_data(&mut self, key: TunnelKey, bytes: Bytes) -> bool {
        let takes = |tunnel: &&mut Tunnel| {
            tunnel.out.end == OutEnd::None && !tunnel.ended && tunnel.phase != Phase::Done
        };
        let Some(tunnel) = self.tunnels.get_mut(key).filter(takes) else {
            self.budget.dequeue(bytes.len() as u64);
            return false;
        };
        // An empty piece would delay the tunnel's end and spin in the encoder.
        if !bytes.is_empty() {
            tunnel.out.push(bytes);
            self.schedule(key);
        }
        true
    }

    /// The endpoint sends no more bytes. On links without half-close this closes the tunnel.
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

    /// The endpoint has reached EOF, but has bytes left for which the queue has no room. Repeats are harmless.
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

    /// Closes the tunnel once the endpoint's bytes are sent. Agents may send an error text.
    pub fn endpoint_close(&mut self, key: TunnelKey, error: String, now: Moment) {
        self.close_outgoing(key, error, now);
    }

    /// The endpoint is gone. Without a previous close its queued bytes are discarded and the tunnel is closed at once.
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

    /// Agent: announces the agent's shutdown to the server.
    pub fn drain(&mut self) {
        self.control(Packet::Drain);
    }

    /// The link is lost: all dials fail and all tunnels end at once.
    pub fn lost(&mut self, now: Moment) {
        self.end_all(TunnelEnd::LinkLost, now);
    }

    /// As [`Self::lost`], because this process shuts down.
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

    /// Cancels a dial at the agent, whose answer may be in flight.
    pub(super) fn call_off(&mut self, dial: DialId, now: Moment) {
        self.cancelled.add(dial, now);
        self.push_control(Control::Cancel(dial));
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

    /// A dial timed out before the stream accepted it: the peer does not read. The peer has not seen the dials queued
    /// behind it either, so they fail at once and may be tried on other links.
    pub(super) fn retire(&mut self) {
        if std::mem::replace(&mut self.retired, true) {
            return;
        }
        self.actions.push_back(Action::Retired);
        let mut unseen = Vec::new();
        self.control.retain(|control| match control {
            Control::Dial(dial) => {
                unseen.push(dial.0);
                false
            }
            _ => true,
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
                self.control
                    .retain(|control| !matches!(control, Control::Dial(dial) if dial.0 == key));
            }
        }
    }

    /// Initial credit of a new tunnel, taken from the budgets. 0 on links without credit.
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
        let is_ample = !self.budget.starts_small() && !self.budget.is_half_full();
        let window = if left >= WINDOW_START_BYTES && is_ample {
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
