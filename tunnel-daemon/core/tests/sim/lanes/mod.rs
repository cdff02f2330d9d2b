//! Simulation of lanes: one agent's lanes to one server, both drivers in short around the real machine, connections
//! that are slow, cut, or silent, and clients, targets and readers with a will of their own.
//!
//! TCP loses no byte, so what is lost here is time, or the connection.

mod books;
mod connection;
mod end;
mod endpoint;
mod wire;
mod world;

pub(crate) use books::Coverage;
pub(crate) use world::LaneWorld;
