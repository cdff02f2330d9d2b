//! Which segments of a connection a sockmap may send on to another socket without user space. Only the experiment of
//! ADR 0017 uses it: no program that decides by it is part of the daemon.

/// Words of a [`Grant`] in its map.
pub const GRANT_WORDS: usize = 7;
/// Words of a [`Moved`] in its map.
pub const MOVED_WORDS: usize = 5;
/// Words of a [`Route`] in its map.
pub const ROUTE_WORDS: usize = 2;

/// What user space says about one direction of a pair, by the cookie of the socket that receives the bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Index of the socket that sends them on.
    pub peer: u64,
    /// What becomes of a segment without payload: [`EMPTY_PASS`], [`EMPTY_REDIRECT`] or [`EMPTY_DROP`].
    pub on_empty: u64,
    /// Most payload bytes in flight: sent on and not drained yet.
    pub limit_bytes: u64,
    /// Most segments in flight.
    pub limit_packets: u64,
    /// Bytes that were sent on and that the peer's TCP has been seen to take.
    pub drained_bytes: u64,
    /// Segments that these are at least.
    pub drained_packets: u64,
    /// Bytes that were passed, and that user space has read and written to the peer by itself.
    pub consumed_bytes: u64,
}

/// What the program says about one direction, by the same cookie. All counts begin when the socket is inserted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Payload bytes sent on.
    pub forwarded_bytes: u64,
    /// Segments sent on.
    pub forwarded_packets: u64,
    /// Payload bytes left to user space.
    pub passed_bytes: u64,
    /// Segments left to user space.
    pub passed_packets: u64,
    /// Segments without payload: the end of the stream, if it came alone.
    pub empty_packets: u64,
}

/// Where what one socket writes appears, by the socket's own port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Index of the socket.
    pub peer: u64,
    /// 1: in what it receives; 0: in what it sends.
    pub is_ingress: u64,
}

/// User space sees the end.
pub const EMPTY_PASS: u64 = 0;
/// The peer is sent nothing at all, which kernels take for an error.
pub const EMPTY_REDIRECT: u64 = 1;
/// It is thrown away.
pub const EMPTY_DROP: u64 = 2;

/// What to do with a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send it on by the peer.
    Redirect,
    /// Leave it to user space.
    Pass,
    /// Throw it away.
    Drop,
}

/// The guard. Nothing is sent on ahead of bytes that user space still holds, nor beyond the limits; what is missing leaves
/// the segment to user space.
#[inline(always)]
#[must_use]
pub fn verdict(length: u64, grant: Option<&Grant>, moved: &Moved) -> Verdict {
    let Some(grant) = grant else {
        return Verdict::Pass;
    };
    if length == 0 {
        return match grant.on_empty {
            EMPTY_REDIRECT => Verdict::Redirect,
            EMPTY_DROP => Verdict::Drop,
            _ => Verdict::Pass,
        };
    }
    let bytes = moved.forwarded_bytes.wrapping_sub(grant.drained_bytes);
    let packets = moved.forwarded_packets.wrapping_sub(grant.drained_packets);
    let is_behind = moved.passed_bytes != grant.consumed_bytes;
    let is_full =
        bytes.saturating_add(length) > grant.limit_bytes || packets >= grant.limit_packets;
    if is_behind || is_full {
        Verdict::Pass
    } else {
        Verdict::Redirect
    }
}

impl Moved {
    /// Counts a segment of `length` payload bytes.
    #[inline(always)]
    pub fn count(&mut self, length: u64, verdict: Verdict) {
        if length == 0 {
            self.empty_packets += 1;
            return;
        }
        match verdict {
            Verdict::Redirect => {
                self.forwarded_bytes += length;
                self.forwarded_packets += 1;
            }
            Verdict::Pass => {
                self.passed_bytes += length;
                self.passed_packets += 1;
            }
            Verdict::Drop => (),
        }
    }

    /// From the words of the map.
    #[must_use]
    pub fn from_words(words: [u64; MOVED_WORDS]) -> Self {
        let [
            forwarded_bytes,
            forwarded_packets,
            passed_bytes,
            passed_packets,
            empty_packets,
        ] = words;
        Self {
            forwarded_bytes,
            forwarded_packets,
            passed_bytes,
            passed_packets,
            empty_packets,
        }
    }
}

impl Grant {
    /// The words of the map.
    #[must_use]
    pub fn to_words(self) -> [u64; GRANT_WORDS] {
        [
            self.peer,
            self.on_empty,
            self.limit_bytes,
            self.limit_packets,
            self.drained_bytes,
            self.drained_packets,
            self.consumed_bytes,
        ]
    }
}

impl Route {
    /// The words of the map.
    #[must_use]
    pub fn to_words(self) -> [u64; ROUTE_WORDS] {
        [self.peer, self.is_ingress]
    }
}

const _: () = {
    assert!(size_of::<Grant>() == 8 * GRANT_WORDS);
    assert!(size_of::<Moved>() == 8 * MOVED_WORDS);
    assert!(size_of::<Route>() == 8 * ROUTE_WORDS);
};

#[cfg(test)]
mod tests {
    use super::*;

    const GRANT: Grant = Grant {
        peer: 1,
        on_empty: EMPTY_PASS,
        limit_bytes: 100,
        limit_packets: 3,
        drained_bytes: 1_000,
        drained_packets: 10,
        consumed_bytes: 50,
    };

    fn moved(forwarded_bytes: u64, forwarded_packets: u64, passed_bytes: u64) -> Moved {
        Moved {
            forwarded_bytes,
            forwarded_packets,
            passed_bytes,
            ..Moved::default()
        }
    }

    #[test]
    fn nothing_is_in_flight_beyond_the_limits() {
        for (length, bytes, packets, expected) in [
            (100, 1_000, 10, Verdict::Redirect),
            (101, 1_000, 10, Verdict::Pass),
            (1, 1_099, 12, Verdict::Redirect),
            (1, 1_100, 12, Verdict::Pass),
            (1, 1_000, 13, Verdict::Pass),
            (u64::MAX, 1_001, 10, Verdict::Pass),
        ] {
            let now = moved(bytes, packets, 50);
            assert_eq!(
                verdict(length, Some(&GRANT), &now),
                expected,
                "{length} {now:?}"
            );
        }
    }

    #[test]
    fn nothing_overtakes_what_user_space_still_holds() {
        assert_eq!(
            verdict(1, Some(&GRANT), &moved(1_000, 10, 51)),
            Verdict::Pass
        );
        let caught_up = Grant {
            consumed_bytes: 51,
            ..GRANT
        };
        let now = moved(1_000, 10, 51);
        assert_eq!(verdict(1, Some(&caught_up), &now), Verdict::Redirect);
    }

    #[test]
    fn without_a_grant_and_without_payload_it_is_left_to_user_space() {
        let now = moved(1_000, 10, 50);
        assert_eq!(verdict(1, None, &now), Verdict::Pass);
        assert_eq!(verdict(0, Some(&GRANT), &now), Verdict::Pass);
        for (on_empty, expected) in [
            (EMPTY_REDIRECT, Verdict::Redirect),
            (EMPTY_DROP, Verdict::Drop),
            (77, Verdict::Pass),
        ] {
            let grant = Grant { on_empty, ..GRANT };
            assert_eq!(verdict(0, Some(&grant), &now), expected);
        }
    }

    #[test]
    fn counts_know_what_became_of_a_segment() {
        let mut moved = Moved::default();
        moved.count(5, Verdict::Redirect);
        moved.count(7, Verdict::Pass);
        moved.count(0, Verdict::Pass);
        moved.count(9, Verdict::Drop);
        assert_eq!(moved, Moved::from_words([5, 1, 7, 1, 1]));
    }
}
