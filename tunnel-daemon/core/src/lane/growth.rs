//! How many lanes an agent keeps open towards one server. Pure: the clock is an argument.

use std::time::Duration;

use crate::session::Moment;

/// Period over which the fewest idle lanes are measured before surplus lanes are closed.
const WINDOW: Duration = Duration::from_secs(60);

/// Number of lanes by state.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Lanes {
    /// Bound and without a tunnel.
    pub idle: usize,
    /// With a tunnel, or abandoned and not closed yet.
    pub busy: usize,
    /// Connecting or not bound yet.
    pub opening: usize,
}

impl Lanes {
    fn all(self) -> usize {
        self.idle + self.busy + self.opening
    }
}

/// The wanted number of idle lanes: doubles when lanes are short, halves when most idle lanes stay unused.
#[derive(Debug)]
pub struct Growth {
    limit: usize,
    wanted: usize,
    /// Lanes were short since `wanted` last grew.
    was_short: bool,
    window_from: Moment,
    idle_min: usize,
}

impl Growth {
    /// Idle lanes kept without demand.
    pub const WARM: usize = 4;

    /// At most `limit` lanes of all kinds; 0: none at all.
    #[must_use]
    pub fn new(limit: usize, now: Moment) -> Self {
        Self {
            limit,
            wanted: Self::WARM.min(limit),
            was_short: false,
            window_from: now,
            idle_min: usize::MAX,
        }
    }

    /// Idle lanes wanted now.
    #[must_use]
    pub fn wanted(&self) -> usize {
        self.wanted
    }

    /// The server ran short of idle lanes, or nearly so. The wanted number doubles once that many lanes are idle; until then
    /// missing lanes are being opened anyway.
    pub fn short(&mut self) {
        self.was_short = true;
    }

    /// How many lanes to open now.
    pub fn missing(&mut self, lanes: Lanes) -> usize {
        let there = lanes.idle + lanes.opening;
        if there >= self.wanted && lanes.opening == 0 && std::mem::take(&mut self.was_short) {
            self.wanted = (self.wanted * 2).min(self.limit);
        }
        let room = self.limit.saturating_sub(lanes.all());
        self.wanted.saturating_sub(there).min(room)
    }

    /// How many idle lanes to close now. Call whenever `idle` has changed, and periodically.
    pub fn surplus(&mut self, lanes: Lanes, now: Moment) -> usize {
        self.idle_min = self.idle_min.min(lanes.idle);
        if now.since(self.window_from) < WINDOW {
            return 0;
        }
        let unused = std::mem::replace(&mut self.idle_min, lanes.idle);
        self.window_from = now;
        if unused > self.wanted / 2 {
            self.wanted = (self.wanted / 2).max(Self::WARM).min(self.limit);
        }
        // Lanes that were needed within the window stay.
        unused.saturating_sub(self.wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    fn idle(idle: usize) -> Lanes {
        Lanes {
            idle,
            ..Lanes::default()
        }
    }

    /// Limit (peers): Idle lanes of an agent | 4; doubled when short, halved when most are unused for 60 s
    #[test]
    fn idle_lanes_start_at_the_minimum_and_double_up_to_the_limit() {
        let mut growth = Growth::new(20, at(0));
        assert_eq!(growth.missing(Lanes::default()), Growth::WARM);
        let lanes = Lanes {
            idle: 1,
            busy: 5,
            opening: 2,
        };
        assert_eq!(growth.missing(lanes), 1);
        growth.short();
        assert_eq!(
            growth.wanted(),
            Growth::WARM,
            "the first ones are on their way"
        );
        for wanted in [8, 16, 20] {
            growth.short();
            growth.short();
            let before = growth.wanted();
            assert_eq!(growth.missing(idle(before)), wanted - before);
            assert_eq!(growth.missing(idle(wanted)), 0);
            assert_eq!(growth.wanted(), wanted);
        }
        // Busy lanes count against the limit.
        let lanes = Lanes {
            idle: 2,
            busy: 15,
            opening: 0,
        };
        assert_eq!(growth.missing(lanes), 3);
        assert_eq!(Growth::new(0, at(0)).missing(Lanes::default()), 0);
    }

    fn grown_to_64() -> Growth {
        let mut growth = Growth::new(100, at(0));
        while growth.wanted() < 64 {
            growth.short();
            growth.missing(idle(growth.wanted()));
        }
        growth
    }

    /// Limit (peers): Idle lanes of an agent
    #[test]
    fn unused_idle_lanes_are_halved_every_minute() {
        let mut growth = grown_to_64();
        assert_eq!(growth.surplus(idle(64), at(1)), 0);
        assert_eq!(growth.surplus(idle(64), at(60)), 32);
        assert_eq!(growth.wanted(), 32);
        assert_eq!(growth.surplus(idle(32), at(120)), 16);
        for minute in 3..20 {
            growth.surplus(idle(growth.wanted()), at(60 * minute));
        }
        assert_eq!(growth.wanted(), Growth::WARM);
        assert_eq!(growth.surplus(idle(Growth::WARM), at(6000)), 0);
    }

    #[test]
    fn a_burst_within_the_window_keeps_the_lanes() {
        let mut growth = grown_to_64();
        growth.surplus(idle(64), at(10));
        growth.surplus(idle(3), at(30));
        assert_eq!(growth.surplus(idle(64), at(60)), 0);
        assert_eq!(growth.wanted(), 64);
    }
}
