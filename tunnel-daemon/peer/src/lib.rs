//! Other servers of the installation: finds them, keeps a link to each, and opens tunnels there.
//!
//! This side asks and never dials: what it opens are tunnels like those that agents open. Owns which servers are peers and what
//! becomes of their links. Knows neither how a peer finds an agent nor the clients of this server.
#![deny(unsafe_code)]

mod discovery;
mod held;
mod link;
mod opener;
mod peers;

pub use discovery::{Fixed, is_inside};
pub use link::LANES_MAX;
pub use peers::{PeerSettings, PeerState, PeerView, Peers};
