//! Live agents and the strategies that choose one for a dial.

mod agents;
mod nets;
mod peers;
mod pool;
mod scope;
mod strategy;

pub use agents::{Availability, Condition, Registry, Silence, Standing};
pub use peers::{PEER_KEYS_MAX, PeerExcess, PeerKey};
pub use scope::Scope;
pub use strategy::{Strategies, StrategiesError, Strategy};

#[cfg(test)]
mod tests;
