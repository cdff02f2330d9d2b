//! A lane: both of its ends, the connection between them, and its faults.

use std::time::Duration;

use adit_core::lane::LaneRole;
use adit_core::session::Moment;

use super::books::Turn;
use super::end::{End, Wires};
use super::wire::Wire;

pub(super) const SERVER: usize = 0;
pub(super) const AGENT: usize = 1;

/// How often an idle lane gets a turn.
const LOOKED_AT_EVERY: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Connection {
    ends: [End; 2],
    /// The direction each end writes.
    wires: [Wire; 2],
    /// When the kernel of each end detects that the peer is gone.
    notices_at: [Option<Moment>; 2],
    /// The lane needs no turn before this moment.
    pub(super) wakes_at: Moment,
}

/// Both directions as one end sees them.
fn seen_by(at: usize, wires: &mut [Wire; 2]) -> Wires<'_> {
    let [from_server, from_agent] = wires;
    if at == SERVER {
        Wires {
            incoming: from_agent,
            outgoing: from_server,
        }
    } else {
        Wires {
            incoming: from_server,
            outgoing: from_agent,
        }
    }
}

impl Connection {
    pub(super) fn new(turn: &mut Turn) -> Self {
        Self {
            ends: [End::new(LaneRole::Server), End::new(LaneRole::Agent)],
            wires: [Wire::new(&mut turn.rng), Wire::new(&mut turn.rng)],
            notices_at: [None; 2],
            wakes_at: turn.now,
        }
    }

    pub(super) fn end(&self, at: usize) -> &End {
        &self.ends[at]
    }

    /// Access for an OPEN or a DRAIN: the lane gets its turn at once.
    pub(super) fn end_mut(&mut self, at: usize) -> &mut End {
        self.wakes_at = Moment::default();
        &mut self.ends[at]
    }

    pub(super) fn is_over(&self) -> bool {
        self.ends.iter().all(End::is_closed)
    }

    /// Whether the lane could carry a new tunnel, with nothing of earlier tunnels left.
    pub(super) fn is_clean(&self) -> bool {
        let quiet = self.wires.iter().all(Wire::is_quiet);
        let [server, agent] = &self.ends;
        let agreed = server.machine.sequence() == agent.machine.sequence();
        let clean = quiet && server.is_clean() && agent.is_clean();
        assert!(!clean || agreed, "ends count differently: {self:?}");
        clean && self.notices_at == [None; 2]
    }

    /// Gives both ends a turn, in either order.
    pub(super) fn step(&mut self, turn: &mut Turn) {
        self.wires
            .iter_mut()
            .for_each(|wire| wire.advance(turn.now));
        turn.moved = false;
        let first = usize::from(turn.rng.once_in(2));
        for at in [first, 1 - first] {
            let end = &mut self.ends[at];
            if end.is_closed() {
                continue;
            }
            let mut wires = seen_by(at, &mut self.wires);
            if self.notices_at[at].is_some_and(|notices| notices <= turn.now) {
                end.lost(turn, &mut wires);
            } else {
                end.step(turn, &mut wires);
            }
        }
        self.wakes_at = if turn.moved {
            let millis = turn.rng.within(1..=15);
            turn.now.after(Duration::from_millis(millis))
        } else {
            self.next_event(turn.now)
        };
    }

    fn next_event(&self, now: Moment) -> Moment {
        let ends = self.ends.iter().filter_map(|end| end.wakes_at(now));
        let arrivals = self.wires.iter().filter_map(|wire| wire.next_arrival(now));
        let notices = self.notices_at.iter().flatten().copied();
        let next = ends
            .chain(arrivals)
            .chain(notices)
            .filter(|at| *at > now)
            .min();
        next.unwrap_or_else(|| now.after(LOOKED_AT_EVERY))
    }

    /// Both ends of an idle lane send a PING.
    pub(super) fn sweep(&mut self, number: u64, turn: &mut Turn) {
        for at in [SERVER, AGENT] {
            let mut wires = seen_by(at, &mut self.wires);
            self.ends[at].sweep(number, turn, &mut wires);
        }
        self.wakes_at = turn.now;
    }

    /// An end closes an idle lane, as when it is short of file descriptors.
    pub(super) fn close_waiting(&mut self, at: usize, turn: &mut Turn) {
        if self.ends[at].is_waiting() {
            let mut wires = seen_by(at, &mut self.wires);
            self.ends[at].close(turn, &mut wires);
            self.wakes_at = turn.now;
        }
    }

    /// Nothing arrives at the peer of `at` until then.
    pub(super) fn jam(&mut self, at: usize, until: Moment) {
        self.wires[at].jam(until);
        self.wakes_at = Moment::default();
    }

    /// A middlebox resets the connection.
    pub(super) fn cut(&mut self, turn: &mut Turn) {
        for wire in &mut self.wires {
            wire.reset(turn.rng.once_in(2));
        }
        self.wakes_at = turn.now;
    }

    /// From now on nothing arrives at either end, and the kernels detect that only later.
    pub(super) fn fall_silent(&mut self, turn: &mut Turn) {
        for (wire, notices_at) in self.wires.iter_mut().zip(&mut self.notices_at) {
            wire.fall_silent();
            let seconds = turn.rng.pick(&[20, 45, 90]);
            let at = turn.now.after(Duration::from_secs(seconds));
            notices_at.get_or_insert(at);
        }
        self.wakes_at = turn.now;
    }
}
