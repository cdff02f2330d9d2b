//! `adit status`, `adit top` and `adit check` as a user runs them: the built binary beside a running demo.

mod check;
mod egress;
mod output;
mod support;
mod top;
