//! What a socket may hold in the kernel, made small for as long as memory is short.

use std::io;
use std::os::fd::AsFd;

use rustix::net::sockopt;

use crate::syscall::lock_buffers;

/// Asked for where memory is short, bytes. The kernel books twice as much.
const SMALL_BYTES: u16 = 16 * 1024;
/// Asked for, has the kernel book what it gives a new socket for receiving, where nobody has changed that (`tcp_rmem`).
const FIRST_BYTES: usize = 64 * 1024;

/// The buffers of one socket, to which their owner passes the same socket each time.
#[derive(Debug, Default)]
pub struct SocketBuffers {
    /// What the kernel had booked for sending before, bytes, and whether the socket was new.
    before: Option<(u32, bool)>,
}

impl SocketBuffers {
    /// Makes the buffers small, or has the kernel size them again. Without effect if they are so already.
    ///
    /// Bytes that wait to be sent stay. The buffer for receiving grows no more; it becomes small only where the socket `is_new`: a
    /// peer may send what was offered before, and the kernel would drop what finds no room, which its sender learns by ever longer
    /// timers.
    ///
    /// # Errors
    /// The descriptor is no socket.
    pub fn fit(&mut self, socket: impl AsFd, small: bool, is_new: bool) -> io::Result<()> {
        match (small, self.before) {
            (true, None) => {
                let sent = sockopt::socket_send_buffer_size(&socket)?;
                sockopt::set_socket_send_buffer_size(&socket, sent.min(SMALL_BYTES.into()))?;
                if is_new {
                    sockopt::set_socket_recv_buffer_size(&socket, SMALL_BYTES.into())?;
                }
                self.before = Some((u32::try_from(sent).unwrap_or(u32::MAX), is_new));
                lock_buffers(&socket, true)
            }
            (false, Some((sent, was_new))) => {
                self.before = None;
                let sent = usize::try_from(sent / 2).unwrap_or(usize::MAX);
                sockopt::set_socket_send_buffer_size(&socket, sent)?;
                if was_new {
                    sockopt::set_socket_recv_buffer_size(&socket, FIRST_BYTES)?;
                }
                lock_buffers(&socket, false)
            }
            (true, Some(_)) | (false, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    const SMALL: usize = 2 * SMALL_BYTES as usize;
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
                buffers.fit(end, false, is_new).unwrap();
                assert!(before.contains(&sizes(end)));
                for _twice in 0..2 {
                    buffers.fit(end, true, is_new).unwrap();
                }
            }
            exchange(&mut ends, MUCH / 8);
            for (end, before) in ends.iter().zip(before) {
                let received = if is_new { SMALL } else { before[1] };
                assert_eq!(sizes(end), [SMALL, received]);
            }
            for (buffers, end) in buffers.iter_mut().zip(&ends) {
                buffers.fit(end, false, is_new).unwrap();
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
        buffers.fit(&near, true, true).unwrap();
        assert_eq!(sizes(&near), [SMALL; 2]);
        buffers.fit(&near, false, false).unwrap();
        assert_eq!(sizes(&near)[0], before[0]);
    }
}
