//! Live agents and the strategies that choose one for a dial.

mod agents;
mod nets;
mod pool;
mod strategy;

pub use agents::{Condition, Registry, Standing};
pub use strategy::{Strategies, StrategiesError, Strategy};

#[cfg(test)]
mod tests;
