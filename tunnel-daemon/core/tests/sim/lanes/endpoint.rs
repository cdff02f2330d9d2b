//! One side of a tunnel: it writes and reads at its own pace, and has its own kind of exit.

use std::time::Duration;

use adit_core::session::Moment;
use bytes::Bytes;

use super::books::{Seen, Turn};
use crate::record::{Who, is_stream, stream_bytes};

/// Time within which a close must be confirmed; after that the endpoint leaves.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(10);
/// How long a half-closed tunnel may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(20);
/// Longer than any tunnel lives.
const FOR_EVER: Duration = Duration::from_secs(24 * 60 * 60);
/// A pause of at least this length counts as long.
const LONG_PAUSE: Duration = Duration::from_secs(10);

/// What an endpoint does after it has written everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Exit {
    Fin,
    Close,
    Reset,
    /// Waits for the peer to close.
    Stay,
}

/// What an endpoint requests for its tunnel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wish {
    Fin,
    Close,
    Reset,
}

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) uid: usize,
    who: Who,
    to_send: u64,
    /// Longest pause between writes, in milliseconds.
    thinks_millis: u64,
    sends_at: Moment,
    /// Longest pause of the reader, in milliseconds.
    nap_millis: u64,
    naps_left: u32,
    asleep_until: Moment,
    exit: Exit,
    finished: bool,
    /// When it leaves, whatever has happened by then.
    leaves_at: Moment,
    leaves_by: Wish,
    left: bool,
    closed_at: Option<Moment>,
    /// When a byte was last sent or received.
    moved_at: Moment,
}

fn other(who: Who) -> Who {
    match who {
        Who::Client => Who::Target,
        Who::Target => Who::Client,
    }
}

impl Endpoint {
    pub(super) fn new(uid: usize, who: Who, turn: &mut Turn) -> Self {
        let most = turn.rng.pick(&[0, 1, 90, 3_000, 3_000, 30_000]);
        let mut endpoint = Self {
            uid,
            who,
            to_send: turn.rng.within(0..=most),
            thinks_millis: 0,
            sends_at: turn.now,
            nap_millis: 0,
            naps_left: 3,
            asleep_until: turn.now,
            exit: Exit::Fin,
            finished: false,
            leaves_at: turn.now.after(FOR_EVER),
            leaves_by: Wish::Close,
            left: false,
            closed_at: None,
            moved_at: turn.now,
        };
        if !turn.tame {
            endpoint.thinks_millis = turn.rng.pick(&[0, 0, 20, 500, 3_000]);
            endpoint.nap_millis = turn.rng.pick(&[0, 0, 0, 700, 9_000, 70_000]);
            endpoint.exit = turn.rng.pick(&[
                Exit::Fin,
                Exit::Fin,
                Exit::Fin,
                Exit::Close,
                Exit::Close,
                Exit::Reset,
                Exit::Stay,
                Exit::Stay,
            ]);
            let patience = turn.rng.pick(&[3_000, 25_000, 90_000]);
            endpoint.leaves_at = turn.within_millis(patience);
            endpoint.leaves_by = turn.rng.pick(&[Wish::Close, Wish::Reset]);
        }
        endpoint
    }

    /// Whether it takes bytes. After a close it takes and ignores them.
    pub(super) fn reads(&self, now: Moment) -> bool {
        now >= self.asleep_until || self.closed_at.is_some()
    }

    pub(super) fn has_finished(&self) -> bool {
        self.finished
    }

    /// Whether its close was not confirmed in time.
    pub(super) fn is_unconfirmed(&self, now: Moment) -> bool {
        self.closed_at
            .is_some_and(|at| now >= at.after(CONFIRMED_WITHIN))
    }

    /// Whether no byte has moved for so long that a half-closed tunnel is reset.
    pub(super) fn is_silent(&self, now: Moment) -> bool {
        self.closed_at.is_none() && now >= self.moved_at.after(SILENCE_MAX)
    }

    pub(super) fn deliver(&mut self, bytes: &[u8], turn: &mut Turn) {
        let (uid, who) = (self.uid, self.who);
        let record = &mut turn.records[uid];
        let sent = record.side(other(who)).sent;
        let side = record.side(who);
        assert!(!side.told, "tunnel {uid}: bytes behind the end");
        assert!(!side.deaf, "tunnel {uid}: bytes after a close");
        assert!(
            is_stream(uid as u64, other(who), side.heard, bytes),
            "tunnel {uid}: {} bytes for {who:?} at {} are not its own",
            bytes.len(),
            side.heard
        );
        side.heard += bytes.len() as u64;
        assert!(side.heard <= sent, "tunnel {uid}: bytes nobody sent");
        self.moved_at = turn.now;
        turn.moved = true;
        if self.nap_millis > 0 && self.naps_left > 0 && turn.rng.once_in(2) {
            self.naps_left -= 1;
            self.asleep_until = turn.within_millis(self.nap_millis);
            if self.asleep_until.since(turn.now) >= LONG_PAUSE {
                turn.coverage.note(Seen::LongPause);
            }
        }
    }

    /// The peer sends no more; all bytes it has sent must be here.
    pub(super) fn told(&mut self, turn: &mut Turn) {
        let record = &mut turn.records[self.uid];
        let from = record.side(other(self.who));
        let (sent, finished) = (from.sent, from.finished);
        let side = record.side(self.who);
        side.told = true;
        let whole = finished && side.heard == sent;
        assert!(whole, "tunnel {}: an early end: {record:?}", self.uid);
        self.moved_at = turn.now;
    }

    /// The next bytes it writes, at most `room`.
    pub(super) fn next_chunk(&mut self, room: usize, turn: &mut Turn) -> Option<Bytes> {
        let sent = turn.records[self.uid].side(self.who).sent;
        if self.finished || sent >= self.to_send || turn.now < self.sends_at || room == 0 {
            return None;
        }
        let left = usize::try_from(self.to_send - sent).unwrap();
        let most = turn.rng.pick(&[1, 100, 5_000, 20_000]);
        let max = turn.rng.length(1..=most).min(left).min(room);
        let bytes = stream_bytes(self.uid as u64, self.who, sent, max);
        turn.records[self.uid].side(self.who).sent += bytes.len() as u64;
        self.sends_at = turn.within_millis(self.thinks_millis);
        self.moved_at = turn.now;
        turn.moved = true;
        Some(bytes)
    }

    /// Its next request; each request is returned once.
    pub(super) fn wish(&mut self, turn: &mut Turn) -> Option<Wish> {
        let record = &mut turn.records[self.uid];
        let side = record.side(self.who);
        let wish = if self.left {
            return None;
        } else if turn.now >= self.leaves_at {
            self.leaves_by
        } else if self.finished || side.sent < self.to_send {
            return None;
        } else {
            match self.exit {
                Exit::Stay if !side.told => return None,
                Exit::Fin | Exit::Stay => Wish::Fin,
                Exit::Close => Wish::Close,
                Exit::Reset => Wish::Reset,
            }
        };
        self.left = wish != Wish::Fin;
        self.finished = true;
        self.moved_at = turn.now;
        turn.moved = true;
        match wish {
            Wish::Fin => side.finished = true,
            Wish::Close => {
                side.finished = true;
                side.deaf = true;
                self.closed_at = Some(turn.now);
            }
            Wish::Reset => {
                record.cut = true;
                record.reset_by_target |= self.who == Who::Target;
            }
        }
        Some(wish)
    }

    /// The next moment at which it may act by itself.
    pub(super) fn wakes_at(&self, now: Moment) -> Option<Moment> {
        let times = [
            Some(self.asleep_until),
            (!self.finished).then_some(self.sends_at),
            (!self.left).then_some(self.leaves_at),
            self.closed_at.map(|at| at.after(CONFIRMED_WITHIN)),
            Some(self.moved_at.after(SILENCE_MAX)),
        ];
        times.into_iter().flatten().filter(|at| *at > now).min()
    }
}
