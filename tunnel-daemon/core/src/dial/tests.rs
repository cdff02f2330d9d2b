//! Tests of the rules for retries, hedges and failover.

use std::time::Duration;

use super::{AnswerTimes, Attempts, HedgeBudget, LinkState, Reason, Step};
use crate::destination::{Denied, Why};
use crate::failure::DialFailure;
use crate::ids::LinkId;
use crate::session::{CancelledDial, Moment};

const FIRST: LinkId = LinkId(1);
const SECOND: LinkId = LinkId(2);

fn at(millis: u64) -> Moment {
    Moment(Duration::from_millis(millis))
}

fn written(failure: DialFailure) -> CancelledDial {
    let written = true;
    CancelledDial { failure, written }
}

fn target(text: &str) -> DialFailure {
    DialFailure::Target(text.to_owned())
}

fn denied() -> DialFailure {
    target(&Denied::name("h", 1, Why::NotListed).to_string())
}

/// One dial: the first agent was asked at 0 ms and may be hedged after 2 s.
struct Rig {
    attempts: Attempts,
    silent: Vec<LinkId>,
}

impl Rig {
    fn new() -> Self {
        let mut attempts = Attempts::default();
        attempts.begin(FIRST, Reason::First, at(0));
        let silent = Vec::new();
        Self { attempts, silent }
    }

    /// A rig whose dial asked a second agent after 2 s.
    fn hedged() -> Self {
        let mut rig = Self::new();
        rig.attempts.begin(SECOND, Reason::Slow, at(2000));
        rig
    }

    fn check(&mut self, millis: u64) -> Step {
        let silent = &self.silent;
        self.attempts.check(at(millis), |link, _asked| LinkState {
            is_silent: silent.contains(&link),
            hedge_at: at(2000),
        })
    }

    fn ended(&mut self, link: LinkId, failure: DialFailure, millis: u64) -> Step {
        let is_silent = self.silent.contains(&link);
        self.attempts
            .ended(link, written(failure), is_silent, at(millis))
    }
}

/// Limit (peers): Concurrent attempts of one dial | 5: the first, one hedge, and three that replace agents that are silent or lost
#[test]
fn a_slow_answer_is_hedged_once() {
    let mut rig = Rig::new();
    assert_eq!(rig.check(0), Step::Wait(Some(at(2000))));
    assert_eq!(rig.check(2000), Step::Ask(Reason::Slow));
    rig.attempts.begin(SECOND, Reason::Slow, at(2000));
    assert_eq!(rig.check(9000), Step::Wait(None));
}

#[test]
fn a_hedge_without_an_agent_is_not_retried() {
    let mut rig = Rig::new();
    let step = rig.attempts.found_none(Reason::Slow, false, at(2000));
    assert_eq!(
        (step, rig.check(3000)),
        (Step::Wait(None), Step::Wait(None))
    );
    rig.silent.push(FIRST);
    assert_eq!(rig.check(4000), Step::Ask(Reason::Silent));
}

/// Limit (peers): Concurrent attempts of one dial
/// Limit (times): A dial on a silent link | asks up to three other agents; without one it waits 10 s, 1,024 dials at
/// once
#[test]
fn silent_agent_is_replaced_at_once_and_its_dial_stays_pending() {
    let mut rig = Rig::new();
    rig.silent.push(FIRST);
    assert_eq!(rig.check(100), Step::Ask(Reason::Silent));
    rig.attempts.begin(SECOND, Reason::Silent, at(100));
    assert_eq!(rig.check(100), Step::Wait(None));
    assert_eq!(rig.attempts.running().count(), 2);
    rig.silent.push(SECOND);
    for link in [LinkId(3), LinkId(4)] {
        assert_eq!(rig.check(200), Step::Ask(Reason::Silent));
        rig.attempts.begin(link, Reason::Silent, at(200));
        rig.silent.push(link);
    }
    assert_eq!(rig.check(300), Step::Wait(None), "three others at most");
}

#[test]
fn unsent_dial_is_retried_on_another_agent() {
    let mut rig = Rig::new();
    let unsent = CancelledDial {
        failure: DialFailure::LinkBusy,
        written: false,
    };
    let step = rig.attempts.ended(FIRST, unsent, false, at(1));
    assert_eq!(step, Step::Ask(Reason::NotSent));
    let none = rig.attempts.found_none(Reason::NotSent, false, at(1));
    assert_eq!(none, Step::Fail(DialFailure::LinkBusy));
}

/// It does not wait for an agent: this one was not silent. A dial that crashes its agents reaches four of them at most.
#[test]
fn a_dial_of_a_link_that_ended_asks_three_others_and_fails_at_once_without_one() {
    let mut rig = Rig::new();
    for link in [SECOND, LinkId(3), LinkId(4)] {
        let before = LinkId(link.0 - 1);
        let step = rig.ended(before, DialFailure::LinkLost, 1);
        assert_eq!(step, Step::Ask(Reason::Lost));
        rig.attempts.begin(link, Reason::Lost, at(1));
    }
    let step = rig.ended(LinkId(4), DialFailure::LinkLost, 1);
    assert_eq!(step, Step::Fail(DialFailure::LinkLost));

    for may_come in [false, true] {
        let mut rig = Rig::new();
        let step = rig.ended(FIRST, DialFailure::LinkLost, 1);
        assert_eq!(step, Step::Ask(Reason::Lost));
        let none = rig.attempts.found_none(Reason::Lost, may_come, at(1));
        assert_eq!(none, Step::Fail(DialFailure::LinkLost));
    }
}

/// The agent whose link has ended may have dialled, whatever becomes of the dial elsewhere.
#[test]
fn a_dial_that_was_lost_stays_lost_where_others_are_not_asked() {
    for may_come in [false, true] {
        let mut rig = Rig::new();
        rig.ended(FIRST, DialFailure::LinkLost, 1);
        rig.attempts.begin(SECOND, Reason::Lost, at(1));
        let unsent = CancelledDial {
            failure: DialFailure::NoAgent,
            written: false,
        };
        let step = rig.attempts.ended(SECOND, unsent, false, at(2));
        assert_eq!(step, Step::Ask(Reason::Lost));
        let none = rig.attempts.found_none(Reason::Lost, may_come, at(2));
        assert_eq!(none, Step::Fail(DialFailure::LinkLost));
    }
}

#[test]
fn a_dial_waits_for_a_silent_agent_also_where_another_link_has_ended() {
    let mut rig = Rig::new();
    rig.silent.push(FIRST);
    assert_eq!(rig.check(100), Step::Ask(Reason::Silent));
    rig.attempts.begin(SECOND, Reason::Silent, at(100));
    rig.ended(FIRST, DialFailure::LinkLost, 200);
    let step = rig.ended(SECOND, DialFailure::LinkLost, 300);
    assert_eq!(step, Step::Ask(Reason::Lost));
    let none = rig.attempts.found_none(Reason::Lost, true, at(300));
    assert_eq!(none, Step::WaitForLink(at(10_300)));
}

#[test]
fn a_target_that_has_refused_is_not_asked_for_again_when_the_other_link_ends() {
    for (refusal, expected) in [
        (target("refused"), Step::Fail(target("refused"))),
        (denied(), Step::Ask(Reason::Lost)),
    ] {
        let mut rig = Rig::hedged();
        rig.ended(FIRST, refusal, 2100);
        assert_eq!(rig.ended(SECOND, DialFailure::LinkLost, 2200), expected);
    }
}

/// Limit (times): A dial on a silent link
#[test]
fn a_dial_of_a_link_that_ended_in_silence_waits_for_an_agent_for_ten_seconds() {
    let mut rig = Rig::new();
    rig.silent.push(FIRST);
    let step = rig.ended(FIRST, DialFailure::LinkLost, 1000);
    assert_eq!(step, Step::Ask(Reason::Silent));
    let none = |rig: &mut Rig, millis| rig.attempts.found_none(Reason::Silent, true, at(millis));
    assert_eq!(none(&mut rig, 1000), Step::WaitForLink(at(11_000)));
    assert_eq!(rig.check(5000), Step::Ask(Reason::Silent));
    assert_eq!(none(&mut rig, 5000), Step::WaitForLink(at(11_000)));
    assert_eq!(rig.check(11_000), Step::Fail(DialFailure::TimedOut));
}

#[test]
fn first_dial_without_an_agent_fails_at_once() {
    let mut attempts = Attempts::default();
    let none = attempts.found_none(Reason::First, false, at(0));
    assert_eq!(none, Step::Fail(DialFailure::NoAgent));
}

/// Limit (times): Two agents asked for one dial | the first success wins; after one refusal the other has 1 s
#[test]
fn after_one_refusal_the_other_agent_has_one_second_to_succeed() {
    for (first, second) in [(FIRST, SECOND), (SECOND, FIRST)] {
        let mut rig = Rig::hedged();
        let step = rig.ended(first, target("refused"), 2500);
        assert_eq!(step, Step::Wait(Some(at(3500))));
        assert_eq!(rig.check(3499), step);
        let mut late = Rig::hedged();
        late.ended(first, target("refused"), 2500);
        assert_eq!(late.check(3500), Step::Fail(target("refused")));
        let both = rig.ended(second, target("another"), 3000);
        assert_eq!(both, Step::Fail(target("refused")), "the first text");
    }
}

#[test]
fn a_denial_does_not_shorten_the_other_attempt() {
    let mut rig = Rig::hedged();
    assert_eq!(rig.ended(SECOND, denied(), 2100), Step::Wait(None));
    assert_eq!(rig.check(20_000), Step::Wait(None));
    let step = rig.ended(FIRST, target("refused"), 20_000);
    assert_eq!(step, Step::Fail(target("refused")));

    let mut rig = Rig::hedged();
    rig.ended(SECOND, denied(), 2100);
    let step = rig.ended(FIRST, denied(), 2200);
    assert_eq!(step, Step::Fail(denied()));
    let mut alone = Rig::new();
    assert_eq!(alone.ended(FIRST, denied(), 1), Step::Fail(denied()));
}

#[test]
fn an_ended_link_does_not_shorten_the_other_attempt() {
    let mut rig = Rig::hedged();
    let step = rig.ended(FIRST, DialFailure::LinkLost, 2100);
    assert_eq!(step, Step::Wait(None));
    let step = rig.ended(SECOND, target("refused"), 9000);
    assert_eq!(step, Step::Fail(target("refused")));
}

/// Limit (times): Hedge of an unanswered dial | after 10 median answer times of the link, at least 200 ms, at most 2 s.
/// For a tenth of the dials per second, or 10
#[test]
fn hedge_delay_is_ten_median_answer_times_within_bounds() {
    let due = |answers: &[u64]| {
        let times = AnswerTimes::default();
        for answer in answers {
            times.sent(at(0));
            times.answered(at(0), at(*answer));
        }
        times.sent(at(0));
        times.hedge_at(at(0)).0.as_millis()
    };
    assert_eq!(due(&[]), 2000, "an agent that has not answered yet");
    assert_eq!(due(&[1]), 200);
    assert_eq!(due(&[50]), 500);
    assert_eq!(due(&[50, 60, 70, 900, 900]), 700);
    assert_eq!(due(&[5_000]), 2000);
    let many: Vec<u64> = (0..100)
        .map(|number| if number < 90 { 1 } else { 60 })
        .collect();
    assert_eq!(due(&many), 600, "of the last answers");
}

#[test]
fn hedge_delay_counts_from_the_first_unanswered_dial() {
    let times = AnswerTimes::default();
    times.sent(at(1000));
    // The dial at 1000 stays unanswered, so the dial at 2900 waits only the minimum of 200 ms.
    times.sent(at(2900));
    assert_eq!(times.hedge_at(at(2900)), at(3100));
    times.sent(at(2000));
    assert_eq!(times.hedge_at(at(2000)), at(3000));
    times.heard();
    times.sent(at(3000));
    assert_eq!(times.hedge_at(at(3000)), at(5000), "others are answered");
}

/// Limit (times): Hedge of an unanswered dial
#[test]
fn hedge_budget_is_a_tenth_of_dials_or_ten_a_second() {
    let mut budget = HedgeBudget::default();
    let hedges = |budget: &mut HedgeBudget, millis: u64| {
        (0..1000)
            .filter(|_hedge| budget.try_hedge("t:1", at(millis)))
            .count()
    };
    assert_eq!(hedges(&mut budget, 0), 10);
    assert_eq!(hedges(&mut budget, 999), 0);
    assert_eq!(hedges(&mut budget, 1000), 10);
    for _dial in 0..500 {
        budget.dial(at(2000));
    }
    assert_eq!(hedges(&mut budget, 2500), 50);
    assert_eq!(hedges(&mut budget, 3000), 50, "of the second before");
    assert_eq!(hedges(&mut budget, 4000), 10);
}

/// Limit (times): A target that failed after 2 s or more | no second agent is asked for 10 s; 1,024 targets are
/// remembered
#[test]
fn a_target_that_timed_out_is_not_hedged_for_ten_seconds() {
    let mut budget = HedgeBudget::default();
    let second = Duration::from_secs(1);
    budget.failed("quick:1", second, at(0));
    budget.failed("slow:1", 5 * second, at(0));
    assert!(budget.try_hedge("quick:1", at(1)));
    assert!(!budget.try_hedge("slow:1", at(9_999)));
    assert!(budget.try_hedge("slow:1", at(10_000)));
    for target in 0..5000 {
        budget.failed(&target.to_string(), 5 * second, at(20_000));
    }
    assert!(budget.try_hedge("3975", at(20_001)), "forgotten");
    assert!(!budget.try_hedge("3976", at(20_001)));
    assert_eq!(budget.targets(), 1024);
}
