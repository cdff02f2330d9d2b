//! What the cases share.

pub(crate) mod privilege;
