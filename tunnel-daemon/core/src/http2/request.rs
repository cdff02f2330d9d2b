//! Heads of requests, and the header blocks that answer them.

use bytes::{BufMut as _, Bytes, BytesMut};

use super::hpack::{ENTRY_OVERHEAD, write_integer};

/// Largest header list accepted (RFC 9113, section 6.5.2): tokens and identifier lists are long.
pub(super) const LIST_BYTES_MAX: usize = 256 * 1024;
/// Bytes kept of a path: more than any method has.
const PATH_BYTES_MAX: usize = 512;

/// What a packet stream's owner has to know of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestHead {
    /// The path, of a longer one its beginning.
    pub path: Bytes,
    /// The content type begins with `application/grpc`.
    pub is_grpc: bool,
}

/// Why a header list makes no request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BadList {
    /// RFC 9113, section 8.1.1.
    Malformed,
    /// Beyond [`LIST_BYTES_MAX`].
    TooLarge,
}

/// The fields of one block, as they come.
#[derive(Default)]
pub(super) struct FieldList {
    bytes: usize,
    is_malformed: bool,
    has_regular: bool,
    method: bool,
    scheme: bool,
    authority: bool,
    is_connect: bool,
    path: Option<Bytes>,
    is_grpc: bool,
    content_length: Option<u64>,
}

impl FieldList {
    /// Takes the next field (RFC 9113, sections 8.2 and 8.3).
    pub(super) fn take(&mut self, name: &[u8], value: &[u8]) {
        self.bytes += name.len() + value.len() + ENTRY_OVERHEAD;
        if self.bytes > LIST_BYTES_MAX {
            return;
        }
        let is_good = match name.first() {
            None => false,
            Some(b':') => !self.has_regular && self.take_pseudo(name, value),
            Some(_) => {
                self.has_regular = true;
                self.take_regular(name, value)
            }
        };
        self.is_malformed |= !is_good || !is_value(value);
    }

    fn take_pseudo(&mut self, name: &[u8], value: &[u8]) -> bool {
        let first = |seen: &mut bool| !std::mem::replace(seen, true);
        match name {
            b":method" => {
                self.is_connect = value == b"CONNECT";
                first(&mut self.method) && !value.is_empty()
            }
            b":scheme" => first(&mut self.scheme) && !value.is_empty(),
            // Any text that a field may have, as Go's server takes it: over a unix socket it is the path of the socket.
            b":authority" => first(&mut self.authority),
            b":path" => {
                let kept = value.get(..PATH_BYTES_MAX).unwrap_or(value);
                let before = self.path.replace(Bytes::copy_from_slice(kept));
                before.is_none() && !value.is_empty()
            }
            _ => false,
        }
    }

    fn take_regular(&mut self, name: &[u8], value: &[u8]) -> bool {
        match name {
            b"connection" | b"proxy-connection" | b"keep-alive" | b"transfer-encoding"
            | b"upgrade" => false,
            b"te" => value == b"trailers",
            b"content-type" => {
                self.is_grpc = value.starts_with(b"application/grpc");
                true
            }
            b"content-length" => {
                let text = std::str::from_utf8(value).ok();
                let is_number = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
                let number = text
                    .filter(|_| is_number)
                    .and_then(|text| text.parse().ok());
                let is_same = self.content_length.is_none_or(|it| Some(it) == number);
                self.content_length = number;
                is_same && number.is_some()
            }
            _ => name.iter().all(|byte| is_name(*byte)),
        }
    }

    /// The request, and the length that it says its body has.
    pub(super) fn request(self) -> Result<(RequestHead, Option<u64>), BadList> {
        self.check_size()?;
        let is_whole = self.method && self.scheme && !self.is_malformed && !self.is_connect;
        match self.path.filter(|_| is_whole) {
            Some(path) => {
                let head = RequestHead {
                    path,
                    is_grpc: self.is_grpc,
                };
                Ok((head, self.content_length))
            }
            None => Err(BadList::Malformed),
        }
    }

    /// Whether these may be trailers.
    pub(super) fn trailers(&self) -> Result<(), BadList> {
        self.check_size()?;
        let has_pseudo = self.method || self.scheme || self.authority || self.path.is_some();
        if has_pseudo || self.is_malformed {
            return Err(BadList::Malformed);
        }
        Ok(())
    }

    fn check_size(&self) -> Result<(), BadList> {
        if self.bytes > LIST_BYTES_MAX {
            return Err(BadList::TooLarge);
        }
        Ok(())
    }
}

/// RFC 9113, section 8.2.1, and RFC 9110, section 5.6.2: a token without upper case.
fn is_name(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// RFC 9113, section 8.2.1.
fn is_value(value: &[u8]) -> bool {
    let is_blank = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    let has_bad = value.iter().any(|byte| matches!(byte, 0 | b'\r' | b'\n'));
    !has_bad && !is_blank(value.first()) && !is_blank(value.last())
}

/// The dynamic table of what is sent has no room (RFC 7541, section 6.3).
pub(super) const NO_TABLE: u8 = 0x20;
/// `:status: 200`, by its index in the static table.
const STATUS_200: u8 = 0x88;
/// `:status` and `content-type` in the static table.
const STATUS: usize = 8;
const CONTENT_TYPE: usize = 31;

/// Fields of an accepted call.
pub(super) fn accepted(block: &mut BytesMut) {
    block.put_u8(STATUS_200);
    write_integer(CONTENT_TYPE, 4, 0, block);
    text(b"application/grpc", block);
}

/// Only a status of HTTP, of three digits.
pub(super) fn only_status(code: &str, block: &mut BytesMut) {
    write_integer(STATUS, 4, 0, block);
    text(code.as_bytes(), block);
}

/// A field that no table keeps.
pub(super) fn field(name: &str, value: &[u8], block: &mut BytesMut) {
    block.put_u8(0);
    text(name.as_bytes(), block);
    text(value, block);
}

fn text(text: &[u8], block: &mut BytesMut) {
    write_integer(text.len(), 7, 0, block);
    block.put_slice(text);
}
