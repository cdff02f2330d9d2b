//! Loopback tier: servers and agents in this process or as processes, on real sockets, through every frontend.
//!
//! Each test is named after what it proves. Tests wait for conditions, each with a limit and a name. They sleep only where time
//! is the subject.

mod cases;
mod support;
