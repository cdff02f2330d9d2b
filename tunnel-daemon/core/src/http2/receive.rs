//! What the client's frames do to a connection (RFC 9113, sections 4 to 6 and 8.1.1).

use bytes::{Buf as _, Bytes, BytesMut};

use super::frame::{
    CONTINUATION, END_HEADERS, FrameHeader, HEADER_LEN, HEADERS, PADDED, PREFACE, PRIORITY,
};
use super::request::{self, BadList, FieldList, LIST_BYTES_MAX};
use super::send::may_go;
use super::stream::Stream;
use super::*;

impl Http2Server {
    pub(super) fn frames(&mut self, input: &mut BytesMut, around: usize) -> Result<(), Http2Error> {
        if self.greeting == Greeting::Preface {
            let begins = input.len().min(PREFACE.len());
            if input.get(..begins) != PREFACE.get(..begins) {
                return Err(broken(code::PROTOCOL_ERROR, "no HTTP/2 preface"));
            }
            if begins < PREFACE.len() {
                return Ok(());
            }
            input.advance(PREFACE.len());
            self.greeting = Greeting::Settings;
        }
        while let Some(header) = FrameHeader::read(input) {
            if header.payload_len > FRAME_BYTES_MAX {
                return Err(broken(
                    code::FRAME_SIZE_ERROR,
                    "a frame of more than 16 KiB",
                ));
            }
            if input.len() < header.frame_len() {
                input.reserve(header.frame_len() - input.len());
                break;
            }
            input.advance(HEADER_LEN);
            self.frame(header, input, around)?;
        }
        Ok(())
    }

    /// Takes the payload of one frame from `input`, which came in a buffer of `around` bytes.
    fn frame(
        &mut self,
        header: FrameHeader,
        input: &mut BytesMut,
        around: usize,
    ) -> Result<(), Http2Error> {
        let header = FrameHeader {
            stream: header.stream & !(1 << 31),
            ..header
        };
        if self.greeting == Greeting::Settings {
            if header.kind != SETTINGS || header.has(ACK) {
                return Err(broken(
                    code::PROTOCOL_ERROR,
                    "the first frame is not SETTINGS",
                ));
            }
            self.greeting = Greeting::Done;
        }
        if let Some(block) = &self.block
            && (header.kind != CONTINUATION || header.stream != block.stream)
        {
            return Err(broken(
                code::PROTOCOL_ERROR,
                "a frame inside a header block",
            ));
        }
        if header.kind == DATA {
            let payload = input.split_to(header.payload_len);
            return self.data(header, payload, around);
        }
        let payload: &[u8] = input.get(..header.payload_len).unwrap_or_default();
        match header.kind {
            HEADERS => self.headers(header, payload)?,
            CONTINUATION => self.continuation(header, payload)?,
            PRIORITY_FRAME if header.stream == 0 => {
                return Err(broken(code::PROTOCOL_ERROR, "PRIORITY without a stream"));
            }
            PRIORITY_FRAME if payload.len() != 5 && header.stream > self.last_stream => {
                return Err(broken(
                    code::FRAME_SIZE_ERROR,
                    "PRIORITY of another length than 5",
                ));
            }
            PRIORITY_FRAME if payload.len() != 5 => {
                self.reset_stream(header.stream, code::FRAME_SIZE_ERROR)
            }
            RST_STREAM => self.client_reset(header.stream, number(payload)?)?,
            SETTINGS => self.client_settings(header, payload)?,
            PUSH_PROMISE => return Err(broken(code::PROTOCOL_ERROR, "PUSH_PROMISE from a client")),
            PING => self.ping(header, payload)?,
            GOAWAY if header.stream != 0 => {
                return Err(broken(code::PROTOCOL_ERROR, "GOAWAY for a stream"));
            }
            WINDOW_UPDATE => {
                let more = number(payload)? & !(1 << 31);
                self.client_window_update(header.stream, more)?;
            }
            // GOAWAY: the client opens no streams, which needs no answer. Others: RFC 9113, section 5.5.
            _ => (),
        }
        input.advance(header.payload_len);
        Ok(())
    }

    fn data(
        &mut self,
        header: FrameHeader,
        mut payload: BytesMut,
        around: usize,
    ) -> Result<(), Http2Error> {
        let id = header.stream;
        if id == 0 || id > self.last_stream {
            return Err(broken(code::PROTOCOL_ERROR, "DATA for no stream"));
        }
        let counted = u32::try_from(header.payload_len).unwrap_or(u32::MAX);
        self.receive_window -= i64::from(counted);
        if self.receive_window < 0 {
            return Err(broken(
                code::FLOW_CONTROL_ERROR,
                "more DATA than the connection's window",
            ));
        }
        self.unreturned += counted;
        if self.unreturned >= RETURN_AFTER_BYTES {
            let more = std::mem::take(&mut self.unreturned);
            self.receive_window += i64::from(more);
            self.window_update(0, more);
        }
        unpad(header, &mut payload)?;
        if self.is_ignored(id) {
            return Ok(());
        }
        let Some(stream) = self.streams.get_mut(&id) else {
            self.rst_frame(id, code::STREAM_CLOSED);
            return Ok(());
        };
        if stream.end.is_some() {
            return Ok(());
        }
        if stream.has_ended {
            self.reset_stream(id, code::STREAM_CLOSED);
            return Ok(());
        }
        stream.receive_window -= i64::from(counted);
        // The end alone needs no window (section 6.9.1).
        if counted > 0 && stream.receive_window < 0 {
            self.reset_stream(id, code::FLOW_CONTROL_ERROR);
            return Ok(());
        }
        let bytes = payload.len() as u64;
        if let Some(left) = stream.content_left {
            let Some(left) = left.checked_sub(bytes) else {
                self.reset_stream(id, code::PROTOCOL_ERROR);
                return Ok(());
            };
            stream.content_left = Some(left);
        }
        let padding = header.payload_len - payload.len();
        if !stream.is_taken {
            let before = stream.counted_untaken();
            stream.untaken_bytes += payload.len();
            self.untaken_bytes += stream.counted_untaken() - before;
            if self.untaken_bytes > UNTAKEN_BYTES_MAX {
                self.reset_stream(id, code::REFUSED_STREAM);
                return Ok(());
            }
        }
        if stream.is_detached {
            // Nobody reads it; the client is not let send more.
        } else if payload.len() < around / COPY_BELOW_SHARE {
            // A few bytes must not keep the whole buffer.
            stream.receive(Bytes::copy_from_slice(&payload));
        } else {
            stream.receive(payload.freeze());
        }
        if header.has(END_STREAM) {
            self.client_ended(id);
        } else if let Some(stream) = self.streams.get_mut(&id) {
            stream.wake();
        }
        self.release(StreamId(id), padding);
        Ok(())
    }

    fn client_ended(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if stream.content_left.is_some_and(|left| left > 0) {
            return self.reset_stream(id, code::PROTOCOL_ERROR);
        }
        stream.has_ended = true;
        stream.wake();
    }

    fn headers(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Http2Error> {
        if header.stream.is_multiple_of(2) {
            return Err(broken(
                code::PROTOCOL_ERROR,
                "HEADERS for a stream that no client opens",
            ));
        }
        let mut payload = BytesMut::from(payload);
        unpad(header, &mut payload)?;
        if header.has(PRIORITY) {
            if payload.len() < 5 {
                return Err(broken(
                    code::FRAME_SIZE_ERROR,
                    "HEADERS too short for its priority",
                ));
            }
            payload.advance(5);
        }
        let block = Block {
            stream: header.stream,
            ends_stream: header.has(END_STREAM),
            frames: 1,
            fragment: payload,
        };
        self.add_to_block(block, header)
    }

    fn continuation(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Http2Error> {
        let Some(mut block) = self.block.take() else {
            return Err(broken(code::PROTOCOL_ERROR, "CONTINUATION without HEADERS"));
        };
        block.frames += 1;
        block.fragment.extend_from_slice(payload);
        self.add_to_block(block, header)
    }

    fn add_to_block(&mut self, block: Block, header: FrameHeader) -> Result<(), Http2Error> {
        if block.fragment.len() > LIST_BYTES_MAX || block.frames > BLOCK_FRAMES_MAX {
            return Err(broken(
                code::ENHANCE_YOUR_CALM,
                "a header block of more than 256 KiB or 24 frames",
            ));
        }
        if !header.has(END_HEADERS) {
            self.block = Some(block);
            return Ok(());
        }
        let mut list = FieldList::default();
        self.fields
            .decode(&block.fragment, |name, value| list.take(name, value))
            .map_err(|_why| {
                broken(
                    code::COMPRESSION_ERROR,
                    "a header block that cannot be decoded",
                )
            })?;
        if let Some(stream) = self.streams.get(&block.stream) {
            if stream.end.is_some() {
                return Ok(());
            }
            let fault = if stream.has_ended {
                Some(code::STREAM_CLOSED)
            } else if !block.ends_stream || list.trailers().is_err() {
                Some(code::PROTOCOL_ERROR)
            } else {
                None
            };
            match fault {
                Some(fault) => self.reset_stream(block.stream, fault),
                None => self.client_ended(block.stream),
            }
            return Ok(());
        }
        if block.stream <= self.last_stream {
            let is_late = self.closed.contains(&block.stream)
                || self.is_ignored(block.stream)
                || (block.ends_stream && list.trailers().is_ok());
            if is_late {
                return Ok(());
            }
            return Err(broken(
                code::PROTOCOL_ERROR,
                "HEADERS for a stream that has ended",
            ));
        }
        self.open(block.stream, block.ends_stream, list);
        Ok(())
    }

    /// A new stream.
    fn open(&mut self, id: u32, has_ended: bool, list: FieldList) {
        self.last_stream = id;
        if self.is_ignored(id) {
            return;
        }
        if self.streams.len() >= self.limits.streams_max() as usize {
            return self.rst_stream(id, code::REFUSED_STREAM);
        }
        match list.request() {
            Ok((head, content_left)) => {
                let mut stream = Stream::new(self.client_window, self.own_window);
                stream.content_left = content_left;
                self.arrived.push_back(Arrival {
                    stream: StreamId(id),
                    head,
                    is_excess: self.streams.len() >= self.limits.calls_max as usize,
                });
                self.streams.insert(id, Box::new(stream));
                self.untaken += 1;
                if has_ended {
                    self.client_ended(id);
                }
            }
            Err(BadList::Malformed) => self.rst_stream(id, code::PROTOCOL_ERROR),
            Err(BadList::TooLarge) => {
                let mut block = BytesMut::new();
                request::only_status("431", &mut block);
                self.header_frame(id, &block, true);
                if !has_ended {
                    self.rst_stream(id, code::NO_ERROR);
                }
            }
        }
    }

    fn client_reset(&mut self, id: u32, reason: u32) -> Result<(), Http2Error> {
        if id == 0 || id > self.last_stream {
            return Err(broken(code::PROTOCOL_ERROR, "RST_STREAM for no stream"));
        }
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.over(StreamEnd::Reset(reason));
            self.drop_unheld(id);
        }
        Ok(())
    }

    fn client_settings(
        &mut self,
        header: FrameHeader,
        mut payload: &[u8],
    ) -> Result<(), Http2Error> {
        if header.stream != 0 {
            return Err(broken(code::PROTOCOL_ERROR, "SETTINGS for a stream"));
        }
        if header.has(ACK) {
            if !payload.is_empty() {
                return Err(broken(
                    code::FRAME_SIZE_ERROR,
                    "SETTINGS with ACK and a payload",
                ));
            }
            if let Some(asked) = self.asked_window.take() {
                let more = asked - std::mem::replace(&mut self.own_window, asked);
                let streams: Vec<u32> = self.streams.keys().copied().collect();
                for id in streams {
                    if let Some(stream) = self.streams.get_mut(&id) {
                        stream.receive_window += more;
                    }
                    // A client whose window has become too small to send would never be told of what its call has taken.
                    self.release(StreamId(id), 0);
                }
            }
            return Ok(());
        }
        if !payload.len().is_multiple_of(6) {
            return Err(broken(
                code::FRAME_SIZE_ERROR,
                "SETTINGS of a length that is no multiple of 6",
            ));
        }
        let mut window = None;
        while payload.len() >= 6 {
            let (setting, value) = (payload.get_u16(), payload.get_u32());
            match setting {
                ENABLE_PUSH if value > 1 => {
                    return Err(broken(code::PROTOCOL_ERROR, "ENABLE_PUSH above 1"));
                }
                INITIAL_WINDOW_SIZE if i64::from(value) > WINDOW_MAX => {
                    return Err(broken(
                        code::FLOW_CONTROL_ERROR,
                        "INITIAL_WINDOW_SIZE out of range",
                    ));
                }
                INITIAL_WINDOW_SIZE => window = Some(value.into()),
                MAX_FRAME_SIZE if !(16_384..1 << 24).contains(&value) => {
                    return Err(broken(code::PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range"));
                }
                MAX_FRAME_SIZE => self.client_frame_bytes = value as usize,
                _ => (),
            }
        }
        // Before any DATA that relies on them.
        head(&mut self.out, 0, SETTINGS, ACK, 0);
        window.map_or(Ok(()), |window| self.set_client_window(window))
    }

    /// Costs a step for each stream, so it may not be done without end.
    fn set_client_window(&mut self, window: i64) -> Result<(), Http2Error> {
        let more = window - std::mem::replace(&mut self.client_window, window);
        if more == 0 {
            return Ok(());
        }
        self.window_changes += 1;
        if self.window_changes > WINDOW_CHANGES_MAX {
            return Err(broken(
                code::ENHANCE_YOUR_CALM,
                "INITIAL_WINDOW_SIZE was changed more than 1,000 times",
            ));
        }
        for (id, stream) in &mut self.streams {
            stream.send_window += more;
            if stream.send_window > WINDOW_MAX {
                return Err(broken(
                    code::FLOW_CONTROL_ERROR,
                    "INITIAL_WINDOW_SIZE makes a window too large",
                ));
            }
            if may_go(stream) && !std::mem::replace(&mut stream.is_queued, true) {
                self.turns.push_back(*id);
            }
        }
        Ok(())
    }

    fn ping(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Http2Error> {
        if header.stream != 0 {
            return Err(broken(code::PROTOCOL_ERROR, "PING for a stream"));
        }
        let Ok(opaque) = <[u8; 8]>::try_from(payload) else {
            return Err(broken(
                code::FRAME_SIZE_ERROR,
                "PING of another length than 8",
            ));
        };
        if !header.has(ACK) {
            self.answer_ping(&opaque);
        } else if opaque == DRAIN_PING {
            self.drained();
        } else {
            self.has_pong |= opaque == KEEPALIVE_PING;
        }
        Ok(())
    }

    fn client_window_update(&mut self, id: u32, more: u32) -> Result<(), Http2Error> {
        if id == 0 {
            self.send_window += i64::from(more);
            if more == 0 {
                return Err(broken(code::PROTOCOL_ERROR, "WINDOW_UPDATE of 0"));
            }
            if self.send_window > WINDOW_MAX {
                return Err(broken(
                    code::FLOW_CONTROL_ERROR,
                    "a connection's window beyond 2^31-1",
                ));
            }
            return Ok(());
        }
        if id > self.last_stream {
            return Err(broken(code::PROTOCOL_ERROR, "WINDOW_UPDATE for no stream"));
        }
        let Some(stream) = self.streams.get_mut(&id) else {
            return Ok(());
        };
        stream.send_window += i64::from(more);
        if more == 0 {
            self.reset_stream(id, code::PROTOCOL_ERROR);
        } else if stream.send_window > WINDOW_MAX {
            self.reset_stream(id, code::FLOW_CONTROL_ERROR);
        } else {
            self.turn(id);
        }
        Ok(())
    }

    /// Resets a stream for a fault of the client.
    pub(super) fn reset_stream(&mut self, id: u32, reason: u32) {
        self.rst_stream(id, reason);
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.over(StreamEnd::Reset(reason));
            self.drop_unheld(id);
        }
    }

    /// Removes a stream that is over, unless a call holds it.
    fn drop_unheld(&mut self, id: u32) {
        let Some(stream) = self.streams.get(&id) else {
            return;
        };
        if !stream.is_taken {
            self.untaken -= 1;
            self.untaken_bytes -= stream.counted_untaken();
            self.cancelled += 1;
            self.remove(id);
            if self.arrived.len() > 2 * self.untaken + LEFT_BEHIND_MAX {
                let streams = &self.streams;
                self.arrived
                    .retain(|arrival| streams.contains_key(&arrival.stream.0));
            }
        } else if stream.is_detached {
            self.remove(id);
        }
    }

    pub(super) fn remove(&mut self, id: u32) {
        let Some(stream) = self.streams.remove(&id) else {
            return;
        };
        if stream.is_detached {
            self.detached_bytes -= stream.detached_bytes;
        }
        if stream.is_queued && self.turns.len() > 2 * self.streams.len() + LEFT_BEHIND_MAX {
            let streams = &self.streams;
            self.turns.retain(|turn| streams.contains_key(turn));
        }
    }

    /// Whether a stream came too late to be taken: the client knows.
    pub(super) fn is_ignored(&self, id: u32) -> bool {
        self.told_last.is_some_and(|last| id > last)
    }
}

/// A number of four octets as the whole payload.
fn number(payload: &[u8]) -> Result<u32, Http2Error> {
    let octets = <[u8; 4]>::try_from(payload);
    let number = octets.map(u32::from_be_bytes);
    number.map_err(|_size| {
        broken(
            code::FRAME_SIZE_ERROR,
            "RST_STREAM or WINDOW_UPDATE of another length than 4",
        )
    })
}

/// Removes padding (RFC 9113, section 6.1).
fn unpad(header: FrameHeader, payload: &mut BytesMut) -> Result<(), Http2Error> {
    if !header.has(PADDED) {
        return Ok(());
    }
    let too_long = broken(code::PROTOCOL_ERROR, "padding beyond the payload");
    let (&padding, rest) = payload.split_first().ok_or(too_long)?;
    let kept = rest.len().checked_sub(padding.into()).ok_or(too_long)?;
    payload.advance(1);
    payload.truncate(kept);
    Ok(())
}
