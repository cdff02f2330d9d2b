//! The kernel's state of a TCP connection.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _};
use std::time::Duration;

/// State of a TCP connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpState {
    /// Bytes written and not yet acknowledged by the peer's kernel, including unsent bytes.
    pub unacknowledged_bytes: usize,
    /// Time since the last segment of the peer's kernel.
    pub silent_for: Duration,
    /// A retransmission or window probe is unanswered. A live peer that does not read still answers.
    pub is_unanswered: bool,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Segments retransmitted since the connection began.
    pub retransmits: u32,
    /// Bytes that the peer's kernel has acknowledged since the connection began. Our FIN counts as a byte, and our SYN if
    /// this end connected.
    pub bytes_acked: u64,
    /// Bytes received from the peer since the connection began. The peer's FIN counts as a byte.
    pub bytes_received: u64,
}

/// Queries the kernel's state of a TCP socket.
///
/// # Errors
/// The socket is not a TCP socket.
pub fn tcp_state(socket: &impl AsFd) -> io::Result<TcpState> {
    let info = tcp_info(socket)?;
    let silent = info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv);
    Ok(TcpState {
        unacknowledged_bytes: unacknowledged_bytes(socket)?,
        silent_for: Duration::from_millis(silent.into()),
        // One probe is always in flight to a peer that does not read; the answer resets the count.
        is_unanswered: info.tcpi_retransmits > 0 || info.tcpi_probes >= 2,
        rtt: Duration::from_micros(info.tcpi_rtt.into()),
        retransmits: info.tcpi_total_retrans,
        bytes_acked: info.tcpi_bytes_acked,
        bytes_received: info.tcpi_bytes_received,
    })
}

fn tcp_info(socket: &impl AsFd) -> io::Result<libc::tcp_info> {
    let fd = socket.as_fd().as_raw_fd();
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = libc::socklen_t::try_from(size_of::<libc::tcp_info>())
        .map_err(|_large| io::ErrorKind::InvalidInput)?;
    // SAFETY: `fd` is borrowed for the call. The kernel writes at most `length` bytes, which is the size of what `info`
    // points to, and `length` itself.
    let result = unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `info` was zeroed, the kernel may have written a part of it, and all its fields are numbers.
    Ok(unsafe { info.assume_init() })
}

/// Only [`TcpState::unacknowledged_bytes`], which shows whether bytes move, in one system call less.
///
/// # Errors
/// The socket is not a TCP socket.
pub fn unacknowledged_bytes(socket: &impl AsFd) -> io::Result<usize> {
    let fd = socket.as_fd().as_raw_fd();
    let mut bytes: libc::c_int = 0;
    // SAFETY: `fd` is borrowed for the call, and SIOCOUTQ (the same number as TIOCOUTQ) writes one int to `bytes`.
    let result = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Disables or re-enables the kernel's autotuning of both buffers of a socket.
///
/// # Errors
/// The descriptor is not a socket.
pub(crate) fn lock_buffers(socket: &impl AsFd, lock: bool) -> io::Result<()> {
    /// `SOCK_SNDBUF_LOCK` and `SOCK_RCVBUF_LOCK`.
    const BOTH: libc::c_int = 3;
    let which = if lock { BOTH } else { 0 };
    let which = which.to_ne_bytes();
    set_option(socket, libc::SOL_SOCKET, libc::SO_BUF_LOCK, &which)
}

/// Limits the receive window offered to a TCP peer, bytes.
///
/// # Errors
/// The socket is not a TCP socket.
pub(crate) fn set_window_clamp(socket: &impl AsFd, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let bytes = bytes.to_ne_bytes();
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, &bytes)
}

/// Sets an option of a socket.
pub(super) fn set_option(
    socket: &impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    let fd = socket.as_fd().as_raw_fd();
    let length =
        libc::socklen_t::try_from(value.len()).map_err(|_large| io::ErrorKind::InvalidInput)?;
    // SAFETY: `fd` is borrowed for the call. The kernel reads `length` bytes, which is the length of `value`.
    let result = unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), length) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn unread_bytes_beyond_the_window_stay_unacknowledged_until_they_are_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut reader, _peer) = listener.accept().unwrap();
        assert_eq!(tcp_state(&writer).unwrap().unacknowledged_bytes, 0);
        writer.set_nonblocking(true).unwrap();
        let mut written = 0;
        while let Ok(count) = writer.write(&[7; 65_536]) {
            written += count;
        }
        let full = tcp_state(&writer).unwrap();
        assert!(
            full.unacknowledged_bytes > 0 && !full.is_unanswered,
            "{full:?}"
        );
        let mut left = written;
        let mut buffer = vec![0; 65_536];
        while left > 0 {
            left -= reader.read(&mut buffer).unwrap();
        }
        let limit = Instant::now() + Duration::from_secs(10);
        while tcp_state(&writer).unwrap().unacknowledged_bytes > 0 {
            assert!(Instant::now() < limit, "all was read");
            std::thread::yield_now();
        }
        let end = tcp_state(&writer).unwrap();
        assert!(end.silent_for < Duration::from_secs(10));
        // This socket connected, so the count includes its SYN.
        assert_eq!(end.bytes_acked, written as u64 + 1);
        assert_eq!(tcp_state(&reader).unwrap().bytes_received, written as u64);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn unix_sockets_have_no_tcp_state() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(tcp_state(&one).is_err());
    }
}
