//! The states and steps of one direction.

use std::io::{self, ErrorKind};

use bytes::{Buf, Bytes};
use rustix::io::Errno;

use super::{recent::Recent, surroundings::Io};
use crate::{
    buffers::{GROWTH, LARGE, SMALL},
    config::Thresholds,
    outcome::{Flow, Mover, Op},
};

/// The state of a direction after its turn.
#[derive(Debug)]
pub(crate) enum Step {
    /// Waits for bytes of the source.
    Idle,
    /// Holds bytes for which the sink has no room.
    Blocked,
    /// Has more to do in its next turn.
    Again,
    /// EOF was passed on to the sink.
    Done,
    /// A read of the source or a write to the sink failed.
    Failed(Op, io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirectionState {
    Open,
    /// The source has reached EOF; bytes may be held.
    Ended,
    Done,
}

/// One direction. `P` is a pipe.
#[derive(Debug)]
pub(crate) struct Direction<P> {
    /// Bytes that the owner had read before.
    first: Bytes,
    /// Empty unless the direction moves or holds bytes; held bytes are `start..end`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    buffer_bytes: usize,
    pipe: Option<P>,
    in_pipe: usize,
    mover: Mover,
    may_splice: bool,
    state: DirectionState,
    readable: bool,
    writable: bool,
    /// The source was reported readable, perhaps for an urgent byte, and no splice has taken bytes since.
    is_unproven: bool,
    /// The source's EOF was reported, so a short read does not mean that the socket is empty.
    source_ends: bool,
    /// Reads end at record boundaries, so a short read does not mean that the socket is empty.
    by_record: bool,
    taken: u64,
    flow: Flow,
    recent: Recent,
}

type Failure = (Op, io::Error);

impl<P> Direction<P> {
    /// A direction that delivers `first` first. Both sockets count as ready, since a failed call is cheaper than a poll.
    pub(crate) fn new(first: Bytes, rules: &Thresholds) -> Self {
        Self {
            first,
            buffer: Vec::new(),
            start: 0,
            end: 0,
            buffer_bytes: SMALL,
            pipe: None,
            in_pipe: 0,
            mover: Mover::Copy,
            may_splice: rules.splice,
            state: DirectionState::Open,
            readable: true,
            writable: true,
            is_unproven: false,
            source_ends: false,
            by_record: false,
            taken: 0,
            flow: Flow::default(),
            recent: Recent::default(),
        }
    }

    /// The source has bytes or EOF.
    pub(crate) fn source_ready(&mut self, ends: bool) {
        self.readable = true;
        self.source_ends |= ends;
    }

    /// The source holds an urgent byte. A read stops before the urgent byte even if bytes follow, and a splice cannot pass it.
    pub(crate) fn source_is_urgent(&mut self) {
        self.by_record = true;
        self.copy_from_now_on();
    }

    /// The source may hold an urgent byte.
    pub(crate) fn source_may_be_urgent(&mut self) {
        self.is_unproven = true;
    }

    /// The sink has room, or an error.
    pub(crate) fn sink_ready(&mut self) {
        self.writable = true;
    }

    /// Copies every byte.
    pub(crate) fn never_splice(&mut self) {
        self.may_splice = false;
    }

    /// Reads end at record boundaries; further records raise no event.
    pub(crate) fn read_by_record(&mut self) {
        self.by_record = true;
    }

    /// Whether the source has reached EOF. Bytes may still wait here and in the source's socket.
    pub(crate) fn source_has_ended(&self) -> bool {
        self.source_ends || self.state != DirectionState::Open
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state == DirectionState::Done
    }

    /// Bytes moved so far.
    pub(crate) fn flow(&self) -> Flow {
        self.flow
    }

    /// Moves bytes within the limits of one turn.
    pub(crate) fn run<I: Io<Pipe = P>>(&mut self, io: &mut I, rules: &Thresholds) -> Step {
        let before = self.taken;
        let step = self
            .turn(io, rules)
            .unwrap_or_else(|(op, error)| Step::Failed(op, error));
        if self.taken > before {
            self.recent.record(self.taken - before);
            if self.recent.is_full() && self.recent.average() < rules.chatty_wake_bytes {
                self.buffer_bytes = SMALL;
            }
        }
        self.settle(io);
        step
    }

    /// Returns buffer and pipe at the end of the pair.
    pub(crate) fn release<I: Io<Pipe = P>>(&mut self, io: &mut I) {
        self.first = Bytes::new();
        (self.start, self.end) = (0, 0);
        if let Some(pipe) = self.pipe.take() {
            io.return_pipe(pipe, self.in_pipe == 0);
        }
        self.settle(io);
    }

    /// Returns an empty buffer and an empty pipe.
    fn settle<I: Io<Pipe = P>>(&mut self, io: &mut I) {
        if self.start == self.end && !self.buffer.is_empty() {
            io.return_buffer(std::mem::take(&mut self.buffer));
        }
        if self.in_pipe == 0
            && let Some(pipe) = self.pipe.take()
        {
            io.return_pipe(pipe, true);
        }
    }

    fn turn<I: Io<Pipe = P>>(&mut self, io: &mut I, rules: &Thresholds) -> Result<Step, Failure> {
        let (mut bytes_left, mut reads_left) = (rules.turn_bytes, rules.turn_reads);
        loop {
            if !self.deliver(io)? {
                self.top_up(io)?;
                return Ok(Step::Blocked);
            }
            match self.state {
                DirectionState::Done => return Ok(Step::Done),
                DirectionState::Ended => return self.finish(io),
                DirectionState::Open if !self.readable => return Ok(Step::Idle),
                DirectionState::Open if bytes_left == 0 || reads_left == 0 => {
                    return Ok(Step::Again);
                }
                DirectionState::Open => {}
            }
            self.choose_mover(io, rules);
            let taken = match self.mover {
                Mover::Copy => self.read(io)?,
                Mover::Splice => self.fill(io)?,
            };
            bytes_left = bytes_left.saturating_sub(taken);
            reads_left -= 1;
        }
    }

    fn finish<I: Io<Pipe = P>>(&mut self, io: &mut I) -> Result<Step, Failure> {
        if !self.writable {
            return Ok(Step::Blocked);
        }
        match io.finish() {
            Ok(()) => {
                self.state = DirectionState::Done;
                Ok(Step::Done)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.writable = false;
                Ok(Step::Blocked)
            }
            Err(error) => Err((Op::Write, error)),
        }
    }

    /// Delivers the held bytes, oldest first. `false` if the sink has no more room.
    fn deliver<I: Io<Pipe = P>>(&mut self, io: &mut I) -> Result<bool, Failure> {
        while !self.first.is_empty() {
            let Some(count) = self.write(io, From::First)? else {
                return Ok(false);
            };
            self.first.advance(count);
        }
        loop {
            while self.start < self.end {
                let Some(count) = self.write(io, From::Buffer)? else {
                    return Ok(false);
                };
                self.start += count;
            }
            (self.start, self.end) = (0, 0);
            if self.in_pipe == 0 {
                return Ok(true);
            }
            match self.mover {
                Mover::Splice => {
                    if !self.drain(io)? {
                        return Ok(false);
                    }
                }
                Mover::Copy => self.unload(io)?,
            }
        }
    }

    fn write<I: Io<Pipe = P>>(&mut self, io: &mut I, from: From) -> Result<Option<usize>, Failure> {
        if !self.writable {
            return Ok(None);
        }
        let bytes = match from {
            From::First => &self.first[..],
            From::Buffer => &self.buffer[self.start..self.end],
        };
        let offered = bytes.len();
        match io.write(bytes) {
            Ok(0) => Err((Op::Write, ErrorKind::WriteZero.into())),
            Ok(count) => {
                // A short write means that the socket is full and will report room later.
                self.writable = count == offered;
                self.flow.movers.copy = true;
                self.delivered(io, count);
                Ok(Some(count))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.writable = false;
                Ok(None)
            }
            Err(error) => Err((Op::Write, error)),
        }
    }

    /// Splices the pipe into the sink. `false` if the sink has no more room.
    fn drain<I: Io<Pipe = P>>(&mut self, io: &mut I) -> Result<bool, Failure> {
        let Some(pipe) = &self.pipe else {
            return Err((Op::Write, io::Error::other("bytes counted in no pipe")));
        };
        if !self.writable {
            return Ok(false);
        }
        match io.drain(pipe, self.in_pipe) {
            // The kernel took nothing from a pipe that holds bytes: fail instead of spinning.
            Ok(0) => Err((Op::Write, ErrorKind::WriteZero.into())),
            Ok(count) => {
                self.in_pipe -= count;
                self.flow.movers.splice = true;
                self.flow.spliced_bytes += count as u64;
                self.delivered(io, count);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.writable = false;
                Ok(false)
            }
            Err(error) if refuses_splice(&error) => {
                self.copy_from_now_on();
                Ok(true)
            }
            Err(error) => Err((Op::Write, error)),
        }
    }

    /// The sink does not accept splices: reads the pipe's bytes into a buffer.
    fn unload<I: Io<Pipe = P>>(&mut self, io: &mut I) -> Result<(), Failure> {
        let Some(pipe) = &self.pipe else {
            return Err((Op::Write, io::Error::other("bytes counted in no pipe")));
        };
        if self.buffer.is_empty() {
            self.buffer = io.lend_buffer(LARGE);
        }
        match io.unload(pipe, &mut self.buffer) {
            Ok(0) => Err((Op::Write, ErrorKind::UnexpectedEof.into())),
            Ok(count) => {
                self.in_pipe -= count;
                (self.start, self.end) = (0, count);
                Ok(())
            }
            Err(error) => Err((Op::Write, error)),
        }
    }

    /// While the sink is full, a pipe at most half full is refilled, so that the source's window keeps moving.
    fn top_up<I: Io<Pipe = P>>(&mut self, io: &mut I) -> Result<(), Failure> {
        let Some(pipe) = &self.pipe else {
            return Ok(());
        };
        let has_room = self.in_pipe > 0 && self.in_pipe <= I::capacity(pipe) / 2;
        if self.mover != Mover::Splice
            || !has_room
            || !self.readable
            || self.state != DirectionState::Open
        {
            return Ok(());
        }
        match io.fill(pipe) {
            // EOF, or an urgent byte: checked once the pipe is empty.
            Ok(0) => {}
            Ok(count) => self.filled(count),
            // The pipe is full or the source empty: checked once the pipe is empty.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) if refuses_splice(&error) => self.copy_from_now_on(),
            Err(error) => return Err((Op::Read, error)),
        }
        Ok(())
    }

    /// Called only without held bytes, so bytes cannot overtake each other.
    fn choose_mover<I: Io<Pipe = P>>(&mut self, io: &mut I, rules: &Thresholds) {
        match self.mover {
            Mover::Copy => {
                let is_bulk = self.taken >= rules.splice_after_bytes
                    && self.recent.average() >= rules.splice_wake_bytes;
                if self.may_splice && is_bulk {
                    self.mover = Mover::Splice;
                }
            }
            Mover::Splice => {
                if self.recent.is_full() && self.recent.average() < rules.chatty_wake_bytes {
                    self.copy_from_now_on();
                }
            }
        }
        if self.mover == Mover::Splice && self.pipe.is_none() {
            self.pipe = io.lend_pipe();
            if self.pipe.is_none() {
                self.copy_from_now_on();
            }
        }
    }

    fn copy_from_now_on(&mut self) {
        self.mover = Mover::Copy;
        self.may_splice = false;
    }

    fn read<I: Io<Pipe = P>>(&mut self, io: &mut I) -> Result<usize, Failure> {
        if self.buffer.len() != self.buffer_bytes {
            io.return_buffer(std::mem::take(&mut self.buffer));
            self.buffer = io.lend_buffer(self.buffer_bytes);
        }
        match io.read(&mut self.buffer) {
            Ok(0) => {
                self.state = DirectionState::Ended;
                Ok(0)
            }
            Ok(count) => {
                (self.start, self.end) = (0, count);
                self.taken += count as u64;
                if count == self.buffer.len() {
                    self.buffer_bytes = (count * GROWTH).min(LARGE);
                } else if !self.source_ends && !self.by_record {
                    // A short read emptied the socket: the next byte or EOF raises an event.
                    self.readable = false;
                }
                Ok(count)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(error) => Err((Op::Read, error)),
        }
    }

    fn fill<I: Io<Pipe = P>>(&mut self, io: &mut I) -> Result<usize, Failure> {
        let Some(pipe) = &self.pipe else {
            return Err((Op::Read, io::Error::other("splice without a pipe")));
        };
        match io.fill(pipe) {
            // EOF, or a splice that stopped before an urgent byte which has arrived.
            Ok(0) => self.ask(io),
            Ok(count) => {
                self.filled(count);
                Ok(count)
            }
            // A readable source without bytes: an urgent byte may be announced that has not arrived.
            Err(error) if error.kind() == ErrorKind::WouldBlock && self.is_unproven => self.ask(io),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.readable = false; // The pipe was empty, so the source has no bytes.
                Ok(0)
            }
            Err(error) if refuses_splice(&error) => {
                self.copy_from_now_on();
                Ok(0)
            }
            Err(error) => Err((Op::Read, error)),
        }
    }

    fn filled(&mut self, count: usize) {
        self.in_pipe += count;
        self.taken += count as u64;
        self.is_unproven = false;
    }

    /// Reads one byte after a splice that took none: unlike a splice, a read can pass an urgent byte.
    fn ask<I: Io<Pipe = P>>(&mut self, io: &mut I) -> Result<usize, Failure> {
        let mut byte = [0];
        match io.read(&mut byte) {
            Ok(0) => {
                self.state = DirectionState::Ended;
                Ok(0)
            }
            Ok(count) => {
                self.first = Bytes::copy_from_slice(&byte);
                self.taken += count as u64;
                self.is_unproven = false;
                Ok(count)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(error) => Err((Op::Read, error)),
        }
    }

    fn delivered<I: Io<Pipe = P>>(&mut self, io: &mut I, count: usize) {
        self.flow.bytes += count as u64;
        io.progress(self.flow.bytes);
    }

    /// Bytes read from the source and not yet written to the sink.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.first.len() + (self.end - self.start) + self.in_pipe
    }
}

/// The source of a write.
#[derive(Clone, Copy)]
enum From {
    First,
    Buffer,
}

fn refuses_splice(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP)
    )
}
