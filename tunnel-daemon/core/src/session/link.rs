//! The machine of one link: state, inputs from the peer, bookkeeping shared by its parts.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::cancelled::CancelledDials;
use super::holders::Holder;
use super::slab::Slab;
use super::tunnel::{Tunnel, TunnelEnd};
use super::{Isolation, Moment, ProcessBudget, SWEEP_EVERY};
use crate::failure::DialFailure;
use crate::ids::{ConnId, DialId, TunnelKey};
use crate::wire::packet::{Packet, Received, Violation};

/// Which end of the link this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Dials; its endpoints are clients.
    Server,
    /// Answers dials; its endpoints are targets.
    Agent,
}

/// What a link was negotiated and configured to do.
#[derive(Clone, Copy, Debug)]
pub struct LinkConfig {
    /// Which end this is.
    pub role: Role,
    /// Both ends are Adit: `WINDOW`, `FIN` and `RESET` are used.
    pub credit: bool,
    /// Most payload bytes in one `DATA`.
    pub packet_bytes_max: usize,
    /// Most dials in flight.
    pub dials_max: usize,
    /// Server: how long a dial may take. `None`: no limit.
    pub dial_timeout: Option<Duration>,
    /// What one tunnel may cost the others.
    pub isolation: Isolation,
    /// Most control packets waiting; beyond it the link ends.
    pub control_max: usize,
}

/// A dial asked for by a frontend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DialRequest {
    /// The id to use if it is free on this link.
    pub dial: DialId,
    /// The id to use otherwise.
    pub spare: DialId,
    /// Network name, passed as it is.
    pub protocol: String,
    /// `host:port`, passed as it is.
    pub address: String,
}

/// A dial that ended before it was open: `written` tells whether the peer may have seen it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CancelledDial {
    /// Why.
    pub failure: DialFailure,
    /// Only a dial that was not written may be tried on another link.
    pub written: bool,
}

/// What the driver must do, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Agent: dial the target, then call [`Link::dialed`].
    StartDial {
        key: TunnelKey,
        protocol: String,
        address: String,
    },
    /// Agent: stop a dial; the key is already gone.
    CancelDial { key: TunnelKey },
    /// Server: the tunnel is open.
    DialDone { key: TunnelKey, conn: ConnId },
    /// Server: the tunnel did not open; the key is already gone.
    DialFailed {
        key: TunnelKey,
        outcome: CancelledDial,
    },
    /// Bytes for the endpoint. It reports them with [`Link::endpoint_drained`] once they have left.
    Deliver { key: TunnelKey, bytes: Bytes },
    /// The peer's side sends no more; the other direction goes on.
    PeerFin { key: TunnelKey },
    /// The tunnel is over; [`TunnelEnd::delivers_rest`] tells what happens to bytes not yet out.
    Ended { key: TunnelKey, end: TunnelEnd },
    /// The endpoint must drop whatever it still holds; `end` takes the place of the end it was told.
    Abort { key: TunnelKey, end: TunnelEnd },
    /// Server: the agent announced that it is going away.
    PeerDraining,
    /// Server: the peer took no packet for as long as a dial may take. Dials should go elsewhere.
    Retired,
    /// Server: the stream of a retired link takes packets again.
    Revived,
    /// The link cannot go on.
    Failed(LinkFailure),
    /// For counters only.
    Count(Event),
}

/// Why a whole link ends from inside.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LinkFailure {
    /// The peer takes no control packets.
    #[error("control queue overflow: the peer does not read")]
    ControlOverflow,
}

/// Things worth counting that change nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A packet type this version does not know.
    UnknownType(i32),
    /// A message that broke the protocol.
    Offence(Violation),
    /// A packet for a connection or dial this link does not have.
    Foreign,
    /// An answer to a dial that is not pending.
    UnrecognizedResponse,
    /// An answer to a dial that was called off.
    LateAnswer,
    /// A client left while its dial was pending.
    DialAbandoned,
    /// A `WINDOW`, `FIN` or `RESET` for a tunnel already gone.
    LateCredit,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Control {
    Packet(Packet),
    Dial { key: TunnelKey, packet: Packet },
}

/// One end of one link.
#[derive(Debug)]
pub struct Link {
    pub(super) config: LinkConfig,
    pub(super) budget: Arc<ProcessBudget>,
    /// `None`: the peer can be told to wait, so nothing of it has to go.
    pub(super) holder: Option<Arc<Holder>>,
    /// Until then another link has been asked to give.
    pub(super) defers_until: Moment,
    pub(super) tunnels: Slab<Tunnel>,
    pub(super) conns: HashMap<ConnId, TunnelKey>,
    pub(super) dials: HashMap<DialId, TunnelKey>,
    pub(super) dial_order: VecDeque<(Moment, TunnelKey)>,
    pub(super) cancelled: CancelledDials,
    pub(super) conn_last: i64,
    pub(super) control: VecDeque<Control>,
    pub(super) windows: VecDeque<TunnelKey>,
    pub(super) ends: VecDeque<TunnelKey>,
    pub(super) ready: VecDeque<TunnelKey>,
    pub(super) actions: VecDeque<Action>,
    pub(super) held: u64,
    pub(super) granted: u64,
    pub(super) drained: u64,
    pub(super) watched: Vec<TunnelKey>,
    pub(super) sweep_at: Option<Moment>,
    pub(super) retired: bool,
    pub(super) lingering: usize,
    pub(super) forgotten: HashSet<ConnId>,
    pub(super) forgotten_order: VecDeque<ConnId>,
    failed: bool,
}

impl Link {
    /// A link without tunnels. Links to one `peer` (who is trusted, not which process it is) give together when the process
    /// holds more than its budget.
    #[must_use]
    pub fn new(config: LinkConfig, budget: Arc<ProcessBudget>, peer: Arc<str>) -> Self {
        let holder = (!config.credit).then(|| budget.holders.enter(peer));
        Self {
            config,
            budget,
            holder,
            defers_until: Moment::default(),
            tunnels: Slab::default(),
            conns: HashMap::new(),
            dials: HashMap::new(),
            dial_order: VecDeque::new(),
            cancelled: CancelledDials::default(),
            conn_last: 0,
            control: VecDeque::new(),
            windows: VecDeque::new(),
            ends: VecDeque::new(),
            ready: VecDeque::new(),
            actions: VecDeque::new(),
            held: 0,
            granted: 0,
            drained: 0,
            watched: Vec::new(),
            sweep_at: None,
            retired: false,
            lingering: 0,
            forgotten: HashSet::new(),
            forgotten_order: VecDeque::new(),
            failed: false,
        }
    }

    /// Whether `WINDOW`, `FIN` and `RESET` are in use.
    #[must_use]
    pub fn has_credit(&self) -> bool {
        self.config.credit
    }

    /// Tunnels and dials this link knows, closing ones included.
    #[must_use]
    pub fn tunnels(&self) -> usize {
        self.tunnels.len()
    }

    /// Tunnels that their endpoints have closed and left, and whose last bytes, or their confirmation, are on their way.
    #[must_use]
    pub fn lingering(&self) -> usize {
        self.lingering
    }

    /// What bounds the whole process.
    #[must_use]
    pub fn budget(&self) -> &Arc<ProcessBudget> {
        &self.budget
    }

    /// Dials without an answer.
    #[must_use]
    pub fn pending_dials(&self) -> usize {
        self.dials.len()
    }

    /// Bytes delivered to endpoints that have not left yet.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held
    }

    /// Bytes endpoints have got rid of since the link began.
    #[must_use]
    pub fn drained_bytes(&self) -> u64 {
        self.drained
    }

    /// Whether a link without credit holds so much that reading on would soon cost a tunnel its life.
    #[must_use]
    pub fn is_nearly_full(&self) -> bool {
        !self.config.credit && self.held > self.config.isolation.link_budget_bytes / 4 * 3
    }

    /// Whether endpoints that read hold a quarter of the budget or more, so that waiting for them makes room. What others hold
    /// comes free only when they lose their tunnels. Looks at every tunnel.
    #[must_use]
    pub fn is_held_by_readers(&self, now: Moment) -> bool {
        let read = self.tunnels.iter().filter(|(_, t)| !t.is_unread(now));
        let held: u64 = read.map(|(_, t)| t.held()).sum();
        held >= self.config.isolation.link_budget_bytes / 4
    }

    /// Whether held bytes come near a budget, so that exact accounts matter.
    #[must_use]
    pub fn is_near_budget(&self) -> bool {
        self.held > self.config.isolation.link_budget_bytes / 2 || self.budget.over()
    }

    /// The next thing to do, if any.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Takes what came from the peer.
    pub fn handle_packet(&mut self, received: Received, now: Moment) {
        let packet = match received {
            Received::Packet(packet) => packet,
            Received::Unknown(number) => return self.count(Event::UnknownType(number)),
            Received::Violation(violation) => {
                self.count(Event::Offence(violation));
                if let Violation::Oversize(Some(conn)) = violation
                    && let Some(&key) = self.conns.get(&conn)
                {
                    self.end_by_us(key, TunnelEnd::Oversize, now);
                }
                return;
            }
        };
        match packet {
            Packet::Data { conn, bytes } => self.handle_data(conn, bytes, now),
            Packet::Window { conn, bytes } if self.config.credit => {
                self.handle_window(conn, bytes, now)
            }
            Packet::Fin { conn, side } if self.config.credit => self.handle_fin(conn, side, now),
            Packet::DialReq {
                dial,
                protocol,
                address,
                window,
            } if self.config.role == Role::Agent => {
                self.handle_dial_req(dial, protocol, address, window, now);
            }
            Packet::DialRsp {
                dial,
                conn,
                error,
                window,
            } if self.config.role == Role::Server => {
                self.handle_dial_rsp(dial, conn, error, window, now);
            }
            Packet::DialCls { dial } => self.handle_dial_cls(dial),
            Packet::CloseReq { conn } if self.config.role == Role::Agent => {
                self.handle_close_req(conn, now)
            }
            Packet::Reset { conn } if self.config.credit && self.config.role == Role::Agent => {
                self.handle_reset(conn, now)
            }
            Packet::CloseRsp { conn, error } if self.config.role == Role::Server => {
                self.handle_close_rsp(conn, error, now)
            }
            Packet::Drain if self.config.role == Role::Server => {
                self.actions.push_back(Action::PeerDraining)
            }
            other => self.count(Event::UnknownType(other.kind().into())),
        }
    }

    pub(super) fn count(&mut self, event: Event) {
        self.actions.push_back(Action::Count(event));
    }

    pub(super) fn control(&mut self, packet: Packet) {
        self.push_control(Control::Packet(packet));
    }

    pub(super) fn push_control(&mut self, control: Control) {
        if self.control.len() >= self.config.control_max {
            if !self.failed {
                self.failed = true;
                self.actions
                    .push_back(Action::Failed(LinkFailure::ControlOverflow));
            }
            return;
        }
        self.control.push_back(control);
    }

    pub(super) fn release(&mut self, bytes: u64) {
        self.held -= bytes;
        self.budget.release(bytes);
    }

    pub(super) fn ungrant(&mut self, bytes: u64) {
        if self.config.credit {
            self.granted -= bytes;
            self.budget.ungrant(bytes);
        }
    }

    /// Has the slow clauses looked at for this tunnel.
    pub(super) fn watch(&mut self, key: TunnelKey, now: Moment) {
        if let Some(tunnel) = self.tunnels.get_mut(key)
            && !tunnel.watched
        {
            tunnel.watched = true;
            self.watched.push(key);
            self.sweep_at.get_or_insert_with(|| now.after(SWEEP_EVERY));
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // A link that is dropped with tunnels gives back what it had taken from the process budget.
        self.budget.release(self.held);
        if self.config.credit {
            self.budget.ungrant(self.granted);
        }
    }
}
