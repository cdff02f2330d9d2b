//! When reading a link without credit is briefly paused: its endpoints take bytes fast, but slower than they come.
//!
//! A Go agent cannot slow down one tunnel. A reader that stalls must not slow the link, so its tunnel is reset when the budget
//! is full. A reader that takes a megabyte a second is different: pausing the link for moments keeps its tunnel and costs the
//! others little. Where endpoints that take nothing hold most of the budget, pausing makes no room, and the link is read on.

use std::time::Duration;

use adit_core::session::{Link, Moment};

/// Bytes a second that the link's endpoints together must take.
const RATE_MIN_BYTES: u64 = 1 << 20;
/// Period over which the rate is measured.
const SAMPLE: Duration = Duration::from_millis(500);
/// How long a link that has just become nearly full is paused, until a rate is known. A fast agent fills its budget before a
/// reader that takes bytes in bursts shows its rate.
const GRACE: Duration = Duration::from_millis(600);
/// How soon a paused link is checked again, drained or not.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Samples of one link.
#[derive(Debug, Default)]
pub(super) struct Pace {
    sampled_at: Moment,
    drained: u64,
    fast: bool,
    full_since: Option<Moment>,
    /// When it was last checked which endpoints hold the budget; `held_by_readers` is the result.
    looked_at: Option<Moment>,
    held_by_readers: bool,
}

impl Pace {
    /// Whether to leave the link unread now.
    pub(super) fn holds(&mut self, link: &Link, now: Moment) -> bool {
        let elapsed = now.since(self.sampled_at);
        if elapsed >= SAMPLE {
            let taken = link.drained_bytes() - self.drained;
            let millis = u64::try_from(elapsed.as_millis())
                .unwrap_or(u64::MAX)
                .max(1);
            self.fast = taken.saturating_mul(1000) / millis >= RATE_MIN_BYTES;
            self.drained = link.drained_bytes();
            self.sampled_at = now;
        }
        if !link.is_nearly_full() {
            self.full_since = None;
            self.looked_at = None;
            return false;
        }
        let since = *self.full_since.get_or_insert(now);
        (self.fast || now.since(since) < GRACE) && self.is_held_by_readers(link, now)
    }

    /// Visits all tunnels, so it is not called for every frame.
    fn is_held_by_readers(&mut self, link: &Link, now: Moment) -> bool {
        let is_due = |at: Moment| now.since(at) >= LOOK_AGAIN;
        if self.looked_at.is_none_or(is_due) {
            self.looked_at = Some(now);
            self.held_by_readers = link.is_held_by_readers(now);
        }
        self.held_by_readers
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use adit_core::ids::{ConnId, DialId, TunnelKey};
    use adit_core::session::{DialRequest, Isolation, LinkConfig, ProcessBudget, Role};
    use adit_core::wire::packet::{Packet, Received};
    use bytes::Bytes;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A server's link with two tunnels and the default budget of 64 MiB: nearly full above 48 MiB.
    struct Rig {
        link: Link,
        pace: Pace,
        now: Moment,
        keys: Vec<TunnelKey>,
        drained: Vec<u64>,
    }

    impl Rig {
        fn new(credit: bool) -> Self {
            let config = LinkConfig {
                role: Role::Server,
                credit,
                packet_bytes_max: 32 * 1024,
                dials_max: 10,
                dial_timeout: None,
                isolation: Isolation::default(),
                control_max: 100,
            };
            let mut rig = Self {
                link: Link::new(config, Arc::new(ProcessBudget::new(1 << 40)), "peer".into()),
                pace: Pace::default(),
                now: Moment(Duration::from_secs(1000)),
                keys: Vec::new(),
                drained: vec![0; 2],
            };
            for id in 1..=2 {
                let request = DialRequest {
                    dial: DialId(id),
                    spare: DialId(id + 100),
                    protocol: "tcp".to_owned(),
                    address: "a:1".to_owned(),
                };
                rig.keys.push(rig.link.dial(request, rig.now).unwrap());
                while rig.link.poll_transmit(rig.now).is_some() {}
                rig.receive(Packet::DialRsp {
                    dial: DialId(id),
                    conn: ConnId(id),
                    error: String::new(),
                    window: 0,
                });
            }
            // The first check has no earlier sample.
            assert!(!rig.holds());
            rig
        }

        fn receive(&mut self, packet: Packet) {
            self.link.handle_packet(Received::Packet(packet), self.now);
            while self.link.poll_action().is_some() {}
        }

        /// The agent sends `bytes` bytes for tunnel `at`.
        fn fill(&mut self, at: usize, bytes: u64) {
            self.receive(Packet::Data {
                conn: ConnId(i64::try_from(at).unwrap() + 1),
                bytes: Bytes::from(vec![0; usize::try_from(bytes).unwrap()]),
            });
        }

        /// The client of tunnel `at` takes `bytes` bytes.
        fn take(&mut self, at: usize, bytes: u64) {
            self.drained[at] += bytes;
            self.link
                .endpoint_drained(self.keys[at], self.drained[at], self.now);
        }

        fn pass(&mut self, millis: u64) {
            self.now = self.now.after(Duration::from_millis(millis));
        }

        fn holds(&mut self) -> bool {
            self.pace.holds(&self.link, self.now)
        }

        /// A nearly full link after the time in which the drain rates are unknown.
        fn full_for_long() -> Self {
            let mut rig = Self::new(false);
            rig.fill(0, 25 * MIB);
            rig.fill(1, 25 * MIB);
            assert!(rig.holds());
            rig.pass(600);
            assert!(!rig.holds());
            rig
        }

        /// Half a second in which each reader takes that many bytes and the agent sends as many again.
        fn half_second(&mut self, taken: [u64; 2]) {
            for (at, bytes) in taken.into_iter().enumerate() {
                self.take(at, bytes);
                self.fill(at, bytes);
            }
            self.pass(500);
        }
    }

    #[test]
    fn a_link_with_room_is_read_however_slow_its_readers_are() {
        let mut rig = Rig::new(false);
        rig.fill(0, 48 * MIB);
        for _look in 0..100 {
            assert!(!rig.holds());
            rig.pass(100);
        }
        rig.take(0, 1);
        rig.fill(0, 2);
        assert!(rig.holds(), "48 MiB of 64 is the limit");
    }

    #[test]
    fn a_link_with_credit_is_always_read() {
        let mut rig = Rig::new(true);
        // Two windows are all that a peer with credit may send; more is a violation by that tunnel.
        rig.fill(0, 256 << 10);
        rig.fill(1, 256 << 10);
        assert!(rig.link.held_bytes() > 0 && !rig.holds());
    }

    /// Limit (memory): Drain rate above which a full link waits for its slow readers | 1 MiB/s over all readers of the
    /// link, measured over 500 ms. The first measurement takes 600 ms
    #[test]
    fn a_full_link_is_not_read_until_its_readers_are_known_to_stall() {
        let mut rig = Rig::new(false);
        rig.fill(0, 50 * MIB);
        assert!(rig.holds());
        rig.pass(500);
        assert!(rig.holds());
        rig.pass(5);
        assert!(!rig.holds(), "its readers took nothing");
        rig.pass(10_000);
        assert!(!rig.holds(), "and there is no second grace");
    }

    #[test]
    fn room_in_between_restarts_the_grace_period() {
        let mut rig = Rig::full_for_long();
        rig.take(0, 10 * MIB);
        rig.pass(2_000);
        // 10 MiB in two seconds count as fast. The link has room again, so the check forgets since when the link was
        // full.
        assert!(!rig.holds());
        rig.pass(20_000);
        assert!(!rig.holds());
        rig.take(0, 1);
        rig.fill(0, 10 * MIB);
        assert!(rig.holds());
        rig.pass(500);
        assert!(rig.holds());
        rig.pass(5);
        assert!(!rig.holds());
    }

    /// A download beside stalled readers must not be delayed for as long as they stall.
    #[test]
    fn a_link_filled_by_stalled_readers_is_still_read_for_active_ones() {
        for (stalled, waited_for) in [(36, false), (35, true)] {
            let mut rig = Rig::new(false);
            rig.fill(1, stalled * MIB);
            rig.pass(501);
            rig.fill(0, (51 - stalled) * MIB);
            assert_eq!(rig.holds(), waited_for, "{stalled} MiB");
            for _half in 0..3 {
                rig.half_second([5 * MIB, 0]);
                assert_eq!(rig.holds(), waited_for, "{stalled} MiB");
            }
        }
    }

    /// Limit (memory): Drain rate above which a full link waits for its slow readers
    #[test]
    fn readers_of_one_mebibyte_a_second_together_are_waited_for_and_slower_ones_are_not() {
        for (taken, waited_for) in [
            ([MIB / 2, 0], true),
            ([MIB / 4, MIB / 4], true),
            ([MIB / 4, MIB / 4 - 3], false),
            ([10_000, 0], false),
            ([0, 0], false),
        ] {
            let mut rig = Rig::full_for_long();
            rig.half_second(taken);
            // The running sample may cover less than this half second, so the next, complete sample is judged.
            rig.holds();
            rig.half_second(taken);
            assert_eq!(rig.holds(), waited_for, "{taken:?}");
            rig.half_second(taken);
            assert_eq!(rig.holds(), waited_for, "{taken:?} goes on");
        }
    }

    /// Limit (memory): Drain rate above which a full link waits for its slow readers
    #[test]
    fn a_burst_counts_only_when_its_half_second_is_over() {
        let mut rig = Rig::full_for_long();
        rig.pass(500);
        assert!(!rig.holds());
        rig.take(0, MIB);
        rig.fill(0, MIB);
        rig.pass(499);
        assert!(!rig.holds());
        rig.pass(1);
        assert!(rig.holds());
    }

    #[test]
    fn a_fast_reader_that_stalls_is_waited_for_half_a_second_only() {
        let mut rig = Rig::full_for_long();
        for _half in 0..4 {
            rig.half_second([5 * MIB, 0]);
            rig.holds();
        }
        assert!(rig.holds(), "it took something half a second ago");
        rig.pass(5);
        assert!(!rig.holds());
    }
}
