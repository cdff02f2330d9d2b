//! Rewriting of HTTP/2 header blocks below the HTTP/2 library.
//!
//! kube-apiserver over a unix socket sends the socket path as `:authority`, raw (`/run/x.sock`) or
//! percent-encoded (`%2Frun%2Fx.sock`). Go's server takes any bytes there; the `http` crate takes neither form
//! and nothing can switch that off, so the stream is filtered before `h2` reads it. [`AuthorityRewriter`] owns
//! that filter. It knows frame headers, header blocks and as much HPACK as it takes to find the field, and
//! refuses to know anything else about HTTP/2: every verdict on the protocol stays with `h2`.
//!
//! The replacement has the *same decoded length* as what it replaces and keeps its representation. An HPACK
//! dynamic table counts bytes of decoded names and values, so the client's table and the one behind this
//! filter evict the same entries at the same time, and later references to a replaced entry need no change.

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
