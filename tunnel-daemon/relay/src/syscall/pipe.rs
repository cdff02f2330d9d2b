//! Pipes and splice.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    io::retry_on_intr,
    pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice},
};

/// Read end and write end, both non-blocking.
pub(crate) fn open() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?)
}

/// Asks for `bytes` of room.
pub(crate) fn resize(pipe: impl AsFd, bytes: usize) -> io::Result<()> {
    fcntl_setpipe_size(pipe, bytes)?;
    Ok(())
}

/// The room there is, in bytes.
pub(crate) fn capacity(pipe: impl AsFd) -> io::Result<usize> {
    Ok(fcntl_getpipe_size(pipe)?)
}

/// Moves up to `len` bytes between a socket and a pipe. `Ok(0)` is end of stream. The flag rules the pipe side, the
/// socket's own mode the socket side: it takes both for a call that never blocks.
pub(crate) fn transfer(from: impl AsFd, to: impl AsFd, len: usize) -> io::Result<usize> {
    let (from, to) = (from.as_fd(), to.as_fd());
    Ok(retry_on_intr(|| {
        splice(from, None, to, None, len, SpliceFlags::NONBLOCK)
    })?)
}
