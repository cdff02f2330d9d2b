//! `adit status`, `adit top`, `adit check` and `kubectl adit` as a user runs them: the built binary beside a running demo.

mod check;
mod egress;
mod fleet;
mod output;
mod support;
mod top;
