//! When a dial asks another agent, and how it ends.

use std::time::Duration;

use super::{AGENT_WAIT, REFUSED_WAIT, REPLACEMENTS_MAX};
use crate::destination::is_denial;
use crate::failure::DialFailure;
use crate::ids::LinkId;
use crate::session::{CancelledDial, Moment};

/// Why another agent is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// It is the dial's first agent.
    First,
    /// The dial was not sent to the previous agent.
    NotSent,
    /// A hedge: the previous agent has not answered for longer than usual on its link. Hedges have a budget.
    Slow,
    /// The previous agent is silent.
    Silent,
    /// The previous agent's link has ended.
    Lost,
}

/// What the caller does next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Ask an agent that was not asked yet and call [`Attempts::begin`]; without one call [`Attempts::found_none`].
    Ask(Reason),
    /// Wait for an answer, a change of the links, or this time; then call [`Attempts::check`].
    Wait(Option<Moment>),
    /// No attempt is running: wait for a link until this time, and ask its agent.
    WaitForLink(Moment),
    /// The dial has failed.
    Fail(DialFailure),
}

/// State of the link that carries an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkState {
    /// Whether the link's agent is silent, or was when the link ended.
    pub is_silent: bool,
    /// When the attempt may be hedged.
    pub hedge_at: Moment,
}

/// Whether the agent answered that it may not dial the target.
fn is_denied(failure: &DialFailure) -> bool {
    matches!(failure, DialFailure::Target(text) if is_denial(text))
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    link: LinkId,
    asked: Moment,
}

/// The attempts of one dial. One agent is asked; a second one if the first is slow; further agents only when all asked agents
/// are silent or have lost their links.
#[derive(Debug, Default)]
pub struct Attempts {
    running: Vec<Attempt>,
    /// No further hedge: the dial was hedged, or a hedge was not possible.
    hedged: bool,
    /// Number of agents asked because the previous ones were silent or their links ended.
    replacements: u8,
    /// The first refusal while another attempt runs, and the deadline of that attempt.
    refusal: Option<(DialFailure, Option<Moment>)>,
    /// Why the last attempt was not sent.
    unsent: Option<DialFailure>,
    /// A link has ended under an attempt whose agent was not silent.
    has_lost: bool,
    /// An attempt's agent was silent.
    was_silent: bool,
    /// Deadline of the wait for a link.
    waits_until: Option<Moment>,
}

impl Attempts {
    /// An agent is asked on `link`.
    pub fn begin(&mut self, link: LinkId, reason: Reason, now: Moment) {
        let attempt = Attempt { link, asked: now };
        match reason {
            Reason::First | Reason::NotSent => (),
            Reason::Slow => self.hedged = true,
            Reason::Silent | Reason::Lost => {
                self.replacements = self.replacements.saturating_add(1);
            }
        }
        self.waits_until = None;
        self.running.push(attempt);
    }

    /// Links of the running attempts, and when each attempt began.
    pub fn running(&self) -> impl Iterator<Item = (LinkId, Moment)> {
        let running = self.running.iter();
        running.map(|attempt| (attempt.link, attempt.asked))
    }

    /// The attempt on `link` has failed. `is_silent`: its agent is silent, or was when the link ended.
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
            // The dial's time is used up.
            DialFailure::SendTimedOut | DialFailure::TimedOut if is_alone => {
                return Step::Fail(self.first_refusal(failure));
            }
            DialFailure::SendTimedOut | DialFailure::TimedOut => (),
            _ if !written => {
                self.unsent = Some(failure);
                if is_alone && !self.has_lost {
                    return Step::Ask(Reason::NotSent);
                }
                if is_alone && self.replacements >= REPLACEMENTS_MAX {
                    return Step::Fail(self.first_refusal(DialFailure::LinkLost));
                }
                if is_alone {
                    return Step::Ask(Reason::Lost);
                }
            }
            // The agent may live on: it gives up the link of a server that it does not hear.
            DialFailure::LinkLost if is_alone => {
                let reason = self.lost(is_silent);
                if self.replacements >= REPLACEMENTS_MAX || self.target_has_refused() {
                    let failure = if is_silent {
                        DialFailure::TimedOut
                    } else {
                        failure
                    };
                    return Step::Fail(self.first_refusal(failure));
                }
                return Step::Ask(reason);
            }
            DialFailure::LinkLost => {
                self.lost(is_silent);
            }
            failure if is_alone => return Step::Fail(self.first_refusal(failure)),
            failure => {
                // A failure that is not about the target does not shorten the other attempt.
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
            // An agent's answer about the target takes precedence over a denial or a lost link of another agent.
            (Some((first @ DialFailure::Target(_), _)), _) if !is_denied(&first) => first,
            (_, failure) => failure,
        }
    }

    fn lost(&mut self, is_silent: bool) -> Reason {
        if is_silent {
            self.was_silent = true;
            Reason::Silent
        } else {
            self.has_lost = true;
            Reason::Lost
        }
    }

    fn target_has_refused(&self) -> bool {
        matches!(&self.refusal, Some((first @ DialFailure::Target(_), _)) if !is_denied(first))
    }

    fn refused_until(&self) -> Option<Moment> {
        self.refusal.as_ref().and_then(|(_, until)| *until)
    }

    /// The next step at `now`; `state` returns the state of a running attempt's link.
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
        self.was_silent |= is_silent;
        if is_silent && self.replacements < REPLACEMENTS_MAX {
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

    /// No agent was found, or the budget allows no hedge. `may_come`: an agent is silent, or was when its link ended, and may
    /// return. A dial that has only lost links does not wait for it.
    pub fn found_none(&mut self, reason: Reason, may_come: bool, now: Moment) -> Step {
        if reason == Reason::Slow {
            self.hedged = true;
        }
        if !self.running.is_empty() {
            return Step::Wait(self.refused_until());
        }
        if !may_come || (self.has_lost && !self.was_silent) {
            let unsent = self.unsent.take().unwrap_or(DialFailure::NoAgent);
            let failure = if self.has_lost {
                DialFailure::LinkLost
            } else {
                unsent
            };
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

    /// Time since the attempt on `link` began.
    #[must_use]
    pub fn took(&self, link: LinkId, now: Moment) -> Duration {
        let mut running = self.running();
        let attempt = running.find(|(running, _)| *running == link);
        attempt.map_or(Duration::ZERO, |(_, asked)| now.since(asked))
    }
}
