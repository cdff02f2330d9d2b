//! State of a socket's peer, for callers that do not read the peer's data.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// No waiting.
const AT_ONCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// State of a peer, whatever data is unread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// The peer has closed nothing.
    There,
    /// The peer sends no more (FIN).
    Silent,
    /// The peer neither sends nor reads: a closed unix socket, or a connection that is over.
    Closed,
    /// The connection has failed, and the error is pending on the socket.
    Failed,
}

/// Consumes neither bytes nor an error. One system call.
#[must_use]
pub fn state(socket: BorrowedFd<'_>) -> Peer {
    let mut asked = [PollFd::new(&socket, PollFlags::RDHUP)];
    if poll(&mut asked, Some(&AT_ONCE)).is_err() {
        return Peer::There;
    }
    let [asked] = asked;
    let seen = asked.revents();
    if seen.contains(PollFlags::ERR) {
        Peer::Failed
    } else if seen.contains(PollFlags::HUP) {
        Peer::Closed
    } else if seen.contains(PollFlags::RDHUP) {
        Peer::Silent
    } else {
        Peer::There
    }
}

/// Waits until the peer reads no more: [`Peer::Closed`] or [`Peer::Failed`]. A half-close is neither. A TCP peer that
/// closes looks like a half-close until something is written to it. Consumes nothing. The socket must be non-blocking, as
/// the runtime's are.
///
/// Holds a duplicate of the descriptor meanwhile, since the runtime has the socket registered for other events. Without a
/// free descriptor it checks once, and then waits for ever.
pub async fn closed(socket: BorrowedFd<'_>) {
    // The type does not matter: nothing is read or written. The end of a connection makes a socket writable once more.
    let duplicate = socket.try_clone_to_owned();
    let watched = duplicate.and_then(|fd| UnixStream::from_std(fd.into()));
    let look = || match state(socket) {
        Peer::Closed | Peer::Failed => Ok(()),
        Peer::There | Peer::Silent => Err(io::ErrorKind::WouldBlock.into()),
    };
    let Ok(watched) = watched else {
        if look().is_err() {
            std::future::pending::<()>().await;
        }
        return;
    };
    // Any error but `WouldBlock` means that the runtime ends.
    let _ended = watched.async_io(Interest::WRITABLE, look).await;
}

/// The error of a failed connection. The socket reports it once: later reads return EOF.
#[must_use]
pub fn take_error(socket: BorrowedFd<'_>) -> io::Error {
    let error = SockRef::from(&socket).take_error();
    let reset = || io::Error::from(io::ErrorKind::ConnectionReset);
    error.ok().flatten().unwrap_or_else(reset)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    fn tcp() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _address) = listener.accept().unwrap();
        (near, far)
    }

    /// Waits: the peer's FIN or RST may still be in flight.
    fn until(socket: &TcpStream, expected: Peer) {
        let start = Instant::now();
        while state(socket.as_fd()) != expected {
            assert!(start.elapsed() < Duration::from_secs(30), "{expected:?}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn eof_and_reset_are_detected_behind_unread_bytes() {
        let (near, mut far) = tcp();
        far.write_all(b"unread").unwrap();
        assert_eq!(state(near.as_fd()), Peer::There);
        far.shutdown(Shutdown::Write).unwrap();
        until(&near, Peer::Silent);
        let breaks_off = SockRef::from(&far).set_linger(Some(Duration::ZERO));
        breaks_off.unwrap();
        drop(far);
        until(&near, Peer::Failed);
        // A check consumes neither data nor error.
        assert_eq!(state(near.as_fd()), Peer::Failed);
        let mut unread = [0; 6];
        (&near).read_exact(&mut unread).unwrap();
        assert_eq!(&unread, b"unread");
        let error = take_error(near.as_fd()).kind();
        // The kernel reports a reset after EOF as EPIPE.
        assert_eq!(error, io::ErrorKind::BrokenPipe);
        assert_eq!(state(near.as_fd()), Peer::Closed);
    }

    #[tokio::test]
    async fn closed_waits_past_a_half_close_until_a_close_or_reset() {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        {
            let mut closed = std::pin::pin!(closed(near.as_fd()));
            far.shutdown(Shutdown::Write).unwrap();
            assert!(futures_util::poll!(&mut closed).is_pending());
            tokio::task::yield_now().await;
            assert!(futures_util::poll!(&mut closed).is_pending());
            drop(far);
            closed.await;
        }
        let (near, far) = tcp();
        near.set_nonblocking(true).unwrap();
        let mut closed = std::pin::pin!(closed(near.as_fd()));
        // Urgent data is no end either.
        SockRef::from(&far).send_out_of_band(b"!").unwrap();
        far.shutdown(Shutdown::Write).unwrap();
        until(&near, Peer::Silent);
        assert!(futures_util::poll!(&mut closed).is_pending());
        let breaks_off = SockRef::from(&far).set_linger(Some(Duration::ZERO));
        breaks_off.unwrap();
        drop(far);
        closed.await;
    }

    #[test]
    fn a_closed_unix_peer_has_failed_only_if_it_left_bytes_unread() {
        for unread in [false, true] {
            let (mut near, mut far) = UnixStream::pair().unwrap();
            far.write_all(b"said").unwrap();
            if unread {
                near.write_all(b"not taken").unwrap();
            }
            drop(far);
            let expected = if unread { Peer::Failed } else { Peer::Closed };
            assert_eq!(state(near.as_fd()), expected);
        }
    }
}
