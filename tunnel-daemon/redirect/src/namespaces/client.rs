//! The daemon's side: starts the helper, sends it requests, notices its end.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

use super::wire::{self, Asked, Reply, receive, send};
use adit_config::NetnsHelperOptions;

/// For the helper to start, and to answer a request. The helper enters a few hundred namespaces at most. But a booting node
/// is busy, and a helper that was given up does not come back.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

static PROGRAM: OnceLock<fn() -> Command> = OnceLock::new();

/// Sets a command that starts the helper by calling [`super::helper::run`], for programs other than `adit` that run a
/// server or an agent. The helper's options are added as arguments. Only the first call counts.
pub fn start_by(command: fn() -> Command) {
    let _first_counts = PROGRAM.set(command);
}

/// This program, even when its file has been replaced.
fn ourselves() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg("netns-helper");
    command
}

/// Why there is no helper, or no longer one.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// The helper lacks what it needs; the text says what to do.
    #[error("{0}")]
    Refused(String),
    /// The helper cannot be started.
    #[error("cannot start the helper that opens listeners in other network namespaces: {0}")]
    Start(io::Error),
    /// The helper is gone, or sends something unexpected.
    #[error("the helper that opens listeners in other network namespaces {0}")]
    Gone(String),
}

/// Namespaces that exist now.
#[derive(Debug, Default)]
pub struct Look {
    /// Namespaces of the request that still exist.
    pub still: Vec<u64>,
    /// IPv6 sockets of namespaces of the request that lacked one, as [`Opened::sockets`].
    pub more: Vec<(u64, OwnedFd)>,
    /// New namespaces, with sockets.
    pub opened: Vec<Opened>,
    /// Names of namespaces that cannot be opened, and why.
    pub failed: Vec<(String, String)>,
    /// Namespaces beyond the limit.
    pub over: usize,
    /// Processes whose namespace cannot be read.
    pub unreadable: usize,
    /// The search hit a limit: namespaces that were not found may exist.
    pub is_cut: bool,
}

/// Sockets in a namespace: bound to loopback, not listening yet. At least one.
#[derive(Debug)]
pub struct Opened {
    /// Id of the namespace, unique while the namespace exists.
    pub id: u64,
    /// A path to the namespace.
    pub name: String,
    /// IPv4, then IPv6 if available.
    pub sockets: Vec<OwnedFd>,
}

/// A running helper. Dropping this ends it.
#[derive(Debug)]
pub struct Helper {
    channel: OwnedFd,
    child: Child,
}

impl Helper {
    /// Starts a helper and waits until it is ready. Blocks, at most half a minute.
    ///
    /// # Errors
    /// The helper lacks a privilege, or cannot be started.
    pub fn start(options: &NetnsHelperOptions) -> Result<Self, HelperError> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|error| HelperError::Start(error.into()))?;
        let mut command = PROGRAM.get().map_or_else(ourselves, |command| command());
        let cgroup = options.cgroup.as_ref().map(OsString::from);
        let child = command
            .arg(options.mark.to_string())
            .arg(cgroup.unwrap_or_default())
            .args(&options.paths)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .map_err(HelperError::Start)?;
        // Now only the helper holds its end of the socket, so that its exit closes the socket.
        drop(command);
        let mut helper = Self {
            channel: ours,
            child,
        };
        match helper.reply(Instant::now() + ANSWER_LIMIT)? {
            Reply::Ready => Ok(helper),
            Reply::Refused(why) => Err(HelperError::Refused(why)),
            _ => Err(HelperError::Gone(
                "sent an unexpected first message".to_owned(),
            )),
        }
    }

    /// Asks which namespaces exist now; `held` are namespaces with a listener already. Blocks, at most half a minute.
    ///
    /// # Errors
    /// The helper does not answer in time, or is gone: it cannot be used any more.
    pub fn look(&mut self, held: impl Iterator<Item = Asked>) -> Result<Look, HelperError> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        send(&self.channel, &wire::look(held), &[]).map_err(|error| self.gone(&error))?;
        let mut look = Look::default();
        loop {
            match self.reply(deadline)? {
                Reply::Have(id) => look.still.push(id),
                // A socket that did not arrive is asked for again, too.
                Reply::More(id, sockets) => {
                    let socket = sockets.into_iter().next();
                    look.more.extend(socket.map(|socket| (id, socket)));
                }
                // The daemon asks for it again with the next look.
                Reply::New(_, name, sockets) if sockets.is_empty() => {
                    let why = "its sockets did not arrive: file descriptors run low";
                    look.failed.push((name, why.to_owned()));
                }
                Reply::New(id, name, sockets) => look.opened.push(Opened { id, name, sockets }),
                Reply::Fail(name, why) => look.failed.push((name, why)),
                Reply::Done {
                    over,
                    unreadable,
                    is_cut,
                } => {
                    (look.over, look.unreadable, look.is_cut) = (over, unreadable, is_cut);
                    return Ok(look);
                }
                Reply::Ready | Reply::Refused(_) => {
                    return Err(HelperError::Gone("sent an unexpected answer".to_owned()));
                }
            }
        }
    }

    fn reply(&mut self, deadline: Instant) -> Result<Reply, HelperError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HelperError::Gone("does not answer".to_owned()));
        }
        set_socket_timeout(self.channel.as_fd(), Timeout::Recv, Some(left))
            .map_err(|error| self.gone(&error.into()))?;
        match receive(&self.channel) {
            Ok(Some((text, sockets))) => Reply::parse(&text, sockets)
                .ok_or_else(|| HelperError::Gone("sent an unexpected answer".to_owned())),
            Ok(None) => Err(self.gone(&io::ErrorKind::BrokenPipe.into())),
            Err(error) => Err(self.gone(&error)),
        }
    }

    fn gone(&mut self, error: &io::Error) -> HelperError {
        HelperError::Gone(match error.kind() {
            io::ErrorKind::WouldBlock => "does not answer".to_owned(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                self.end();
                let ended = self.child.wait().map(|status| format!("ended: {status}"));
                ended.unwrap_or_else(|_unknown| "ended".to_owned())
            }
            _ => format!("cannot be asked: {error}"),
        })
    }

    /// Ends the helper in two ways: a seccomp profile may forbid one of them. No effect on a helper that is ending.
    fn end(&mut self) {
        let _closed = shutdown(&self.channel, Shutdown::Both);
        let _killed = self.child.kill();
    }

    /// Process id of the helper.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // The helper has nothing to finish. The child is not reaped twice: a child that was waited for keeps its status.
        self.end();
        let _reaped = self.child.wait();
    }
}
