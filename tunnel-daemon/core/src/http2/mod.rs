//! Rewriting of HTTP/2 header blocks below the HTTP/2 library.
//!
//! Over a unix socket kube-apiserver sends the socket path as `:authority`, raw (`/run/x.sock`) or percent-encoded
//! (`%2Frun%2Fx.sock`). Go's server accepts any bytes there. The `http` crate refuses both forms, and this check cannot
//! be disabled. So [`AuthorityRewriter`] filters the stream before `h2` reads it. The filter parses frame headers,
//! header blocks and only the HPACK needed to find the field; `h2` checks everything else.
//!
//! The replacement has the *same decoded length* as the replaced value and keeps its representation. HPACK dynamic
//! tables count bytes of decoded names and values. So the client's table and the table of `h2` evict the same entries
//! at the same time, and later references to a replaced entry need no change.

mod authority;
mod frame;
mod hpack;
mod huffman;
mod rewrite;

#[cfg(test)]
mod tests;

pub use authority::{is_valid_authority, stand_in};
pub use frame::FRAME_PAYLOAD_LEN_MAX;
pub use hpack::HpackError;
pub use rewrite::{AuthorityRewriter, HandOver, Limits, RewriteError, fuzz_entry};
