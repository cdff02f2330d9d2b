//! How many lanes a server asks the agent of one link for. Pure: the clock is an argument.

use std::time::Duration;

use crate::session::Moment;

/// Misses older than this belong to a burst that is over.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);

/// Dials of one link that found no idle lane, and lanes asked for.
#[derive(Debug)]
pub struct Demand {
    /// Limit on lanes of the link, and so on lanes to ask for.
    limit: usize,
    /// Dials that found no lane, as far as no lane was asked for.
    missed: usize,
    /// Lanes asked for since few were left, beside those for missed dials.
    spare: usize,
    since: Moment,
}

impl Demand {
    /// With fewer idle lanes left, the server asks for more, though no dial has missed one.
    pub const IDLE_MIN: usize = 2;

    /// At most `limit` lanes.
    #[must_use]
    pub fn new(limit: usize, now: Moment) -> Self {
        Self {
            limit,
            missed: 0,
            spare: 0,
            since: now,
        }
    }

    /// A dial found no idle lane.
    pub fn miss(&mut self, now: Moment) {
        self.forget(now);
        self.missed = (self.missed + 1).min(self.limit);
        self.since = now;
    }

    /// How many lanes to ask for when a dial has left `idle` lanes.
    pub fn after_dial(&mut self, idle: usize, now: Moment) -> usize {
        let missed = self.after_return(idle, now);
        let low = Self::IDLE_MIN.saturating_sub(idle);
        (missed + low.saturating_sub(self.spare)).min(self.limit)
    }

    /// How many lanes to ask for when a lane has become the last of `idle` ones: further ones may be on their way.
    pub fn after_return(&mut self, idle: usize, now: Moment) -> usize {
        self.forget(now);
        if idle >= Self::IDLE_MIN {
            self.spare = 0;
        }
        self.missed
    }

    /// That many lanes were asked for.
    pub fn requested(&mut self, lanes: usize, now: Moment) {
        let for_missed = lanes.min(self.missed);
        self.missed -= for_missed;
        self.spare += lanes - for_missed;
        self.since = now;
    }

    fn forget(&mut self, now: Moment) {
        if now.since(self.since) > FORGOTTEN_AFTER {
            (self.missed, self.spare) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    #[test]
    fn each_missed_dial_is_asked_for_once() {
        let mut demand = Demand::new(100, at(0));
        for _dial in 0..13 {
            demand.miss(at(1));
        }
        assert_eq!(demand.after_dial(5, at(1)), 13);
        demand.requested(8, at(1));
        assert_eq!(demand.after_dial(5, at(2)), 5);
        demand.requested(5, at(2));
        assert_eq!(demand.after_dial(5, at(2)), 0);
    }

    #[test]
    fn few_idle_lanes_are_made_up_for_once_until_they_are_there() {
        let mut demand = Demand::new(100, at(0));
        assert_eq!(demand.after_dial(2, at(0)), 0);
        assert_eq!(demand.after_dial(1, at(0)), 1);
        demand.requested(1, at(0));
        assert_eq!(demand.after_dial(1, at(0)), 0);
        assert_eq!(demand.after_dial(0, at(0)), 1);
        demand.requested(1, at(0));
        assert_eq!(demand.after_dial(0, at(1)), 0);
        // The agent has opened them, and later they are taken again.
        assert_eq!(demand.after_dial(2, at(2)), 0);
        assert_eq!(demand.after_dial(0, at(3)), 2);
        assert_eq!(demand.after_return(1, at(3)), 0, "no dial missed one");
    }

    #[test]
    fn misses_are_bounded_and_forgotten() {
        let mut demand = Demand::new(4, at(0));
        for _dial in 0..10 {
            demand.miss(at(0));
        }
        assert_eq!(demand.after_dial(9, at(10)), 4);
        assert_eq!(demand.after_dial(9, at(11)), 0);
    }
}
