//! A lane: a dedicated connection between an Adit agent and an Adit server that carries one tunnel at a time.
//!
//! Frames in, frames and events out; no socket and no clock. TCP provides the flow control, so lanes have no credit:
//! the lane's driver reads only as fast as the endpoint takes bytes.

mod bind;
mod demand;
mod end;
mod event;
mod frame;
#[doc(hidden)]
pub mod fuzz;
mod growth;
mod out;
mod payload;
mod places;
mod warm;

pub use bind::{Bind, Greeting, Hello, NONCE_BYTES, PROOF_BYTES, Proof, proof_input};
pub use demand::Demand;
pub use end::{LaneEnd, LaneRole, NotIdle};
pub use event::LaneEvent;
pub use frame::{
    CONTROL_BYTES_MAX, DATA_BYTES_MAX, FrameReader, FrameType, HEADER_BYTES, Header, LaneViolation,
    OutFrame, Piece,
};
pub use growth::{Growth, Lanes, Want};
pub use payload::{OpenRequest, Origin, RefusalCode};
pub use places::{UnboundOrigin, UnboundPlaces, UnboundSource};
pub use warm::WarmLanes;

/// The application protocol of a lane's TLS connection.
pub const ALPN: &str = "adit-lane/1";

#[cfg(test)]
mod tests;
