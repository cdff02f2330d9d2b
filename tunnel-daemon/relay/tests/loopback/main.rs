//! Tests of the relay with real sockets: each test for both drivers and both movers, over TCP and over Unix sockets.
//! Tests that count descriptors or memory run alone, in a separate process. `ADIT_NIGHTLY=1` runs more of some.
#![expect(
    clippy::unwrap_used,
    reason = "a test: a panic is its way to fail, helpers included"
)]

mod closing;
mod driver_failure;
mod far_ends;
mod forbidden;
mod kernel_tls;
mod lifecycle;
mod paced_readers;
mod scale;
mod support;
mod transfer;
mod wake_ups;
