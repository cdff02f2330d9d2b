//! How a pair ended and what it moved. Counts come with every end, also with a failure.

use std::{fmt, io};

use crate::probe::Engine;

/// One of the two sockets of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// [`crate::Pair::a`].
    A,
    /// [`crate::Pair::b`].
    B,
}

impl Side {
    /// The one opposite.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    pub(crate) fn index(self) -> usize {
        match self {
            Self::A => 0,
            Self::B => 1,
        }
    }
}

/// What was tried on the side that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Taking bytes from it, or watching it.
    Read,
    /// Giving bytes to it, or closing its writing half.
    Write,
}

/// How bytes of a direction move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mover {
    /// Read into a pooled buffer, written from it.
    Copy,
    /// Moved by the kernel through a pooled pipe.
    Splice,
}

/// The movers a direction has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Movers {
    /// Bytes were copied.
    pub copy: bool,
    /// Bytes were spliced.
    pub splice: bool,
}

/// What one direction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Bytes the receiving socket took, those handed over with the pair included.
    pub bytes: u64,
    /// Those of them that went through a pipe.
    pub spliced_bytes: u64,
    /// Movers used.
    pub movers: Movers,
}

/// Why a pair is over.
#[derive(Debug)]
pub enum PairEnd {
    /// Both directions ended with an end of stream, and every byte was delivered.
    Finished,
    /// A socket failed. Both were reset.
    Failed {
        /// The socket.
        side: Side,
        /// What was tried.
        op: Op,
        /// What the kernel said.
        error: io::Error,
    },
    /// The owner asked for it. Both sockets were reset.
    Cancelled,
    /// The relay was stopped before the pair was through. Both sockets were reset.
    Stopped,
    /// The relay thread that owned the pair panicked. Both sockets were reset.
    Panicked,
    /// The relay thread that owned the pair gets no events from the kernel any more. Both sockets were reset.
    DriverFailed {
        /// Of `epoll_wait` or `io_uring_enter`, or of what makes their descriptors.
        error: io::Error,
    },
}

impl fmt::Display for PairEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished => f.write_str("finished"),
            Self::Failed { side, op, error } => write!(f, "{op:?} on side {side:?}: {error}"),
            Self::Cancelled => f.write_str("cancelled"),
            Self::Stopped => f.write_str("relay stopped"),
            Self::Panicked => f.write_str("relay thread panicked"),
            Self::DriverFailed { error } => write!(f, "relay thread without events: {error}"),
        }
    }
}

/// What the owner of a pair hears at its end.
#[must_use = "an outcome carries the byte counts for metrics and the access log"]
#[derive(Debug)]
pub struct Outcome {
    /// From side a to side b.
    pub to_b: Flow,
    /// From side b to side a.
    pub to_a: Flow,
    /// Why it is over.
    pub end: PairEnd,
    /// The driver that ran it.
    pub engine: Engine,
}
