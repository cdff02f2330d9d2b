//! The daemon's side: starts the helper, asks it, notices its end.

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

/// For the helper to start, and to answer a request. It enters a few hundred namespaces at most, but a node that boots is busy,
/// and one that was given up does not come back.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

static PROGRAM: OnceLock<fn() -> Command> = OnceLock::new();

/// For programs other than `adit` that run a server or an agent: a command that starts the helper, by calling
/// [`super::helper::run`]. What is to be told to it is added as arguments. Only the first call counts.
pub fn start_by(command: fn() -> Command) {
    let _first_counts = PROGRAM.set(command);
}

/// The program itself, also when its file has been replaced.
fn ourselves() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg("netns-helper");
    command
}

/// Why there is no helper, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// It lacks what it needs; the text says what to do.
    #[error("{0}")]
    Refused(String),
    /// It cannot be started.
    #[error("cannot start the helper that opens listeners in other network namespaces: {0}")]
    Start(io::Error),
    /// It is not there any more, or says what it should not.
    #[error("the helper that opens listeners in other network namespaces {0}")]
    Gone(String),
}

/// What is there now.
#[derive(Debug, Default)]
pub struct Look {
    /// Namespaces that were asked about and are still there.
    pub still: Vec<u64>,
    /// Sockets for IPv6 of those among them that wanted one and have it now, as [`Opened::sockets`].
    pub more: Vec<(u64, OwnedFd)>,
    /// New ones, with sockets.
    pub opened: Vec<Opened>,
    /// Names of those that cannot be opened, and why.
    pub failed: Vec<(String, String)>,
    /// Namespaces beyond the limit.
    pub over: usize,
    /// Processes whose namespace cannot be read.
    pub unreadable: usize,
    /// There was more to look at than is looked at: what is not found may be there.
    pub is_cut: bool,
}

/// Sockets in a namespace: bound to loopback, not listening yet. At least one.
#[derive(Debug)]
pub struct Opened {
    /// Of the namespace, as long as it is there.
    pub id: u64,
    /// A way to it.
    pub name: String,
    /// IPv4, then IPv6 if there is any.
    pub sockets: Vec<OwnedFd>,
}

/// A running helper. It ends with this.
#[derive(Debug)]
pub struct Helper {
    channel: OwnedFd,
    child: Child,
}

impl Helper {
    /// Starts one and waits until it says that it can work. Blocks, at most half a minute.
    ///
    /// # Errors
    /// It lacks a privilege, or cannot be started.
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
        // Its end of the socket is only its own now, and so is the end of it.
        drop(command);
        let mut helper = Self {
            channel: ours,
            child,
        };
        match helper.reply(Instant::now() + ANSWER_LIMIT)? {
            Reply::Ready => Ok(helper),
            Reply::Refused(why) => Err(HelperError::Refused(why)),
            _ => Err(HelperError::Gone("began with something else".to_owned())),
        }
    }

    /// Asks what is there now; `held` are namespaces with a listener already. Blocks, at most half a minute.
    ///
    /// # Errors
    /// It does not answer in time, or is gone: it is of no use any more.
    pub fn look(&mut self, held: impl Iterator<Item = Asked>) -> Result<Look, HelperError> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        send(&self.channel, &wire::look(held), &[]).map_err(|error| self.gone(&error))?;
        let mut look = Look::default();
        loop {
            match self.reply(deadline)? {
                Reply::Have(id) => look.still.push(id),
                // One that did not arrive is asked for again, too.
                Reply::More(id, sockets) => {
                    let socket = sockets.into_iter().next();
                    look.more.extend(socket.map(|socket| (id, socket)));
                }
                // Asked for again with the next look.
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
                    return Err(HelperError::Gone("answered something else".to_owned()));
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
                .ok_or_else(|| HelperError::Gone("answered something else".to_owned())),
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

    /// Tells it to end, in both ways there are: a seccomp profile may be without one. No effect on one that is ending.
    fn end(&mut self) {
        let _closed = shutdown(&self.channel, Shutdown::Both);
        let _killed = self.child.kill();
    }

    /// Its process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // It has nothing to finish. Not reaped twice: a child that was waited for keeps its status.
        self.end();
        let _reaped = self.child.wait();
    }
}
