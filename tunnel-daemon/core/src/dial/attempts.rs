//! When a dial asks another agent, and how it ends.

use std::time::Duration;

use super::{AGENT_WAIT, REFUSED_WAIT, SILENT_MAX};
use crate::destination::is_denial;
use crate::failure::DialFailure;
use crate::ids::LinkId;
use crate::session::{CancelledDial, Moment};

/// Why another agent is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// It is the first.
    First,
    /// The agent before was not sent the dial.
    NotSent,
    /// The agent before has not answered for longer than its link usually takes: a hedge, which has a budget.
    Slow,
    /// The agent before is silent.
    Silent,
}

/// What the caller does next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Ask an agent that was not asked, and call [`Attempts::begin`], or [`Attempts::found_none`].
    Ask(Reason),
    /// Wait for an answer, for a change of the links, or until then, and call [`Attempts::check`].
    Wait(Option<Moment>),
    /// No agent is asked: wait until then for a link, and ask it.
    WaitForLink(Moment),
    /// The dial has failed.
    Fail(DialFailure),
}

/// What is known of the link that carries an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkState {
    /// Its agent is silent, or was when the link ended.
    pub is_silent: bool,
    /// When the attempt may be hedged.
    pub hedge_at: Moment,
}

/// The agent answered that it may not dial the target.
fn is_denied(failure: &DialFailure) -> bool {
    matches!(failure, DialFailure::Target(text) if is_denial(text))
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    link: LinkId,
    asked: Moment,
}

/// The attempts of one dial: one agent is asked, a second beside one that is slow, and further ones only when all of them are
/// silent.
#[derive(Debug, Default)]
pub struct Attempts {
    running: Vec<Attempt>,
    /// No further hedge: there was one, or none was allowed.
    hedged: bool,
    /// Agents asked because others were silent.
    silent: u8,
    /// The first refusal while another agent was asked, and until when that one may answer.
    refusal: Option<(DialFailure, Option<Moment>)>,
    /// Why the last attempt was not sent.
    unsent: Option<DialFailure>,
    /// Until when it waits for a link.
    waits_until: Option<Moment>,
}

impl Attempts {
    /// An agent is asked on `link`.
    pub fn begin(&mut self, link: LinkId, reason: Reason, now: Moment) {
        let attempt = Attempt { link, asked: now };
        match reason {
            Reason::First | Reason::NotSent => (),
            Reason::Slow => self.hedged = true,
            Reason::Silent => self.silent = self.silent.saturating_add(1),
        }
        self.waits_until = None;
        self.running.push(attempt);
    }

    /// Links on which agents are asked now, and since when.
    pub fn running(&self) -> impl Iterator<Item = (LinkId, Moment)> {
        let running = self.running.iter();
        running.map(|attempt| (attempt.link, attempt.asked))
    }

    /// The attempt on `link` has failed. Its agent `is_silent`, or was when the link ended.
    pub fn ended(
        &mut self,
        link: LinkId,
        cancelled: CancelledDial,
        is_silent: bool,
        now: Moment,
    ) -> Step {
        self.running.retain(|attempt| attempt.link != link);
        let is_alone = self.running.is_empty();
        let CancelledDial { failure, written } = cancelled;
        match failure {
            // The whole time of the dial is spent.
            DialFailure::SendTimedOut | DialFailure::TimedOut if is_alone => {
                return Step::Fail(self.first_refusal(failure));
            }
            DialFailure::SendTimedOut | DialFailure::TimedOut => (),
            _ if !written => {
                self.unsent = Some(failure);
                if is_alone {
                    return Step::Ask(Reason::NotSent);
                }
            }
            DialFailure::LinkLost if is_silent => {
                if is_alone && self.silent < SILENT_MAX {
                    return Step::Ask(Reason::Silent);
                }
                if is_alone {
                    return Step::Fail(self.first_refusal(DialFailure::TimedOut));
                }
            }
            failure if is_alone => return Step::Fail(self.first_refusal(failure)),
            failure => {
                // What says nothing of the target leaves the other agent its whole time.
                let of_target = matches!(failure, DialFailure::Target(_)) && !is_denied(&failure);
                let until = of_target.then(|| now.after(REFUSED_WAIT));
                let until = self.refused_until().or(until);
                self.refusal = Some((self.first_refusal(failure), until));
            }
        }
        Step::Wait(self.refused_until())
    }

    fn first_refusal(&mut self, failure: DialFailure) -> DialFailure {
        match (self.refusal.take(), failure) {
            // What one agent says of the target is more than that another may not ask, or is gone.
            (Some((first @ DialFailure::Target(_), _)), _) if !is_denied(&first) => first,
            (_, failure) => failure,
        }
    }

    fn refused_until(&self) -> Option<Moment> {
        self.refusal.as_ref().and_then(|(_, until)| *until)
    }

    /// What to do at `now`; `state` tells of the link of a running attempt.
    pub fn check(&mut self, now: Moment, state: impl Fn(LinkId, Moment) -> LinkState) -> Step {
        if let Some(until) = self.refused_until() {
            return match &self.refusal {
                Some((failure, _)) if now >= until => Step::Fail(failure.clone()),
                _ => Step::Wait(Some(until)),
            };
        }
        if self.running.is_empty() {
            return match self.waits_until {
                Some(until) if now >= until => Step::Fail(DialFailure::TimedOut),
                _ => Step::Ask(Reason::Silent),
            };
        }
        let is_silent = self
            .running()
            .all(|(link, asked)| state(link, asked).is_silent);
        if is_silent && self.silent < SILENT_MAX {
            return Step::Ask(Reason::Silent);
        }
        let [Attempt { link, asked }] = *self.running else {
            return Step::Wait(None);
        };
        let LinkState { hedge_at, .. } = state(link, asked);
        if self.hedged || is_silent {
            return Step::Wait(None);
        }
        if now >= hedge_at {
            return Step::Ask(Reason::Slow);
        }
        Step::Wait(Some(hedge_at))
    }

    /// There was no agent to ask, or none might be; `may_come`: one of them is silent, or was when its link ended.
    pub fn found_none(&mut self, reason: Reason, may_come: bool, now: Moment) -> Step {
        if reason == Reason::Slow {
            self.hedged = true;
        }
        if !self.running.is_empty() {
            return Step::Wait(self.refused_until());
        }
        if !may_come {
            let failure = self.unsent.take().unwrap_or(DialFailure::NoAgent);
            return Step::Fail(self.first_refusal(failure));
        }
        let until = *self
            .waits_until
            .get_or_insert_with(|| now.after(AGENT_WAIT));
        if now >= until {
            return Step::Fail(self.first_refusal(DialFailure::TimedOut));
        }
        Step::WaitForLink(until)
    }

    /// How long the attempt on `link` has taken.
    #[must_use]
    pub fn took(&self, link: LinkId, now: Moment) -> Duration {
        let mut running = self.running();
        let attempt = running.find(|(running, _)| *running == link);
        attempt.map_or(Duration::ZERO, |(_, asked)| now.since(asked))
    }
}
