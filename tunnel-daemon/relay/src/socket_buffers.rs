//! The buffers of a socket in the kernel, made small for as long as memory is short.

use std::io;
use std::os::fd::AsFd;

use rustix::net::sockopt;

use crate::syscall::unlock_buffers;

/// Asked for each way where memory is short, bytes. The kernel books twice as much.
const SMALL_BYTES: usize = 16 * 1024;

/// The buffers of one socket, to which their owner passes the same socket each time.
#[derive(Debug, Default)]
pub struct SocketBuffers {
    /// What the kernel had booked for sending and receiving before they became small.
    before: Option<[usize; 2]>,
}

impl SocketBuffers {
    /// Makes both buffers small, or as large as they were, and has the kernel size them again. Without effect if they are so
    /// already. Bytes that wait in a buffer stay there.
    ///
    /// # Errors
    /// The descriptor is no socket.
    pub fn fit(&mut self, socket: impl AsFd, small: bool) -> io::Result<()> {
        match (small, self.before) {
            (true, None) => {
                let before = [
                    sockopt::socket_send_buffer_size(&socket)?,
                    sockopt::socket_recv_buffer_size(&socket)?,
                ];
                self.before = Some(before);
                set(&socket, before.map(|bytes| bytes.min(SMALL_BYTES)))
            }
            (false, Some(before)) => {
                self.before = None;
                set(&socket, before.map(|bytes| bytes / 2))?;
                unlock_buffers(&socket)
            }
            (true, Some(_)) | (false, None) => Ok(()),
        }
    }
}

fn set(socket: impl AsFd, [send, receive]: [usize; 2]) -> io::Result<()> {
    sockopt::set_socket_send_buffer_size(&socket, send)?;
    Ok(sockopt::set_socket_recv_buffer_size(&socket, receive)?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn sizes(socket: impl AsFd) -> [usize; 2] {
        [
            sockopt::socket_send_buffer_size(&socket).unwrap(),
            sockopt::socket_recv_buffer_size(&socket).unwrap(),
        ]
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn buffers_become_small_and_grow_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _peer) = listener.accept().unwrap();
        let before = sizes(&near);
        let mut buffers = SocketBuffers::default();
        buffers.fit(&near, false).unwrap();
        assert_eq!(sizes(&near), before);
        for _twice in 0..2 {
            buffers.fit(&near, true).unwrap();
            assert_eq!(sizes(&near), [2 * SMALL_BYTES; 2]);
        }
        buffers.fit(&near, false).unwrap();
        // As they were, or what the kernel allows one to ask for.
        assert!(sizes(&near)[0] > 2 * SMALL_BYTES && sizes(&near)[1] > 2 * SMALL_BYTES);
        // The kernel sizes them again as bytes come: nobody asked for these sizes.
        let given_back = sizes(&near)[1];
        let sender = std::thread::spawn(move || {
            let chunk = vec![7; 1 << 20];
            for _ in 0..64 {
                far.write_all(&chunk).unwrap();
            }
        });
        let mut chunk = vec![0; 1 << 20];
        while near.read(&mut chunk).unwrap() > 0 {}
        sender.join().unwrap();
        assert!(sizes(&near)[1] > given_back);
    }
}
