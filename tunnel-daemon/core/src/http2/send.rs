//! What is sent to a client: streams take turns of one frame, and what no window keeps back goes at once.

use bytes::BufMut as _;

use super::frame::{END_HEADERS, HEADER_LEN, HEADERS};
use super::request;
use super::stream::Stream;
use super::*;

impl Http2Server {
    pub(super) fn fill(&mut self) {
        while self.out.len() < self.limits.output_bytes && self.send_window > 0 {
            let Some(id) = self.turns.pop_front() else {
                return;
            };
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.is_queued = false;
                self.write_frame(id);
                self.turn(id);
            }
        }
    }

    /// One frame of a stream that may send, and its trailers if that was the last.
    fn write_frame(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let most = self
            .client_frame_bytes
            .min(SENT_FRAME_BYTES_MAX)
            .min(stream.waiting_bytes());
        let room = stream.send_window.min(self.send_window);
        let bytes = usize::try_from(room).unwrap_or(0).min(most);
        if bytes > 0 {
            stream.send_window -= bytes as i64;
            self.send_window -= bytes as i64;
            self.out.reserve(HEADER_LEN + bytes);
            head(&mut self.out, bytes, DATA, 0, id);
            stream.write(bytes, &mut self.out);
            if stream.is_detached {
                stream.detached_bytes -= bytes;
                self.detached_bytes -= bytes;
            }
        }
        self.write_trailers(id);
    }

    /// The end of a stream without a message that waits: no window keeps it back.
    pub(super) fn write_trailers(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if !stream.is_drained() {
            return;
        }
        let Some(block) = stream.trailers.take() else {
            return;
        };
        stream.is_finished = true;
        let (has_ended, is_detached) = (stream.has_ended, stream.is_detached);
        self.header_frame(id, &block, true);
        if !has_ended {
            self.rst_stream(id, code::NO_ERROR);
        }
        if is_detached {
            self.remove(id);
        }
    }

    /// Gives a stream a turn if it may send.
    pub(super) fn turn(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id)
            && may_go(stream)
            && !std::mem::replace(&mut stream.is_queued, true)
        {
            self.turns.push_back(id);
        }
    }

    pub(super) fn answer_ping(&mut self, payload: &[u8]) {
        let waits = self.answers.len() + HEADER_LEN + payload.len() <= ANSWERS_BYTES_MAX;
        if !waits {
            self.release_answers();
        }
        let out = if waits {
            &mut self.answers
        } else {
            &mut self.out
        };
        head(out, payload.len(), PING, ACK, 0);
        out.put_slice(payload);
    }

    pub(super) fn settings(&mut self, all: &[(u16, u32)]) {
        head(&mut self.out, 6 * all.len(), SETTINGS, 0, 0);
        for (setting, value) in all {
            self.out.put_u16(*setting);
            self.out.put_u32(*value);
        }
    }

    pub(super) fn window_update(&mut self, id: u32, more: u32) {
        head(&mut self.out, 4, WINDOW_UPDATE, 0, id);
        self.out.put_u32(more);
    }

    pub(super) fn rst_frame(&mut self, id: u32, reason: u32) {
        head(&mut self.out, 4, RST_STREAM, 0, id);
        self.out.put_u32(reason);
    }

    pub(super) fn rst_stream(&mut self, id: u32, reason: u32) {
        self.rst_frame(id, reason);
        if self.closed.len() == CLOSED_MAX {
            self.closed.pop_front();
        }
        self.closed.push_back(id);
    }

    pub(super) fn goaway(&mut self, last: u32, reason: u32) {
        head(&mut self.out, 8, GOAWAY, 0, 0);
        self.out.put_u32(last);
        self.out.put_u32(reason);
    }

    pub(super) fn header_frame(&mut self, id: u32, block: &[u8], ends: bool) {
        let end = if ends { END_STREAM } else { 0 };
        // Clients that make their table smaller want to be told of it (RFC 7541, section 4.2): it is empty from the start.
        let resize: &[u8] = if std::mem::replace(&mut self.has_sent_block, true) {
            &[]
        } else {
            &[request::NO_TABLE]
        };
        let bytes = resize.len() + block.len();
        head(&mut self.out, bytes, HEADERS, END_HEADERS | end, id);
        self.out.put_slice(resize);
        self.out.put_slice(block);
    }
}

/// Whether a stream has something that it may send.
pub(super) fn may_go(stream: &Stream) -> bool {
    !stream.is_drained() && stream.send_window > 0
}
