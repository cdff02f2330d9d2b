//! The cap on dials in flight, at its default.

use std::task::Poll;

use super::*;
use crate::config::plan::DialPlan;

/// Links enough that none of them is the limit.
const LINKS: usize = 64;

#[tokio::test]
async fn sixteen_thousand_three_hundred_and_eighty_four_dials_may_wait_and_no_more() {
    let pending_max = usize::try_from(DialPlan::default().pending_max.get()).unwrap();
    let hub = Hub::new(
        Registry::new("default".parse().unwrap()),
        DialLimits {
            pending_max,
            timeout: None,
        },
    );
    // Links whose tasks never answer.
    let _silent: Vec<Entered> = (0..LINKS)
        .map(|number| {
            let info = LinkInfo {
                agent: AgentId::new(&format!("agent-{number}")),
                identifiers: Identifiers::default(),
                principal: None,
                credit: true,
                address: PeerAddr::Unix,
            };
            hub.enter(info, 1, None).expect("each agent has one link")
        })
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
    let limits = DialLimits {
        pending_max: 1000,
        timeout: None,
    };
    let hub = Hub::new(Registry::new("default".parse().unwrap()), limits);
    let enter = |name: &str| {
        let info = LinkInfo {
            agent: AgentId::new(name),
            identifiers: Identifiers::default(),
            principal: None,
            credit: true,
            address: PeerAddr::Unix,
        };
        hub.enter(info, 1, None).expect("each agent has one link")
    };
    let (leaving, _staying) = (enter("leaving"), enter("staying"));
    locked(&hub.links).remove(&leaving.handle.id);
    for number in 0..64 {
        let mut dial = Box::pin(hub.dial(DialId(number), "tcp", "a:1"));
        let early = futures_util::poll!(&mut dial);
        assert!(early.is_pending(), "dial {number} found no agent");
    }
}

#[tokio::test]
async fn what_is_longer_than_any_destination_is_asked_of_nobody() {
    let limits = DialLimits {
        pending_max: 1000,
        timeout: None,
    };
    let hub = Hub::new(Registry::new("default".parse().unwrap()), limits);
    let info = LinkInfo {
        agent: AgentId::new("agent"),
        identifiers: Identifiers::default(),
        principal: None,
        credit: false,
        address: PeerAddr::Unix,
    };
    let mut entered = hub.enter(info, 1, None).expect("each agent has one link");
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
