//! Connections over loopback with small buffers, and what the standard library does not ask of a socket.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};

/// What the kernel is asked to keep for a socket each way, bytes; it takes twice as much.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) receive: usize,
    pub(crate) send: usize,
}

impl Sizes {
    /// So small that growth beyond them is plain.
    pub(crate) const SMALL: Self = Self {
        receive: 128 * 1024,
        send: 128 * 1024,
    };
}

/// A relay's two sockets and their peers: `client` - `a`, relay, `b` - `target`.
pub(crate) struct Crossing {
    pub(crate) client: TcpStream,
    pub(crate) a: TcpStream,
    pub(crate) b: TcpStream,
    pub(crate) target: TcpStream,
}

impl Crossing {
    pub(crate) fn new() -> Self {
        Self::sized(Sizes::SMALL, Sizes::SMALL)
    }

    /// As the ends of connections and as the relay's sockets have it.
    pub(crate) fn sized(ends: Sizes, relay: Sizes) -> Self {
        let (client, a) = connection(ends, relay);
        let (target, b) = connection(ends, relay);
        Self {
            client,
            a,
            b,
            target,
        }
    }
}

/// A connection over loopback whose calls never block: who connected, and who accepted.
fn connection(outer: Sizes, inner: Sizes) -> (TcpStream, TcpStream) {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    resize(&listener, inner);
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    listener.bind(&any.into()).unwrap();
    listener.listen(1).unwrap();
    let calling = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    resize(&calling, outer);
    calling.connect(&listener.local_addr().unwrap()).unwrap();
    let (accepted, _peer) = listener.accept().unwrap();
    [calling, accepted]
        .map(|socket| {
            socket.set_tcp_nodelay(true).unwrap();
            socket.set_nonblocking(true).unwrap();
            TcpStream::from(socket)
        })
        .into()
}

fn resize(socket: &Socket, sizes: Sizes) {
    socket.set_recv_buffer_size(sizes.receive).unwrap();
    // Beyond the sysctl, which is not ours to change.
    rustix::net::sockopt::set_socket_send_buffer_size_force(socket, sizes.send).unwrap();
}

/// The error that the kernel holds for a socket, which is gone with that.
pub(crate) fn taken_error(socket: &TcpStream) -> Option<io::Error> {
    SockRef::from(socket).take_error().unwrap()
}

/// Closes a connection by a reset; what it had not sent yet is thrown away.
pub(crate) fn reset(socket: TcpStream) {
    let linger = Some(Duration::ZERO);
    SockRef::from(&socket).set_linger(linger).unwrap();
    drop(socket);
}

/// `SO_RCVLOWAT`: how much makes a socket readable. Setting it has the kernel look at what is there.
pub(crate) fn set_receive_low_water(socket: &TcpStream, bytes: i32) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or(4);
    // SAFETY: the descriptor is borrowed, so it stays open for the call; the kernel reads `length` bytes, which is the size
    // of the local that the pointer is to.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const bytes).cast(),
            length,
        )
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A line of what this kernel did, past the harness, which keeps what tests print. `cargo xtask vm` shows such lines.
pub(crate) fn report(line: &str) {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    writeln!(io::stderr(), "FOUND {release}: {line}").ok();
}
