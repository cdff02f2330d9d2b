//! The hand-over under loom: its models, and the types that they replace.

mod loom_models;
pub(super) mod modelled;
