//! Which link carries a dial, and the cap on dials in flight, at its default.

use std::task::Poll;

use tokio::time::timeout;

use super::*;
use crate::config::plan::DialPlan;

/// Links enough that none of them is the limit.
const LINKS: usize = 64;

fn hub(pending_max: usize) -> Arc<Hub> {
    let limits = DialLimits {
        pending_max,
        timeout: None,
    };
    let strategies = "default".parse().expect("a known strategy");
    Hub::new(Registry::new(strategies), limits)
}

/// Enters a link of an agent that may have two.
fn enter(hub: &Arc<Hub>, agent: &str) -> Entered {
    let info = LinkInfo {
        agent: AgentId::new(agent),
        identifiers: Identifiers::default(),
        identity: AgentIdentity::Unverified,
        credit: true,
        address: PeerAddr::Unix,
    };
    hub.enter(info, 2, None).expect("there is room for two")
}

#[tokio::test]
async fn sixteen_thousand_three_hundred_and_eighty_four_dials_may_wait_and_no_more() {
    let hub = hub(usize::try_from(DialPlan::default().pending_max.get()).unwrap());
    // Links whose tasks never answer.
    let _silent: Vec<Entered> = (0..LINKS)
        .map(|number| enter(&hub, &format!("agent-{number}")))
        .collect();
    let mut waiting = Vec::new();
    for number in 0..16_384 {
        let mut dial = Box::pin(hub.dial(DialId(number), "tcp", "a:1"));
        let early = futures_util::poll!(&mut dial);
        assert!(early.is_pending(), "dial {number} is refused");
        waiting.push(dial);
    }
    let mut refused = std::pin::pin!(hub.dial(DialId(-1), "tcp", "a:1"));
    match futures_util::poll!(&mut refused) {
        Poll::Ready(Err(failure)) => {
            assert_eq!(failure, DialFailure::TooManyPending { per_agent: false });
        }
        Poll::Ready(Ok(_)) | Poll::Pending => panic!("one more may wait"),
    }
    waiting.pop();
    let mut next = std::pin::pin!(hub.dial(DialId(-2), "tcp", "a:1"));
    assert!(futures_util::poll!(&mut next).is_pending(), "room for one");
}

#[tokio::test]
async fn a_link_that_is_just_leaving_is_passed_over() {
    let hub = hub(1000);
    let (leaving, _staying) = (enter(&hub, "leaving"), enter(&hub, "staying"));
    locked(&hub.links).remove(&leaving.handle.id);
    for number in 0..64 {
        let mut dial = Box::pin(hub.dial(DialId(number), "tcp", "a:1"));
        let early = futures_util::poll!(&mut dial);
        assert!(early.is_pending(), "dial {number} found no agent");
    }
}

#[tokio::test]
async fn what_is_longer_than_any_destination_is_asked_of_nobody() {
    let hub = hub(1000);
    let mut entered = enter(&hub, "agent");
    let (fits, long) = ("a".repeat(1021), "a".repeat(1022));
    for (protocol, address) in [("tcp", &long), (long.as_str(), &fits)] {
        let mut dial = Box::pin(hub.dial(DialId(1), protocol, address));
        match futures_util::poll!(&mut dial) {
            Poll::Ready(Err(failure)) => assert_eq!(failure, DialFailure::TooLong),
            Poll::Ready(Ok(_)) | Poll::Pending => panic!("an agent is asked"),
        }
    }
    assert!(entered.commands.try_recv().is_err());
    let mut dial = Box::pin(hub.dial(DialId(2), "tcp", &fits));
    assert!(futures_util::poll!(&mut dial).is_pending());
    assert!(entered.commands.try_recv().is_ok());
}

/// An agent that looks for further servers closes a link to one it has as soon as it knows who has answered.
#[tokio::test(start_paused = true)]
async fn a_further_link_of_an_agent_that_is_closed_at_once_takes_no_dial_with_it() {
    let hub = hub(1000);
    let mut kept = enter(&hub, "agent");
    // The only one is no trial.
    let mut dial = Box::pin(hub.dial(DialId(1), "tcp", "a:1"));
    assert!(futures_util::poll!(&mut dial).is_pending());
    assert!(matches!(kept.commands.try_recv(), Ok(Command::Dial { .. })));
    let mut trial = enter(&hub, "agent");
    let mut dial = Box::pin(hub.dial(DialId(2), "tcp", "a:1"));
    assert!(futures_util::poll!(&mut dial).is_pending());
    assert!(trial.commands.try_recv().is_err(), "nobody would read it");
    drop(trial);
    assert!(futures_util::poll!(&mut dial).is_pending());
    assert!(matches!(kept.commands.try_recv(), Ok(Command::Dial { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_further_link_of_an_agent_that_stays_takes_dials_after_a_moment() {
    let hub = hub(1000);
    let (_half_open, mut newest) = (enter(&hub, "agent"), enter(&hub, "agent"));
    let start = Instant::now();
    let mut dial = Box::pin(hub.dial(DialId(1), "tcp", "a:1"));
    let asked = timeout(Duration::from_secs(1), async {
        tokio::select! {
            biased;
            _never = &mut dial => None,
            asked = newest.commands.recv() => asked,
        }
    });
    let asked = asked.await;
    assert!(matches!(asked, Ok(Some(Command::Dial { .. }))));
    let took = start.elapsed();
    let moment = TRIAL_TIME..TRIAL_TIME + Duration::from_millis(2);
    assert!(moment.contains(&took), "{took:?}");
}

/// It is no further one to those who dial.
#[tokio::test(start_paused = true)]
async fn a_link_beside_one_that_drains_takes_dials_at_once() {
    let hub = hub(1000);
    let (old, mut newest) = (enter(&hub, "agent"), enter(&hub, "agent"));
    hub.set_draining(old.handle.id);
    let mut dial = Box::pin(hub.dial(DialId(1), "tcp", "a:1"));
    assert!(futures_util::poll!(&mut dial).is_pending());
    let asked = newest.commands.try_recv();
    assert!(matches!(asked, Ok(Command::Dial { .. })));
}
