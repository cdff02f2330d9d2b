//! A dial that a peer forwards, as its holder answers it.

use adit_core::failure::DialFailure;
use adit_core::ids::LinkId;
use adit_core::peer::Forward;
use adit_core::session::CancelledDial;

use super::world::{Ask, Asker, Event, PeerWorld, hash};

/// What a holder answers.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Open,
    NotHere,
    NotAsked,
    Limit,
    Failed(DialFailure),
}

pub(super) struct SimForward {
    /// The link between the servers.
    pub(super) link: LinkId,
    pub(super) dial: usize,
    pub(super) forward: Forward,
    passed: Vec<LinkId>,
    why: Answer,
    /// Number of times that it reached a holder.
    arrived: u32,
    pub(super) is_over: bool,
}

impl SimForward {
    pub(super) fn new(link: LinkId, dial: usize, forward: Forward) -> Self {
        Self {
            link,
            dial,
            forward,
            passed: Vec::new(),
            why: Answer::NotHere,
            arrived: 0,
            is_over: false,
        }
    }
}

impl PeerWorld {
    /// A forwarded dial reaches its holder.
    pub(super) fn forwarded(&mut self, at: usize, bytes: &[u8]) {
        let forward = &mut self.forwards[at];
        forward.arrived += 1;
        assert_eq!(forward.arrived, 1, "an attempt is forwarded once");
        let read = Forward::decode(bytes).unwrap();
        let sent = std::mem::replace(&mut forward.forward, read.clone());
        assert_eq!((&read.scope, read.owner), (&sent.scope, sent.owner));
        assert!(read.time_left <= sent.time_left);
        let holder = self.peers[&forward.link].holder;
        if self.servers[holder].leaves_at.is_some() {
            self.seen.leaving += 1;
            return self.answer(at, Answer::NotAsked);
        }
        let deadline = self.now.after(forward.forward.time_left.unwrap());
        self.send(deadline, Event::ForwardDeadline { forward: at });
        self.ask_local(at);
    }

    /// Property 3: a holder asks an agent of its own, or nobody.
    fn ask_local(&mut self, at: usize) {
        let draw = self.rng.next();
        let SimForward {
            link,
            forward,
            passed,
            why,
            ..
        } = &self.forwards[at];
        let holder = self.peers[link].holder;
        let is_owner = |other: Option<&str>| forward.owner.is_none_or(|owner| hash(other) == owner);
        let registry = &self.servers[holder].registry;
        let Some(link) = registry.pick_local(&forward.scope, &is_owner, draw, passed) else {
            return self.answer(at, why.clone());
        };
        let agent = self.links.get(&link).expect("an agent, not a third server");
        assert_eq!(agent.server, holder);
        let principal = self.agents[agent.agent].principal;
        assert!(is_owner(Some(principal)) || !registry.is_claim(&forward.scope));
        let is_unsent = !self.is_calm && self.rng.once_in(20);
        self.forwards[at].passed.push(link);
        let ask = self.asks.len();
        self.asks.push(Ask {
            link,
            by: Asker::Forward(at),
            is_over: false,
        });
        self.send_ask(link, ask, is_unsent);
    }

    /// An agent of the holder has answered.
    pub(super) fn local_answered(&mut self, at: usize, outcome: Result<(), CancelledDial>) {
        if self.forwards[at].is_over {
            return;
        }
        match outcome {
            Ok(()) => self.answer(at, Answer::Open),
            Err(cancelled) if cancelled.written => {
                self.answer(at, Answer::Failed(cancelled.failure));
            }
            Err(_unsent) => {
                self.forwards[at].why = Answer::Limit;
                self.ask_local(at);
            }
        }
    }

    pub(super) fn forward_timed_out(&mut self, at: usize) {
        if !self.forwards[at].is_over {
            self.answer(at, Answer::Failed(DialFailure::TimedOut));
        }
    }

    fn answer(&mut self, at: usize, answer: Answer) {
        let forward = &mut self.forwards[at];
        forward.is_over = true;
        let link = forward.link;
        self.carry(Event::Answer {
            link,
            forward: at,
            answer,
        });
    }

    /// The link between two servers has ended: the holder drops the dials of the asker, and the asker's attempts have failed.
    pub(super) fn peer_lost(&mut self, link: LinkId) {
        for at in 0..self.forwards.len() {
            if self.forwards[at].link != link {
                continue;
            }
            self.forwards[at].is_over = true;
            let dial = self.forwards[at].dial;
            if self.active.contains(&dial) {
                let (failure, written) = (DialFailure::LinkLost, true);
                self.attempt_ended(dial, link, Err(CancelledDial { failure, written }));
            }
        }
    }
}
