//! Netlink messages as bytes: netlink(7).

use rustix::io::Errno;

/// Flags of requests.
pub(super) const REQUEST: u16 = 0x1;
pub(super) const ACK: u16 = 0x4;
pub(super) const DUMP: u16 = 0x300;
pub(super) const REPLACE: u16 = 0x100;
pub(super) const EXCLUSIVE: u16 = 0x200;
pub(super) const CREATE: u16 = 0x400;
/// Flag of an answer that others follow.
const MULTI: u16 = 0x2;
/// Kinds of messages that end an answer.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Length of `struct nlmsghdr`, and of `struct rtattr`.
const HEAD: usize = 16;
const ATTRIBUTE_HEAD: usize = 4;
/// Messages and attributes begin at multiples of this.
const ALIGN: usize = 4;

/// A request.
#[derive(Debug)]
pub(super) struct Message {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
}

impl Message {
    /// A request with the fixed part of its kind.
    pub(super) fn new(kind: u16, flags: u16, head: &[u8]) -> Self {
        Self {
            kind,
            flags,
            body: head.to_vec(),
        }
    }

    /// Adds an attribute.
    pub(super) fn with(mut self, kind: u16, value: &[u8]) -> Self {
        self.body.extend(attribute(kind, value));
        self
    }

    /// Adds an attribute that ends with a zero byte.
    pub(super) fn with_text(self, kind: u16, text: &str) -> Self {
        let value: Vec<u8> = text.bytes().chain([0]).collect();
        self.with(kind, &value)
    }

    /// Its bytes, under a sequence number.
    pub(super) fn numbered(self, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(HEAD + self.body.len()).unwrap_or(u32::MAX);
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(self.flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]); // To the kernel.
        bytes.extend(self.body);
        bytes
    }
}

/// An attribute with its padding.
pub(super) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(ATTRIBUTE_HEAD + value.len()).unwrap_or(u16::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
    bytes
}

/// The body of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Answer<'a>(pub(super) &'a [u8]);

impl Answer<'_> {
    /// The number at an offset.
    pub(super) fn number(self, at: usize) -> Option<u32> {
        let bytes = self.0.get(at..at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }
}

/// A part of what the kernel answers.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Part<'a> {
    /// An answer, and whether more follow.
    Answer {
        /// Without the head of the message.
        body: Answer<'a>,
        /// Whether more answers, or an end, follow.
        more: bool,
    },
    /// The request is done, or has failed.
    End(Option<Errno>),
}

/// The parts in received bytes, each with the sequence number of its request; `None`: the bytes end within a part.
pub(super) fn parts(mut bytes: &[u8]) -> impl Iterator<Item = Option<(u32, Part<'_>)>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let Some((sequence, part, length)) = part(bytes) else {
            bytes = &[];
            return Some(None);
        };
        let next = length.next_multiple_of(ALIGN);
        bytes = bytes.get(next..).unwrap_or_default();
        Some(Some((sequence, part)))
    })
}

fn part(bytes: &[u8]) -> Option<(u32, Part<'_>, usize)> {
    let head = Answer(bytes);
    let length = usize::try_from(head.number(0)?).ok()?;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let flags = u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?);
    let body = Answer(bytes.get(HEAD..length)?);
    let part = match kind {
        // Errors are negative, and 0 is an acknowledgement. A list that ends has such a number, too.
        ERROR | DONE => match body.number(0)?.cast_signed() {
            0 => Part::End(None),
            error => Part::End(Some(Errno::from_raw_os_error(error.wrapping_neg()))),
        },
        _ => Part::Answer {
            body,
            more: flags & MULTI != 0,
        },
    };
    Some((head.number(8)?, part, length))
}

/// Attributes behind the fixed part of an answer.
#[derive(Clone, Copy)]
pub(super) struct Attributes<'a>(pub(super) &'a [u8]);

impl<'a> Attributes<'a> {
    /// The value of the first attribute of this kind.
    pub(super) fn of(self, kind: u16) -> Option<&'a [u8]> {
        let mut rest = self.0;
        loop {
            let length = u16::from_ne_bytes(rest.get(..2)?.try_into().ok()?);
            let found = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?);
            let value = rest.get(ATTRIBUTE_HEAD..usize::from(length))?;
            if found == kind {
                return Some(value);
            }
            rest = rest.get(usize::from(length).next_multiple_of(ALIGN)..)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let message = |flags| Message::new(16, flags, &[7; 8]);
        let mut bytes = message(MULTI)
            .with(1, b"one")
            .with_text(2, "two!")
            .numbered(5);
        assert_eq!(bytes.len(), 16 + 8 + 8 + 12);
        bytes.extend(message(0).numbered(6));
        let read: Vec<_> = parts(&bytes).map(Option::unwrap).collect();
        let (5, Part::Answer { body, more: true }) = &read[0] else {
            panic!("{read:?}")
        };
        let attributes = Attributes(&body.0[8..]);
        assert_eq!(attributes.of(1), Some(&b"one"[..]));
        assert_eq!(attributes.of(2), Some(&b"two!\0"[..]));
        assert_eq!(attributes.of(3), None);
        let body = Answer(&[7; 8]);
        assert_eq!(read[1], (6, Part::Answer { body, more: false }));
    }

    #[test]
    fn errors_and_acknowledgements_end_a_request() {
        let end = |number: i32| Message::new(ERROR, 0, &number.to_ne_bytes()).numbered(1);
        for (number, ended) in [
            (0, None),
            (-1, Some(Errno::PERM)),
            (-17, Some(Errno::EXIST)),
        ] {
            let bytes = end(number);
            let read: Vec<_> = parts(&bytes).collect();
            assert_eq!(read, [Some((1, Part::End(ended)))]);
        }
        let done = Message::new(DONE, MULTI, &[0; 4]).numbered(2);
        assert_eq!(parts(&done).next(), Some(Some((2, Part::End(None)))));
    }

    #[test]
    fn bytes_that_end_too_early_are_told() {
        let whole = Message::new(ERROR, 0, &[0; 4]).numbered(1);
        for length in 1..whole.len() {
            let read: Vec<_> = parts(&whole[..length]).collect();
            assert_eq!(read, [None], "{length}");
        }
        let attribute = attribute(1, b"value");
        for length in 0..9 {
            assert_eq!(Attributes(&attribute[..length]).of(1), None, "{length}");
        }
        // A length of 0 does not go round in circles.
        assert_eq!(Attributes(&[0; 8]).of(1), None);
        assert_eq!(parts(&[0; 16]).next(), Some(None));
    }
}
