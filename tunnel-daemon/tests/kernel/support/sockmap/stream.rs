//! Writing and reading a known stream without blocking, and waiting with a deadline.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Far beyond what anything here takes, also under emulation.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Without progress for as long, a stream is taken for stalled.
pub(crate) const QUIET: Duration = Duration::from_millis(700);

/// Each byte of a stream tells where it is, but for multiples of this.
const PERIOD: usize = 251;
const CHUNK: usize = 64 * 1024;
/// So many refusals in a row by a socket that polls writable are no accident.
const REFUSALS_MAX: u32 = 10_000;

/// Why a writer stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// All was written.
    All,
    /// Nothing could be written for a while.
    Stalled,
    /// Nothing could be written again and again, though the kernel said that it could.
    Refused,
    /// The kernel's word.
    Failed(ErrorKind),
}

/// Why a reader stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// All was read.
    All,
    /// Nothing came for a while.
    Quiet,
    /// The stream ended.
    Eof,
    /// The kernel's word.
    Failed(ErrorKind),
}

static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let bytes = 0..CHUNK + PERIOD;
    bytes
        .map(|at| u8::try_from(at % PERIOD).unwrap_or(0))
        .collect()
});

fn start(offset: u64) -> usize {
    usize::try_from(offset % PERIOD as u64).unwrap_or(0)
}

fn part(left: u64) -> usize {
    usize::try_from(left).unwrap_or(CHUNK).min(CHUNK)
}

/// Writes bytes `offset..offset + most` of the stream, as far as the kernel takes them within `quiet` of each other.
pub(crate) fn push(socket: &TcpStream, offset: u64, most: u64, quiet: Duration) -> (u64, Stop) {
    let (mut written, mut refusals) = (0, 0);
    while written < most {
        let bytes = &PATTERN[start(offset + written)..][..part(most - written)];
        match (&*socket).write(bytes) {
            Ok(count) => {
                written += count as u64;
                refusals = 0;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !is_ready(socket, PollFlags::OUT, quiet) {
                    return (written, Stop::Stalled);
                }
                refusals += 1;
                if refusals == REFUSALS_MAX {
                    return (written, Stop::Refused);
                }
            }
            Err(error) => return (written, Stop::Failed(error.kind())),
        }
    }
    (written, Stop::All)
}

/// Reads bytes `offset..offset + most` of the stream and compares each; how many came, and why not more.
///
/// # Panics
/// A byte is not the one of its place.
pub(crate) fn pull(socket: &TcpStream, offset: u64, most: u64, quiet: Duration) -> (u64, End) {
    let (mut read, mut buffer) = (0, vec![0; part(most)]);
    while read < most {
        match (&*socket).read(&mut buffer[..part(most - read)]) {
            Ok(0) => return (read, End::Eof),
            Ok(count) => {
                let expected = &PATTERN[start(offset + read)..][..count];
                assert!(
                    buffer[..count] == *expected,
                    "other bytes after {}",
                    offset + read
                );
                read += count as u64;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !is_readable(socket, quiet) {
                    return (read, End::Quiet);
                }
            }
            Err(error) => return (read, End::Failed(error.kind())),
        }
    }
    (read, End::All)
}

/// Whether a socket has bytes, an end or an error within `patience`.
pub(crate) fn is_readable(socket: &TcpStream, patience: Duration) -> bool {
    is_ready(socket, PollFlags::IN, patience)
}

/// Whether a socket says that it takes bytes within `patience`.
pub(crate) fn is_writable(socket: &TcpStream, patience: Duration) -> bool {
    is_ready(socket, PollFlags::OUT, patience)
}

/// Whether a connection ends by an error, or in both directions, within `patience`. Takes no error away.
pub(crate) fn is_broken(socket: &TcpStream, patience: Duration) -> bool {
    // The kernel tells of these unasked.
    is_ready(socket, PollFlags::empty(), patience)
}

fn is_ready(socket: &TcpStream, what: PollFlags, patience: Duration) -> bool {
    let mut entry = [PollFd::from_borrowed_fd(socket.as_fd(), what)];
    let timeout = Timespec::try_from(patience).expect("short");
    poll(&mut entry, Some(&timeout)).expect("it is polled") > 0
}

/// What the socket's TCP has taken since the connection began: acknowledged, and what is not yet.
pub(crate) fn accepted(socket: &TcpStream) -> u64 {
    // It asks for the first before the second, so bytes that are acknowledged in between are missing, and none counts twice.
    let state = adit_relay::tcp_state(socket).expect("a TCP socket");
    state.bytes_acked + state.unacknowledged_bytes as u64
}

/// Waits until `done` holds.
///
/// # Panics
/// If it does not in a minute.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "no {what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}
