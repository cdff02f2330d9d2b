//! Busy polling: whether a thread may ask for events without waiting before it sleeps, and for how long. Knows neither
//! clock nor driver: times are passed in.

use std::time::{Duration, Instant};

use crate::config::BusyPoll;

/// A thread's share that it did not use is kept for this long: so much of it may be used in one go.
const WINDOW: Duration = Duration::from_millis(100);
/// So many long waits more than short ones, and a thread sleeps at once until a wait is short again.
const HOPE_MAX: u32 = 8;

/// What one thread may still spin, and whether it is worth it.
pub(crate) struct Spin {
    rule: BusyPoll,
    /// Time that the share allows and that was not used.
    credit: Duration,
    /// Until when credit was given.
    credited: Instant,
    /// Whether waits were short of late: then spinning would have spared a sleep.
    hope: u32,
}

impl Spin {
    pub(crate) fn new(rule: BusyPoll, now: Instant) -> Self {
        Self {
            rule,
            credit: Duration::ZERO,
            credited: now,
            hope: HOPE_MAX,
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        !self.rule.at_most.is_zero()
    }

    /// For how long the wait that begins now may ask again and again before it sleeps: as long as it is of use, or not
    /// at all.
    pub(crate) fn allowed(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.credited);
        self.credited = now;
        self.credit = (self.credit + self.share_of(passed)).min(self.share_of(WINDOW));
        if self.hope == 0 || self.credit < self.rule.at_most {
            Duration::ZERO
        } else {
            self.rule.at_most
        }
    }

    /// A wait is over that took `waited` in all, `spun` of it without sleep.
    pub(crate) fn note(&mut self, spun: Duration, waited: Duration) {
        self.credit = self.credit.saturating_sub(spun);
        self.hope = if waited <= self.rule.at_most {
            HOPE_MAX.min(self.hope + 1)
        } else {
            self.hope.saturating_sub(1)
        };
    }

    fn share_of(&self, time: Duration) -> Duration {
        time * self.rule.percent.min(100) / 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_MOST: Duration = Duration::from_micros(50);
    const SHORT: Duration = Duration::from_micros(40);
    const LONG: Duration = Duration::from_millis(1);

    fn spin(percent: u32, now: Instant) -> Spin {
        let rule = BusyPoll {
            at_most: AT_MOST,
            percent,
        };
        Spin::new(rule, now)
    }

    /// Waits that begin one after the other and each take `wait`, for `time`: how long they spun in all.
    fn spun(spin: &mut Spin, now: &mut Instant, wait: Duration, time: Duration) -> Duration {
        let (start, mut all) = (*now, Duration::ZERO);
        while *now - start < time {
            let spun = spin.allowed(*now).min(wait);
            *now += wait;
            spin.note(spun, wait);
            all += spun;
        }
        all
    }

    #[test]
    fn a_busy_thread_spins_for_its_share_and_no_longer() {
        let second = Duration::from_secs(1);
        for percent in [1, 25, 100] {
            let mut now = Instant::now();
            let mut spin = spin(percent, now);
            let all = spun(&mut spin, &mut now, SHORT, second);
            let share = second * percent / 100;
            assert!(all <= share + AT_MOST, "{percent} %: {all:?}");
            assert!(all >= share - 2 * AT_MOST, "{percent} %: {all:?}");
        }
    }

    #[test]
    fn what_was_not_used_is_kept_for_a_window_only() {
        let mut now = Instant::now();
        let mut spin = spin(25, now);
        now += Duration::from_secs(3600);
        let all = spun(&mut spin, &mut now, SHORT, WINDOW);
        assert!(all <= WINDOW / 2, "an hour's credit was used: {all:?}");
    }

    #[test]
    fn a_thread_that_spins_in_vain_stops_until_a_wait_is_short() {
        let mut now = Instant::now();
        let mut spin = spin(25, now);
        now += WINDOW;
        let vain = spun(&mut spin, &mut now, LONG, 1000 * LONG);
        assert_eq!(vain, AT_MOST * HOPE_MAX);
        assert_eq!(spun(&mut spin, &mut now, SHORT, SHORT), Duration::ZERO);
        assert_eq!(spun(&mut spin, &mut now, SHORT, SHORT), SHORT);
    }

    #[test]
    fn without_a_rule_nothing_is_allowed() {
        let now = Instant::now();
        let mut spin = Spin::new(BusyPoll::default(), now);
        assert!(!spin.is_on());
        assert_eq!(spin.allowed(now + WINDOW), Duration::ZERO);
    }
}
