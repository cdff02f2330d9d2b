//! Which sockets the kernel accounts for, and under which labels. The kernel side is a trait object, so that nothing here
//! knows eBPF.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use adit_telemetry::labels::AccountRole;
use rustix::io::Errno;
use rustix::net::getpeername;
use rustix::net::sockopt::socket_cookie;

/// What a connection is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Labels<'a> {
    /// Role of the connection.
    pub role: AccountRole,
    /// Id of the agent at one end; empty if the agent is unknown, or may be any agent.
    pub agent: &'a str,
    /// The rule or identifier that the destination matches; empty if there is none.
    pub destination_class: &'a str,
}

/// What counts the bytes of sockets. Sockets are named by their cookies (`SO_COOKIE`).
pub trait Accounting: Send + Sync {
    /// A socket is about to listen: its accepted connections may be named later.
    fn listening(&self, cookie: u64);
    /// A socket is about to connect.
    fn connecting(&self, cookie: u64, labels: &Labels<'_>);
    /// An established connection; its bytes count from its beginning, its lifetime from here.
    fn accepted(&self, cookie: u64, labels: &Labels<'_>);
    /// A socket is no longer named; mostly the kernel side has forgotten it already.
    fn forget(&self, cookie: u64);
}

/// Names sockets to the accounting of the process; does nothing where accounting is off. Cheap to clone; accounting goes on
/// as long as a clone lives.
#[derive(Clone, Default)]
pub struct Accounts(Option<Arc<dyn Accounting>>);

impl Accounts {
    /// Accounting that does nothing.
    #[must_use]
    pub fn off() -> Self {
        Self(None)
    }

    /// Accounting by `accounting`.
    #[must_use]
    pub fn new(accounting: Arc<dyn Accounting>) -> Self {
        Self(Some(accounting))
    }

    /// Whether anything is accounted for.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// A socket that is about to listen.
    pub fn listening(&self, socket: &impl AsFd) {
        if let Some((accounting, cookie)) = self.named(socket.as_fd()) {
            accounting.listening(cookie);
        }
    }

    /// A socket that is about to connect. It counts once it is connected; if it never is, tell [`Self::failed`].
    pub fn connecting(&self, socket: &impl AsFd, labels: &Labels<'_>) -> Option<u64> {
        let (accounting, cookie) = self.named(socket.as_fd())?;
        accounting.connecting(cookie, labels);
        Some(cookie)
    }

    /// The connect of a socket failed, perhaps before the kernel's programs saw the socket.
    pub fn failed(&self, cookie: Option<u64>) {
        if let (Some(accounting), Some(cookie)) = (&self.0, cookie) {
            accounting.forget(cookie);
        }
    }

    /// A connection of a listener that was named before it listened.
    pub fn accepted(&self, socket: &impl AsFd, labels: &Labels<'_>) {
        if let Some((accounting, cookie)) = self.named(socket.as_fd()) {
            accounting.accepted(cookie, labels);
            // The connection ended before it was named: the program has counted its end as unknown, and will not remove the
            // entry.
            if matches!(getpeername(socket), Err(Errno::NOTCONN)) {
                accounting.forget(cookie);
            }
        }
    }

    /// As [`Self::accepted`], for a socket that is out of reach behind other layers.
    pub fn accepted_cookie(&self, cookie: u64, labels: &Labels<'_>) {
        if let Some(accounting) = &self.0 {
            accounting.accepted(cookie, labels);
        }
    }

    /// The cookie of a socket; `None` where accounting is off.
    #[must_use]
    pub fn cookie(&self, socket: &impl AsFd) -> Option<u64> {
        Some(self.named(socket.as_fd())?.1)
    }

    fn named(&self, socket: BorrowedFd<'_>) -> Option<(&Arc<dyn Accounting>, u64)> {
        let accounting = self.0.as_ref()?;
        Some((accounting, socket_cookie(socket).ok()?))
    }
}
