//! Moves bytes between two stream sockets, by copying or by splicing, driven by epoll or io_uring.
//!
//! This package knows descriptors and bytes, not protocols, tokio or configuration files. The caller submits two
//! sockets with the bytes already read from them, and a callback reports once how the pair ended. Of TLS the package
//! knows only kTLS sockets.
//!
//! Each direction of a pair is a state machine (`direction`) without descriptors; both drivers (`driver`) run the same
//! one. Relay threads own their pairs, so moving bytes takes no locks and allocates no memory. Unsafe system calls are
//! in `syscall` only.
#![deny(unsafe_code)]

mod buffers;
mod config;
mod direction;
mod driver;
mod flow;
mod inbox;
mod kernel_tls;
mod outcome;
mod pair;
mod pipes;
mod probe;
mod relay;
mod socket_buffers;
mod stats;
mod sync;
mod syscall;
mod thread;

pub use config::{ConfigError, RelayConfig, Thresholds};
pub use kernel_tls::{
    KernelTls, KernelTlsError, KeysUsedUp, TrafficKeys, attach_kernel_tls, probe_kernel_tls,
    splices_into_kernel_tls,
};
pub use outcome::{Flow, Mover, Movers, Op, Outcome, PairEnd, Side};
pub use pair::{Done, Pair, Progress, Submitted};
pub use probe::{Basis, Choice, Engine, Preference, ProbeError, probe};
pub use relay::{Rejected, Relay, RelayHandle, Why};
pub use socket_buffers::{BufferSizes, SocketBuffers};
pub use stats::Stats;
pub use syscall::{TcpState, give_back_program_pages, tcp_state, unacknowledged_bytes};
