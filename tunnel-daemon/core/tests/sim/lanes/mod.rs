//! Simulation of lanes: one agent's lanes to one server. Both drivers are abridged around the real lane machine.
//! Connections are slow, reset or silent; clients and targets have random paces.
//!
//! TCP loses no byte, so the faults are delay and loss of the connection.

mod books;
mod connection;
mod end;
mod endpoint;
mod wire;
mod world;

pub(crate) use books::Coverage;
pub(crate) use world::LaneWorld;
