//! Naming sockets to the kernel.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_ebpf_abi::{ACCOUNT_BYTES, Account, FLAG_ESTABLISHED};
use aya::maps::{HashMap, MapData, PerCpuArray};
use rustix::io::Errno;
use rustix::net::getpeername;
use rustix::time::{ClockId, clock_gettime};

use super::classes::{Classes, Labels};
use adit_redirect::attach::Attached;

pub(super) type SocketMap = HashMap<MapData, u64, [u8; ACCOUNT_BYTES]>;

/// Names sockets to the kernel; does nothing where accounting is off. Cheap to clone; the programs stay attached as
/// long as a clone or the reader lives.
#[derive(Clone, Default)]
pub struct Accounts(Option<Arc<Shared>>);

/// What handles and reader share.
pub(super) struct Shared {
    pub(super) sockets: Mutex<SocketMap>,
    pub(super) classes: Mutex<Classes>,
    pub(super) outcomes: PerCpuArray<MapData, u64>,
    pub(super) program: Option<u32>,
    pub(super) _attached: Attached,
}

/// A connection now, as the kernel last looked at it: at its latest round-trip measurement or retransmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// Names the socket.
    pub cookie: u64,
    /// Its numbers.
    pub account: Account,
}

impl Accounts {
    /// Accounting that does nothing.
    #[must_use]
    pub fn off() -> Self {
        Self(None)
    }

    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self(Some(shared))
    }

    /// Whether anything is accounted for.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The program that counts, by the number that tools of the kernel show.
    #[must_use]
    pub fn program(&self) -> Option<u32> {
        self.0.as_ref()?.program
    }

    /// A socket that is about to listen: the kernel will look at what it accepts.
    pub fn listening(&self, socket: &impl AsFd) {
        if let Some(shared) = &self.0 {
            let _cookie = shared.put(socket, Account::default());
        }
    }

    /// A socket that is about to connect. It counts once it is connected; if it never is, tell [`Self::failed`].
    pub fn connecting(&self, socket: &impl AsFd, labels: &Labels<'_>) -> Option<u64> {
        let shared = self.0.as_ref()?;
        let account = Account {
            class: shared.classes().number(labels),
            ..Account::default()
        };
        shared.put(socket, account)
    }

    /// A socket was refused a connection, perhaps so early that the kernel's programs have not heard of it.
    pub fn failed(&self, cookie: Option<u64>) {
        if let (Some(shared), Some(cookie)) = (&self.0, cookie) {
            // Mostly it is not there any more.
            let _gone = shared.sockets().remove(&cookie);
        }
    }

    /// A connection of a listener that was named before it listened. Its bytes count from its beginning, its lifetime from
    /// here.
    pub fn accepted(&self, socket: &impl AsFd, labels: &Labels<'_>) {
        if let (true, Ok(cookie)) = (self.is_on(), cookie(socket)) {
            self.accepted_cookie(cookie, labels);
            // Over before it was named: the program has counted its end as unknown, and does not come back for the entry.
            if matches!(getpeername(socket), Err(Errno::NOTCONN)) {
                self.failed(Some(cookie));
            }
        }
    }

    /// As [`Self::accepted`], for a socket that is out of reach behind other layers.
    pub fn accepted_cookie(&self, cookie: u64, labels: &Labels<'_>) {
        if let Some(shared) = &self.0 {
            let account = Account {
                class: shared.classes().number(labels),
                flags: FLAG_ESTABLISHED,
                since_ns: monotonic_ns(),
                ..Account::default()
            };
            shared.put_cookie(cookie, account);
        }
    }

    /// What names a socket to the kernel; `None` where accounting is off.
    #[must_use]
    pub fn cookie(&self, socket: &impl AsFd) -> Option<u64> {
        self.0.as_ref().and_then(|_on| cookie(socket).ok())
    }

    /// The numbers of one connection; `None` if it is over or never counted.
    #[must_use]
    pub fn live(&self, cookie: u64) -> Option<Live> {
        let found = self.0.as_ref()?.sockets().get(&cookie, 0).ok()?;
        Some(Live {
            cookie,
            account: Account::from_bytes(&found),
        })
    }
}

impl Shared {
    pub(super) fn sockets(&self) -> MutexGuard<'_, SocketMap> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn classes(&self) -> MutexGuard<'_, Classes> {
        self.classes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, socket: &impl AsFd, account: Account) -> Option<u64> {
        let cookie = cookie(socket).ok()?;
        self.put_cookie(cookie, account);
        Some(cookie)
    }

    fn put_cookie(&self, cookie: u64, account: Account) {
        if let Err(error) = self.sockets().insert(cookie, account.to_bytes(), 0) {
            tracing::debug!(%error, "a socket is not accounted for");
        }
    }
}

fn cookie(socket: &impl AsFd) -> rustix::io::Result<u64> {
    rustix::net::sockopt::socket_cookie(socket)
}

/// The clock that programs read.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(nanoseconds)
}
