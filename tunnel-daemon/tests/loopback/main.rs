//! Loopback tier: the whole server and its agents in one process, on real sockets, through every frontend.
//!
//! Each test is named after what it proves. Nothing sleeps: tests wait for conditions, each with a limit and a name.

mod cases;
mod support;
