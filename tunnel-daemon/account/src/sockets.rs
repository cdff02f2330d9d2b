//! Registers sockets with the accounting program.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_ebpf_abi::{ACCOUNT_BYTES, Account, FLAG_ESTABLISHED};
use aya::maps::{HashMap, MapData, PerCpuArray};

use super::classes::Classes;
use adit_net::accounts::{Accounting, Labels};
use adit_redirect::attach::Attached;
use adit_redirect::redirect::monotonic_ns;

pub(super) type SocketMap = HashMap<MapData, u64, [u8; ACCOUNT_BYTES]>;

/// State that handles and reader share.
pub(super) struct Shared {
    pub(super) sockets: Mutex<SocketMap>,
    pub(super) classes: Mutex<Classes>,
    pub(super) outcomes: PerCpuArray<MapData, u64>,
    pub(super) program: Option<u32>,
    pub(super) _attached: Attached,
}

/// The counts of a live connection, as of its latest recorded round-trip measurement or retransmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// The socket's cookie.
    pub cookie: u64,
    /// The connection's counts.
    pub account: Account,
}

/// The accounting of a process, for [`adit_net::accounts::Accounts`]. The program stays attached while a clone or the reader
/// lives.
#[derive(Clone)]
pub struct SocketTable(Arc<Shared>);

impl SocketTable {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// The kernel's id of the accounting program, as tools show it.
    #[must_use]
    pub fn program(&self) -> Option<u32> {
        self.0.program
    }

    /// The counts of one connection; `None` if it has ended or was never registered.
    #[must_use]
    pub fn live(&self, cookie: u64) -> Option<Live> {
        let found = self.0.sockets().get(&cookie, 0).ok()?;
        Some(Live {
            cookie,
            account: Account::from_bytes(&found),
        })
    }
}

impl Accounting for SocketTable {
    fn listening(&self, cookie: u64) {
        self.0.put(cookie, Account::default());
    }

    fn connecting(&self, cookie: u64, labels: &Labels<'_>) {
        let account = Account {
            class: self.0.classes().number(labels),
            ..Account::default()
        };
        self.0.put(cookie, account);
    }

    fn accepted(&self, cookie: u64, labels: &Labels<'_>) {
        let account = Account {
            class: self.0.classes().number(labels),
            flags: FLAG_ESTABLISHED,
            since_ns: monotonic_ns(),
            ..Account::default()
        };
        self.0.put(cookie, account);
    }

    fn forget(&self, cookie: u64) {
        // The program has usually removed the entry before.
        let _gone = self.0.sockets().remove(&cookie);
    }
}

impl Shared {
    pub(super) fn sockets(&self) -> MutexGuard<'_, SocketMap> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn classes(&self) -> MutexGuard<'_, Classes> {
        self.classes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, cookie: u64, account: Account) {
        if let Err(error) = self.sockets().insert(cookie, account.to_bytes(), 0) {
            tracing::debug!(%error, "a socket is not accounted for");
        }
    }
}
