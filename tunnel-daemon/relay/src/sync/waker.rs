//! An eventfd that wakes a relay thread from its wait for events.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::event::{EventfdFlags, eventfd};

/// Any thread may wake the relay thread. The drivers watch the eventfd edge triggered, so it need not be read.
#[derive(Debug)]
pub(crate) struct Waker {
    fd: OwnedFd,
    #[cfg(all(test, loom))]
    edge: super::tests::modelled::Edge,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            #[cfg(all(test, loom))]
            edge: super::tests::modelled::Edge::default(),
        })
    }

    /// The eventfd, which becomes readable whenever the waker is used.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn wake(&self) {
        // Fails only if the eventfd's counter is full; then the eventfd is readable anyway.
        let _full = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        #[cfg(all(test, loom))]
        self.edge.set();
    }

    /// The loom model of a driver's wait: returns once the waker was used since the last return.
    #[cfg(all(test, loom))]
    pub(crate) fn wait(&self) {
        self.edge.wait();
    }
}
