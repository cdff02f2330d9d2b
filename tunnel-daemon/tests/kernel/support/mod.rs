//! What the cases share.

pub(crate) mod privilege;
pub(crate) mod wait;
