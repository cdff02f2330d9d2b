//! What the cases share.

pub(crate) mod accounting;
pub(crate) mod privilege;
pub(crate) mod wait;
