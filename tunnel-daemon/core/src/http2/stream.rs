//! One stream of a client: what it has sent, and what waits to be sent to it.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use bytes::{Buf as _, Bytes, BytesMut};

use crate::wire::encode::MessageBuf;

/// Smaller pieces of DATA are joined while they wait: each would take a place of its own.
const JOIN_BELOW_BYTES: usize = 1024;
/// Bytes of a stream that do not count while nobody has taken it.
const UNTAKEN_FREE_BYTES: usize = 1024;

/// How the client, or this end for a fault of the client, ended a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamEnd {
    /// Reset with this error code (RFC 9113, section 7).
    Reset(u32),
    /// The connection is over.
    Gone,
}

/// The state of one stream.
#[derive(Debug)]
pub(super) struct Stream {
    /// Bytes that this end may send on the stream; less than none after the client has made its windows smaller.
    pub(super) send_window: i64,
    /// Bytes that the client may send on the stream; less than none after this end has made its windows smaller.
    pub(super) receive_window: i64,
    /// Bytes taken by the call that the client does not know of.
    pub(super) unreturned: u32,
    /// Bytes that the rest of the body has, if the request said so.
    pub(super) content_left: Option<u64>,
    inbox: VecDeque<Bytes>,
    /// Small pieces behind those of the inbox.
    small: BytesMut,
    /// The client sends no more.
    pub(super) has_ended: bool,
    pub(super) end: Option<StreamEnd>,
    pub(super) has_answered: bool,
    pending: VecDeque<MessageBuf>,
    /// The header block behind the last message.
    pub(super) trailers: Option<Bytes>,
    /// They have gone.
    pub(super) is_finished: bool,
    /// A call holds the stream, or has held it.
    pub(super) is_taken: bool,
    /// Bytes that came before.
    pub(super) untaken_bytes: usize,
    /// The stream is in the list of turns.
    pub(super) is_queued: bool,
    /// Nobody holds the stream: it stays until its last bytes have gone.
    pub(super) is_detached: bool,
    /// Those of its bytes that wait.
    pub(super) detached_bytes: usize,
    /// The call waits until its messages have left.
    pub(super) waits_for_room: bool,
    waker: Option<Waker>,
}

impl Stream {
    pub(super) fn new(send_window: i64, receive_window: i64) -> Self {
        Self {
            send_window,
            receive_window,
            unreturned: 0,
            content_left: None,
            inbox: VecDeque::new(),
            small: BytesMut::new(),
            has_ended: false,
            end: None,
            has_answered: false,
            pending: VecDeque::new(),
            trailers: None,
            is_finished: false,
            is_taken: false,
            untaken_bytes: 0,
            is_queued: false,
            is_detached: false,
            detached_bytes: 0,
            waits_for_room: false,
            waker: None,
        }
    }

    /// Keeps a piece of the client's body.
    pub(super) fn receive(&mut self, piece: Bytes) {
        let waits = !self.inbox.is_empty() || !self.small.is_empty();
        if waits && piece.len() < JOIN_BELOW_BYTES {
            self.small.extend_from_slice(&piece);
        } else if !piece.is_empty() {
            if !self.small.is_empty() {
                self.inbox.push_back(self.small.split().freeze());
            }
            self.inbox.push_back(piece);
        }
    }

    pub(super) fn next_piece(&mut self) -> Option<Bytes> {
        let piece = self.inbox.pop_front();
        piece.or_else(|| {
            let small = std::mem::take(&mut self.small);
            (!small.is_empty()).then(|| small.freeze())
        })
    }

    /// Ends the stream for its call, which sends nothing more.
    pub(super) fn over(&mut self, end: StreamEnd) {
        self.end.get_or_insert(end);
        self.pending.clear();
        self.inbox.clear();
        self.small = BytesMut::new();
        self.trailers = None;
        self.wake();
    }

    pub(super) fn queue(&mut self, message: MessageBuf) {
        if message.has_remaining() {
            self.pending.push_back(message);
        }
    }

    /// Whether all messages have left this stream.
    pub(super) fn is_drained(&self) -> bool {
        self.pending.is_empty()
    }

    /// Appends up to `max` bytes of the first message to `out`.
    pub(super) fn write(&mut self, max: usize, out: &mut BytesMut) {
        let Some(message) = self.pending.front_mut() else {
            return;
        };
        let mut left = max.min(message.remaining());
        while left > 0 {
            let chunk = message.chunk();
            let chunk = chunk.get(..left).unwrap_or(chunk);
            let copied = chunk.len();
            out.extend_from_slice(chunk);
            message.advance(copied);
            left -= copied;
        }
        if !message.has_remaining() {
            self.pending.pop_front();
            if self.pending.is_empty() && std::mem::take(&mut self.waits_for_room) {
                self.wake();
            }
        }
    }

    /// Bytes that came before the stream was taken, as far as they count: its first message does not.
    pub(super) fn counted_untaken(&self) -> usize {
        self.untaken_bytes.saturating_sub(UNTAKEN_FREE_BYTES)
    }

    /// Bytes of all messages that wait.
    pub(super) fn pending_bytes(&self) -> usize {
        self.pending.iter().map(MessageBuf::remaining).sum()
    }

    /// Bytes of the first message that wait.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.pending.front().map_or(0, MessageBuf::remaining)
    }

    pub(super) fn wait<T>(&mut self, cx: &Context<'_>) -> Poll<T> {
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => self.waker = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    pub(super) fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}
