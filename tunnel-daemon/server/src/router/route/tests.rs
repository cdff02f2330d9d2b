//! Tests of the choice of a dial's link, and of the default limit on pending dials.

use std::pin::Pin;
use std::task::Poll;

use adit_core::failure::DialFailure;
use adit_core::ids::DialId;
use adit_core::session::CancelledDial;
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::PeerVersion;
use tokio::sync::oneshot;

use super::*;
use crate::router::AskedAgents;
use adit_config::plan::DialPlan;
use adit_tls::agent_identity::AgentIdentity;
use adit_tls::stream::PeerAddr;
use adit_tunnel::DialOutcome;

/// Enough links that none of them is the limit.
const LINKS: usize = 64;

fn limits(pending_max: usize) -> DialLimits {
    DialLimits {
        pending_max,
        timeout: None,
        dead_after: Duration::from_secs(8),
    }
}

fn registry(strategies: &str) -> Registry {
    Registry::new(strategies.parse().expect("known strategies"))
}

fn router(pending_max: usize) -> Arc<Router> {
    Router::new(registry("default"), limits(pending_max))
}

/// Enters a link of an agent that may have two.
fn enter(router: &Arc<Router>, agent: &str) -> RegisteredLink {
    let info = LinkInfo {
        agent: AgentId::new(agent),
        identifiers: Identifiers::default(),
        identity: AgentIdentity::Unverified,
        credit: true,
        version: PeerVersion::default(),
        address: PeerAddr::Unix,
        dials: Arc::default(),
    };
    router
        .register(info, 2, None)
        .expect("there is room for two")
}

/// A silent agent whose process is killed, or that an operator unlinks, is not waited for.
#[test]
fn a_silent_link_whose_end_breaks_the_silence_leaves_no_key() {
    for is_heard in [false, true] {
        let router = Router::new(registry("destHost,default"), limits(1));
        let mut info = LinkInfo::clone(&enter(&router, "silent").handle.info);
        info.identifiers = Identifiers::parse("host=a").expect("an identifier");
        let mut silent = router.register(info, 2, None).expect("there is room");
        let other = enter(&router, "other");
        let silence = router.set_silence(silent.handle.id, Duration::from_secs(4));
        assert!(silence.is_some());
        if is_heard {
            silent.guard.heard();
        }
        drop(silent);
        let chosen = router.with_registry(|registry| {
            let scope = registry.scope(&Host::parse("a"), moment());
            registry.pick(&scope.expect("an agent for all hosts"), 0, &[])
        });
        assert_eq!(chosen, is_heard.then_some(other.handle.id));
    }
}

async fn dial(router: &Router, number: i64) -> Result<OpenTunnel, DialFailure> {
    let asked = AskedAgents::default();
    router.dial(DialId(number), "tcp", "a:1", &asked).await
}

/// Limit (peers): Pending dials
#[tokio::test]
async fn at_most_16384_dials_are_pending() {
    let router = router(usize::try_from(DialPlan::default().pending_max.get()).unwrap());
    // Links whose tasks never answer.
    let _silent: Vec<RegisteredLink> = (0..LINKS)
        .map(|number| enter(&router, &format!("agent-{number}")))
        .collect();
    let mut waiting = Vec::new();
    for number in 0..16_384 {
        let mut dial = Box::pin(dial(&router, number));
        let early = futures_util::poll!(&mut dial);
        assert!(early.is_pending(), "dial {number} is refused");
        waiting.push(dial);
    }
    let mut refused = std::pin::pin!(dial(&router, -1));
    match futures_util::poll!(&mut refused) {
        Poll::Ready(Err(failure)) => {
            assert_eq!(failure, DialFailure::TooManyPending { per_agent: false });
        }
        Poll::Ready(Ok(_)) | Poll::Pending => panic!("one more may wait"),
    }
    waiting.pop();
    let mut next = std::pin::pin!(dial(&router, -2));
    assert!(futures_util::poll!(&mut next).is_pending(), "room for one");
}

#[tokio::test]
async fn a_link_being_removed_is_skipped() {
    let router = router(1000);
    let (leaving, _staying) = (enter(&router, "leaving"), enter(&router, "staying"));
    locked(&router.links).remove(&leaving.handle.id);
    for number in 0..64 {
        let mut dial = Box::pin(dial(&router, number));
        let early = futures_util::poll!(&mut dial);
        assert!(early.is_pending(), "dial {number} found no agent");
    }
}

/// Limit (sizes): Protocol and address of a dial
#[tokio::test]
async fn an_oversized_destination_is_sent_to_no_agent() {
    let router = router(1000);
    let mut entered = enter(&router, "agent");
    let asked = AskedAgents::default();
    let (fits, long) = ("a".repeat(1021), "a".repeat(1022));
    for (protocol, address) in [("tcp", &long), (long.as_str(), &fits)] {
        let mut dial = Box::pin(router.dial(DialId(1), protocol, address, &asked));
        match futures_util::poll!(&mut dial) {
            Poll::Ready(Err(failure)) => assert_eq!(failure, DialFailure::TooLong),
            Poll::Ready(Ok(_)) | Poll::Pending => panic!("an agent is asked"),
        }
    }
    assert!(entered.commands.try_recv().is_err());
    let mut dial = Box::pin(router.dial(DialId(2), "tcp", &fits, &asked));
    assert!(futures_util::poll!(&mut dial).is_pending());
    assert!(entered.commands.try_recv().is_ok());
}

/// Limit (memory): Tunnels while `--process-budget` is in use
#[tokio::test]
async fn no_tunnel_is_opened_while_memory_is_full() {
    let budget = Arc::new(ProcessBudget::new(1000));
    let router = Router::within(registry("default"), limits(1000), Arc::clone(&budget));
    let mut only = enter(&router, "agent");
    budget.hold(999);
    let mut fits = Box::pin(dial(&router, 1));
    assert!(futures_util::poll!(&mut fits).is_pending());
    budget.enter_kernel(1);
    let refused = dial(&router, 2).await.err();
    assert_eq!(refused, Some(DialFailure::NoMemory));
    assert!(given(&mut only).is_some() && given(&mut only).is_none());
}

/// An agent that connects to further servers closes a duplicate link as soon as it knows which server answered.
///
/// Upstream (choice): For the first 0.2 s of a new link, dials go to the older link of the agent.
#[tokio::test(start_paused = true)]
async fn dials_go_to_the_older_link_of_an_agent_while_the_newer_is_provisional() {
    let router = router(1000);
    let mut older = enter(&router, "agent");
    let mut newer = enter(&router, "agent");
    let mut first = Box::pin(dial(&router, 1));
    assert!(futures_util::poll!(&mut first).is_pending());
    let _older = given(&mut older).expect("it is asked");
    tokio::time::advance(Duration::from_millis(150)).await;
    assert!(futures_util::poll!(&mut first).is_pending());
    assert!(newer.commands.try_recv().is_err(), "it may be closed yet");
    tokio::time::advance(Duration::from_millis(50)).await;
    let mut second = Box::pin(dial(&router, 2));
    assert!(futures_util::poll!(&mut second).is_pending());
    let _newer = given(&mut newer).expect("it is asked");
    // The older link may be half-open: the agent may have reconnected for that reason.
    assert!(futures_util::poll!(&mut first).is_pending());
    assert!(given(&mut newer).is_some());
    assert_eq!(router.dial_counts().hedges, 1);
}

/// It is the only link that can take dials.
#[tokio::test(start_paused = true)]
async fn a_link_beside_a_draining_one_takes_dials_at_once() {
    let router = router(1000);
    let (old, mut newest) = (enter(&router, "agent"), enter(&router, "agent"));
    router.set_draining(old.handle.id);
    let mut dial = Box::pin(dial(&router, 1));
    assert!(futures_util::poll!(&mut dial).is_pending());
    let asked = newest.commands.try_recv();
    assert!(matches!(asked, Ok(Command::Dial { .. })));
}

/// The dial that a link received, if any.
fn given(entered: &mut RegisteredLink) -> Option<oneshot::Sender<DialOutcome>> {
    match entered.commands.try_recv() {
        Ok(Command::Dial { reply, .. }) => Some(reply),
        _ => None,
    }
}

/// Starts a dial with two agents; returns the agent that was asked first.
async fn one_of_two<'a>(
    router: &'a Arc<Router>,
    asked: &'a AskedAgents,
) -> (
    Pin<Box<impl Future<Output = Result<OpenTunnel, DialFailure>> + use<'a>>>,
    [RegisteredLink; 2],
    oneshot::Sender<DialOutcome>,
) {
    let (mut a, mut b) = (enter(router, "a"), enter(router, "b"));
    let mut dial = Box::pin(router.dial(DialId(1), "tcp", "t:1", asked));
    assert!(futures_util::poll!(&mut dial).is_pending());
    match (given(&mut a), given(&mut b)) {
        (Some(reply), None) => (dial, [a, b], reply),
        (None, Some(reply)) => (dial, [b, a], reply),
        other => panic!("one of them: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_dial_is_hedged_and_the_first_success_wins() {
    let router = router(1000);
    for first_wins in [false, true] {
        let asked = AskedAgents::default();
        let (mut dial, [first, mut second], reply) = one_of_two(&router, &asked).await;
        tokio::time::advance(Duration::from_millis(1999)).await;
        assert!(futures_util::poll!(&mut dial).is_pending());
        assert!(given(&mut second).is_none(), "too early");
        tokio::time::advance(Duration::from_millis(2)).await;
        assert!(futures_util::poll!(&mut dial).is_pending());
        let hedge = given(&mut second).expect("the other is asked");
        let (winner, answer) = if first_wins {
            (&first, reply)
        } else {
            (&second, hedge)
        };
        answer.send(Ok(ConnId(7))).expect("it waits for both");
        match futures_util::poll!(&mut dial) {
            Poll::Ready(Ok(open)) => {
                assert_eq!((open.link, open.conn), (winner.handle.id, ConnId(7)));
            }
            _ => panic!("it is open"),
        }
        let names = [&first, &second].map(|entered| entered.handle.info.agent.to_string());
        assert_eq!(asked.names(), names.join(","));
    }
    assert_eq!(router.dial_counts().hedges, 2);
}

/// A refusal of the target is an answer. An attempt that is given up counts if the agent had a second to answer.
#[tokio::test(start_paused = true)]
async fn the_dials_of_an_agent_count_by_how_they_ended() {
    let router = router(1000);
    let mut only = enter(&router, "agent");
    let counts = |entered: &RegisteredLink| {
        let counts = entered.handle.info.dials.counts();
        (counts.answered, counts.slow, counts.failed)
    };
    let target = |text: &str| DialFailure::Target(text.to_owned());
    let refused = target("dial tcp 127.0.0.1:1: connect: connection refused");
    let unknown = target("lookup a: no such host");
    let after = |answer: Option<DialFailure>, wait| (answer, Duration::from_millis(wait));
    for ((answer, wait), expected) in [
        (after(None, 999), (1, 0, 0)),
        (after(None, 1001), (1, 1, 0)),
        (after(Some(refused), 10), (2, 1, 0)),
        (after(Some(unknown), 10), (2, 1, 1)),
    ] {
        let mut dial = Box::pin(dial(&router, 1));
        assert!(futures_util::poll!(&mut dial).is_pending());
        let reply = given(&mut only).expect("it is asked");
        tokio::time::advance(wait).await;
        let written = true;
        let outcome = match answer {
            None => Ok(ConnId(7)),
            Some(failure) => Err(CancelledDial { failure, written }),
        };
        reply.send(outcome).expect("it waits");
        assert!(futures_util::poll!(&mut dial).is_ready());
        drop(dial);
        assert_eq!(counts(&only), expected);
    }
    for (wait, slow) in [(900, 1), (1100, 2)] {
        let mut dial = Box::pin(dial(&router, 1));
        assert!(futures_util::poll!(&mut dial).is_pending());
        tokio::time::advance(Duration::from_millis(wait)).await;
        drop(dial);
        assert_eq!(counts(&only).1, slow, "given up after {wait} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dial_on_a_silent_link_fails_over_without_a_hedge_budget() {
    let router = router(1000);
    // Uses up the hedge budget of this second.
    while router
        .dials
        .with_budget(|budget| budget.try_hedge("other:1", moment()))
    {}
    let asked = AskedAgents::default();
    let (mut dial, [first, mut second], _reply) = one_of_two(&router, &asked).await;
    let silent = router.set_silence(first.handle.id, Duration::from_secs(4));
    assert!(matches!(silent, Some((_, Silence::Suspected))));
    // The dial watches for link changes once it has waited for a usual answer time.
    tokio::time::advance(Duration::from_millis(2001)).await;
    assert!(futures_util::poll!(&mut dial).is_pending());
    let reply = given(&mut second).expect("the other is asked");
    reply.send(Ok(ConnId(7))).expect("it waits");
    assert!(matches!(futures_util::poll!(&mut dial), Poll::Ready(Ok(_))));
    let counts = router.dial_counts();
    assert_eq!(
        (counts.hedges, counts.failovers, counts.suspicions),
        (0, 1, 1)
    );
}

/// As when an agent gives up the link of a busy server: it has another one, or another agent of the key has.
#[tokio::test]
async fn a_dial_whose_link_ends_goes_to_another_link_of_its_key_at_once() {
    let router = router(1000);
    let asked = AskedAgents::default();
    let (mut dial, [_first, mut second], reply) = one_of_two(&router, &asked).await;
    let lost = |reply: oneshot::Sender<DialOutcome>| {
        let (failure, written) = (DialFailure::LinkLost, true);
        reply
            .send(Err(CancelledDial { failure, written }))
            .expect("it waits");
    };
    lost(reply);
    assert!(futures_util::poll!(&mut dial).is_pending());
    let reply = given(&mut second).expect("the other is asked");
    lost(reply);
    match futures_util::poll!(&mut dial) {
        Poll::Ready(Err(failure)) => assert_eq!(failure, DialFailure::LinkLost),
        _ => panic!("nobody else can be asked"),
    }
    let counts = router.dial_counts();
    assert_eq!((counts.lost, counts.failovers), (1, 0));
}

/// As when a NAT has dropped the connection: the agent returns on a new link.
#[tokio::test(start_paused = true)]
async fn a_dial_on_a_single_silent_link_moves_to_a_new_link() {
    let router = router(1000);
    let mut silent = enter(&router, "agent");
    let mut dial = Box::pin(dial(&router, 1));
    assert!(futures_util::poll!(&mut dial).is_pending());
    let _unanswered = given(&mut silent).expect("it is asked");
    tokio::time::advance(Duration::from_secs(4)).await;
    router.set_silence(silent.handle.id, Duration::from_secs(4));
    assert!(futures_util::poll!(&mut dial).is_pending());
    let mut new = enter(&router, "agent");
    assert!(futures_util::poll!(&mut dial).is_pending());
    let reply = given(&mut new).expect("it is asked at once");
    reply.send(Ok(ConnId(7))).expect("it waits");
    assert!(matches!(futures_util::poll!(&mut dial), Poll::Ready(Ok(_))));
}

#[tokio::test(start_paused = true)]
async fn a_dial_waits_for_an_agent_only_where_the_last_link_ended_in_silence() {
    let router = router(1000);
    let only = enter(&router, "agent");
    drop(only);
    let refused = dial(&router, 1).await.err();
    assert_eq!(refused, Some(DialFailure::NoAgent));

    let only = enter(&router, "agent");
    router.set_silence(only.handle.id, Duration::from_secs(8));
    let start = Instant::now();
    assert_eq!(dial(&router, 2).await.err(), Some(DialFailure::TimedOut));
    assert_eq!(start.elapsed().as_secs(), 10);
    drop(only);
    let mut waits = Box::pin(dial(&router, 3));
    assert!(futures_util::poll!(&mut waits).is_pending());
    let mut new = enter(&router, "agent");
    assert!(futures_util::poll!(&mut waits).is_pending());
    assert!(given(&mut new).is_some());
    assert_eq!(router.dial_counts().waited, 2);
}

/// Limit (times): A dial on a silent link
#[tokio::test(start_paused = true)]
async fn at_most_1024_dials_wait_for_an_agent() {
    let router = router(16_384);
    let only = enter(&router, "agent");
    router.set_silence(only.handle.id, Duration::from_secs(8));
    let mut waiting = Vec::new();
    for number in 0..1024 {
        let mut waits = Box::pin(dial(&router, number));
        assert!(futures_util::poll!(&mut waits).is_pending());
        waiting.push(waits);
    }
    let full = DialFailure::TooManyPending { per_agent: false };
    assert_eq!(dial(&router, -1).await.err(), Some(full));
    router.set_silence(only.handle.id, Duration::ZERO);
    for waits in &mut waiting {
        assert!(futures_util::poll!(waits).is_pending());
    }
    drop(waiting);
}

/// A Go agent may be silent for 20 s, for example during garbage collection or while its container is stopped.
///
/// Limit (times): A link whose agent stays silent
#[tokio::test(start_paused = true)]
async fn a_go_agent_may_be_silent_longer() {
    let router = router(1000);
    let adit = enter(&router, "a");
    let info = LinkInfo {
        credit: false,
        ..(*adit.handle.info).clone()
    };
    let go = router.register(info, 2, None).expect("there is room");
    let silence = |entered: &RegisteredLink, seconds| {
        let quiet = Duration::from_secs(seconds);
        router
            .set_silence(entered.handle.id, quiet)
            .map(|(_, silence)| silence)
    };
    for entered in [&adit, &go] {
        assert_eq!(silence(entered, 7), Some(Silence::Suspected));
    }
    assert_eq!(silence(&adit, 8), Some(Silence::Dead));
    assert_eq!(silence(&go, 19), None, "nothing changed");
    assert_eq!(silence(&go, 20), Some(Silence::Dead));
}
