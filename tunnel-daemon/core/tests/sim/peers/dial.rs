//! A client's dial, as the router makes it.

use std::sync::Arc;
use std::time::Duration;

use adit_core::dial::{AnswerTimes, Attempts, LinkState, Reason, Step};
use adit_core::failure::DialFailure;
use adit_core::ids::{DialId, LinkId};
use adit_core::peer::Forward;
use adit_core::registry::Scope;
use adit_core::session::{CancelledDial, Moment};
use adit_core::target::Host;

use super::forwarded::{Answer, SimForward};
use super::world::{Ask, Asker, Event, PeerWorld, hash};

/// The router's margin beyond the deadline.
const BACKSTOP: Duration = Duration::from_secs(1);

/// An attempt: whom it asked, and what became of it.
pub(super) struct Tried {
    pub(super) link: LinkId,
    is_peer: bool,
    is_running: bool,
    /// Only agents of this owner may be asked.
    owner: Option<u64>,
    answers: Arc<AnswerTimes>,
    /// Number of agents that saw the dial.
    seen: u32,
}

/// How a dial ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// A tunnel over this link.
    Open(LinkId),
    Failed(DialFailure),
}

pub(super) struct SimDial {
    pub(super) server: usize,
    pub(super) address: &'static str,
    host: Host,
    pub(super) scope: Scope,
    attempts: Attempts,
    pub(super) tried: Vec<Tried>,
    not_here: Vec<(LinkId, Scope)>,
    deadline: Moment,
    until: Option<Moment>,
    pub(super) listens: bool,
    pub(super) ended: Option<Ended>,
    hedges: u32,
    replacements: u32,
    /// Owners of the agents that saw it.
    owners: Vec<&'static str>,
}

impl PeerWorld {
    /// A client dials; its server may refuse.
    pub(super) fn dial(&mut self, server: usize, address: &'static str) -> Option<usize> {
        if self.servers[server].leaves_at.is_some() {
            return None;
        }
        let host = Host::parse(address);
        let scope = self.servers[server].registry.scope(&host, self.now);
        self.check_scope(server, &host, scope.as_ref());
        let scope = scope?;
        self.servers[server].hedges.dial(self.now);
        let (at, deadline) = (self.dials.len(), self.now.after(self.timeout));
        self.dials.push(SimDial {
            server,
            address,
            host,
            scope,
            attempts: Attempts::default(),
            tried: Vec::new(),
            not_here: Vec::new(),
            deadline,
            until: None,
            listens: false,
            ended: None,
            hedges: 0,
            replacements: 0,
            owners: Vec::new(),
        });
        self.active.insert(at);
        self.send(deadline, Event::Deadline { dial: at });
        self.send(deadline.after(BACKSTOP), Event::Backstop { dial: at });
        self.run(at, Step::Ask(Reason::First));
        Some(at)
    }

    fn run(&mut self, at: usize, mut step: Step) {
        loop {
            let (until, listens) = match step {
                Step::Fail(failure) => return self.conclude(at, Ended::Failed(failure)),
                Step::Ask(reason) => {
                    step = match self.pick(at, reason) {
                        Some(link) => {
                            self.ask(at, link);
                            self.next_step(at)
                        }
                        None => self.found_none(at, reason),
                    };
                    continue;
                }
                Step::Wait(until) => (until, until.is_none()),
                Step::WaitForLink(until) => {
                    self.seen.waited += 1;
                    (Some(until), true)
                }
            };
            let dial = &mut self.dials[at];
            (dial.until, dial.listens) = (until, listens);
            if let Some(until) = until {
                self.send(until.max(self.now), Event::Wake { dial: at });
            }
            return;
        }
    }

    /// Property 4: at most one hedge.
    fn pick(&mut self, at: usize, reason: Reason) -> Option<LinkId> {
        let now = self.now;
        let dial = &self.dials[at];
        let hedges = &mut self.servers[dial.server].hedges;
        if reason == Reason::Slow && !hedges.try_hedge(dial.address, now) {
            return None;
        }
        let found = self.find(at, reason);
        let link = found.or_else(|| self.find_elsewhere(at, reason))?;
        let owner = self.owner_to_ask(at, link);
        let peer = self.peers.get(&link).map(|peer| &peer.answers);
        let (is_peer, agent) = (peer.is_some(), self.links.get(&link));
        let answers = peer.or_else(|| agent.map(|agent| &agent.answers)).unwrap();
        let answers = Arc::clone(answers);
        let dial = &mut self.dials[at];
        match reason {
            Reason::First => (),
            Reason::NotSent => self.seen.retried += 1,
            Reason::Slow => {
                dial.hedges += 1;
                self.seen.hedged += 1;
                self.seen.hedged_at_peer += u64::from(is_peer);
            }
            Reason::Silent | Reason::Lost => {
                dial.replacements += 1;
                self.seen.failed_over += 1;
            }
        }
        assert!(dial.hedges <= 1, "a dial is hedged once");
        assert!(dial.tried.iter().all(|tried| tried.link != link));
        dial.attempts.begin(link, reason, now);
        answers.sent(now);
        dial.tried.push(Tried {
            link,
            is_peer,
            is_running: true,
            owner,
            answers,
            seen: 0,
        });
        Some(link)
    }

    /// The owner that an attempt after the first keeps to: `None` before the first, `Some(None)` if it is not known. Kept from the
    /// first attempt, since peers may have said something else of the key since. Peers that had no agent have asked nobody.
    fn first_owner(&self, at: usize) -> Option<Option<u64>> {
        let dial = &self.dials[at];
        let mut tried = dial.tried.iter();
        let first = tried.find(|tried| {
            let is_it =
                |(peer, scope): &(LinkId, Scope)| *peer == tried.link && *scope == dial.scope;
            !dial.not_here.iter().any(is_it)
        })?;
        Some(first.owner)
    }

    /// The owner whose agents alone this attempt may ask.
    fn owner_to_ask(&self, at: usize, link: LinkId) -> Option<u64> {
        let dial = &self.dials[at];
        let registry = &self.servers[dial.server].registry;
        if let Some(agent) = self.links.get(&link) {
            return Some(hash(Some(self.agents[agent.agent].principal)));
        }
        if !registry.is_claim(&dial.scope) {
            return None;
        }
        self.first_owner(at)
            .unwrap_or_else(|| registry.peer_owner(&dial.scope))
    }

    fn find(&mut self, at: usize, reason: Reason) -> Option<LinkId> {
        let heard = matches!(reason, Reason::Slow | Reason::Silent | Reason::Lost);
        let draw = self.rng.next();
        let dial = &self.dials[at];
        let tried: Vec<LinkId> = dial.tried.iter().map(|tried| tried.link).collect();
        let registry = &self.servers[dial.server].registry;
        let link = match self.first_owner(at) {
            None => registry.pick(&dial.scope, draw, &tried),
            Some(owner) if owner.is_none() && registry.is_claim(&dial.scope) => None,
            Some(owner) => {
                let is_owner = |other: Option<&str>| Some(hash(other)) == owner;
                registry.pick_owned(&dial.scope, &is_owner, heard, draw, &tried)
            }
        }?;
        self.check_pick(at, link, tried.is_empty());
        Some(link)
    }

    fn find_elsewhere(&mut self, at: usize, reason: Reason) -> Option<LinkId> {
        let dial = &self.dials[at];
        let is_elsewhere = |tried: &Tried| {
            let is_it =
                |(peer, scope): &(LinkId, Scope)| *peer == tried.link && *scope == dial.scope;
            dial.not_here.iter().any(is_it)
        };
        if dial.tried.is_empty() || !dial.tried.iter().all(is_elsewhere) {
            return None;
        }
        let registry = &self.servers[dial.server].registry;
        let scope = registry.scope_without(&dial.host, self.now, &dial.not_here)?;
        if scope == dial.scope {
            return None;
        }
        self.seen.next_key += 1;
        let dial = &mut self.dials[at];
        dial.scope = scope;
        // A peer without an agent under one key may have one under the next.
        dial.tried.clear();
        self.find(at, reason)
    }

    fn ask(&mut self, at: usize, link: LinkId) {
        let is_unsent = !self.is_calm && self.rng.once_in(20);
        let dial = &self.dials[at];
        let owner = dial.tried.last().unwrap().owner;
        if self.links.contains_key(&link) {
            let ask = self.asks.len();
            self.asks.push(Ask {
                link,
                by: Asker::Dial(at),
                is_over: false,
            });
            return self.send_ask(link, ask, is_unsent);
        }
        let forward = Forward {
            scope: dial.scope.clone(),
            time_left: Some(dial.deadline.since(self.now)),
            owner,
            dial: DialId(i64::try_from(at).unwrap()),
            client: String::new(),
        };
        let (bytes, number) = (forward.encode(), self.forwards.len());
        self.forwards.push(SimForward::new(link, at, forward));
        if is_unsent {
            let (now, answer) = (self.now, Answer::NotAsked);
            self.forwards[number].is_over = true;
            let forward = number;
            return self.send(
                now,
                Event::Answer {
                    link,
                    forward,
                    answer,
                },
            );
        }
        let forward = number;
        self.carry(Event::Forward {
            link,
            forward,
            bytes,
        });
    }

    /// Sends a question to an agent.
    pub(super) fn send_ask(&mut self, link: LinkId, ask: usize, is_unsent: bool) {
        if !is_unsent {
            return self.carry(Event::Ask { link, ask });
        }
        let (failure, written) = (DialFailure::LinkBusy, false);
        let outcome = Err(CancelledDial { failure, written });
        self.send(self.now, Event::Outcome { link, ask, outcome });
    }

    /// Properties 2 and 5, where a question reaches an agent.
    pub(super) fn agent_asked(&mut self, ask: usize) {
        let Ask { link, by, .. } = self.asks[ask];
        let (at, on, scope) = match by {
            Asker::Dial(dial) => (dial, link, self.dials[dial].scope.clone()),
            Asker::Forward(forward) => {
                let forward = &self.forwards[forward];
                (forward.dial, forward.link, forward.forward.scope.clone())
            }
        };
        let agent = &self.agents[self.links[&link].agent];
        let is_claim = self.servers[self.links[&link].server]
            .registry
            .is_claim(&scope);
        let dial = &mut self.dials[at];
        assert_eq!(scope, dial.scope, "an attempt keeps the scope of its dial");
        super::oracle::assert_answers(&agent.identifiers, &scope, &dial.host);
        let attempt = dial.tried.iter_mut().find(|tried| tried.link == on);
        let attempt = attempt.unwrap();
        attempt.seen += 1;
        assert_eq!(attempt.seen, 1, "an attempt asks the target once");
        let seen: u32 = dial.tried.iter().map(|tried| tried.seen).sum();
        assert!(
            seen <= 1 + dial.hedges + dial.replacements,
            "the target is asked again although somebody has seen the dial"
        );
        dial.owners.push(agent.principal);
        if is_claim {
            let first = dial.owners[0];
            assert!(
                dial.owners.iter().all(|owner| *owner == first),
                "agents of several owners are asked under a claim: {:?}",
                dial.owners
            );
        }
        let takes = match self.is_calm {
            true => 1,
            false => self.rng.pick(&[1, 5, 5, 20, 300, 1_500, 5_000, 60_000]),
        };
        let refusal = match self.rng.within(0..=9) {
            _ if self.is_calm => None,
            0..=1 => Some(DialFailure::Target("connection refused".to_owned())),
            2 => Some(DialFailure::Closed),
            _ => None,
        };
        let written = true;
        let outcome = refusal.map_or(Ok(()), |failure| Err(CancelledDial { failure, written }));
        let answered = self.now.after(Duration::from_millis(takes));
        let arrives = answered.after(self.delay());
        self.send(arrives, Event::Outcome { link, ask, outcome });
    }

    pub(super) fn agent_answered(&mut self, ask: usize, outcome: Result<(), CancelledDial>) {
        let Ask { link, by, is_over } = self.asks[ask];
        if is_over {
            return;
        }
        self.asks[ask].is_over = true;
        match by {
            Asker::Forward(forward) => self.local_answered(forward, outcome),
            Asker::Dial(at) if self.active.contains(&at) => self.attempt_ended(at, link, outcome),
            // The late answer to a dial that is over.
            Asker::Dial(_) => {
                if let Some(link) = self.links.get(&link) {
                    link.answers.heard();
                }
            }
        }
    }

    /// A peer's answer has come.
    pub(super) fn peer_answered(&mut self, forward: usize, answer: Answer) {
        let SimForward { link, dial, .. } = self.forwards[forward];
        if !self.active.contains(&dial) {
            return;
        }
        let (failure, written) = match answer {
            Answer::Open => return self.attempt_ended(dial, link, Ok(())),
            Answer::NotHere => (DialFailure::NoAgent, false),
            Answer::NotAsked => (DialFailure::LinkBusy, false),
            Answer::Limit => (DialFailure::TooManyPending { per_agent: true }, false),
            Answer::Failed(failure) => (failure, true),
        };
        self.attempt_ended(dial, link, Err(CancelledDial { failure, written }));
    }

    pub(super) fn attempt_ended(
        &mut self,
        at: usize,
        link: LinkId,
        outcome: Result<(), CancelledDial>,
    ) {
        let (now, is_silent) = (self.now, self.is_silent(link));
        let dial = &mut self.dials[at];
        let tried = dial.tried.iter_mut().find(|tried| tried.link == link);
        // The dial has gone on to another key, for which it may ask the same peer again.
        let Some(tried) = tried else {
            return;
        };
        if !std::mem::take(&mut tried.is_running) {
            return;
        }
        let running = dial.attempts.running().find(|(on, _)| *on == link);
        let (_, asked) = running.unwrap();
        let Err(cancelled) = outcome else {
            tried.answers.answered(asked, now);
            return self.conclude(at, Ended::Open(link));
        };
        if cancelled.written {
            if let DialFailure::Target(_) = cancelled.failure {
                tried.answers.answered(asked, now);
                let took = dial.attempts.took(link, now);
                let hedges = &mut self.servers[dial.server].hedges;
                hedges.failed(dial.address, took, now);
            }
        } else {
            assert_eq!(tried.seen, 0, "the agent has seen an unsent dial");
        }
        if tried.is_peer && cancelled.failure == DialFailure::NoAgent {
            tried.answers.answered(asked, now);
            dial.not_here.push((link, dial.scope.clone()));
            self.seen.not_here += 1;
        }
        let step = dial.attempts.ended(link, cancelled, is_silent, now);
        self.run(at, step);
    }

    fn found_none(&mut self, at: usize, reason: Reason) -> Step {
        let dial = &mut self.dials[at];
        let registry = &self.servers[dial.server].registry;
        let may_come = registry.is_silent(&dial.scope, self.now);
        dial.attempts.found_none(reason, may_come, self.now)
    }

    fn next_step(&mut self, at: usize) -> Step {
        let tried = self.dials[at].tried.iter();
        let states: Vec<_> = tried
            .map(|tried| {
                (
                    tried.link,
                    self.is_silent(tried.link),
                    Arc::clone(&tried.answers),
                )
            })
            .collect();
        let now = self.now;
        self.dials[at].attempts.check(now, |link, asked| {
            let state = states.iter().find(|(on, _, _)| *on == link);
            let (_, is_silent, answers) = state.unwrap();
            LinkState {
                is_silent: *is_silent,
                hedge_at: answers.hedge_at(asked),
            }
        })
    }

    pub(super) fn check_dial(&mut self, at: usize) {
        let step = self.next_step(at);
        self.run(at, step);
    }

    pub(super) fn woken(&mut self, at: usize) {
        let until = self.dials[at].until;
        if self.active.contains(&at) && until.is_some_and(|until| until <= self.now) {
            self.check_dial(at);
        }
    }

    /// Links to agents end their own attempts.
    pub(super) fn deadline(&mut self, at: usize) {
        let running = self.dials[at].tried.iter();
        let running = running.filter(|tried| tried.is_running && !tried.is_peer);
        let running: Vec<LinkId> = running.map(|tried| tried.link).collect();
        for link in running {
            if self.active.contains(&at) {
                let (failure, written) = (DialFailure::TimedOut, true);
                self.attempt_ended(at, link, Err(CancelledDial { failure, written }));
            }
        }
    }

    pub(super) fn backstop(&mut self, at: usize) {
        if self.active.contains(&at) {
            self.conclude(at, Ended::Failed(DialFailure::TimedOut));
        }
    }

    /// Property 7: no dial outlives its deadline.
    fn conclude(&mut self, at: usize, ended: Ended) {
        assert!(self.active.remove(&at), "a dial ends once");
        let dial = &mut self.dials[at];
        let last = dial.deadline.after(BACKSTOP);
        assert!(self.now <= last, "a dial outlives its deadline");
        match &ended {
            Ended::Open(link) if self.peers.contains_key(link) => self.seen.opened_at_peer += 1,
            Ended::Open(_) => self.seen.opened_here += 1,
            Ended::Failed(DialFailure::TimedOut) => self.seen.timed_out += 1,
            Ended::Failed(_) => self.seen.failed += 1,
        }
        dial.ended = Some(ended);
        let running = dial.tried.iter().filter(|tried| tried.is_running);
        let running: Vec<LinkId> = running.map(|tried| tried.link).collect();
        for link in running {
            let is_it = |forward: &SimForward| forward.dial == at && forward.link == link;
            if let Some(forward) = self.forwards.iter().position(is_it) {
                self.carry(Event::Withdraw { link, forward });
            }
        }
    }
}
