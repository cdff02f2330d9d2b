//! What travels on a stream: packets, their framing, and the metadata around them.

pub mod decode;
pub mod encode;
pub mod identifiers;
mod lane_grant;
pub mod metadata;
pub mod packet;
pub mod packets;
mod values;
pub mod version;

/// Largest gRPC message any party accepts, bytes. Both Go ends keep gRPC-Go's default receive limit.
pub const MESSAGE_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Longest message that is taken as a whole, bytes: every kind but `DATA`, and `DATA` whose fields come in an order that no known
/// peer uses. A dial and its answer, a close and its text have some hundred; a message is held until it is whole, and a peer
/// opens as many streams as it likes.
pub const COLLECTED_BYTES_MAX: usize = 16 * 1024;

/// Bytes of gRPC framing before each message: a compression flag and a big-endian length.
pub const GRPC_PREFIX_BYTES: usize = 5;
