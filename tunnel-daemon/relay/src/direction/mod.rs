//! One direction of a pair as a state machine: what it holds, whether its ends are ready, which mover it uses and when
//! that changes. System calls, pools and counters are behind [`Io`], so every order of events is a row in a test.

mod machine;
mod recent;
mod surroundings;
#[cfg(test)]
mod tests;

pub(crate) use machine::{Direction, Step};
pub(crate) use surroundings::Io;
