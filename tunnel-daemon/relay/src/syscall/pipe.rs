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

/// Requests a capacity of `bytes`.
pub(crate) fn resize(pipe: impl AsFd, bytes: usize) -> io::Result<()> {
    fcntl_setpipe_size(pipe, bytes)?;
    Ok(())
}

/// The capacity, bytes.
pub(crate) fn capacity(pipe: impl AsFd) -> io::Result<usize> {
    Ok(fcntl_getpipe_size(pipe)?)
}

/// Moves up to `len` bytes between a socket and a pipe. `Ok(0)` is EOF. The flag makes the pipe side non-blocking; the
/// socket side depends on the socket's mode. Both are needed for a call that never blocks.
pub(crate) fn transfer(from: impl AsFd, to: impl AsFd, len: usize) -> io::Result<usize> {
    let (from, to) = (from.as_fd(), to.as_fd());
    Ok(retry_on_intr(|| {
        splice(from, None, to, None, len, SpliceFlags::NONBLOCK)
    })?)
}
