//! What a socket may hold in the kernel, made small for as long as memory is short.

use std::io;
use std::os::fd::AsFd;

use rustix::net::sockopt;

use crate::syscall::lock_buffers;

/// Asked for where memory is short, bytes. The kernel books twice as much.
const SMALL_BYTES: usize = 16 * 1024;
/// Asked for, has the kernel book what it gives a new socket for receiving, where nobody has changed that (`tcp_rmem`).
const FIRST_BYTES: usize = 64 * 1024;

/// How large the buffers of a socket may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BufferSizes {
    /// As the kernel finds best (`tcp_rmem`, `tcp_wmem`): some MiB.
    #[default]
    Kernel,
    /// So many bytes each way, as the kernel books them; not less than it gives a new socket for receiving.
    Most(u32),
    /// 32 KiB each way, as the kernel books them.
    Small,
}

/// The buffers of one socket, to which their owner passes the same socket each time.
#[derive(Debug, Default)]
pub struct SocketBuffers {
    sizes: BufferSizes,
    /// What the kernel had booked for sending at first, bytes.
    first_sent: u32,
    /// The buffer for receiving was made small.
    was_new: bool,
}

impl SocketBuffers {
    /// Those of an end that is no socket, so that nothing has to be fitted until `sizes` change.
    #[must_use]
    pub fn none(sizes: BufferSizes) -> Self {
        Self {
            sizes,
            ..Self::default()
        }
    }

    /// What they were fitted to.
    #[must_use]
    pub fn sizes(&self) -> BufferSizes {
        self.sizes
    }

    /// Has the buffers be of these sizes. Without effect if they are so already.
    ///
    /// Bytes that wait to be sent stay. The buffer for receiving may be made smaller only where the socket `is_new`, else it just
    /// grows no more: a peer may send what was offered before, and the kernel would drop what finds no room, which its sender
    /// learns by ever longer timers.
    ///
    /// # Errors
    /// The descriptor is no socket.
    pub fn fit(&mut self, socket: impl AsFd, sizes: BufferSizes, is_new: bool) -> io::Result<()> {
        if sizes == self.sizes {
            return Ok(());
        }
        // What fails once fails again: it is not tried at every turn.
        let before = std::mem::replace(&mut self.sizes, sizes);
        let sent = sockopt::socket_send_buffer_size(&socket)?;
        if before == BufferSizes::Kernel {
            self.first_sent = u32::try_from(sent).unwrap_or(u32::MAX);
        }
        let was_new = std::mem::take(&mut self.was_new);
        match sizes {
            BufferSizes::Small => {
                sockopt::set_socket_send_buffer_size(&socket, sent.min(SMALL_BYTES))?;
                if is_new {
                    sockopt::set_socket_recv_buffer_size(&socket, SMALL_BYTES)?;
                }
                self.was_new = is_new || was_new;
                lock_buffers(&socket, true)
            }
            BufferSizes::Most(bytes) => {
                let asked = usize::try_from(bytes / 2).unwrap_or(usize::MAX);
                sockopt::set_socket_send_buffer_size(&socket, asked)?;
                let received = sockopt::socket_recv_buffer_size(&socket)? / 2;
                let least = received.max(FIRST_BYTES);
                sockopt::set_socket_recv_buffer_size(&socket, asked.max(least))?;
                lock_buffers(&socket, true)
            }
            BufferSizes::Kernel => {
                let sent = usize::try_from(self.first_sent / 2).unwrap_or(usize::MAX);
                sockopt::set_socket_send_buffer_size(&socket, sent)?;
                if was_new {
                    sockopt::set_socket_recv_buffer_size(&socket, FIRST_BYTES)?;
                }
                lock_buffers(&socket, false)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::BufferSizes::{Kernel, Most, Small};
    use super::*;

    const SMALL: usize = 2 * SMALL_BYTES;
    const MUCH: usize = 64 << 20;

    fn sizes(socket: impl AsFd) -> [usize; 2] {
        [
            sockopt::socket_send_buffer_size(&socket).unwrap(),
            sockopt::socket_recv_buffer_size(&socket).unwrap(),
        ]
    }

    fn pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [near, listener.accept().unwrap().0]
    }

    /// So many bytes go from the second to the first.
    fn exchange([near, far]: &mut [TcpStream; 2], much: usize) {
        std::thread::scope(|scope| {
            scope.spawn(|| far.write_all(&vec![7; much]).unwrap());
            near.read_exact(&mut vec![0; much]).unwrap();
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn buffers_become_small_and_grow_again() {
        for is_new in [true, false] {
            let mut ends = pair();
            let before = ends.each_ref().map(sizes);
            let mut buffers = [SocketBuffers::default(), SocketBuffers::default()];
            for (buffers, end) in buffers.iter_mut().zip(&ends) {
                buffers.fit(end, Kernel, is_new).unwrap();
                assert!(before.contains(&sizes(end)));
                for _twice in 0..2 {
                    buffers.fit(end, Small, is_new).unwrap();
                }
            }
            exchange(&mut ends, MUCH / 8);
            for (end, before) in ends.iter().zip(before) {
                let received = if is_new { SMALL } else { before[1] };
                assert_eq!(sizes(end), [SMALL, received]);
            }
            for (buffers, end) in buffers.iter_mut().zip(&ends) {
                buffers.fit(end, Kernel, is_new).unwrap();
            }
            // The kernel sizes them as bytes come.
            exchange(&mut ends, MUCH);
            assert!(sizes(&ends[1])[0] > before[1][0].min(4 * SMALL));
            assert!(sizes(&ends[0])[1] >= before[0][1]);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_unix_socket_becomes_small_and_as_large_as_it_was() {
        let (near, _far) = UnixStream::pair().unwrap();
        let before = sizes(&near);
        let mut buffers = SocketBuffers::default();
        buffers.fit(&near, Small, true).unwrap();
        assert_eq!(sizes(&near), [SMALL; 2]);
        buffers.fit(&near, Kernel, false).unwrap();
        assert_eq!(sizes(&near)[0], before[0]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn buffers_grow_to_a_bound_and_back_to_it_from_small_ones() {
        const BOUND: usize = 4 * FIRST_BYTES;
        let bound = Most(BOUND.try_into().unwrap());
        let mut ends = pair();
        let mut buffers = [SocketBuffers::default(), SocketBuffers::default()];
        let mut fit = |ends: &[TcpStream; 2], sizes| {
            for (buffers, end) in buffers.iter_mut().zip(ends) {
                buffers.fit(end, sizes, false).unwrap();
                assert_eq!(buffers.sizes(), sizes);
            }
        };
        for _round in 0..2 {
            fit(&ends, bound);
            exchange(&mut ends, MUCH);
            assert_eq!(ends.each_ref().map(sizes), [[BOUND; 2]; 2]);
            fit(&ends, Small);
            exchange(&mut ends, MUCH / 8);
            assert_eq!(ends.each_ref().map(sizes), [[SMALL, BOUND]; 2]);
        }
        // What a peer may have been offered stays, and a smaller one than the kernel's first is none.
        fit(&ends, Most(1));
        let smallest = sizes(&ends[0]);
        assert!(smallest[0] < SMALL && smallest[1] == BOUND, "{smallest:?}");
    }
}
