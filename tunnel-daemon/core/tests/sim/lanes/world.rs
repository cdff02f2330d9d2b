//! An agent, its lanes to one server, time, and faults.

use std::time::Duration;

use adit_core::lane::{Growth, Lanes};
use adit_core::session::Moment;

use super::books::{Coverage, Seen, Turn};
use super::connection::{AGENT, Connection, SERVER};
use crate::rng::Rng;

/// How often idle lanes are probed with a PING.
const SWEEP_EVERY: Duration = Duration::from_secs(30);
/// With fewer idle lanes left, the server asks the agent for more.
const IDLE_MIN: usize = 2;
/// Time in which all tunnels end once no new event starts: the longest pauses, and every timer in turn.
const SETTLES_WITHIN: Duration = Duration::from_secs(20 * 60);
/// A world with more rounds moves forever.
const ROUNDS_MAX: u64 = 300_000;

/// A client at the server or a process at the agent that dials.
#[derive(Debug)]
struct Dialler {
    at: usize,
    dials_at: Moment,
    /// Longest gap between two dials, in milliseconds.
    gap_millis: u64,
}

#[derive(Debug)]
pub(crate) struct LaneWorld {
    turn: Turn,
    lanes: Vec<Connection>,
    lanes_max: usize,
    growth: Growth,
    /// When each lane that is being opened will be bound.
    bound_at: Vec<Moment>,
    diallers: [Dialler; 2],
    dials_left: u64,
    sweeps: u64,
    sweeps_at: Moment,
    befalls_at: Moment,
    /// Longest gap between two faults, in milliseconds.
    calm_millis: u64,
    busy_until: Moment,
}

impl LaneWorld {
    pub(crate) fn new(seed: u64) -> Self {
        let mut turn = Turn::new(Rng::new(seed));
        let lanes_max = turn.rng.pick(&[2, 5, 12]);
        let calm_millis = turn.rng.pick(&[6_000, 30_000, 1_000_000_000]);
        let dialler = |at, gap_millis| Dialler {
            at,
            dials_at: Moment::default(),
            gap_millis,
        };
        let diallers = [
            dialler(SERVER, turn.rng.pick(&[600, 4_000, 12_000])),
            dialler(AGENT, turn.rng.pick(&[2_000, 10_000, 30_000])),
        ];
        Self {
            lanes: Vec::new(),
            lanes_max,
            growth: Growth::new(lanes_max, turn.now),
            bound_at: Vec::new(),
            diallers,
            dials_left: turn.rng.within(3..=30),
            sweeps: 0,
            sweeps_at: turn.now,
            befalls_at: turn.within_millis(calm_millis),
            calm_millis,
            busy_until: Moment(Duration::from_secs(turn.rng.within(90..=240))),
            turn,
        }
    }

    /// Runs a world: busy, then at rest, then tunnels on all lanes, then all checks.
    pub(crate) fn live(&mut self, coverage: &mut Coverage) {
        while self.turn.now < self.busy_until {
            self.keep_lanes();
            self.dial();
            self.befall();
            self.round();
        }
        self.turn.tame = true;
        self.settle();
        for at in [SERVER, AGENT] {
            self.use_every_lane(at);
            self.settle();
        }
        for record in &self.turn.records {
            record.check(&mut self.turn.coverage);
        }
        coverage.add(&self.turn.coverage);
    }

    pub(crate) fn simulated(&self) -> Duration {
        self.turn.now.0
    }

    /// Gives every due lane its turn, then advances time.
    fn round(&mut self) {
        self.sweep();
        for lane in &mut self.lanes {
            if lane.wakes_at <= self.turn.now {
                lane.step(&mut self.turn);
            }
        }
        self.lanes.retain(|lane| !lane.is_over());
        if std::mem::take(&mut self.turn.wanted) {
            self.growth.short();
        }
        let now = self.turn.now;
        let soonest = now.after(Duration::from_millis(1));
        let next = self.next_event().max(soonest);
        self.turn.now = next.min(now.after(SWEEP_EVERY));
    }

    fn next_event(&self) -> Moment {
        let lanes = self.lanes.iter().map(|lane| lane.wakes_at);
        let mut next = lanes.fold(self.sweeps_at, Moment::min);
        if !self.turn.tame {
            let dials = self.diallers.iter().map(|dialler| dialler.dials_at);
            let dials = dials.filter(|_| self.dials_left > 0);
            let others = self.bound_at.iter().copied().chain(dials);
            next = others.fold(next.min(self.befalls_at), Moment::min);
        }
        next
    }

    /// The agent opens and closes lanes as `Growth` decides.
    fn keep_lanes(&mut self) {
        let now = self.turn.now;
        let before = self.bound_at.len();
        self.bound_at.retain(|at| *at > now);
        for _lane in self.bound_at.len()..before {
            self.lanes.push(Connection::new(&mut self.turn));
        }
        let mut count = self.count();
        for _lane in 0..self.growth.missing(count) {
            self.bound_at.push(self.turn.within_millis(500));
            count.opening += 1;
        }
        let all = count.idle + count.busy + count.opening;
        assert!(all <= self.lanes_max, "too many lanes: {count:?}");
        let surplus = self.growth.surplus(count, now);
        let lanes = self.lanes.iter_mut();
        let idle = lanes.filter(|lane| lane.end(AGENT).is_free());
        for lane in idle.take(surplus) {
            lane.end_mut(AGENT).drain();
        }
    }

    /// The lanes as the agent counts them.
    fn count(&self) -> Lanes {
        let idle = self.free(AGENT).count();
        let open = self.lanes.iter().map(|lane| lane.end(AGENT));
        let open = open.filter(|end| !end.is_closed()).count();
        Lanes {
            idle,
            busy: open - idle,
            opening: self.bound_at.len(),
        }
    }

    /// Indices of the lanes on which this side may open a tunnel.
    fn free(&self, at: usize) -> impl Iterator<Item = usize> {
        let lanes = self.lanes.iter().enumerate();
        lanes
            .filter(move |(_, lane)| lane.end(at).is_free())
            .map(|(place, _)| place)
    }

    fn dial(&mut self) {
        for dialler in 0..self.diallers.len() {
            let Dialler {
                at,
                dials_at,
                gap_millis,
            } = self.diallers[dialler];
            if self.dials_left == 0 || dials_at > self.turn.now {
                continue;
            }
            self.dials_left -= 1;
            self.diallers[dialler].dials_at = self.turn.within_millis(gap_millis);
            let free: Vec<usize> = self.free(at).collect();
            if free.is_empty() {
                self.turn.coverage.note(Seen::OnLink);
                self.growth.short();
                continue;
            }
            let place = self.turn.rng.pick(&free);
            let lane = &mut self.lanes[place];
            let few = at == SERVER && free.len() <= IDLE_MIN;
            let raw = at == SERVER && self.turn.rng.once_in(6);
            lane.end_mut(at).open(raw, u32::from(few), &mut self.turn);
            // Now and then both ends open at the same time.
            if self.turn.rng.once_in(6) && lane.end(1 - at).is_free() {
                lane.end_mut(1 - at).open(false, 0, &mut self.turn);
            }
        }
    }

    fn befall(&mut self) {
        if self.befalls_at > self.turn.now {
            return;
        }
        self.befalls_at = self.turn.within_millis(self.calm_millis);
        if self.lanes.is_empty() {
            return;
        }
        let place = self.turn.rng.length(0..=self.lanes.len() - 1);
        let lane = &mut self.lanes[place];
        match self.turn.rng.within(0..=9) {
            0..=5 => {
                let most = self.turn.rng.pick(&[300, 3_000, 12_000, 60_000]);
                let until = self.turn.within_millis(most);
                let first = usize::from(self.turn.rng.once_in(2));
                lane.jam(first, until);
                if self.turn.rng.once_in(2) {
                    lane.jam(1 - first, until);
                }
            }
            6 | 7 => lane.cut(&mut self.turn),
            8 => lane.fall_silent(&mut self.turn),
            _ => {
                let at = usize::from(self.turn.rng.once_in(2));
                lane.close_waiting(at, &mut self.turn);
            }
        }
    }

    fn sweep(&mut self) {
        if self.sweeps_at > self.turn.now {
            return;
        }
        self.sweeps_at = self.turn.now.after(SWEEP_EVERY);
        self.sweeps += 1;
        for lane in &mut self.lanes {
            lane.sweep(self.sweeps, &mut self.turn);
        }
    }

    /// Runs until every lane is clean or closed.
    fn settle(&mut self) {
        let began = self.turn.now;
        for _round in 0..ROUNDS_MAX {
            self.lanes.retain(|lane| !lane.is_over());
            if self.lanes.iter().all(Connection::is_clean) {
                return;
            }
            let took = self.turn.now.since(began);
            assert!(took < SETTLES_WITHIN, "still busy: {:#?}", self.unclean());
            self.round();
        }
        panic!("moves without end: {:#?}", self.unclean());
    }

    fn unclean(&self) -> Vec<&Connection> {
        let unclean = self.lanes.iter().filter(|lane| !lane.is_clean());
        unclean.collect()
    }

    /// Opens a tunnel on each lane: on a clean lane all its bytes arrive.
    fn use_every_lane(&mut self, at: usize) {
        for lane in &mut self.lanes {
            lane.jam(SERVER, self.turn.now);
            lane.jam(AGENT, self.turn.now);
            lane.end_mut(at).open(false, 0, &mut self.turn);
        }
    }
}
