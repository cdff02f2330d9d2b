//! The filter: walks frames, collects header blocks, replaces refused authorities.

use bytes::{Buf, BytesMut};

use super::{
    frame::{CONTINUATION, END_HEADERS, FrameHeader, HEADER_LEN, HEADERS, HeaderBlock, PREFACE},
    hpack::{self, HpackError, Tracker},
};

/// Limits of the memory that a client can make this filter use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Octets of one header block as received. Frame headers and padding count, which also bounds a stream of empty
    /// CONTINUATION frames.
    pub header_block_len: usize,
    /// `SETTINGS_HEADER_TABLE_SIZE` that `h2` announces.
    pub header_table_len: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_block_len: 256 * 1024,
            header_table_len: 4096,
        }
    }
}

/// An error after which the connection must be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RewriteError {
    /// One request's headers are longer than the limit.
    #[error(
        "HTTP/2 header block of {len} octets or more exceeds the limit of {limit}; send less metadata"
    )]
    HeaderBlockTooLarge {
        /// Octets announced or received so far.
        len: usize,
        /// [`Limits::header_block_len`].
        limit: usize,
    },
}

/// Why the filter passes the rest of a connection unchanged.
///
/// The bytes violate RFC 9113 or RFC 7541, so the filter can no longer interpret the stream. Instead of failing, the filter
/// passes the bytes on unchanged: `h2` ends the connection with the error code that the RFC requires, or accepts the bytes if
/// `h2` is more lenient. No component routes or authorises by `:authority`, so unfiltered bytes do no harm.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HandOver {
    /// The first bytes are not the HTTP/2 connection preface.
    #[error("connection does not start with the HTTP/2 preface")]
    NoPreface,
    /// The padding or priority of a HEADERS frame does not fit in it.
    #[error("HEADERS frame is shorter than its padding and priority")]
    BadHeadersFrame,
    /// Another frame came before the header block was complete.
    #[error("header block is interrupted by another frame")]
    Interrupted,
    /// The header block cannot be decoded.
    #[error(transparent)]
    Hpack(#[from] HpackError),
}

/// Where in the stream the next byte belongs.
#[derive(Debug)]
enum State {
    /// Number of preface bytes that have passed.
    Preface(usize),
    /// A frame header is next.
    Boundary,
    /// Number of payload bytes that pass unread.
    Payload(usize),
    /// An incomplete header block and its octets so far; a CONTINUATION of its stream must follow.
    Block(HeaderBlock, usize),
    /// All bytes pass unchanged.
    Open(HandOver),
}

/// Replaces the `:authority` values that the `http` crate would refuse, in one client's stream of one HTTP/2 connection.
///
/// First give received bytes to [`pass`](Self::pass), which copies nothing. Only the rest, which starts with a header
/// block or an incomplete frame header, goes through [`rewrite`](Self::rewrite).
#[derive(Debug)]
pub struct AuthorityRewriter {
    state: State,
    tracker: Tracker,
    limits: Limits,
}

impl Default for AuthorityRewriter {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

impl AuthorityRewriter {
    /// A filter at the start of a connection.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            state: State::Preface(0),
            tracker: Tracker::new(limits.header_table_len),
            limits,
        }
    }

    /// Why all further bytes pass unchanged, if they do.
    #[must_use]
    pub fn handed_over(&self) -> Option<HandOver> {
        match self.state {
            State::Open(why) => Some(why),
            _ => None,
        }
    }

    /// Whether the next bytes belong to a header block, so that [`pass`](Self::pass) would return zero.
    #[must_use]
    pub fn is_in_block(&self) -> bool {
        matches!(self.state, State::Block(..))
    }

    /// Returns the number of leading bytes of `chunk` that pass unchanged. Give the rest and all bytes after it to
    /// [`rewrite`](Self::rewrite).
    pub fn pass(&mut self, chunk: &[u8]) -> usize {
        let mut at = 0;
        while let Some(rest) = chunk.get(at..).filter(|rest| !rest.is_empty()) {
            match &mut self.state {
                State::Open(_) => return chunk.len(),
                State::Block(..) => return at,
                State::Payload(left) => {
                    let taken = rest.len().min(*left);
                    at += taken;
                    *left -= taken;
                    if *left == 0 {
                        self.state = State::Boundary;
                    }
                }
                State::Boundary => match FrameHeader::read(rest) {
                    Some(header) if header.kind != HEADERS => {
                        at += HEADER_LEN;
                        self.state = Self::before_payload(header);
                    }
                    _ => return at,
                },
                State::Preface(seen) => {
                    let wanted = PREFACE.get(*seen..).unwrap_or_default();
                    let taken = rest.len().min(wanted.len());
                    if rest.get(..taken) != wanted.get(..taken) {
                        self.state = State::Open(HandOver::NoPreface);
                        continue;
                    }
                    at += taken;
                    *seen += taken;
                    if *seen == PREFACE.len() {
                        self.state = State::Boundary;
                    }
                }
            }
        }
        at
    }

    /// Moves all complete frames from `input` to the end of `output`. An incomplete frame header or header block frame
    /// stays in `input`: append more bytes and call again.
    ///
    /// # Errors
    ///
    /// A header block exceeds the limit. Close the connection without reading `output`.
    pub fn rewrite(
        &mut self,
        input: &mut BytesMut,
        output: &mut BytesMut,
    ) -> Result<(), RewriteError> {
        loop {
            let passed = self.pass(input);
            if passed > 0 {
                output.unsplit(input.split_to(passed));
            }
            let Some(header) = FrameHeader::read(input) else {
                return Ok(());
            };
            let block_len = self.block_len() + header.frame_len();
            if self.is_header_frame(header) {
                if block_len > self.limits.header_block_len {
                    let limit = self.limits.header_block_len;
                    return Err(RewriteError::HeaderBlockTooLarge {
                        len: block_len,
                        limit,
                    });
                }
                if input.len() < header.frame_len() {
                    return Ok(());
                }
            }
            self.state = match std::mem::replace(&mut self.state, State::Boundary) {
                State::Block(block, _) if block.is_continued_by(header) => {
                    self.continue_block(block, block_len, header, input, output)
                }
                State::Block(block, _) => {
                    block.write(false, output);
                    State::Open(HandOver::Interrupted)
                }
                State::Boundary => self.open_block(header, input, output),
                other => other,
            };
        }
    }

    fn before_payload(header: FrameHeader) -> State {
        match header.payload_len {
            0 => State::Boundary,
            left => State::Payload(left),
        }
    }

    /// Octets of the incomplete block.
    fn block_len(&self) -> usize {
        match self.state {
            State::Block(_, len) => len,
            _ => 0,
        }
    }

    /// Whether the frame is processed only once it is complete.
    fn is_header_frame(&self, header: FrameHeader) -> bool {
        match &self.state {
            State::Block(block, _) => block.is_continued_by(header),
            _ => header.kind == HEADERS,
        }
    }

    /// Takes a complete HEADERS frame from `input`.
    fn open_block(
        &mut self,
        header: FrameHeader,
        input: &mut BytesMut,
        output: &mut BytesMut,
    ) -> State {
        // Most frames need no change, so the original frame is kept and passed on with its padding.
        let payload = input
            .get(HEADER_LEN..header.frame_len())
            .unwrap_or_default();
        let Some(mut block) = HeaderBlock::open(header, BytesMut::from(payload)) else {
            return State::Open(HandOver::BadHeadersFrame);
        };
        let original = input.split_to(header.frame_len());
        if !header.has(END_HEADERS) {
            return State::Block(block, original.len());
        }
        match self.tracker.follow(&block.fragment) {
            Ok(edits) if edits.is_empty() => {
                output.unsplit(original);
                State::Boundary
            }
            Ok(edits) => {
                block.fragment = hpack::apply(&block.fragment, &edits);
                block.write(true, output);
                State::Boundary
            }
            Err(why) => {
                output.unsplit(original);
                State::Open(HandOver::Hpack(why))
            }
        }
    }

    /// Takes a complete CONTINUATION frame from `input`.
    fn continue_block(
        &mut self,
        mut block: HeaderBlock,
        block_len: usize,
        header: FrameHeader,
        input: &mut BytesMut,
        output: &mut BytesMut,
    ) -> State {
        debug_assert_eq!(header.kind, CONTINUATION, "checked by is_continued_by");
        input.advance(HEADER_LEN);
        block
            .fragment
            .extend_from_slice(&input.split_to(header.payload_len));
        if !header.has(END_HEADERS) {
            return State::Block(block, block_len);
        }
        let followed = self.tracker.follow(&block.fragment);
        if let Ok(edits) = &followed
            && !edits.is_empty()
        {
            block.fragment = hpack::apply(&block.fragment, edits);
        }
        block.write(true, output);
        match followed {
            Ok(_edits) => State::Boundary,
            Err(why) => State::Open(HandOver::Hpack(why)),
        }
    }
}

/// For the fuzz target and the test that replays its corpus.
///
/// The first byte sets the chunk size of the rest, the second whether the preface is prepended.
///
/// # Panics
///
/// When the output depends on the chunk size, or a second filter finds values to replace in the output.
#[doc(hidden)]
pub fn fuzz_entry(data: &[u8]) {
    let [cut, with_preface, stream @ ..] = data else {
        return;
    };
    let mut bytes = if with_preface & 1 == 1 {
        PREFACE.to_vec()
    } else {
        Vec::new()
    };
    bytes.extend_from_slice(stream);
    let limits = Limits {
        header_block_len: 4096,
        ..Limits::default()
    };
    let whole = filtered(limits, bytes.chunks(bytes.len().max(1)));
    let pieces = filtered(limits, bytes.chunks(usize::from(*cut) + 1));
    assert_eq!(whole, pieces, "the output depends on how the input is cut");
    if let Ok(once) = whole {
        let roomy = Limits {
            header_block_len: 1 << 20,
            ..limits
        };
        let twice = filtered(roomy, once.chunks(once.len().max(1)));
        assert_eq!(
            twice.as_ref(),
            Ok(&once),
            "the output still holds something to replace"
        );
    }
}

/// The output of a new filter for `chunks`, without incomplete frames.
fn filtered<'a>(
    limits: Limits,
    chunks: impl Iterator<Item = &'a [u8]>,
) -> Result<BytesMut, RewriteError> {
    let mut rewriter = AuthorityRewriter::new(limits);
    let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
    for chunk in chunks {
        input.extend_from_slice(chunk);
        rewriter.rewrite(&mut input, &mut output)?;
    }
    Ok(output)
}
