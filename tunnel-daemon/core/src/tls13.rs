//! TLS 1.3 records after the handshake (RFC 8446 sections 4.6 and 5), without keys: record lengths and the meaning of
//! decrypted records.

pub mod fuzz;

/// Bytes of a record's header.
pub const HEADER_BYTES: usize = 5;
/// Bytes of an authentication tag, equal for all cipher suites of RFC 8446.
pub const TAG_BYTES: usize = 16;
/// Most content of one record, bytes.
pub const PLAIN_BYTES_MAX: usize = 1 << 14;
/// Most bytes after a record's header: content, type, padding and tag. Section 5.2 allows longer records, but section 5.4
/// refuses their content.
pub const SEALED_BYTES_MAX: usize = PLAIN_BYTES_MAX + 1 + TAG_BYTES;
/// Most bytes of a handshake message after its header; the limit of rustls.
const MESSAGE_BYTES_MAX: usize = 0xffff;
/// Most consecutive records without payload, including key updates and tickets. More would let a peer consume CPU time
/// without sending data.
pub const EMPTY_RECORDS_MAX: u32 = 32;

/// Content type of an alert.
pub const ALERT: u8 = 21;
/// Content type of a handshake message.
pub const HANDSHAKE: u8 = 22;
/// Content type of payload, and of every encrypted record.
pub const APPLICATION_DATA: u8 = 23;
/// Level of an alert.
pub const WARNING: u8 = 1;
/// Description of the alert that ends one direction.
pub const CLOSE_NOTIFY: u8 = 0;
/// Description of an alert that some peers send before close_notify.
const USER_CANCELED: u8 = 90;
/// Bytes of a handshake message's header: type and length.
const MESSAGE_HEADER_BYTES: usize = 4;
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// A KeyUpdate that does not request one in return.
pub const KEY_UPDATE_MESSAGE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];

/// A protocol violation of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RecordViolation {
    /// The header is not that of an encrypted record.
    #[error("not a TLS 1.3 record")]
    NoRecord,
    /// Shorter than its tag and type.
    #[error("a record that is too short")]
    TooShort,
    /// More content than a record may have.
    #[error("a record that is too long")]
    TooLong,
    /// The decrypted record has only zeros.
    #[error("a record without a type")]
    NoType,
    /// A content type that is not allowed after the handshake.
    #[error("an unexpected TLS record")]
    UnexpectedRecord,
    /// An alert other than close_notify.
    #[error("the peer sent a TLS alert")]
    Alert,
    /// A handshake message that is not allowed after the handshake.
    #[error("an unexpected TLS message")]
    UnexpectedMessage,
    /// A malformed handshake message.
    #[error("a TLS message that cannot be read")]
    BadMessage,
    /// A record of another type in the middle of a handshake message.
    #[error("a TLS message that is interrupted by another record")]
    Interrupted,
    /// Bytes after a KeyUpdate in the same record, which has the old keys.
    #[error("a TLS message behind a change of keys")]
    BehindKeyUpdate,
    /// [`EMPTY_RECORDS_MAX`] was exceeded.
    #[error("too many records without payload")]
    TooManyEmpty,
}

/// Bytes after a record's header.
///
/// # Errors
/// The header is not that of a record that may follow a handshake.
pub fn sealed_bytes(header: [u8; HEADER_BYTES]) -> Result<usize, RecordViolation> {
    let [kind, major, _minor, high, low] = header;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if kind != APPLICATION_DATA || major != 3 {
        Err(RecordViolation::NoRecord)
    } else if length > SEALED_BYTES_MAX {
        Err(RecordViolation::TooLong)
    } else if length <= TAG_BYTES {
        Err(RecordViolation::TooShort)
    } else {
        Ok(length)
    }
}

/// Type and length of the content of a decrypted record. Type and padding follow the content.
///
/// # Errors
/// The record has no type, or too much content.
pub fn content(opened: &[u8]) -> Result<(u8, usize), RecordViolation> {
    let end = opened.iter().rposition(|byte| *byte != 0);
    let end = end.ok_or(RecordViolation::NoType)?;
    if opened.len() > PLAIN_BYTES_MAX + 1 {
        return Err(RecordViolation::TooLong);
    }
    let kind = opened.get(end).ok_or(RecordViolation::NoType)?;
    Ok((*kind, end))
}

/// The meaning of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meaning {
    /// The content is payload.
    Payload,
    /// Nothing to do: an empty record, tickets, or part of a message.
    Nothing,
    /// A KeyUpdate: all further records are encrypted with the next keys.
    NewKeys {
        /// The peer requests a KeyUpdate of the other direction, too.
        asks: bool,
    },
    /// A close_notify: the peer sends no more.
    GoodBye,
}

/// Reads the contents of one direction's records in order.
#[derive(Debug)]
pub struct ContentReader {
    is_client: bool,
    /// The start of an incomplete handshake message; at most [`MESSAGE_BYTES_MAX`] and its header.
    message: Vec<u8>,
    empty_records: u32,
}

impl ContentReader {
    /// A reader for a client, or for a server, which gets no tickets.
    #[must_use]
    pub fn new(is_client: bool) -> Self {
        Self {
            is_client,
            message: Vec::new(),
            empty_records: 0,
        }
    }

    /// Whether no handshake message is incomplete.
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        self.message.is_empty()
    }

    /// Reads the next record. After an error the connection cannot continue.
    ///
    /// # Errors
    /// The peer broke the protocol, or sent an alert.
    pub fn read(&mut self, kind: u8, content: &[u8]) -> Result<Meaning, RecordViolation> {
        if kind != HANDSHAKE && !self.is_at_boundary() {
            return Err(RecordViolation::Interrupted);
        }
        let meaning = match (kind, content) {
            (APPLICATION_DATA, []) => Meaning::Nothing,
            (APPLICATION_DATA, _) => {
                self.empty_records = 0;
                return Ok(Meaning::Payload);
            }
            // TLS 1.3 ignores the level.
            (ALERT, [_level, CLOSE_NOTIFY]) => return Ok(Meaning::GoodBye),
            (ALERT, [WARNING, USER_CANCELED]) => Meaning::Nothing,
            (ALERT, _) => return Err(RecordViolation::Alert),
            (HANDSHAKE, []) => return Err(RecordViolation::BadMessage),
            (HANDSHAKE, _) => self.read_messages(content)?,
            _ => return Err(RecordViolation::UnexpectedRecord),
        };
        self.empty_records += 1;
        if self.empty_records > EMPTY_RECORDS_MAX {
            return Err(RecordViolation::TooManyEmpty);
        }
        Ok(meaning)
    }

    /// A record may hold several messages, and a message may span several records.
    fn read_messages(&mut self, content: &[u8]) -> Result<Meaning, RecordViolation> {
        self.message.extend_from_slice(content);
        let all = std::mem::take(&mut self.message);
        let mut rest = &all[..];
        while let Some((&[kind, high, middle, low], behind)) =
            rest.split_first_chunk::<MESSAGE_HEADER_BYTES>()
        {
            let length = u32::from_be_bytes([0, high, middle, low]);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            // Checked before the body arrives, so that no body of a refused message is awaited.
            match kind {
                NEW_SESSION_TICKET if self.is_client && length <= MESSAGE_BYTES_MAX => (),
                KEY_UPDATE if length == 1 => (),
                NEW_SESSION_TICKET if self.is_client => return Err(RecordViolation::BadMessage),
                KEY_UPDATE => return Err(RecordViolation::BadMessage),
                _ => return Err(RecordViolation::UnexpectedMessage),
            }
            let Some((body, next)) = behind.split_at_checked(length) else {
                break;
            };
            match (kind, body) {
                (KEY_UPDATE, [asks @ 0..=1]) if next.is_empty() => {
                    return Ok(Meaning::NewKeys { asks: *asks == 1 });
                }
                (KEY_UPDATE, [0..=1]) => return Err(RecordViolation::BehindKeyUpdate),
                (NEW_SESSION_TICKET, ticket) if is_ticket(ticket) => rest = next,
                _ => return Err(RecordViolation::BadMessage),
            }
        }
        self.message = rest.to_vec();
        Ok(Meaning::Nothing)
    }
}

/// Whether `body` is a NewSessionTicket (section 4.6.1): lifetime, age, nonce, ticket, extensions.
fn is_ticket(body: &[u8]) -> bool {
    let fields = || {
        let (_lifetime_and_age, rest) = body.split_at_checked(8)?;
        let (nonce_length, rest) = rest.split_first()?;
        let (_nonce, rest) = rest.split_at_checked(usize::from(*nonce_length))?;
        let (ticket, rest) = vector(rest)?;
        let (extensions, rest) = vector(rest)?;
        Some(!ticket.is_empty() && are_extensions(extensions) && rest.is_empty())
    };
    fields().unwrap_or(false)
}

fn are_extensions(mut list: &[u8]) -> bool {
    while !list.is_empty() {
        let next = list
            .split_at_checked(2)
            .and_then(|(_kind, rest)| vector(rest));
        let Some((_data, rest)) = next else {
            return false;
        };
        list = rest;
    }
    true
}

/// Splits off a vector with a length prefix of two bytes; returns the vector and the rest.
fn vector(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))
}

#[cfg(test)]
mod tests;
