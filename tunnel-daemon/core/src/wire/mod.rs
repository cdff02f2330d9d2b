//! The wire format: packets, their framing, and stream metadata.

pub mod decode;
pub mod encode;
pub mod identifiers;
mod lane_grant;
pub mod metadata;
pub mod packet;
pub mod packets;
mod values;
pub mod version;

/// Largest gRPC message that any party accepts, bytes: gRPC-Go's default receive limit, which both Go programs keep.
pub const MESSAGE_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Longest message that is collected as a whole, bytes: all types but `DATA`, and `DATA` in a field order that no known peer
/// uses. Dials, closes and their answers have some hundred bytes. A message is held until it is complete, and a peer may open
/// many streams.
pub const COLLECTED_BYTES_MAX: usize = 16 * 1024;

/// Bytes of gRPC framing before each message: a compression flag and a big-endian length.
pub const GRPC_PREFIX_BYTES: usize = 5;
