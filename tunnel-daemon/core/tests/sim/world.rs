//! Processes, links between them, time, and faults.

use std::sync::Arc;
use std::time::Duration;

use adit_core::session::{Isolation, LinkConfig, Moment, ProcessBudget, Role, WINDOW_MIN_BYTES};

use crate::end::{End, Turn};
use crate::ledger::Ledger;
use crate::pipe::Pipe;
use crate::record::{Record, Tally};
use crate::rng::Rng;

/// Turns in which clients dial and links break.
const BUSY_TURNS: u64 = 250;
/// A world that still moves after this many turns never comes to rest.
const IDLE_TURNS_MAX: u64 = 10_000;
/// Turns without movement before time advances in larger steps: every remaining actor waits for the clock.
const QUIET_TURNS: u32 = 12;

/// One link between one server and one agent, reconnected after each loss.
#[derive(Debug)]
struct Wire {
    server: usize,
    agent: usize,
    ends: Option<Ends>,
    remade_at: Moment,
}

#[derive(Debug)]
struct Ends {
    config: LinkConfig,
    /// `None`: this side has detected the loss of the link.
    server: Option<End>,
    agent: Option<End>,
    up: Pipe,
    down: Pipe,
    broken: bool,
    ledger: Ledger,
}

#[derive(Debug)]
pub(crate) struct World {
    rng: Rng,
    now: Moment,
    servers: Vec<Arc<ProcessBudget>>,
    agents: Vec<Arc<ProcessBudget>>,
    process_bytes: u64,
    wires: Vec<Wire>,
    records: Vec<Record>,
    dials_left: u64,
    /// Links break once in this many turns. 0: never.
    break_once_in: u64,
    /// Turns since anything moved.
    quiet: u32,
}

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let process_bytes = rng.pick(&[150_000, 2 << 20, 1 << 30]);
        let budget = || Arc::new(ProcessBudget::new(process_bytes));
        let servers: Vec<_> = (0..rng.within(1..=2)).map(|_| budget()).collect();
        let agents: Vec<_> = (0..rng.within(1..=3)).map(|_| budget()).collect();
        let wires = (0..servers.len())
            .flat_map(|server| (0..agents.len()).map(move |agent| (server, agent)))
            .map(|(server, agent)| Wire {
                server,
                agent,
                ends: None,
                remade_at: Moment::default(),
            })
            .collect();
        Self {
            now: Moment::default(),
            servers,
            agents,
            process_bytes,
            wires,
            records: Vec::new(),
            dials_left: rng.within(1..=24),
            quiet: 0,
            break_once_in: rng.pick(&[0, 0, 40, 200]),
            rng,
        }
    }

    /// Runs a world: busy, winding down, at rest, then all checks.
    pub(crate) fn live(&mut self, tally: &mut Tally) {
        for turn in 0..BUSY_TURNS {
            let step = match self.rng.within(0..=99) {
                0..=2 => 4_000,
                3..=9 => 400,
                _ => 10,
            };
            let time = millis(self.rng.within(0..=step));
            self.pass(time);
            self.make_links();
            self.dial();
            self.break_links();
            self.step();
            self.check_credit();
            if turn + 1 == BUSY_TURNS {
                self.wind_down();
            }
        }
        self.settle();
        self.judge(tally);
    }

    pub(crate) fn simulated(&self) -> Duration {
        self.now.0
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now.after(time);
    }

    fn config(&mut self) -> LinkConfig {
        let link_budget_bytes = self.rng.pick(&[30_000, 80_000, 700_000, 64 << 20]);
        LinkConfig {
            role: Role::Server,
            credit: !self.rng.once_in(3),
            packet_bytes_max: self.rng.pick(&[100, 4_096, 32 << 10]),
            dials_max: self.rng.pick(&[2, 1_000]),
            dial_timeout: self
                .rng
                .pick(&[None, Some(Duration::from_secs(25)), Some(millis(300))]),
            isolation: Isolation {
                tunnel_share_bytes: self.rng.pick(&[10_000, 4 << 20]),
                link_budget_bytes,
                stall_timeout: self
                    .rng
                    .pick(&[Duration::from_secs(20), Duration::from_secs(300)]),
                ..Isolation::default()
            },
            control_max: self.rng.pick(&[6, 4_096, 4_096, 4_096]),
        }
    }

    fn make_links(&mut self) {
        for at in 0..self.wires.len() {
            if self.wires[at].ends.is_some() || self.wires[at].remade_at > self.now {
                continue;
            }
            let config = self.config();
            let wire = &mut self.wires[at];
            let agent = LinkConfig {
                role: Role::Agent,
                ..config
            };
            wire.ends = Some(Ends {
                config,
                server: Some(End::new(config, &self.servers[wire.server])),
                agent: Some(End::new(agent, &self.agents[wire.agent])),
                up: Pipe::new(&mut self.rng),
                down: Pipe::new(&mut self.rng),
                broken: false,
                ledger: Ledger::new(config.credit),
            });
        }
    }

    fn dial(&mut self) {
        while self.dials_left > 0 && self.rng.once_in(8) {
            let at = self.rng.length(0..=self.wires.len() - 1);
            let server = self.wires[at].ends.as_mut().and_then(|e| e.server.as_mut());
            let Some(server) = server else { return };
            self.dials_left -= 1;
            server.dial(&mut Turn {
                now: self.now,
                records: &mut self.records,
                rng: &mut self.rng,
                lazy: self.quiet < QUIET_TURNS,
            });
        }
    }

    fn break_links(&mut self) {
        let breaks = self.break_once_in > 0 && self.rng.once_in(self.break_once_in);
        if self.rng.once_in(60) {
            let at = self.rng.length(0..=self.wires.len() - 1);
            let until = self.now.after(millis(self.rng.within(0..=6_000)));
            if let Some(ends) = &mut self.wires[at].ends {
                ends.up.jam(until);
            }
        }
        if !breaks {
            return;
        }
        // One link breaks, or all links of one agent, as in a restart.
        let victim = self.rng.length(0..=self.wires.len() - 1);
        let restart = self.rng.once_in(3).then(|| self.wires[victim].agent);
        for at in 0..self.wires.len() {
            let wire = &mut self.wires[at];
            if let Some(ends) = &mut wire.ends
                && (at == victim || restart == Some(wire.agent))
            {
                ends.snap();
            }
        }
    }

    /// Gives every end a turn; ends of broken links detect the loss after a random delay.
    fn step(&mut self) {
        for wire in &mut self.wires {
            let Some(ends) = &mut wire.ends else { continue };
            let mut turn = Turn {
                now: self.now,
                records: &mut self.records,
                rng: &mut self.rng,
                lazy: self.quiet < QUIET_TURNS,
            };
            ends.step(&mut turn);
            if ends.server.is_none() && ends.agent.is_none() {
                wire.ends = None;
                wire.remade_at = self.now.after(millis(self.rng.within(0..=1_000)));
            }
        }
    }

    /// The sum of granted credit stays within each process's cap; only the smallest windows may exceed it.
    fn check_credit(&self) {
        for (budgets, is_server) in [(&self.servers, true), (&self.agents, false)] {
            for (index, budget) in budgets.iter().enumerate() {
                let tunnels: usize = self
                    .wires
                    .iter()
                    .filter(|wire| (if is_server { wire.server } else { wire.agent }) == index)
                    .filter_map(|wire| wire.ends.as_ref())
                    .filter_map(|ends| {
                        let end = if is_server { &ends.server } else { &ends.agent };
                        end.as_ref()
                    })
                    .map(|end| end.link.tunnels())
                    .sum();
                let cap = self.process_bytes + tunnels as u64 * WINDOW_MIN_BYTES;
                let granted = budget.granted_bytes();
                assert!(granted <= cap, "granted {granted} of {cap}");
            }
        }
    }

    fn wind_down(&mut self) {
        self.dials_left = 0;
        self.break_once_in = 0;
        self.ends().for_each(End::wind_down);
    }

    fn ends(&mut self) -> impl Iterator<Item = &mut End> {
        self.wires
            .iter_mut()
            .filter_map(|wire| wire.ends.as_mut())
            .flat_map(|ends| ends.server.iter_mut().chain(ends.agent.iter_mut()))
    }

    fn is_idle(&mut self) -> bool {
        self.ends().all(|end| end.is_idle())
            && self.wires.iter().filter_map(|w| w.ends.as_ref()).all(|e| {
                !e.broken && e.up.next_arrival().is_none() && e.down.next_arrival().is_none()
            })
    }

    /// Runs until nothing moves; while endpoints wait for the clock, time advances in steps that they can follow.
    fn settle(&mut self) {
        for _turn in 0..IDLE_TURNS_MAX {
            if self.is_idle() {
                return;
            }
            let before = self.movement();
            self.ends().for_each(End::wind_down);
            self.step();
            self.check_credit();
            self.quiet = if before == self.movement() {
                self.quiet + 1
            } else {
                0
            };
            let most = if self.quiet < QUIET_TURNS { 300 } else { 3_000 };
            let gap = self
                .next_wake()
                .map_or_else(|| millis(most), |at| at.since(self.now));
            self.pass(gap.clamp(millis(5), millis(most)));
        }
        panic!("still busy after {IDLE_TURNS_MAX} turns: {self:#?}");
    }

    /// A number that changes with every movement.
    fn movement(&mut self) -> u64 {
        let bytes: u64 = self
            .records
            .iter()
            .map(|r| r.client.sent + r.client.taken + r.target.sent + r.target.taken)
            .sum();
        let packets: u64 = self
            .wires
            .iter()
            .filter_map(|wire| wire.ends.as_ref())
            .map(|ends| ends.ledger.packets * 1_000)
            .sum();
        bytes * 1_000_000 + packets + self.ends().map(|end| end.endpoints() as u64).sum::<u64>()
    }

    /// The next arrival, end of a pause, or deadline.
    fn next_wake(&mut self) -> Option<Moment> {
        let now = self.now;
        let arrivals: Vec<_> = self
            .wires
            .iter()
            .filter_map(|wire| wire.ends.as_ref())
            .flat_map(|ends| [ends.up.next_arrival(), ends.down.next_arrival()])
            .flatten()
            .collect();
        self.ends()
            .filter_map(|end| end.wakes_at(now))
            .chain(arrivals)
            .filter(|at| *at > now)
            .min()
    }

    fn judge(&mut self, tally: &mut Tally) {
        let now = self.now;
        self.ends().for_each(|end| end.check_empty(now));
        for budget in self.servers.iter().chain(&self.agents) {
            assert_eq!(budget.held_bytes(), 0, "bytes held by nobody");
            assert_eq!(budget.granted_bytes(), 0, "credit granted to nobody");
        }
        for record in &self.records {
            record.check(tally);
        }
    }
}

impl Ends {
    fn snap(&mut self) {
        self.broken = true;
        self.up.cut();
        self.down.cut();
    }

    fn step(&mut self, turn: &mut Turn<'_>) {
        if let Some(server) = &mut self.server {
            server.step(turn, &mut self.up, &mut self.down, &mut self.ledger);
        }
        if let Some(agent) = &mut self.agent {
            agent.step(turn, &mut self.down, &mut self.up, &mut self.ledger);
        }
        let failed = |end: &Option<End>| end.as_ref().is_some_and(|end| end.failed);
        if !self.broken && (failed(&self.server) || failed(&self.agent)) {
            assert!(self.config.control_max < 100, "a control queue ran over");
            self.snap();
        }
        for end in [&mut self.server, &mut self.agent] {
            if self.broken
                && turn.rng.once_in(5)
                && let Some(mut over) = end.take()
            {
                over.lost(turn);
            }
        }
    }
}
