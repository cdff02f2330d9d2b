//! Sizes of a socket's kernel buffers, reduced while memory is short.

use std::io;
use std::num::NonZeroU16;
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, sockopt};

use crate::syscall::{lock_buffers, set_window_clamp};

/// Buffer size requested while memory is short, bytes. The kernel allocates twice this.
const SMALL_BYTES: usize = 16 * 1024;
/// Requested receive buffer size that results in the kernel's default for a new socket (with the default `tcp_rmem`), bytes.
const FIRST_BYTES: usize = 64 * 1024;

/// Sizes of a socket's buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BufferSizes {
    /// Autotuned by the kernel up to the maximum of `tcp_rmem` and `tcp_wmem`.
    #[default]
    Kernel,
    /// At most this many KiB each way, as allocated by the kernel. The receive buffer is not below the kernel's default
    /// for a new socket.
    AtMost(u16),
    /// 32 KiB each way, as allocated by the kernel.
    Small,
}

/// Buffer state of one socket. The owner must pass the same socket each time.
#[derive(Debug, Default)]
pub struct SocketBuffers {
    sizes: BufferSizes,
    /// Initial send buffer size, KiB; `None` until queried. 16 bits keep a tunnel's state small.
    initial_send_kib: Option<NonZeroU16>,
    /// The receive buffer was reduced.
    receive_is_small: bool,
}

impl SocketBuffers {
    /// The state of an endpoint without a socket: no change is needed until `sizes` change.
    #[must_use]
    pub fn without_socket(sizes: BufferSizes) -> Self {
        Self {
            sizes,
            ..Self::default()
        }
    }

    /// The sizes last set.
    #[must_use]
    pub fn sizes(&self) -> BufferSizes {
        self.sizes
    }

    /// Sets the buffer sizes. No effect if they are already set.
    ///
    /// Bytes queued to send stay. The receive buffer is reduced only if the socket `is_new`; otherwise it only stops growing.
    /// The peer may use the window offered before, and the kernel would drop bytes without room, which the peer retransmits
    /// with growing timeouts.
    ///
    /// # Errors
    /// The descriptor is not a socket.
    pub fn fit(&mut self, socket: impl AsFd, sizes: BufferSizes, is_new: bool) -> io::Result<()> {
        if sizes == self.sizes {
            return Ok(());
        }
        // Set first, so that a failing call is not repeated every turn.
        self.sizes = sizes;
        let send_bytes = sockopt::socket_send_buffer_size(&socket)?;
        let booked = u16::try_from(send_bytes / 1024).unwrap_or(u16::MAX);
        let initial = self.initial_send_kib;
        self.initial_send_kib = initial.or_else(|| NonZeroU16::new(booked));
        let receive_was_small = std::mem::take(&mut self.receive_is_small);
        match sizes {
            BufferSizes::Small => {
                sockopt::set_socket_send_buffer_size(&socket, send_bytes.min(SMALL_BYTES))?;
                if is_new {
                    sockopt::set_socket_recv_buffer_size(&socket, SMALL_BYTES)?;
                }
                self.receive_is_small = is_new || receive_was_small;
                lock_buffers(&socket, true)
            }
            BufferSizes::AtMost(kib) => {
                let asked = halved(kib);
                let is_unix = sockopt::socket_domain(&socket)? == AddressFamily::UNIX;
                // The kernel autotunes TCP buffers, but not those of unix sockets.
                let initial = self.initial_send_kib.map_or(asked, |kib| halved(kib.get()));
                let send = if is_unix { asked.min(initial) } else { asked };
                sockopt::set_socket_send_buffer_size(&socket, send)?;
                let wanted = asked.max(FIRST_BYTES);
                let receive = sockopt::socket_recv_buffer_size(&socket)? / 2;
                // A smaller request would shrink the buffer; the kernel grants at most `rmem_max`.
                if !is_unix && receive < wanted {
                    sockopt::set_socket_recv_buffer_size(&socket, wanted)?;
                    let given = sockopt::socket_recv_buffer_size(&socket)?;
                    // Older kernels limit the window to the initial size of a locked buffer.
                    set_window_clamp(&socket, given / 2)?;
                }
                lock_buffers(&socket, true)
            }
            BufferSizes::Kernel => {
                if let Some(kib) = self.initial_send_kib {
                    sockopt::set_socket_send_buffer_size(&socket, halved(kib.get()))?;
                }
                if receive_was_small {
                    sockopt::set_socket_recv_buffer_size(&socket, FIRST_BYTES)?;
                }
                lock_buffers(&socket, false)
            }
        }
    }
}

/// Bytes to request for this many allocated KiB: the kernel allocates twice the request.
fn halved(booked_kib: u16) -> usize {
    usize::from(booked_kib) * 1024 / 2
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::BufferSizes::{AtMost, Kernel, Small};
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

    /// The second socket sends that many bytes to the first.
    fn exchange([near, far]: &mut [TcpStream; 2], much: usize) {
        std::thread::scope(|scope| {
            scope.spawn(|| far.write_all(&vec![7; much]).unwrap());
            near.read_exact(&mut vec![0; much]).unwrap();
        });
    }

    /// Limit (memory): Memory of the cgroup, without pages of files
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
            // The kernel adjusts the buffers as bytes arrive.
            exchange(&mut ends, MUCH);
            assert!(sizes(&ends[1])[0] > before[1][0].min(4 * SMALL));
            assert!(sizes(&ends[0])[1] >= before[0][1]);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_unix_socket_shrinks_and_regains_its_size() {
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
        let bound = AtMost((BOUND / 1024).try_into().unwrap());
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
        // Receive buffers do not shrink: the peer may have been offered their window.
        fit(&ends, AtMost(1));
        assert_eq!(ends.each_ref().map(|end| sizes(end)[1]), [BOUND; 2]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_bound_does_not_shrink_a_grown_buffer() {
        let mut ends = pair();
        exchange(&mut ends, MUCH);
        let grown = sizes(&ends[0])[1];
        let bound = u16::try_from(4 * FIRST_BYTES / 1024).unwrap();
        let mut buffers = SocketBuffers::default();
        buffers.fit(&ends[0], AtMost(bound), false).unwrap();
        assert_eq!(sizes(&ends[0])[1], grown);
        assert!(grown > 4 * FIRST_BYTES, "it has not grown: {grown}");
    }

    /// On older kernels a buffer with a set size keeps the window of a new socket forever, half of 128 KiB.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_bounded_buffer_takes_half_of_its_bytes() {
        const BOUND: usize = 6 * FIRST_BYTES;
        let mut ends = pair();
        let mut buffers = SocketBuffers::default();
        let bound = AtMost((BOUND / 1024).try_into().unwrap());
        buffers.fit(&ends[0], bound, true).unwrap();
        exchange(&mut ends, MUCH);
        let [near, far] = &mut ends;
        far.set_nonblocking(true).unwrap();
        // Writes until no byte is taken for a while; the kernel offers no other indication.
        let mut patience = 50;
        while patience > 0 {
            if far.write(&[7; 4096]).is_err() {
                patience -= 1;
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        }
        let waiting = rustix::io::ioctl_fionread(&*near).unwrap();
        let waiting = usize::try_from(waiting).unwrap();
        assert!((BOUND / 3..=BOUND).contains(&waiting), "{waiting}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_bound_never_enlarges_a_unix_socket() {
        let (near, _far) = UnixStream::pair().unwrap();
        let before = sizes(&near)[0];
        let mut buffers = SocketBuffers::default();
        for (bound, expected) in [(1024, before), (64, 64 * 1024), (1024, before)] {
            buffers.fit(&near, AtMost(bound), true).unwrap();
            assert_eq!(sizes(&near)[0], expected, "{bound}");
        }
    }
}
