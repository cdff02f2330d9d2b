//! An endpoint: a client or a target that reads and writes at its own pace and has its own kind of exit.

use std::time::Duration;

use adit_core::ids::TunnelKey;
use adit_core::session::{Link, Moment, TunnelEnd};

use crate::record::{Record, Who, is_stream, stream_bytes};
use crate::rng::Rng;

/// Bytes that an endpoint may have queued towards its peer, the limit of the driver's channel.
const QUEUED_MAX: usize = 64 << 10;

/// Turns that an endpoint waits for a peer that takes nothing.
const PATIENCE_TURNS: u32 = 300;

/// How an endpoint reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pace {
    Brisk,
    /// Reads a little, then pauses for seconds: slow, but always within the linger time.
    Napping,
    /// Pauses for minutes.
    Sleeping,
    Dead,
}

/// What an endpoint does after it has written everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Exit {
    Fin,
    Close,
    CloseAndGo,
    Vanish,
    /// Waits for the peer to close.
    Stay,
}

#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) key: TunnelKey,
    pub(crate) uid: u64,
    pub(crate) who: Who,
    pub(crate) open: bool,
    to_send: u64,
    queued: usize,
    delivered: u64,
    drained: u64,
    peer_fin: bool,
    end: Option<TunnelEnd>,
    aborted: bool,
    pace: Pace,
    exit: Exit,
    exited: bool,
    /// The endpoint writes while its dial is still pending.
    early: bool,
    cancels: bool,
    asleep_until: Moment,
    /// Long pauses left; afterwards a sleeping endpoint reads briskly.
    naps_left: u32,
    winding_down: bool,
    /// Turns in which the peer took nothing; an endpoint does not wait forever.
    blocked: u32,
}

impl Endpoint {
    pub(crate) fn new(key: TunnelKey, record: &mut Record, who: Who, rng: &mut Rng) -> Self {
        let pace = rng.pick(&[
            Pace::Brisk,
            Pace::Brisk,
            Pace::Brisk,
            Pace::Napping,
            Pace::Sleeping,
            Pace::Dead,
        ]);
        if matches!(pace, Pace::Sleeping | Pace::Dead) {
            record.excuse = Some("paused for long");
        }
        let most = rng.pick(&[0, 1, 90, 5_000, 60_000, 60_000, 400_000]);
        Self {
            key,
            uid: record.uid,
            who,
            open: who == Who::Target,
            to_send: rng.within(0..=most),
            queued: 0,
            delivered: 0,
            drained: 0,
            peer_fin: false,
            end: None,
            aborted: false,
            pace,
            exit: rng.pick(&[
                Exit::Fin,
                Exit::Fin,
                Exit::Close,
                Exit::CloseAndGo,
                Exit::Vanish,
                Exit::Stay,
                Exit::Stay,
            ]),
            exited: false,
            early: rng.once_in(6),
            cancels: who == Who::Client && rng.once_in(8),
            asleep_until: Moment::default(),
            naps_left: 2,
            winding_down: false,
            blocked: 0,
        }
    }

    pub(crate) fn deliver(&mut self, bytes: &[u8]) {
        let uid = self.uid;
        assert!(self.open, "tunnel {uid}: bytes before it was open");
        assert!(
            self.end.is_none() && !self.peer_fin,
            "tunnel {uid}: bytes after the end"
        );
        let from = match self.who {
            Who::Client => Who::Target,
            Who::Target => Who::Client,
        };
        assert!(
            is_stream(uid, from, self.delivered, bytes),
            "tunnel {uid}: {} bytes for {:?} at {} are not its own",
            bytes.len(),
            self.who,
            self.delivered
        );
        self.delivered += bytes.len() as u64;
    }

    pub(crate) fn peer_fin(&mut self) {
        assert!(!self.peer_fin && self.end.is_none());
        self.peer_fin = true;
    }

    pub(crate) fn ended(&mut self, end: TunnelEnd) {
        self.end = Some(end);
    }

    pub(crate) fn abort(&mut self) {
        assert!(self.end.is_some(), "aborted before it ended");
        self.aborted = true;
    }

    pub(crate) fn transmitted(&mut self, bytes: usize) {
        assert!(bytes <= self.queued, "more sent than was given");
        self.queued -= bytes;
    }

    /// The world winds down: an endpoint that would wait for the peer closes instead.
    pub(crate) fn wind_down(&mut self) {
        self.winding_down = true;
        if self.exit == Exit::Stay && self.who == Who::Client {
            self.exit = Exit::Close;
        }
        if self.exit == Exit::Stay {
            self.exit = Exit::Fin;
        }
    }

    pub(crate) fn wakes_at(&self) -> Moment {
        self.asleep_until
    }

    /// One turn. Returns whether the endpoint has left.
    pub(crate) fn act(
        &mut self,
        link: &mut Link,
        record: &mut Record,
        now: Moment,
        rng: &mut Rng,
    ) -> bool {
        if !self.open {
            if self.cancels && rng.once_in(40) {
                record.left_first = true;
                return self.go(link, now);
            }
            if self.early {
                self.write(link, record, now, rng);
            }
            return false;
        }
        self.read(link, record, now, rng);
        if let Some(end) = &self.end {
            let idle = self.drained == self.delivered;
            if self.aborted || !end.delivers_rest() || idle {
                return self.go(link, now);
            }
            return false;
        }
        if self.write(link, record, now, rng) {
            return self.go(link, now);
        }
        let done = self.exited && self.peer_fin && self.drained == self.delivered;
        done && rng.once_in(4) && self.go(link, now)
    }

    fn go(&mut self, link: &mut Link, now: Moment) -> bool {
        link.endpoint_gone(self.key, now);
        true
    }

    fn read(&mut self, link: &mut Link, record: &mut Record, now: Moment, rng: &mut Rng) {
        let waiting = self.delivered - self.drained;
        if waiting == 0 || now < self.asleep_until || self.pace == Pace::Dead || self.aborted {
            return;
        }
        let most = match self.pace {
            Pace::Napping => 9_000,
            _ => 40_000,
        };
        self.drained += waiting.min(rng.within(1..=most));
        if self.end.as_ref().is_none_or(TunnelEnd::delivers_rest) {
            record.seen(self.who).taken = self.drained;
        }
        link.endpoint_drained(self.key, self.drained, now);
        let nap = match self.pace {
            Pace::Napping if rng.once_in(2) => rng.within(100..=9_000),
            Pace::Sleeping if self.naps_left > 0 && rng.once_in(3) => {
                self.naps_left -= 1;
                rng.within(20_000..=400_000)
            }
            _ => return,
        };
        self.asleep_until = now.after(Duration::from_millis(nap));
    }

    /// Returns whether the endpoint leaves at once.
    fn write(&mut self, link: &mut Link, record: &mut Record, now: Moment, rng: &mut Rng) -> bool {
        if self.exited {
            return false;
        }
        let sent = record.seen(self.who).sent;
        if sent < self.to_send {
            self.blocked += u32::from(self.winding_down && self.queued >= QUEUED_MAX);
            if self.blocked > PATIENCE_TURNS {
                record.excuse.get_or_insert("ran out of patience");
                return true;
            }
            if self.queued < QUEUED_MAX && !rng.once_in(3) {
                let left = usize::try_from(self.to_send - sent).unwrap();
                let most = rng.pick(&[0, 1, 700, 16_384, 40_000]);
                let bytes = stream_bytes(self.uid, self.who, sent, left.min(rng.length(0..=most)));
                let length = bytes.len();
                link.budget().queue(bytes.len() as u64);
                if link.endpoint_data(self.key, bytes) {
                    self.queued += length;
                    record.seen(self.who).sent += length as u64;
                } else {
                    // Only a closing tunnel refuses bytes; its end arrives soon.
                    self.exited = true;
                }
            }
            return false;
        }
        if !self.open || rng.once_in(2) {
            return false;
        }
        self.exit(link, record, now)
    }

    fn exit(&mut self, link: &mut Link, record: &mut Record, now: Moment) -> bool {
        let text = match self.who {
            Who::Client => String::new(),
            Who::Target => String::from("target says bye"),
        };
        match self.exit {
            Exit::Stay if !self.peer_fin => return false,
            Exit::Fin | Exit::Stay => {
                record.seen(self.who).fin = true;
                link.endpoint_fin(self.key, now);
            }
            Exit::Close | Exit::CloseAndGo => {
                record.seen(self.who).closed = true;
                link.endpoint_close(self.key, text, now);
            }
            Exit::Vanish => {
                record.excuse = Some("vanished");
                return true;
            }
        }
        self.exited = true;
        self.exit == Exit::CloseAndGo
    }
}
