//! One direction of a pair as a state machine: held bytes, readiness of its sockets, and the choice of the mover.
//! System calls, pools and counters are behind [`Io`], so tests can enumerate every order of events.

mod machine;
mod recent;
mod surroundings;
#[cfg(test)]
mod tests;

pub(crate) use machine::{Direction, Step};
pub(crate) use surroundings::Io;
