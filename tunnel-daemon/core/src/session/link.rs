//! The state machine of one link: state, packets from the peer, shared bookkeeping.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::cancelled::CancelledDials;
use super::control_pool::ControlShare;
use super::control_queue::{Control, ControlQueue};
use super::forgotten::Forgotten;
use super::holders::Holder;
use super::slab::Slab;
use super::tunnel::{Tunnel, TunnelEnd};
use super::{Isolation, Moment, ProcessBudget, Role, SWEEP_EVERY};
use crate::failure::DialFailure;
use crate::ids::{ConnId, DialId, TunnelKey};
use crate::wire::encode::GO_PAYLOAD_BYTES_MAX;
use crate::wire::packet::{Packet, Received, Violation};

/// Negotiated and configured properties of a link.
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
    /// Limits that isolate tunnels from each other.
    pub isolation: Isolation,
    /// Most queued control packets; beyond this the link ends.
    pub control_max: usize,
}

/// Size of a packet towards an Adit peer.
const PACKET_BYTES_ADIT: usize = 64 * 1024;
/// Control packets queued for a peer that does not read.
const CONTROL_MAX: usize = 65_536;

impl LinkConfig {
    /// A link in `role`; `credit`: both ends are Adit.
    #[must_use]
    pub fn new(role: Role, credit: bool, isolation: Isolation, dials_max: usize) -> Self {
        Self {
            role,
            credit,
            packet_bytes_max: if credit {
                PACKET_BYTES_ADIT
            } else {
                GO_PAYLOAD_BYTES_MAX
            },
            dials_max,
            dial_timeout: None,
            isolation,
            control_max: CONTROL_MAX,
        }
    }
}

/// A dial asked for by a frontend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DialRequest {
    /// The id to use if it is free on this link.
    pub dial: DialId,
    /// The id to use otherwise.
    pub spare: DialId,
    /// Network name, passed on unchanged.
    pub protocol: String,
    /// `host:port`, passed on unchanged.
    pub address: String,
}

/// A dial that ended without a tunnel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CancelledDial {
    /// Why the dial ended.
    pub failure: DialFailure,
    /// Whether the peer may have seen the dial. Only an unwritten dial may be tried on another link.
    pub written: bool,
}

/// Actions for the driver, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Agent: dial the target, then call [`Link::dialed`].
    StartDial {
        key: TunnelKey,
        protocol: String,
        address: String,
    },
    /// Agent: stop a dial; the key is already invalid.
    CancelDial { key: TunnelKey },
    /// Server: the tunnel is open.
    DialDone { key: TunnelKey, conn: ConnId },
    /// Server: the tunnel did not open; the key is already invalid.
    DialFailed {
        key: TunnelKey,
        outcome: CancelledDial,
    },
    /// Bytes for the endpoint, which calls [`Link::endpoint_drained`] once they are written.
    Deliver { key: TunnelKey, bytes: Bytes },
    /// The peer sends no more data; the other direction continues.
    PeerFin { key: TunnelKey },
    /// The tunnel is over; [`TunnelEnd::delivers_rest`] says whether pending bytes are still delivered.
    Ended { key: TunnelKey, end: TunnelEnd },
    /// The endpoint must drop the bytes it still holds; `end` replaces the end reported before.
    Abort { key: TunnelKey, end: TunnelEnd },
    /// Server: the agent announced its shutdown.
    PeerDraining,
    /// Server: the peer took no packet for the whole dial timeout. Send dials to other links.
    Retired,
    /// Server: the stream of a retired link accepts packets again.
    Revived,
    /// The link must end.
    Failed(LinkFailure),
    /// For counters only.
    Count(Event),
}

/// Why the state machine ends its link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LinkFailure {
    /// The peer does not read control packets: too many wait on this link, or this link is the furthest over its share of
    /// what all links may queue.
    #[error("control queue overflow: the peer does not read")]
    ControlOverflow,
}

/// Events for counters only.
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
    /// An answer to a cancelled dial.
    LateAnswer,
    /// A client left while its dial was pending.
    DialAbandoned,
    /// A `WINDOW`, `FIN` or `RESET` for a tunnel that has ended.
    LateCredit,
}

/// One end of one link.
#[derive(Debug)]
pub struct Link {
    pub(super) config: LinkConfig,
    pub(super) budget: Arc<ProcessBudget>,
    /// `None`: the peer has flow control, so its tunnels are not ended for the budget.
    pub(super) holder: Option<Arc<Holder>>,
    /// Until this time another link has been asked to end tunnels.
    pub(super) defers_until: Moment,
    pub(super) tunnels: Slab<Tunnel>,
    pub(super) conns: HashMap<ConnId, TunnelKey>,
    pub(super) dials: HashMap<DialId, TunnelKey>,
    pub(super) dial_order: VecDeque<(Moment, TunnelKey)>,
    pub(super) cancelled: CancelledDials,
    pub(super) conn_last: i64,
    pub(super) control: ControlQueue,
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
    pub(super) forgotten: Forgotten,
    failed: bool,
}

impl Link {
    /// A link without tunnels. All links of one `peer` (a principal, not a process) count together when the process exceeds
    /// its budget, or what its links may queue for peers that do not read.
    #[must_use]
    pub fn new(config: LinkConfig, budget: Arc<ProcessBudget>, peer: Arc<str>) -> Self {
        let share = ControlShare::new(Arc::clone(&budget.control), Arc::clone(&peer));
        let holder = (!config.credit).then(|| budget.holders.enter(peer));
        Self {
            config,
            cancelled: CancelledDials::new(&budget.control),
            control: ControlQueue::new(share),
            forgotten: Forgotten::new(&budget.control),
            budget,
            holder,
            defers_until: Moment::default(),
            tunnels: Slab::default(),
            conns: HashMap::new(),
            dials: HashMap::new(),
            dial_order: VecDeque::new(),
            conn_last: 0,
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
            failed: false,
        }
    }

    /// Number of tunnels and dials, including closing tunnels.
    #[must_use]
    pub fn tunnels(&self) -> usize {
        self.tunnels.len()
    }

    /// Number of tunnels whose endpoints are gone after a close, and whose last bytes or confirmation are pending.
    #[must_use]
    pub fn lingering(&self) -> usize {
        self.lingering
    }

    /// The budget of the process.
    #[must_use]
    pub fn budget(&self) -> &Arc<ProcessBudget> {
        &self.budget
    }

    /// What this link holds for its peer.
    #[must_use]
    pub fn control_share(&self) -> &Arc<ControlShare> {
        self.control.share()
    }

    /// Dials without an answer.
    #[must_use]
    pub fn pending_dials(&self) -> usize {
        self.dials.len()
    }

    /// Bytes delivered to endpoints and not yet drained.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held
    }

    /// Bytes that endpoints have drained since the link began.
    #[must_use]
    pub fn drained_bytes(&self) -> u64 {
        self.drained
    }

    /// Whether a link without credit holds so many bytes that further reading would soon end a tunnel.
    #[must_use]
    pub fn is_nearly_full(&self) -> bool {
        !self.config.credit && self.held > self.config.isolation.link_budget_bytes / 4 * 3
    }

    /// Whether endpoints that read hold at least a quarter of the budget, so that waiting frees memory. Bytes of other
    /// endpoints are freed only when their tunnels end. Iterates over all tunnels.
    #[must_use]
    pub fn is_held_by_readers(&self, now: Moment) -> bool {
        let read = self.tunnels.iter().filter(|(_, t)| !t.is_unread(now));
        let held: u64 = read.map(|(_, t)| t.held()).sum();
        held >= self.config.isolation.link_budget_bytes / 4
    }

    /// Whether held bytes are near a budget, so that exact accounting matters.
    #[must_use]
    pub fn is_near_budget(&self) -> bool {
        self.held > self.config.isolation.link_budget_bytes / 2 || self.budget.over()
    }

    /// The next action, if any.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Handles a packet of the peer.
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
        self.push_control(Control::Packet(Box::new(packet)));
    }

    pub(super) fn push_control(&mut self, control: Control) {
        if self.failed || self.control.len() >= self.config.control_max {
            return self.overflow();
        }
        self.control.push(control);
        self.end_if_chosen();
    }

    /// Ends the link if it was chosen to make room for others.
    pub(super) fn end_if_chosen(&mut self) {
        if self.control.share().must_end() {
            self.overflow();
        }
    }

    fn overflow(&mut self) {
        if !std::mem::replace(&mut self.failed, true) {
            self.actions
                .push_back(Action::Failed(LinkFailure::ControlOverflow));
        }
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

    /// Adds the tunnel to the periodic checks of the sweep.
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
        // A link dropped with open tunnels returns its bytes and credit to the process budget.
        self.budget.release(self.held);
        if self.config.credit {
            self.budget.ungrant(self.granted);
        }
    }
}
