//! Several agents of one key behind one server: they fall silent, answer late, end and return, while dials are retried,
//! hedged and cancelled.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use adit_core::dial::{AnswerTimes, Attempts, HedgeBudget, LinkState, Reason, Step};
use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, DialId, LinkId, TunnelKey};
use adit_core::registry::{Registry, Scope, Silence};
use adit_core::session::{
    Action, CancelledDial, DialRequest, Event, Isolation, Link, LinkConfig, Moment, ProcessBudget,
    Role, Transmit,
};
use adit_core::target::Host;
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::packet::{Packet, Received};

use crate::rng::Rng;

const TICK: Duration = Duration::from_millis(20);
/// Tick length of the rest phase, in which no new event starts.
const REST_TICK: Duration = Duration::from_millis(100);
/// Ticks of the busy phase, one minute: clients dial, agents fall silent.
const BUSY_TICKS: u64 = 3_000;
/// Ticks of the rest phase, after which nothing may be left: longer than any timeout, including those of closes and
/// dials.
const REST_TICKS: u64 = 1_200;
const DEAD_AFTER: Duration = Duration::from_secs(8);

/// Totals over all seeds.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    opened: u64,
    failed: u64,
    given_up: u64,
    late: u64,
    waited: u64,
    retried: u64,
    hedged: u64,
    failed_over: u64,
}

impl Shown {
    /// Asserts that every case this simulation exists for has occurred.
    pub(crate) fn check(&self) {
        let Self {
            opened,
            failed,
            given_up,
            late,
            waited,
            retried,
            hedged,
            failed_over,
        } = self;
        let all = [
            opened,
            failed,
            given_up,
            late,
            waited,
            retried,
            hedged,
            failed_over,
        ];
        assert!(all.iter().all(|count| **count > 0), "{self:?}");
    }
}

/// Packets in flight and their arrival times.
type Wire = VecDeque<(Moment, Packet)>;

struct SimLink {
    agent: usize,
    server_end: Link,
    agent_end: Link,
    to_agent: Wire,
    to_server: Wire,
    /// Until this moment nothing arrives on either side.
    silent_until: Option<Moment>,
    silent_since: Moment,
    answers: AnswerTimes,
    /// Dials at the agent's target, and when each is answered.
    targets: Vec<(Moment, TunnelKey, bool)>,
    /// The dial that each tunnel of the server belongs to.
    dials: HashMap<TunnelKey, usize>,
}

struct SimDial {
    scope: Scope,
    attempts: Attempts,
    step: Step,
    running: Vec<(LinkId, TunnelKey)>,
    tried: Vec<LinkId>,
    deadline: Moment,
    /// Number of outcomes: exactly one at the end.
    outcomes: u32,
    open: Option<(LinkId, TunnelKey, Moment)>,
}

pub(crate) struct FailoverWorld {
    rng: Rng,
    now: Moment,
    budget: Arc<ProcessBudget>,
    registry: Registry,
    hedges: HedgeBudget,
    links: BTreeMap<LinkId, SimLink>,
    /// Links that ended in silence.
    dead: Vec<LinkId>,
    next_link: u64,
    agents: usize,
    dials: Vec<SimDial>,
    /// Dials that wait for an outcome or have an open tunnel.
    active: Vec<usize>,
}

fn config(role: Role) -> LinkConfig {
    LinkConfig {
        role,
        credit: true,
        packet_bytes_max: 32 << 10,
        dials_max: 1_000,
        dial_timeout: Some(Duration::from_secs(25)),
        isolation: Isolation::default(),
        control_max: 4_096,
    }
}

impl FailoverWorld {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let agents = rng.length(1..=4);
        let strategies = "default".parse().unwrap();
        Self {
            now: Moment::default(),
            budget: Arc::new(ProcessBudget::new(1 << 30)),
            registry: Registry::new(strategies),
            hedges: HedgeBudget::default(),
            links: BTreeMap::new(),
            dead: Vec::new(),
            next_link: 1,
            agents,
            dials: Vec::new(),
            active: Vec::new(),
            rng,
        }
    }

    /// Runs the busy phase, ends all silence, runs the rest phase, then checks.
    pub(crate) fn live(&mut self, shown: &mut Shown) {
        for _tick in 0..BUSY_TICKS {
            self.fate();
            self.tick(TICK, shown);
        }
        for link in self.links.values_mut() {
            link.silent_until = link.silent_until.map(|_until| self.now);
        }
        for _tick in 0..REST_TICKS {
            self.tick(REST_TICK, shown);
        }
        for dial in &self.dials {
            assert_eq!(dial.outcomes, 1, "{:?}", dial.step);
            assert!(dial.open.is_none() && dial.running.is_empty());
        }
        for (id, link) in &self.links {
            let ends = [&link.server_end, &link.agent_end];
            assert_eq!(ends.map(Link::tunnels), [0, 0], "{id:?} leaks a tunnel");
        }
        self.links.clear();
        assert_eq!(
            (self.budget.used_bytes(), self.budget.granted_bytes()),
            (0, 0)
        );
    }

    pub(crate) fn simulated(&self) -> Duration {
        self.now.0
    }

    /// Links come and go, agents fall silent, clients dial.
    fn fate(&mut self) {
        for agent in 0..self.agents {
            let held = self
                .links
                .values()
                .filter(|link| link.agent == agent)
                .count();
            if held == 0 && self.rng.once_in(50) || held == 1 && self.rng.once_in(2_000) {
                self.connect(agent);
            }
        }
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            if self.rng.once_in(4_000) {
                self.lose(id);
                continue;
            }
            let falls = self.rng.once_in(700);
            let seconds = self.rng.within(1..=25);
            let (now, link) = (self.now, self.links.get_mut(&id).unwrap());
            if falls && link.silent_until.is_none() {
                link.silent_until = Some(now.after(Duration::from_secs(seconds)));
                link.silent_since = now;
            }
        }
        if self.rng.once_in(15) {
            self.dial();
        }
    }

    fn connect(&mut self, agent: usize) {
        let id = LinkId(self.next_link);
        self.next_link += 1;
        let name = AgentId::new(&agent.to_string());
        let _standing = self.registry.add(id, name, &Identifiers::default(), None);
        let end = |role| Link::new(config(role), Arc::clone(&self.budget), "peer".into());
        let link = SimLink {
            agent,
            server_end: end(Role::Server),
            agent_end: end(Role::Agent),
            to_agent: Wire::new(),
            to_server: Wire::new(),
            silent_until: None,
            silent_since: self.now,
            answers: AnswerTimes::default(),
            targets: Vec::new(),
            dials: HashMap::new(),
        };
        self.links.insert(id, link);
    }

    /// Ends the link; counts as silent if it is silent now.
    fn lose(&mut self, id: LinkId) {
        let mut link = self.links.remove(&id).unwrap();
        let silence = link
            .silent_until
            .map(|_until| self.now.since(link.silent_since));
        if silence.is_some_and(|silence| silence >= Duration::from_secs(4)) {
            self.dead.push(id);
        }
        self.registry.remove(id, self.now);
        link.server_end.lost(self.now);
        self.act(id, &mut link);
        for dial in &mut self.dials {
            if dial.open.is_some_and(|(on, _, _)| on == id) {
                dial.open = None;
            }
        }
    }

    fn dial(&mut self) {
        let Some(scope) = self.registry.scope(&Host::parse("h"), self.now) else {
            return;
        };
        self.hedges.dial(self.now);
        let patience = self.rng.pick(&[300, 1_000, 30_000, 30_000]);
        self.active.push(self.dials.len());
        self.dials.push(SimDial {
            scope,
            attempts: Attempts::default(),
            step: Step::Ask(Reason::First),
            running: Vec::new(),
            tried: Vec::new(),
            deadline: self.now.after(Duration::from_millis(patience)),
            outcomes: 0,
            open: None,
        });
    }

    fn tick(&mut self, time: Duration, shown: &mut Shown) {
        self.now = self.now.after(time);
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            self.run_link(id, shown);
        }
        for at in std::mem::take(&mut self.active) {
            self.run_dial(at, shown);
            let dial = &self.dials[at];
            if dial.outcomes == 0 || dial.open.is_some() {
                self.active.push(at);
            }
        }
    }

    fn run_link(&mut self, id: LinkId, shown: &mut Shown) {
        let now = self.now;
        let mut link = self.links.remove(&id).unwrap();
        if link.silent_until.is_some_and(|until| until <= now) {
            link.silent_until = None;
        }
        let silence = match link.silent_until.map(|_until| now.since(link.silent_since)) {
            Some(quiet) if quiet >= DEAD_AFTER => Silence::Dead,
            Some(quiet) if quiet >= Duration::from_secs(4) => Silence::Suspected,
            _ => Silence::None,
        };
        self.registry.set_silence(id, silence);
        if link.silent_until.is_none() {
            deliver(&mut link.to_agent, &mut link.agent_end, now);
            deliver(&mut link.to_server, &mut link.server_end, now);
        }
        link.server_end.handle_tick(now);
        link.agent_end.handle_tick(now);
        let (due, later): (Vec<_>, Vec<_>) = link.targets.iter().partition(|(at, _, _)| *at <= now);
        link.targets = later;
        for (_, key, connects) in due {
            let outcome = if connects {
                Ok(())
            } else {
                Err(String::from("connection refused"))
            };
            link.agent_end.dialed(key, outcome, now);
        }
        shown.late += self.act(id, &mut link);
        let delay = Duration::from_millis(self.rng.within(0..=40));
        transmit(&mut link.server_end, &mut link.to_agent, now, delay);
        transmit(&mut link.agent_end, &mut link.to_server, now, delay);
        self.links.insert(id, link);
    }

    /// Performs the actions of both ends; returns how many answers were late.
    fn act(&mut self, id: LinkId, link: &mut SimLink) -> u64 {
        let (now, mut late) = (self.now, 0);
        while let Some(action) = link.agent_end.poll_action() {
            match action {
                Action::StartDial { key, .. } => {
                    let takes = self.rng.pick(&[1, 5, 20, 20, 300, 5_000]);
                    let at = now.after(Duration::from_millis(takes));
                    link.targets.push((at, key, takes < 5_000));
                }
                Action::CancelDial { key } => link.targets.retain(|(_, other, _)| *other != key),
                Action::Ended { key, .. } => link.agent_end.endpoint_gone(key, now),
                _ => (),
            }
        }
        while let Some(action) = link.server_end.poll_action() {
            match action {
                Action::DialDone { key, .. } => {
                    let at = link.dials[&key];
                    let dial = &mut self.dials[at];
                    dial.running.retain(|running| *running != (id, key));
                    if dial.outcomes > 0 {
                        // The success crossed another answer or the client's cancellation: the attempt ends as a dropped
                        // future would.
                        link.server_end.endpoint_gone(key, now);
                        continue;
                    }
                    let (_, asked) = dial.attempts.running().find(|(on, _)| *on == id).unwrap();
                    link.answers.answered(asked, now);
                    dial.outcomes += 1;
                    dial.open = Some((id, key, now));
                }
                Action::DialFailed { key, outcome } => {
                    let at = link.dials[&key];
                    self.failed(at, id, key, outcome, link);
                }
                Action::Ended { key, .. } => link.server_end.endpoint_gone(key, now),
                Action::Count(Event::LateAnswer) => {
                    late += 1;
                    link.answers.heard();
                }
                Action::Count(Event::UnrecognizedResponse) => panic!("a dial is counted twice"),
                _ => (),
            }
        }
        late
    }

    fn failed(
        &mut self,
        at: usize,
        id: LinkId,
        key: TunnelKey,
        outcome: CancelledDial,
        link: &SimLink,
    ) {
        let now = self.now;
        let dial = &mut self.dials[at];
        dial.running.retain(|running| *running != (id, key));
        if dial.outcomes > 0 {
            return;
        }
        if let DialFailure::Target(_) = outcome.failure {
            let took = dial.attempts.took(id, now);
            self.hedges.failed("h:1", took, now);
            link.answers.heard();
        }
        let is_silent = self.dead.contains(&id) || is_suspected(link, now);
        dial.step = dial.attempts.ended(id, outcome, is_silent, now);
    }

    fn run_dial(&mut self, at: usize, shown: &mut Shown) {
        let now = self.now;
        let dial = &mut self.dials[at];
        if dial.outcomes > 0 {
            // The losing attempts are cancelled, and the tunnel is closed after 500 ms.
            self.call_off(at);
            let dial = &mut self.dials[at];
            if let Some((id, key, since)) = dial.open
                && now.since(since) > Duration::from_millis(500)
            {
                shown.opened += 1;
                dial.open = None;
                let link = self.links.get_mut(&id).unwrap();
                link.server_end.endpoint_close(key, String::new(), now);
                link.server_end.endpoint_gone(key, now);
            }
            return;
        }
        if now >= dial.deadline {
            shown.given_up += 1;
            dial.outcomes += 1;
            self.call_off(at);
            return;
        }
        for _step in 0..10 {
            let dial = &mut self.dials[at];
            match dial.step.clone() {
                Step::Fail(_) => {
                    shown.failed += 1;
                    dial.outcomes += 1;
                    return self.call_off(at);
                }
                Step::Ask(reason) => self.ask(at, reason, shown),
                // Checked again with each tick, which replaces the notification of a link change.
                Step::Wait(_) | Step::WaitForLink(_) => {
                    let links = &self.links;
                    let state = |id, asked| {
                        let link: Option<&SimLink> = links.get(&id);
                        LinkState {
                            is_silent: link.is_none_or(|link| is_suspected(link, now)),
                            hedge_at: link.map_or(asked, |link| link.answers.hedge_at(asked)),
                        }
                    };
                    dial.step = dial.attempts.check(now, state);
                    if !matches!(dial.step, Step::Ask(_)) {
                        return;
                    }
                }
            }
        }
    }

    fn call_off(&mut self, at: usize) {
        for (id, key) in std::mem::take(&mut self.dials[at].running) {
            if let Some(link) = self.links.get_mut(&id) {
                link.server_end.endpoint_gone(key, self.now);
            }
        }
    }

    fn ask(&mut self, at: usize, reason: Reason, shown: &mut Shown) {
        let now = self.now;
        let dial = &mut self.dials[at];
        let may = reason != Reason::Slow || self.hedges.try_hedge("h:1", now);
        let mut passed = dial.tried.clone();
        let picked = loop {
            let draw = self.rng.next();
            let Some(id) = self
                .registry
                .pick(&dial.scope, draw, &passed)
                .filter(|_| may)
            else {
                break None;
            };
            passed.push(id);
            let repeats = matches!(reason, Reason::Slow | Reason::Silent | Reason::Lost);
            if !(repeats && is_suspected(&self.links[&id], now)) {
                break Some(id);
            }
        };
        let Some(id) = picked else {
            let may_come = self.registry.is_silent(&dial.scope, now);
            dial.step = dial.attempts.found_none(reason, may_come, now);
            if let Step::WaitForLink(_) = dial.step {
                shown.waited += 1;
            }
            return;
        };
        match reason {
            Reason::First => (),
            Reason::NotSent => shown.retried += 1,
            Reason::Slow => shown.hedged += 1,
            Reason::Silent | Reason::Lost => shown.failed_over += 1,
        }
        dial.tried.push(id);
        dial.attempts.begin(id, reason, now);
        let link = self.links.get_mut(&id).unwrap();
        link.answers.sent(now);
        let number = DialId(i64::try_from(at).unwrap() * 2 + 1);
        let request = DialRequest {
            dial: number,
            spare: DialId(number.0 + 1),
            protocol: String::from("tcp"),
            address: String::from("h:1"),
        };
        match link.server_end.dial(request, now) {
            // A full queue: rare, and before anything is sent.
            Ok(key) if self.rng.once_in(40) => {
                link.server_end.endpoint_gone(key, now);
                let unsent = CancelledDial {
                    failure: DialFailure::LinkBusy,
                    written: false,
                };
                dial.step = dial.attempts.ended(id, unsent, false, now);
            }
            Ok(key) => {
                link.dials.insert(key, at);
                dial.running.push((id, key));
                dial.step = Step::Wait(None);
            }
            Err(failure) => {
                let written = false;
                let cancelled = CancelledDial { failure, written };
                dial.step = dial.attempts.ended(id, cancelled, false, now);
            }
        }
    }
}

fn is_suspected(link: &SimLink, now: Moment) -> bool {
    link.silent_until.is_some() && now.since(link.silent_since) >= Duration::from_secs(4)
}

fn deliver(wire: &mut Wire, end: &mut Link, now: Moment) {
    while wire.front().is_some_and(|(at, _)| *at <= now) {
        let (_, packet) = wire.pop_front().unwrap();
        end.handle_packet(Received::Packet(packet), now);
    }
}

fn transmit(end: &mut Link, wire: &mut Wire, now: Moment, delay: Duration) {
    while let Some(transmit) = end.poll_transmit(now) {
        let Transmit::Control(packet) = transmit else {
            panic!("no tunnel carries data here");
        };
        // No packet overtakes another.
        let at = wire.back().map_or(now, |(at, _)| *at).max(now.after(delay));
        wire.push_back((at, packet));
    }
}
