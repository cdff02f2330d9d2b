//! One direction of a link's stream: ordered bytes with a capacity and a delay, until the stream breaks.

use std::collections::VecDeque;
use std::time::Duration;

use adit_core::session::Moment;
use bytes::{Buf, Bytes};

use crate::rng::Rng;

/// Bytes in flight, oldest first.
#[derive(Debug)]
pub(crate) struct Pipe {
    queue: VecDeque<(Moment, Bytes)>,
    bytes: usize,
    capacity: usize,
    delay: Duration,
    jammed_until: Moment,
    broken: bool,
}

impl Pipe {
    pub(crate) fn new(rng: &mut Rng) -> Self {
        // A wire must carry more than one message per delay, or it would itself cause 30 s without progress.
        let (capacity, delays): (usize, &[u64]) = if rng.once_in(2) {
            (rng.pick(&[1, 300]), &[0, 0, 1])
        } else {
            (rng.pick(&[20_000, 1 << 20]), &[0, 1, 30, 400])
        };
        Self {
            queue: VecDeque::new(),
            bytes: 0,
            capacity,
            delay: Duration::from_millis(rng.pick(delays)),
            jammed_until: Moment::default(),
            broken: false,
        }
    }

    /// Whether the writer may send one more message, as HTTP/2 flow control would decide.
    pub(crate) fn has_room(&self) -> bool {
        self.broken || self.bytes < self.capacity
    }

    pub(crate) fn send(&mut self, message: impl Buf, now: Moment) {
        let mut message = message;
        if !self.broken {
            let bytes = message.copy_to_bytes(message.remaining());
            self.bytes += bytes.len();
            self.queue.push_back((now.after(self.delay), bytes));
        }
    }

    /// The next piece that has arrived, of at most `max` bytes.
    pub(crate) fn receive(&mut self, max: usize, now: Moment) -> Option<Bytes> {
        if now < self.jammed_until {
            return None;
        }
        let (at, front) = self.queue.front_mut()?;
        if *at > now {
            return None;
        }
        let piece = front.split_to(max.min(front.len()));
        if front.is_empty() {
            self.queue.pop_front();
        }
        self.bytes -= piece.len();
        Some(piece)
    }

    pub(crate) fn next_arrival(&self) -> Option<Moment> {
        self.queue
            .front()
            .map(|(at, _)| (*at).max(self.jammed_until))
    }

    /// Nothing arrives until then.
    pub(crate) fn jam(&mut self, until: Moment) {
        self.jammed_until = self.jammed_until.max(until);
    }

    /// Bytes in flight are lost, and so are all later ones.
    pub(crate) fn cut(&mut self) {
        self.broken = true;
        self.queue.clear();
        self.bytes = 0;
    }
}
