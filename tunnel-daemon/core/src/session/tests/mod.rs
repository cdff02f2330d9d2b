//! One test for each rule of a link. [`Rig`] is one link with a scripted peer and manual time.

mod budgets;
mod closing;
mod control;
mod credit;
mod dials;
mod isolation;
mod order;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::{
    Action, DialRequest, Event, Isolation, Link, LinkConfig, Moment, ProcessBudget, Role, Transmit,
    TunnelEnd,
};
use crate::failure::DialFailure;
use crate::ids::{ConnId, DialId, TunnelKey};
use crate::wire::packet::{Packet, Received, Side};

fn config(role: Role, credit: bool) -> LinkConfig {
    LinkConfig {
        role,
        credit,
        packet_bytes_max: 32 << 10,
        dials_max: 2_000,
        dial_timeout: Some(Duration::from_secs(25)),
        isolation: Isolation::default(),
        control_max: 4_096,
    }
}

fn bytes(length: u64) -> Bytes {
    Bytes::from(vec![7; usize::try_from(length).unwrap()])
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

struct Rig {
    link: Link,
    now: Moment,
    dials: i64,
}

impl Rig {
    fn new(config: LinkConfig) -> Self {
        Self::with_budget(config, &Arc::new(ProcessBudget::new(1 << 40)))
    }

    fn with_budget(config: LinkConfig, budget: &Arc<ProcessBudget>) -> Self {
        Self::of_peer(config, budget, "peer")
    }

    fn of_peer(config: LinkConfig, budget: &Arc<ProcessBudget>, peer: &str) -> Self {
        Self {
            link: Link::new(config, Arc::clone(budget), peer.into()),
            now: Moment::default(),
            dials: 0,
        }
    }

    fn server(credit: bool) -> Self {
        Self::new(config(Role::Server, credit))
    }

    fn agent(credit: bool) -> Self {
        Self::new(config(Role::Agent, credit))
    }

    /// Adds the bytes as an endpoint does: counted as queued.
    fn endpoint_data(&mut self, key: TunnelKey, bytes: Bytes) -> bool {
        self.link.budget().queue(bytes.len() as u64);
        self.link.endpoint_data(key, bytes)
    }

    fn receive(&mut self, packet: Packet) {
        self.link.handle_packet(Received::Packet(packet), self.now);
    }

    fn data(&mut self, conn: i64, length: u64) {
        self.receive(Packet::Data {
            conn: ConnId(conn),
            bytes: bytes(length),
        });
    }

    /// All pending actions except counters.
    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.link.poll_action())
            .filter(|action| !matches!(action, Action::Count(_)))
            .collect()
    }

    fn transmits(&mut self) -> Vec<Transmit> {
        let now = self.now;
        std::iter::from_fn(|| self.link.poll_transmit(now)).collect()
    }

    /// All packets that can be sent now; payload is replaced by zeros of the same length.
    fn packets(&mut self) -> Vec<Packet> {
        self.transmits()
            .into_iter()
            .map(|transmit| match transmit {
                Transmit::Control(packet) => packet,
                Transmit::Data { conn, bytes: n, .. } => Packet::Data {
                    conn,
                    bytes: bytes(n as u64),
                },
            })
            .collect()
    }

    /// Advances time as a driver does: one tick each second.
    fn pass(&mut self, time: Duration) {
        for _second in 0..time.as_secs() {
            self.now = self.now.after(seconds(1));
            self.link.handle_tick(self.now);
        }
    }

    fn request(&mut self) -> DialRequest {
        self.dials += 1;
        DialRequest {
            dial: DialId(self.dials),
            spare: DialId(self.dials + 1_000_000),
            protocol: String::from("tcp"),
            address: String::from("10.0.0.1:80"),
        }
    }

    fn dial(&mut self) -> TunnelKey {
        let request = self.request();
        self.link.dial(request, self.now).unwrap()
    }

    fn dial_rsp(&mut self, dial: i64, conn: i64, window: u64) {
        self.receive(Packet::DialRsp {
            dial: DialId(dial),
            conn: ConnId(conn),
            error: String::new(),
            window,
        });
    }

    fn dial_req(&mut self, dial: i64, window: u64) -> TunnelKey {
        self.receive(Packet::DialReq {
            dial: DialId(dial),
            protocol: String::from("tcp"),
            address: String::from("10.0.0.1:80"),
            window,
        });
        match &self.actions()[..] {
            [Action::StartDial { key, .. }] => *key,
            other => panic!("a dial to start, not {other:?}"),
        }
    }

    /// Opens a tunnel in either role and drops the packets. Agents also number connections from 1.
    fn open(&mut self, window: u64) -> (TunnelKey, i64) {
        let key = if self.link.config.role == Role::Server {
            let key = self.dial();
            self.packets();
            self.dial_rsp(self.dials, self.dials, window);
            key
        } else {
            self.dials += 1;
            let key = self.dial_req(self.dials, window);
            assert!(self.link.dialed(key, Ok(()), self.now));
            self.packets();
            key
        };
        self.actions();
        (key, self.dials)
    }

    /// The end reported to the endpoint, if any.
    fn end_of(&mut self, wanted: TunnelKey) -> Option<TunnelEnd> {
        self.actions().into_iter().find_map(|action| match action {
            Action::Ended { key, end } if key == wanted => Some(end),
            _ => None,
        })
    }

    fn gone(&mut self, key: TunnelKey) {
        self.link.endpoint_gone(key, self.now);
    }
}

fn close_req(conn: i64) -> Packet {
    Packet::CloseReq { conn: ConnId(conn) }
}

fn close_rsp(conn: i64, error: &str) -> Packet {
    Packet::CloseRsp {
        conn: ConnId(conn),
        error: error.to_owned(),
    }
}

fn fin(conn: i64, side: Side) -> Packet {
    let conn = ConnId(conn);
    Packet::Fin { conn, side }
}

fn reset(conn: i64) -> Packet {
    let conn = ConnId(conn);
    Packet::Reset { conn }
}

fn window(conn: i64, bytes: u64) -> Packet {
    let conn = ConnId(conn);
    Packet::Window { conn, bytes }
}

fn payload(conn: i64, length: u64) -> Packet {
    let conn = ConnId(conn);
    Packet::Data {
        conn,
        bytes: bytes(length),
    }
}

fn failed(action: &Action) -> (&DialFailure, bool) {
    match action {
        Action::DialFailed { outcome, .. } => (&outcome.failure, outcome.written),
        other => panic!("a failed dial, not {other:?}"),
    }
}
