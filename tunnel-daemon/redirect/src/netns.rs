//! Which network namespace a socket is in, as eBPF programs tell them apart.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// `SO_NETNS_COOKIE`.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The cookie of the namespace of `socket`, unique until the machine restarts.
///
/// # Errors
/// Kernels before 5.14 do not know the option.
#[expect(unsafe_code, reason = "no crate offers this socket option")]
pub fn cookie(socket: &impl AsFd) -> io::Result<u64> {
    let mut cookie = 0_u64;
    let mut length = libc::socklen_t::try_from(size_of::<u64>()).unwrap_or(8);
    // SAFETY: the descriptor is borrowed, so it stays open for the call; the value and its length are locals of the
    // sizes that are named, and the kernel writes at most that many bytes.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(cookie)
}
