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

/// What a server asks for in WANT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Want {
    /// Open so many lanes now. A server that does not count always says 1, and means that few are idle.
    Open(u32),
    /// Keep so many idle lanes.
    Keep(u32),
}

/// The wanted number of idle lanes. It grows by what the server asks for, or doubles when lanes are short at a server that
/// does not count. It halves when most idle lanes stay unused.
#[derive(Debug)]
pub struct Growth {
    limit: usize,
    /// Idle lanes kept without demand.
    warm: usize,
    wanted: usize,
    /// The server counts the dials that found no lane, and asks for as many.
    server_counts: bool,
    /// Lanes that the server has asked for and that were not tried yet.
    granted: usize,
    /// Lanes were short since `wanted` last grew.
    was_short: bool,
    window_from: Moment,
    idle_min: usize,
}

impl Growth {
    /// Idle lanes kept without demand, unless the server asks for more.
    pub const WARM: usize = 4;
    /// Most idle lanes kept without demand.
    pub const WARM_MAX: usize = 16;
    /// Lanes opened at once that no server has asked for.
    pub const AT_ONCE: usize = 4;
    /// Most lanes at once that a server can ask for.
    pub const GRANT_MAX: usize = 32;

    /// At most `limit` lanes of all kinds; 0: none at all.
    #[must_use]
    pub fn new(limit: usize, now: Moment) -> Self {
        Self {
            limit,
            warm: Self::WARM.min(limit),
            wanted: Self::WARM.min(limit),
            server_counts: false,
            granted: 0,
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
    /// missing lanes are being opened anyway. A server that counts will ask for lanes.
    pub fn short(&mut self) {
        self.was_short = !self.server_counts;
    }

    /// The server asks for lanes. What it asks for is bounded, whatever the number.
    pub fn want(&mut self, want: Want) {
        match want {
            Want::Open(0 | 1) if !self.server_counts => self.was_short = true,
            Want::Open(lanes) => {
                let lanes = usize::try_from(lanes).unwrap_or(usize::MAX);
                let lanes = lanes.min(Self::GRANT_MAX);
                (self.server_counts, self.was_short) = (true, false);
                self.wanted = (self.wanted + lanes).min(self.limit);
                self.granted = (self.granted + lanes).min(Self::GRANT_MAX);
            }
            Want::Keep(lanes) => {
                let lanes = usize::try_from(lanes).unwrap_or(usize::MAX);
                (self.server_counts, self.was_short) = (true, false);
                self.warm = lanes.clamp(Self::WARM, Self::WARM_MAX).min(self.limit);
                self.wanted = self.wanted.max(self.warm);
            }
        }
    }

    /// Whether the server has asked for one more lane, beside those that are opened [at once](Self::AT_ONCE) anyway. Each one
    /// is returned once.
    pub fn take_granted(&mut self) -> bool {
        let is_granted = self.granted > 0;
        self.granted = self.granted.saturating_sub(1);
        is_granted
    }

    /// How many lanes to open now.
    pub fn missing(&mut self, lanes: Lanes) -> usize {
        let there = lanes.idle + lanes.opening;
        if there >= self.wanted {
            // They were opened beside it.
            self.granted = 0;
        }
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
            self.wanted = (self.wanted / 2).max(self.warm).min(self.limit);
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

    /// Limit (peers): Idle lanes of an agent | 16, with many agents 8 or 4; more when dials miss, halved when most are unused
    /// for 60 s
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

    /// Limit (peers): Lanes that an agent opens at once
    #[test]
    fn lanes_that_the_server_asks_for_are_opened_at_once() {
        let mut growth = Growth::new(100, at(0));
        growth.want(Want::Open(13));
        assert_eq!(growth.missing(Lanes::default()), 17);
        let granted = std::iter::from_fn(|| growth.take_granted().then_some(()));
        assert_eq!(granted.count(), 13);
        // From now on the server counts: 1 means one, and a dial over the link means nothing.
        growth.want(Want::Open(1));
        growth.short();
        assert_eq!(growth.missing(idle(17)), 1);
        assert_eq!(growth.missing(idle(18)), 0);
        assert_eq!(growth.wanted(), 18);
        assert!(!growth.take_granted(), "it was opened meanwhile");
    }

    /// A server of an older release always says 1.
    #[test]
    fn a_one_of_a_server_that_does_not_count_doubles_the_idle_lanes() {
        let mut growth = Growth::new(100, at(0));
        growth.want(Want::Open(1));
        assert_eq!(growth.missing(idle(4)), 4);
        assert_eq!((growth.wanted(), growth.take_granted()), (8, false));
    }

    /// Limit (peers): Lanes that servers ask for at once
    #[test]
    fn absurd_numbers_of_a_server_are_bounded() {
        let mut growth = Growth::new(1000, at(0));
        for _again in 0..3 {
            growth.want(Want::Open(u32::MAX));
        }
        assert_eq!(growth.wanted(), Growth::WARM + 3 * Growth::GRANT_MAX);
        let granted = std::iter::from_fn(|| growth.take_granted().then_some(()));
        assert_eq!(granted.count(), Growth::GRANT_MAX);
        let mut growth = Growth::new(1000, at(0));
        growth.want(Want::Keep(u32::MAX));
        assert_eq!(growth.wanted(), Growth::WARM_MAX);
        growth.want(Want::Keep(0));
        growth.surplus(idle(16), at(60));
        growth.surplus(idle(8), at(120));
        assert_eq!(growth.wanted(), Growth::WARM);
        let mut few = Growth::new(2, at(0));
        few.want(Want::Keep(16));
        few.want(Want::Open(9));
        assert_eq!(few.missing(Lanes::default()), 2);
    }

    /// Limit (peers): Idle lanes of an agent
    #[test]
    fn unused_idle_lanes_shrink_to_the_number_that_the_server_names() {
        let mut growth = Growth::new(100, at(0));
        growth.want(Want::Keep(16));
        assert_eq!(growth.missing(idle(4)), 12);
        growth.want(Want::Open(20));
        assert_eq!(growth.surplus(idle(36), at(60)), 18);
        growth.surplus(idle(18), at(120));
        assert_eq!(growth.surplus(idle(16), at(600)), 0);
        assert_eq!(growth.wanted(), 16);
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
