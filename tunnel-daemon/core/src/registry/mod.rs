//! Live agents and the strategies that choose one for a dial.

mod agents;
mod choice;
mod nets;
mod pool;
mod strategy;

pub use agents::{Availability, Condition, Registry, Silence, Standing};
pub use choice::Scope;
pub use strategy::{Strategies, StrategiesError, Strategy};

#[cfg(test)]
mod tests;
