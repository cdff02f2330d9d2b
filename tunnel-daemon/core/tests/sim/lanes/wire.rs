//! One direction of a lane's connection: bytes arrive in order, delayed and in pieces, while the connection lives.

use std::collections::VecDeque;
use std::time::Duration;

use adit_core::session::Moment;
use bytes::{Bytes, BytesMut};

use crate::rng::Rng;

/// Result of a read.
#[derive(Debug)]
pub(super) enum Found {
    /// At least one byte.
    Bytes(Bytes),
    Nothing,
    /// The writer has closed its direction, and everything was read.
    End,
    /// The connection was reset.
    Reset,
}

/// Bytes in the writer's kernel, in flight, and in the reader's kernel.
#[derive(Debug)]
pub(super) struct Wire {
    /// Unacknowledged chunks with their arrival times, oldest first.
    flight: VecDeque<(Moment, Bytes)>,
    flight_bytes: usize,
    send_bytes_max: usize,
    arrived: BytesMut,
    receive_bytes_max: usize,
    delay: Duration,
    jammed_until: Moment,
    /// When the FIN of this direction arrives.
    finished: Option<Moment>,
    reset: bool,
    /// Nothing arrives any more, including FIN and RST.
    silent: bool,
}

impl Wire {
    pub(super) fn new(rng: &mut Rng) -> Self {
        // Small buffers on a long path would make every tunnel last for minutes.
        let (sizes, delays): (&[usize], &[u64]) = if rng.once_in(2) {
            (&[100, 2_000], &[0, 0, 1])
        } else {
            (&[20_000, 1 << 18], &[0, 1, 30, 400])
        };
        Self {
            flight: VecDeque::new(),
            flight_bytes: 0,
            send_bytes_max: rng.pick(sizes),
            arrived: BytesMut::new(),
            receive_bytes_max: rng.pick(sizes),
            delay: Duration::from_millis(rng.pick(delays)),
            jammed_until: Moment::default(),
            finished: None,
            reset: false,
            silent: false,
        }
    }

    /// How many bytes the writer's kernel takes.
    pub(super) fn room(&self) -> usize {
        self.send_bytes_max.saturating_sub(self.flight_bytes)
    }

    pub(super) fn send(&mut self, bytes: Bytes, now: Moment) {
        assert!(self.finished.is_none(), "bytes behind the end");
        if !self.reset && !bytes.is_empty() {
            self.flight_bytes += bytes.len();
            self.flight.push_back((now.after(self.delay), bytes));
        }
    }

    /// The writer sends FIN.
    pub(super) fn finish(&mut self, now: Moment) {
        if self.finished.is_none() {
            self.finished = Some(now.after(self.delay));
        }
    }

    /// Bytes that the reader's kernel has not received.
    pub(super) fn unacknowledged(&self) -> usize {
        self.flight_bytes
    }

    /// Delivers due bytes, as far as the reader's kernel has room.
    pub(super) fn advance(&mut self, now: Moment) {
        if self.silent || now < self.jammed_until {
            return;
        }
        while self.arrived.len() < self.receive_bytes_max
            && self.flight.front().is_some_and(|(at, _)| *at <= now)
            && let Some((_, bytes)) = self.flight.pop_front()
        {
            self.flight_bytes -= bytes.len();
            self.arrived.extend_from_slice(&bytes);
        }
    }

    /// At most `max` bytes that have arrived.
    pub(super) fn read(&mut self, max: usize, now: Moment) -> Found {
        if !self.arrived.is_empty() {
            let length = self.arrived.len().min(max);
            return Found::Bytes(self.arrived.split_to(length).freeze());
        }
        let ended = self.finished.is_some_and(|at| at <= now) && now >= self.jammed_until;
        if self.silent {
            Found::Nothing
        } else if self.reset {
            Found::Reset
        } else if ended && self.flight.is_empty() {
            Found::End
        } else {
            Found::Nothing
        }
    }

    /// Whether the reader's kernel has seen the reset.
    pub(super) fn is_reset(&self) -> bool {
        self.reset && !self.silent
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.flight.is_empty() && self.arrived.is_empty()
    }

    /// When the next bytes or the FIN arrive.
    pub(super) fn next_arrival(&self, now: Moment) -> Option<Moment> {
        if self.silent {
            return None;
        }
        let due = self.flight.front().map(|(at, _)| *at).or(self.finished);
        due.map(|at| at.max(self.jammed_until))
            .filter(|at| *at > now)
    }

    /// Nothing arrives until then.
    pub(super) fn jam(&mut self, until: Moment) {
        self.jammed_until = until;
    }

    /// Resets the connection. `delivers`: bytes that have arrived can still be read.
    pub(super) fn reset(&mut self, delivers: bool) {
        if self.silent {
            return;
        }
        self.reset = true;
        self.flight.clear();
        self.flight_bytes = 0;
        if !delivers {
            self.arrived.clear();
        }
    }

    /// The peer's host is gone without FIN or RST.
    pub(super) fn fall_silent(&mut self) {
        self.silent = true;
    }
}
