//! Credit counted on the wire, independent of both machines.

use std::collections::BTreeMap;

use adit_core::ids::{ConnId, DialId};
use adit_core::session::{Role, Transmit, WINDOW_MAX_BYTES, WINDOW_MIN_BYTES};
use adit_core::wire::packet::Packet;

/// Bytes that each direction of one connection may still carry.
#[derive(Debug, Default)]
struct Account {
    to_agent: u64,
    to_server: u64,
    server_done: bool,
    agent_done: bool,
}

/// The ledger of one link, from its first packet on.
#[derive(Debug)]
pub(crate) struct Ledger {
    credit: bool,
    pub(crate) packets: u64,
    offered: BTreeMap<DialId, u64>,
    accounts: BTreeMap<ConnId, Account>,
}

impl Ledger {
    pub(crate) fn new(credit: bool) -> Self {
        Self {
            credit,
            packets: 0,
            offered: BTreeMap::new(),
            accounts: BTreeMap::new(),
        }
    }

    /// A packet leaves this end. Counting data when it leaves is stricter than counting it when it arrives.
    pub(crate) fn transmitted(&mut self, by: Role, transmit: &Transmit) {
        self.packets += 1;
        match transmit {
            Transmit::Data { conn, bytes, .. } => self.data(by, *conn, *bytes as u64),
            Transmit::Control(packet) => self.control(by, packet),
        }
    }

    fn data(&mut self, by: Role, conn: ConnId, bytes: u64) {
        let credit = self.credit;
        let account = self
            .accounts
            .get_mut(&conn)
            .expect("data of an open tunnel");
        let (done, left) = account.sender(by);
        assert!(!*done, "{conn:?}: data after the end of its direction");
        if credit {
            assert!(*left >= bytes, "{conn:?}: {bytes} bytes with {left} credit");
            *left -= bytes;
        }
    }

    fn control(&mut self, by: Role, packet: &Packet) {
        match packet {
            Packet::DialReq { dial, window, .. } => {
                self.check_window(*window);
                self.offered.insert(*dial, *window);
            }
            Packet::DialRsp {
                dial, conn, window, ..
            } if conn.0 != 0 => {
                self.check_window(*window);
                let account = Account {
                    to_agent: *window,
                    to_server: self.offered.remove(dial).expect("an answer to a dial"),
                    ..Account::default()
                };
                let before = self.accounts.insert(*conn, account);
                assert!(before.is_none(), "{conn:?} was used twice");
            }
            Packet::Window { conn, bytes } => {
                assert!(self.credit && *bytes > 0);
                if let Some(account) = self.accounts.get_mut(conn) {
                    let peer = match by {
                        Role::Server => Role::Agent,
                        Role::Agent => Role::Server,
                    };
                    let (_, left) = account.sender(peer);
                    *left += bytes;
                    assert!(*left <= WINDOW_MAX_BYTES, "{conn:?}: {left} credit");
                }
            }
            Packet::Fin { conn, .. } => {
                assert!(self.credit);
                self.finish(by, *conn);
            }
            Packet::CloseReq { conn } | Packet::CloseRsp { conn, .. } => self.finish(by, *conn),
            _ => (),
        }
    }

    fn finish(&mut self, by: Role, conn: ConnId) {
        if let Some(account) = self.accounts.get_mut(&conn) {
            *account.sender(by).0 = true;
        }
    }

    fn check_window(&self, window: u64) {
        if self.credit {
            assert!((WINDOW_MIN_BYTES..=WINDOW_MAX_BYTES).contains(&window));
        } else {
            assert_eq!(window, 0, "credit towards a peer that knows none");
        }
    }
}

impl Account {
    /// Whether this sender has ended its direction, and the bytes it may still send.
    fn sender(&mut self, by: Role) -> (&mut bool, &mut u64) {
        match by {
            Role::Server => (&mut self.server_done, &mut self.to_agent),
            Role::Agent => (&mut self.agent_done, &mut self.to_server),
        }
    }
}
