//! Reads, writes and options of stream sockets.

use std::{io, os::fd::AsFd, time::Duration};

use rustix::{
    io::{ioctl_fionbio, retry_on_intr},
    net::{self, RecvFlags, SendFlags, Shutdown, sockopt},
};

/// Makes the socket non-blocking.
pub(crate) fn set_nonblocking(socket: impl AsFd) -> io::Result<()> {
    Ok(ioctl_fionbio(socket, true)?)
}

/// Reads available bytes; `Ok(0)` is EOF.
pub(crate) fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
    let socket = socket.as_fd();
    let (count, _length) = retry_on_intr(|| net::recv(socket, &mut *into, RecvFlags::empty()))?;
    Ok(count)
}

/// Writes as many bytes as there is room for, without SIGPIPE.
pub(crate) fn send(socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let socket = socket.as_fd();
    Ok(retry_on_intr(|| {
        net::send(socket, bytes, SendFlags::NOSIGNAL)
    })?)
}

/// Reads from the reading end of a pipe.
pub(crate) fn read_pipe(pipe: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
    let pipe = pipe.as_fd();
    Ok(retry_on_intr(|| rustix::io::read(pipe, &mut *into))?)
}

/// Closes the writing half.
pub(crate) fn finish_writing(socket: impl AsFd) -> io::Result<()> {
    Ok(net::shutdown(socket, Shutdown::Write)?)
}

/// Closing the socket will send RST and discard unsent bytes. Unix sockets have no reset and ignore this.
pub(crate) fn reset_on_close(socket: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(socket, Some(Duration::ZERO))?)
}

/// Closing the socket will send unsent bytes and FIN, as by default.
pub(crate) fn end_on_close(socket: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(socket, None)?)
}

/// Takes the socket's pending error.
pub(crate) fn take_error(socket: impl AsFd) -> Option<io::Error> {
    match sockopt::socket_error(socket) {
        Ok(Ok(())) => None,
        Ok(Err(errno)) | Err(errno) => Some(errno.into()),
    }
}
