//! How a pair ended and what it moved. Byte counts come with every end, including failures.

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
    /// The opposite side.
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

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A => "A",
            Self::B => "B",
        })
    }
}

/// The operation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Reading from the side, or watching it.
    Read,
    /// Writing to the side, or closing its writing half.
    Write,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// How a direction moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mover {
    /// Read into a pooled buffer and written from the buffer.
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

/// Counts of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Bytes that the receiving socket took, including those submitted with the pair.
    pub bytes: u64,
    /// Bytes that went through a pipe.
    pub spliced_bytes: u64,
    /// Movers used.
    pub movers: Movers,
}

/// Why a pair is over.
#[derive(Debug)]
pub enum PairEnd {
    /// Both directions reached EOF, and every byte was delivered.
    Finished,
    /// A socket failed. Both were reset.
    Failed {
        /// The socket.
        side: Side,
        /// The operation.
        op: Op,
        /// The kernel's error.
        error: io::Error,
    },
    /// The owner cancelled the pair. Both sockets were reset.
    Cancelled,
    /// The relay was stopped before the pair finished. Both sockets were reset.
    Stopped,
    /// The relay thread that owned the pair panicked. Both sockets were reset.
    Panicked,
    /// The driver of the relay thread that owned the pair failed. Both sockets were reset.
    DriverFailed {
        /// Error of `epoll_wait` or `io_uring_enter`, or of creating their descriptors.
        error: io::Error,
    },
}

impl fmt::Display for PairEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished => f.write_str("finished"),
            Self::Failed { side, op, error } => write!(f, "cannot {op} socket {side}: {error}"),
            Self::Cancelled => f.write_str("cancelled"),
            Self::Stopped => f.write_str("relay stopped"),
            Self::Panicked => f.write_str("relay thread panicked"),
            Self::DriverFailed { error } => write!(f, "relay thread without events: {error}"),
        }
    }
}

/// The report to the owner at the end of a pair.
#[must_use = "an outcome carries the byte counts for metrics and the access log"]
#[derive(Debug)]
pub struct Outcome {
    /// From side a to side b.
    pub to_b: Flow,
    /// From side b to side a.
    pub to_a: Flow,
    /// Why the pair ended.
    pub end: PairEnd,
    /// The driver that ran the pair.
    pub engine: Engine,
}
