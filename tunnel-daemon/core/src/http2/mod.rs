//! The server's side of HTTP/2 (RFC 9113) for packet streams, without I/O and without a clock.
//!
//! A connection of a gRPC client carries one stream for each tunnel, and of HTTP/2 its tunnels need little: no push, no priorities,
//! no dynamic table for what this end sends. Bytes go in by [`Http2Server::receive`] and come out of [`Http2Server::output`]; in between
//! the owner takes calls, and each call its pieces.
//!
//! What a hostile client can make this end keep is bounded: bodies by the windows of as many streams as it may have, answers because
//! the owner reads no more while much output waits, header blocks by size and number of frames.

mod fields;
mod frame;
#[doc(hidden)]
pub mod fuzz;
mod hpack;
mod huffman;
mod receive;
mod request;
mod send;
mod stream;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};

use crate::wire::encode::MessageBuf;
use fields::FieldDecoder;
use frame::FrameHeader;
use request::LIST_BYTES_MAX;
pub use request::RequestHead;
use stream::Stream;
pub use stream::StreamEnd;

/// Frame types (RFC 9113, section 6).
const DATA: u8 = 0x0;
const PRIORITY_FRAME: u8 = 0x2;
const RST_STREAM: u8 = 0x3;
const SETTINGS: u8 = 0x4;
const PUSH_PROMISE: u8 = 0x5;
const PING: u8 = 0x6;
const GOAWAY: u8 = 0x7;
const WINDOW_UPDATE: u8 = 0x8;

const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;

/// Error codes (RFC 9113, section 7).
pub mod code {
    /// No fault.
    pub const NO_ERROR: u32 = 0x0;
    /// A rule of HTTP/2 was broken.
    pub const PROTOCOL_ERROR: u32 = 0x1;
    /// More was sent than a window allows.
    pub const FLOW_CONTROL_ERROR: u32 = 0x3;
    /// A frame came for a stream that had ended.
    pub const STREAM_CLOSED: u32 = 0x5;
    /// A frame of a wrong size.
    pub const FRAME_SIZE_ERROR: u32 = 0x6;
    /// The stream was not processed.
    pub const REFUSED_STREAM: u32 = 0x7;
    /// The stream is not needed any more.
    pub const CANCEL: u32 = 0x8;
    /// A header block cannot be decoded.
    pub const COMPRESSION_ERROR: u32 = 0x9;
    /// Excessive load.
    pub const ENHANCE_YOUR_CALM: u32 = 0xb;
}

/// Settings (RFC 9113, section 6.5.2).
const ENABLE_PUSH: u16 = 0x2;
const MAX_CONCURRENT_STREAMS: u16 = 0x3;
const INITIAL_WINDOW_SIZE: u16 = 0x4;
const MAX_FRAME_SIZE: u16 = 0x5;
const MAX_HEADER_LIST_SIZE: u16 = 0x6;

/// Window of connection and streams before any setting, and the largest window.
const DEFAULT_WINDOW: i64 = 65_535;
const WINDOW_MAX: i64 = (1 << 31) - 1;
/// Largest payload that a client may send: the smallest limit that there is, and what Go clients send.
const FRAME_BYTES_MAX: usize = 16_384;
/// Largest payload sent. Clients may allow more; then one stream would keep the others waiting for longer.
const SENT_FRAME_BYTES_MAX: usize = 16_384;
/// The connection's window is as large as HTTP/2 allows, so that a stalled stream never holds up the others, and opened again after
/// this many bytes.
const RETURN_AFTER_BYTES: u32 = 1 << 30;
/// Frames of one header block: what the largest list needs in full frames, and half as many again.
const BLOCK_FRAMES_MAX: usize = 24;
/// Streams of which this end remembers that it has closed them.
const CLOSED_MAX: usize = 256;
/// Changes of the window of streams. Go clients make fewer than ten.
const WINDOW_CHANGES_MAX: u32 = 1_000;
/// Bytes that clients may send on streams whose calls nobody has taken yet: these count in no budget.
const UNTAKEN_BYTES_MAX: usize = 128 * 1024;
/// Bytes that may wait in streams which nobody holds any more, in parts of the output; one such stream may always wait.
const DETACHED_SHARE: usize = 8;
/// Places in a list, beyond twice those that are needed, that streams may leave behind which are gone.
const LEFT_BEHIND_MAX: usize = 64;
/// A frame of less than this part of the memory around it is copied out of it.
const COPY_BELOW_SHARE: usize = 4;
/// Bytes of answers that may wait for other frames.
const ANSWERS_BYTES_MAX: usize = 64;

/// Opaque data of this end's PINGs.
const KEEPALIVE_PING: [u8; 8] = *b"adit-ask";
const DRAIN_PING: [u8; 8] = *b"adit-bye";

/// Id of a stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StreamId(u32);

/// Why a connection has to end. GOAWAY with this code is in the output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer broke HTTP/2: {why}")]
pub struct Http2Error {
    /// Error code; see [`code`].
    pub code: u32,
    /// The rule, in words for operators.
    pub why: &'static str,
}

fn broken(code: u32, why: &'static str) -> Http2Error {
    Http2Error { code, why }
}

/// What this end allows.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Calls at a time. A client may have as many streams again, to be told in its own terms why they are no tunnels: of a stream
    /// beyond what SETTINGS allow, many a client waits for the end of another one in silence.
    pub calls_max: u32,
    /// Bytes that a client may send on one stream before its call takes them.
    pub window_bytes: u32,
    /// Bytes of output beyond which streams wait for their turn.
    pub output_bytes: usize,
}

impl ServerLimits {
    fn streams_max(&self) -> u32 {
        self.calls_max.saturating_mul(2)
    }
}

/// A request, as its owner takes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Its stream.
    pub stream: StreamId,
    /// What it asks for.
    pub head: RequestHead,
    /// The connection has as many calls as it may: to be refused.
    pub is_excess: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Greeting {
    Preface,
    Settings,
    Done,
}

/// A header block whose last frame has not come.
#[derive(Debug)]
struct Block {
    stream: u32,
    ends_stream: bool,
    frames: usize,
    fragment: BytesMut,
}

/// The state of one client's connection.
#[derive(Debug)]
pub struct Http2Server {
    limits: ServerLimits,
    greeting: Greeting,
    streams: BTreeMap<u32, Box<Stream>>,
    last_stream: u32,
    /// The last stream that is taken, once the client was told.
    told_last: Option<u32>,
    closed: VecDeque<u32>,
    fields: FieldDecoder,
    block: Option<Block>,
    /// Calls that nobody has taken, and some that are gone.
    arrived: VecDeque<Arrival>,
    /// Number of the former, and the bytes of their bodies.
    untaken: usize,
    untaken_bytes: usize,
    cancelled: u32,
    out: BytesMut,
    answers: BytesMut,
    turns: VecDeque<u32>,
    /// Bytes that wait in streams which nobody holds.
    detached_bytes: usize,
    /// The client knows that no table is used for what is sent.
    has_sent_block: bool,
    send_window: i64,
    client_window: i64,
    window_changes: u32,
    client_frame_bytes: usize,
    receive_window: i64,
    unreturned: u32,
    /// Window of new streams in force, and one that the client has not acknowledged.
    own_window: i64,
    asked_window: Option<i64>,
    /// GOAWAY without a last stream was sent, and a PING behind it: streams may be on their way.
    is_draining: bool,
    has_pong: bool,
}

impl Http2Server {
    /// A connection before its first byte. SETTINGS are in the output.
    #[must_use]
    pub fn new(limits: ServerLimits) -> Self {
        let mut server = Self {
            limits,
            greeting: Greeting::Preface,
            streams: BTreeMap::new(),
            last_stream: 0,
            told_last: None,
            closed: VecDeque::new(),
            fields: FieldDecoder::default(),
            block: None,
            arrived: VecDeque::new(),
            untaken: 0,
            untaken_bytes: 0,
            cancelled: 0,
            out: BytesMut::new(),
            answers: BytesMut::new(),
            turns: VecDeque::new(),
            detached_bytes: 0,
            has_sent_block: false,
            send_window: DEFAULT_WINDOW,
            client_window: DEFAULT_WINDOW,
            window_changes: 0,
            client_frame_bytes: FRAME_BYTES_MAX,
            receive_window: WINDOW_MAX,
            unreturned: 0,
            own_window: DEFAULT_WINDOW,
            asked_window: Some(limits.window_bytes.into()),
            is_draining: false,
            has_pong: false,
        };
        let list = u32::try_from(LIST_BYTES_MAX).unwrap_or(u32::MAX);
        server.settings(&[
            (MAX_CONCURRENT_STREAMS, limits.streams_max()),
            (INITIAL_WINDOW_SIZE, limits.window_bytes),
            (MAX_HEADER_LIST_SIZE, list),
        ]);
        let more = u32::try_from(WINDOW_MAX - DEFAULT_WINDOW).unwrap_or(0);
        server.window_update(0, more);
        server
    }

    /// Takes all whole frames from `input`, and leaves the rest in it. `around`: bytes of the memory that `input` lies in.
    ///
    /// # Errors
    /// The connection has to end, once the output is written.
    pub fn receive(&mut self, input: &mut BytesMut, around: usize) -> Result<(), Http2Error> {
        let result = self.frames(input, around);
        if let Err(error) = &result {
            let last = self.told_last.unwrap_or(self.last_stream);
            self.goaway(last, error.code);
        }
        result
    }
}

/// What the owner of the connection does.
impl Http2Server {
    /// Whether the client has sent its preface and settings.
    #[must_use]
    pub fn is_greeted(&self) -> bool {
        self.greeting == Greeting::Done
    }

    /// The next call. The owner has to [detach](Self::detach) it in the end.
    pub fn next_call(&mut self) -> Option<Arrival> {
        loop {
            let arrival = self.arrived.pop_front()?;
            if let Some(stream) = self.streams.get_mut(&arrival.stream.0) {
                stream.is_taken = true;
                self.untaken -= 1;
                self.untaken_bytes -= stream.counted_untaken();
                if self.arrived.is_empty() {
                    // A burst leaves no memory behind.
                    self.arrived = VecDeque::new();
                }
                return Some(arrival);
            }
        }
    }

    /// Calls that the client has reset before they were taken, since this was last asked.
    pub fn take_cancelled(&mut self) -> u32 {
        std::mem::take(&mut self.cancelled)
    }

    /// Number of streams.
    #[cfg(test)]
    fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Bytes to be written, from the front. Streams have their turns until there are enough.
    pub fn output(&mut self) -> &mut BytesMut {
        self.fill();
        if !self.out.is_empty() && !self.answers.is_empty() {
            self.release_answers();
        }
        &mut self.out
    }

    /// Whether so much output waits that the owner should neither read nor take calls: twice what streams may make.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.out.len() >= 2 * self.limits.output_bytes + SENT_FRAME_BYTES_MAX
    }

    /// Whether calls wait that have sent more than a first message.
    #[must_use]
    pub fn has_untaken_bytes(&self) -> bool {
        self.untaken_bytes > 0
    }

    /// Whether answers to PING wait for other frames to leave with.
    #[must_use]
    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Answers wait no longer.
    pub fn release_answers(&mut self) {
        let answers = std::mem::take(&mut self.answers);
        self.out.extend_from_slice(&answers);
    }

    /// Sends a PING; [`Self::take_pong`] tells of its answer.
    pub fn ask(&mut self) {
        self.has_pong = false;
        head(&mut self.out, 8, PING, 0, 0);
        self.out.put_slice(&KEEPALIVE_PING);
    }

    /// Whether the PING has been answered.
    pub fn take_pong(&mut self) -> bool {
        std::mem::take(&mut self.has_pong)
    }

    /// Tells the client to open no more streams. Those that it has go on, and those that are on their way (RFC 9113, section 6.8).
    pub fn drain(&mut self) {
        if !std::mem::replace(&mut self.is_draining, true) {
            self.goaway(u32::MAX >> 1, code::NO_ERROR);
            head(&mut self.out, 8, PING, 0, 0);
            self.out.put_slice(&DRAIN_PING);
        }
    }

    /// The client is taken to have opened its last stream. Without effect unless it was told, or a second time.
    pub fn drained(&mut self) {
        if self.is_draining && self.told_last.is_none() {
            self.told_last = Some(self.last_stream);
            self.goaway(self.last_stream, code::NO_ERROR);
        }
    }

    /// Whether the client knows that the connection ends, and no stream is left.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.told_last.is_some() && self.streams.is_empty()
    }

    /// Tells all calls that the connection is over.
    pub fn gone(&mut self) {
        self.arrived.clear();
        (self.untaken, self.untaken_bytes) = (0, 0);
        for stream in self.streams.values_mut() {
            stream.over(StreamEnd::Gone);
        }
    }

    /// Makes windows of streams as large as this; false while the client has not acknowledged the last size.
    pub fn resize_windows(&mut self, bytes: u32) -> bool {
        if self.asked_window.is_some() {
            return false;
        }
        self.asked_window = Some(bytes.into());
        self.settings(&[(INITIAL_WINDOW_SIZE, bytes)]);
        true
    }
}

/// What a call does.
impl Http2Server {
    /// The next piece of the client's body; `None` at its end.
    ///
    /// # Errors
    /// The stream was reset, or the connection is over.
    pub fn poll_data(
        &mut self,
        id: StreamId,
        cx: &Context<'_>,
    ) -> Poll<Option<Result<Bytes, StreamEnd>>> {
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return Poll::Ready(Some(Err(StreamEnd::Gone)));
        };
        if let Some(end) = stream.end {
            return Poll::Ready(Some(Err(end)));
        }
        match stream.next_piece() {
            Some(piece) => Poll::Ready(Some(Ok(piece))),
            None if stream.has_ended => Poll::Ready(None),
            None => stream.wait(cx),
        }
    }

    /// The call has taken bytes of the body: the client may send more.
    pub fn release(&mut self, id: StreamId, bytes: usize) {
        let half = u32::try_from(self.own_window / 2).unwrap_or(0);
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return;
        };
        stream.unreturned = stream
            .unreturned
            .saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        if stream.unreturned > half && !stream.has_ended && stream.end.is_none() {
            let more = std::mem::take(&mut stream.unreturned);
            stream.receive_window += i64::from(more);
            self.window_update(id.0, more);
        }
    }

    /// How the stream ended, once it was reset or the connection is over.
    pub fn poll_end(&mut self, id: StreamId, cx: &Context<'_>) -> Poll<StreamEnd> {
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return Poll::Ready(StreamEnd::Gone);
        };
        match stream.end {
            Some(end) => Poll::Ready(end),
            None => stream.wait(cx),
        }
    }

    /// Sends a message, and before the first one the response's headers. It waits here while the client's windows are closed or much
    /// output waits.
    pub fn send(&mut self, id: StreamId, message: MessageBuf) {
        self.send_head(id);
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return;
        };
        if stream.end.is_none() {
            stream.queue(message);
            self.turn(id.0);
            // Without others nothing is gained by waiting.
            if self.turns.len() == 1 {
                self.fill();
            }
        }
    }

    fn send_head(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id.0)
            && stream.end.is_none()
            && !std::mem::replace(&mut stream.has_answered, true)
        {
            let mut block = BytesMut::with_capacity(24);
            request::accepted(&mut block);
            self.header_frame(id.0, &block, false);
        }
    }

    /// Completes when all messages of the stream are in the output.
    pub fn poll_drained(&mut self, id: StreamId, cx: &Context<'_>) -> Poll<Result<(), StreamEnd>> {
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return Poll::Ready(Err(StreamEnd::Gone));
        };
        match stream.end {
            Some(end) => Poll::Ready(Err(end)),
            None if stream.is_drained() => Poll::Ready(Ok(())),
            None => {
                stream.waits_for_room = true;
                stream.wait(cx)
            }
        }
    }

    /// Whether all messages of the stream are in the output.
    #[must_use]
    pub fn is_drained(&self, id: StreamId) -> bool {
        let stream = self.streams.get(&id.0);
        stream.is_none_or(|stream| stream.is_drained())
    }

    /// Ends the call with a status (of gRPC, a number) behind its last message. Resets the stream if the client's window has no room for
    /// what waits.
    pub fn finish(&mut self, id: StreamId, status: &str, message: &str) {
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return;
        };
        if stream.end.is_some() || stream.trailers.is_some() {
            return;
        }
        let room = stream.send_window.min(self.send_window).max(0);
        if usize::try_from(room).is_ok_and(|room| stream.pending_bytes() > room) {
            return self.reset(id);
        }
        let mut block = BytesMut::new();
        if !std::mem::replace(&mut stream.has_answered, true) {
            request::accepted(&mut block);
        }
        request::field("grpc-status", status.as_bytes(), &mut block);
        if !message.is_empty() {
            request::field("grpc-message", message.as_bytes(), &mut block);
        }
        stream.trailers = Some(block.freeze());
        self.write_trailers(id.0);
    }

    /// Answers a request that is no call with this status of HTTP.
    pub fn refuse(&mut self, id: StreamId, status: &str) {
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return;
        };
        let mut block = BytesMut::new();
        request::only_status(status, &mut block);
        stream.has_answered = true;
        stream.trailers = Some(block.freeze());
        self.write_trailers(id.0);
    }

    /// Cancels the stream.
    pub fn reset(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return;
        };
        if stream.end.is_none() {
            stream.over(StreamEnd::Reset(code::CANCEL));
            self.rst_stream(id.0, code::CANCEL);
        }
    }

    /// The call is over: the stream stays only until its last bytes have gone, and is cancelled if it was not finished, or if too many
    /// bytes wait in such streams.
    pub fn detach(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id.0) else {
            return;
        };
        if stream.end.is_none() && stream.trailers.is_some() {
            let waits = stream.pending_bytes();
            let most = DETACHED_SHARE * self.limits.output_bytes;
            if self.detached_bytes == 0 || self.detached_bytes + waits <= most {
                self.detached_bytes += waits;
                stream.detached_bytes = waits;
                stream.is_detached = true;
                return;
            }
        }
        if !stream.is_finished {
            self.reset(id);
        }
        self.remove(id.0);
    }
}

fn head(out: &mut BytesMut, payload_len: usize, kind: u8, flags: u8, stream: u32) {
    FrameHeader {
        payload_len,
        kind,
        flags,
        stream,
    }
    .write(out);
}
