//! What the harness asks of its load tools, and what they answer. Both sides of a run use these types.

mod path;
mod plan;
mod sample;

pub use path::Shape;
pub use plan::{Counted, Dialect, MEASUREMENTS, Operation, Plan};
pub use sample::{Sample, quantile_us};
