//! An eventfd that wakes a relay thread from its wait for events.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::event::{EventfdFlags, eventfd};

/// Rung by anyone; the drivers watch it edge triggered, so nobody has to read it.
#[derive(Debug)]
pub(crate) struct Bell {
    fd: OwnedFd,
    #[cfg(all(test, loom))]
    edge: super::modelled::Edge,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            #[cfg(all(test, loom))]
            edge: super::modelled::Edge::default(),
        })
    }

    /// Reports readiness each time the thread is called.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn ring(&self) {
        // Fails only when 2^64 calls were not taken, and then the bell is ringing already.
        let _full = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        #[cfg(all(test, loom))]
        self.edge.set();
    }

    /// The model's sleep of a driver: until the bell has been rung since it last returned.
    #[cfg(all(test, loom))]
    pub(crate) fn wait(&self) {
        self.edge.wait();
    }
}
