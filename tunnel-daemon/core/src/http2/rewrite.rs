//! The filter itself: walks frames, collects header blocks, replaces refused authorities.

use bytes::{Buf, BytesMut};

use super::{
    frame::{CONTINUATION, END_HEADERS, FrameHeader, HEADER_LEN, HEADERS, HeaderBlock, PREFACE},
    hpack::{self, HpackError, Tracker},
};

/// What a client may make this filter hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Octets of one header block as it comes, frame headers and padding included, so that a stream of empty
    /// CONTINUATION frames ends too.
    pub header_block_len: usize,
    /// `SETTINGS_HEADER_TABLE_SIZE` that the HTTP/2 library behind this filter announces.
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

/// The connection has to be closed.
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

/// Why the rest of a connection passes untouched.
///
/// The bytes are not what RFC 9113 and RFC 7541 allow, so the filter can no longer know what they mean. It
/// gives them on as they came instead of failing: `h2` reads the same bytes, ends the connection with the
/// error code that the RFC asks for, and where it is more lenient than this filter the client loses nothing.
/// Nobody routes or authorises by `:authority`, so bytes that pass unseen can do no harm.
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
    /// So many bytes of the preface have passed.
    Preface(usize),
    /// Next is a frame header.
    Boundary,
    /// Next are so many bytes of a payload nobody looks at.
    Payload(usize),
    /// A header block is incomplete and the CONTINUATION of its stream must follow; with the octets so far.
    Block(HeaderBlock, usize),
    /// Everything passes.
    Open(HandOver),
}

/// Replaces, in what one client sends on one HTTP/2 connection, the `:authority` values that the `http` crate
/// would refuse.
///
/// First offer what arrived to [`pass`](Self::pass), which leaves payloads where they are. Only the rest, which
/// starts with a header block or an incomplete frame header, goes through [`rewrite`](Self::rewrite).
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

    /// Why everything passes untouched from here on, if it does.
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

    /// Takes the leading bytes of `chunk` that go on unchanged and returns how many they are. The rest is for
    /// [`rewrite`](Self::rewrite), with whatever follows it.
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

    /// Moves everything that is complete from `input` to the end of `output`. An incomplete frame header or
    /// frame of a header block stays in `input`: call again with more bytes behind it.
    ///
    /// # Errors
    ///
    /// A header block beyond the limit; the connection has to be closed, without reading `output`.
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

    /// Whether the frame has to be there as a whole before anything is decided.
    fn is_header_frame(&self, header: FrameHeader) -> bool {
        match &self.state {
            State::Block(block, _) => block.is_continued_by(header),
            _ => header.kind == HEADERS,
        }
    }

    /// Takes a whole HEADERS frame off `input`.
    fn open_block(
        &mut self,
        header: FrameHeader,
        input: &mut BytesMut,
        output: &mut BytesMut,
    ) -> State {
        // Most frames need no change, so the original is kept and goes on as it came, padding and all.
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

    /// Takes a whole CONTINUATION frame off `input`.
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
/// The first byte is how the rest is cut, the second adds the preface or leaves it out.
///
/// # Panics
///
/// When the output depends on the cuts, or a second filter behind the first finds anything left to replace.
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

/// What a fresh filter makes of `chunks`, without what it still waits to complete.
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
