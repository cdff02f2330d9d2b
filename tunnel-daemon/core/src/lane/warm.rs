//! How many idle lanes a server lets each agent keep.

use super::Growth;

/// Idle lanes of all agents together, if the process may have many lanes: each is a connection with its TLS state.
const ALL_MAX: usize = 1024;
/// The part of a process's lanes that may be idle ones.
const PART: usize = 4;

/// Idle lanes for each of a server's links: few where links are many.
#[derive(Debug)]
pub struct WarmLanes {
    /// Idle lanes of all links together, above the least that each link has.
    all_max: usize,
    links: usize,
    each: usize,
}

impl WarmLanes {
    /// Most idle lanes of a link.
    pub const MAX: usize = Growth::WARM_MAX;

    /// For a process that may have `lanes_max` lanes.
    #[must_use]
    pub fn new(lanes_max: usize) -> Self {
        Self {
            all_max: (lanes_max / PART).min(ALL_MAX),
            links: 0,
            each: Self::MAX,
        }
    }

    /// One more link has lanes.
    pub fn joined(&mut self) {
        self.links += 1;
        while self.each > Growth::WARM && self.links * self.each > self.all_max {
            self.each /= 2;
        }
    }

    /// One link less.
    pub fn left(&mut self) {
        self.links = self.links.saturating_sub(1);
        // A quarter stays free, so that a link that comes and goes changes nothing for the others.
        while self.each < Self::MAX && self.links * self.each * 2 <= self.all_max * 3 / 4 {
            self.each *= 2;
        }
    }

    /// Idle lanes that the agent of each link keeps.
    #[must_use]
    pub fn each(&self) -> usize {
        self.each
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit (peers): Idle lanes of an agent
    #[test]
    fn few_agents_keep_sixteen_idle_lanes_and_a_thousand_keep_four() {
        let mut warm = WarmLanes::new(usize::MAX);
        let mut each = Vec::new();
        for links in 1..=1000 {
            warm.joined();
            if [1, 64, 65, 128, 129, 1000].contains(&links) {
                each.push(warm.each());
            }
        }
        assert_eq!(each, [16, 16, 8, 8, 4, 4]);
        for _link in 48..1000 {
            warm.left();
        }
        assert_eq!((warm.links, warm.each()), (48, 16));
    }

    #[test]
    fn a_link_that_comes_and_goes_changes_the_number_once() {
        let mut warm = WarmLanes::new(usize::MAX);
        for _link in 0..64 {
            warm.joined();
        }
        for _time in 0..3 {
            warm.joined();
            assert_eq!(warm.each(), 8);
            warm.left();
            assert_eq!(warm.each(), 8);
        }
    }

    #[test]
    fn a_server_with_few_descriptors_keeps_fewer_idle_lanes() {
        let mut warm = WarmLanes::new(170);
        let mut each = Vec::new();
        for _link in 0..6 {
            warm.joined();
            each.push(warm.each());
        }
        assert_eq!(each, [16, 16, 8, 8, 8, 4]);
        assert_eq!(WarmLanes::new(0).each(), WarmLanes::MAX, "nobody is told");
    }
}
