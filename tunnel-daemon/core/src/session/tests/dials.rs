//! Tests of dials: one outcome each, cancellations that cross answers, ids, limits and deadlines.

use super::*;

#[test]
fn a_dial_is_passed_on_as_it_is_and_its_answer_opens_the_tunnel() {
    let mut rig = Rig::server(false);
    let key = rig.dial();
    let sent = Packet::DialReq {
        dial: DialId(1),
        protocol: String::from("tcp"),
        address: String::from("10.0.0.1:80"),
        window: 0,
    };
    assert_eq!(rig.packets(), [sent]);
    rig.dial_rsp(1, 9, 0);
    let conn = ConnId(9);
    assert_eq!(rig.actions(), [Action::DialDone { key, conn }]);
    assert_eq!(rig.link.pending_dials(), 0);
}

/// Packets of an open tunnel keep their order. `DIAL_CLS` follows for a dial whose client leaves before the answer; the
/// frontend holds the client's bytes until that answer.
///
/// Upstream (dials): A dial reaches the agent unchanged, and so does its cancellation. Data and close before the answer
/// stay at the server.
#[test]
fn dial_data_close_and_cancellation_reach_the_agent_in_order() {
    let mut rig = Rig::server(false);
    let (key, conn) = rig.open(0);
    let pending = rig.dial();
    assert!(rig.endpoint_data(key, bytes(3)));
    rig.link.endpoint_close(key, String::new(), rig.now);
    let kinds: Vec<_> = rig.packets().iter().map(Packet::kind).collect();
    assert_eq!(kinds.len(), 3, "{kinds:?}");
    rig.gone(pending);
    let dial = DialId(2);
    assert_eq!(rig.packets(), [Packet::DialCls { dial }]);
    rig.receive(close_rsp(conn, ""));
    rig.gone(key);
    assert_eq!(rig.link.tunnels(), 0);
}

/// Upstream (dials): Pending dials of a client's stream end with it; those of other streams stay.
#[test]
fn a_disconnect_cancels_only_the_clients_own_pending_dials() {
    let mut rig = Rig::server(true);
    let leaves = rig.dial();
    let stays = rig.dial();
    rig.packets();
    rig.gone(leaves);
    assert_eq!(rig.link.pending_dials(), 1);
    rig.dial_rsp(2, 5, 1_000);
    let conn = ConnId(5);
    assert_eq!(rig.actions(), [Action::DialDone { key: stays, conn }]);
}

/// Only a dial that was not written may be retried on another agent.
#[test]
fn a_failed_dial_reports_whether_it_was_sent() {
    let mut rig = Rig::server(true);
    rig.dial();
    rig.packets();
    rig.dial();
    rig.link.lost(rig.now);
    let actions = rig.actions();
    assert_eq!(failed(&actions[0]), (&DialFailure::LinkLost, true));
    assert_eq!(failed(&actions[1]), (&DialFailure::LinkLost, false));
    assert_eq!(actions.len(), 2);
}

#[test]
fn an_unsent_dial_leaves_no_packet_behind() {
    let mut rig = Rig::server(true);
    let cancelled = rig.dial();
    rig.gone(cancelled);
    rig.dial();
    rig.pass(seconds(25));
    let actions = rig.actions();
    assert_eq!(failed(&actions[0]), (&DialFailure::SendTimedOut, false));
    assert_eq!(rig.packets(), []);
    assert_eq!(rig.link.tunnels(), 0);
}

/// Upstream (dials): After 500 ms an unsent dial gets status 504. Its link gets no dials until it reads again.
#[test]
fn a_link_that_takes_no_dial_in_time_is_retired_until_it_takes_packets() {
    let mut rig = Rig::server(false);
    rig.dial();
    rig.pass(seconds(10));
    rig.dial();
    rig.pass(seconds(15));
    let actions = rig.actions();
    assert_eq!(failed(&actions[0]), (&DialFailure::SendTimedOut, false));
    assert_eq!(actions[1], Action::Retired);
    let unseen = failed(&actions[2]);
    assert_eq!(unseen, (&DialFailure::LinkBusy, false), "may go elsewhere");
    assert_eq!((actions.len(), rig.link.pending_dials()), (3, 0));
    let request = rig.request();
    let refused = rig.link.dial(request, rig.now);
    assert_eq!(refused, Err(DialFailure::LinkBusy));

    assert!(rig.link.wants_transmit(), "or nobody watches the stream");
    assert_eq!(rig.packets(), [], "the dials are not sent late");
    assert_eq!(rig.actions(), [Action::Revived]);
    assert!(!rig.link.wants_transmit());
    rig.dial();
    assert_eq!(rig.packets().len(), 1);
}

/// An agent that does not answer is not a stuck link: other dials continue.
#[test]
fn an_agent_that_does_not_answer_is_not_retired() {
    let mut rig = Rig::server(false);
    rig.dial();
    rig.packets();
    rig.pass(seconds(25));
    assert_eq!(rig.actions().len(), 1);
    rig.dial();
}

/// Limit (times): Dial at a server, native mode | 25 s
#[test]
fn a_written_dial_times_out_and_is_cancelled() {
    let mut rig = Rig::server(true);
    rig.dial();
    rig.packets();
    rig.pass(seconds(24));
    assert_eq!(rig.actions(), []);
    rig.pass(seconds(1));
    assert_eq!(failed(&rig.actions()[0]), (&DialFailure::TimedOut, true));
    let dial = DialId(1);
    assert_eq!(rig.packets(), [Packet::DialCls { dial }]);
    assert_eq!(rig.link.pending_dials(), 0);
    assert_eq!(rig.link.next_deadline(), None);
}

#[test]
fn without_a_timeout_a_dial_waits() {
    let mut rig = Rig::new(LinkConfig {
        dial_timeout: None,
        ..config(Role::Server, true)
    });
    rig.dial();
    rig.pass(seconds(1_000));
    assert_eq!(rig.link.pending_dials(), 1);
    assert_eq!(rig.link.next_deadline(), None);
}

#[test]
fn an_answer_that_crossed_the_cancel_is_closed_once() {
    let mut rig = Rig::server(true);
    let key = rig.dial();
    rig.packets();
    rig.gone(key);
    rig.packets();
    rig.dial_rsp(1, 4, 1_000);
    assert_eq!(rig.packets(), [close_req(4)]);
    rig.data(4, 10);
    rig.receive(close_rsp(4, ""));
    assert_eq!((rig.packets(), rig.actions()), (vec![], vec![]));
}

/// A late answer is no failure: the dial was cancelled, and its outcome was counted then.
///
/// Limit (peers): Cancelled dials remembered for late answers | 1,024 per link, 60 s each
#[test]
fn a_late_answer_of_a_cancelled_dial_is_recognized_for_a_minute() {
    let answer = |rig: &mut Rig, dial: i64, conn: i64| {
        rig.dial_rsp(dial, conn, 0);
        let counted = std::iter::from_fn(|| rig.link.poll_action());
        let events = counted.filter_map(|action| match action {
            Action::Count(event) => Some(event),
            _ => None,
        });
        events.collect::<Vec<_>>()
    };
    let mut rig = Rig::server(false);
    for _dial in 0..4 {
        rig.dial();
    }
    rig.packets();
    rig.pass(seconds(25));
    rig.actions();
    assert_eq!(answer(&mut rig, 1, 0), [Event::LateAnswer]);
    assert_eq!(
        answer(&mut rig, 1, 0),
        [Event::UnrecognizedResponse],
        "twice"
    );
    assert_eq!(answer(&mut rig, 2, 7), [Event::LateAnswer]);
    rig.pass(seconds(59));
    assert_eq!(answer(&mut rig, 3, 0), [Event::LateAnswer]);
    rig.pass(seconds(1));
    assert_eq!(answer(&mut rig, 4, 0), [Event::UnrecognizedResponse]);
    let key = rig.dial();
    rig.packets();
    rig.gone(key);
    rig.actions();
    assert_eq!(answer(&mut rig, 5, 0), [Event::LateAnswer]);
}

/// One dial to an unresponsive target stays at the front of the queue until its own deadline.
///
/// Limit (peers): Dial deadlines kept by a link | twice its dials, plus 64
#[test]
fn deadlines_of_finished_dials_do_not_pile_up_behind_a_pending_one() {
    let mut rig = Rig::server(true);
    rig.dial();
    rig.packets();
    for number in 2..5_000 {
        let key = rig.dial();
        rig.packets();
        rig.dial_rsp(number, 0, 0);
        rig.actions();
        let most = 2 * rig.link.pending_dials() + super::super::role::OVER_DIALS_MAX + 2;
        assert!(
            rig.link.dial_order.len() <= most,
            "{}",
            rig.link.dial_order.len()
        );
        assert!(rig.link.tunnels.get(key).is_none());
    }
    assert!(rig.link.dial_order.capacity() < 1_000);
    // The deadline of the first dial is still known.
    rig.pass(seconds(25));
    assert_eq!(rig.link.pending_dials(), 0);
}

/// Limit (peers): Cancelled dials remembered for late answers
#[test]
fn remembered_cancelled_dials_are_bounded() {
    let budget = Arc::new(ProcessBudget::new(1 << 40));
    let mut dials = super::super::cancelled::CancelledDials::new(&budget.control);
    for dial in 0..5_000 {
        dials.add(DialId(dial), Moment::default());
    }
    assert_eq!(dials.len(), 1024);
    assert!(!dials.take(DialId(3_975), Moment::default()));
    assert!(dials.take(DialId(3_976), Moment::default()));
    dials.add(DialId(0), Moment(seconds(60)));
    assert_eq!(dials.len(), 1, "the others are too old");
}

#[test]
fn a_taken_dial_id_is_replaced_by_the_spare_and_then_by_a_free_one() {
    let mut rig = Rig::server(true);
    let request = DialRequest {
        spare: DialId(2),
        ..rig.request()
    };
    for _same in 0..3 {
        rig.link.dial(request.clone(), rig.now).unwrap();
    }
    let ids: Vec<_> = rig
        .packets()
        .into_iter()
        .map(|packet| match packet {
            Packet::DialReq { dial, .. } => dial.0,
            other => panic!("a dial, not {other:?}"),
        })
        .collect();
    assert_eq!(ids, [1, 2, 3]);
}

/// Limit (peers): Pending dials | 1,024 per link, 16,384 in total
/// Limit (peers): Dials in progress on one link of an agent | 4,096, then refused
#[test]
fn both_ends_cap_dials_in_flight() {
    let few = |role| LinkConfig {
        dials_max: 1,
        ..config(role, true)
    };
    let mut server = Rig::new(few(Role::Server));
    server.dial();
    let request = server.request();
    let refused = server.link.dial(request, server.now);
    assert_eq!(
        refused,
        Err(DialFailure::TooManyPending { per_agent: true })
    );
    let mut agent = Rig::new(few(Role::Agent));
    agent.dial_req(1, 1_000);
    agent.receive(Packet::DialReq {
        dial: DialId(2),
        protocol: String::from("tcp"),
        address: String::from("10.0.0.1:80"),
        window: 1_000,
    });
    assert_eq!(agent.actions(), []);
    match &agent.packets()[..] {
        [Packet::DialRsp { conn, error, .. }] => {
            assert!(conn.0 == 0 && !error.is_empty());
        }
        other => panic!("a refusal, not {other:?}"),
    }
}

/// Upstream (packets): An agent answers dial, data and the target's close with the right ids.
#[test]
fn an_agent_answers_with_the_same_random_and_a_connection_id() {
    let mut rig = Rig::agent(false);
    let key = rig.dial_req(77, 0);
    assert!(rig.link.dialed(key, Ok(()), rig.now));
    let opened = Packet::DialRsp {
        dial: DialId(77),
        conn: ConnId(1),
        error: String::new(),
        window: 0,
    };
    assert_eq!(rig.packets(), [opened]);
    let refused = rig.dial_req(78, 0);
    let error = String::from("connection refused");
    assert!(!rig.link.dialed(refused, Err(error.clone()), rig.now));
    let refused = Packet::DialRsp {
        dial: DialId(78),
        conn: ConnId(0),
        error,
        window: 0,
    };
    assert_eq!(rig.packets(), [refused]);
    // The failed dial has used an id, as in every agent.
    assert_eq!(rig.dial_req(79, 0).slot, 1);
    assert_eq!(rig.link.conn_last, 3);
}

#[test]
fn a_cancelled_dial_drops_its_socket_and_sends_no_answer() {
    let mut rig = Rig::agent(true);
    let key = rig.dial_req(1, 1_000);
    let dial = DialId(1);
    rig.receive(Packet::DialCls { dial });
    assert_eq!(rig.actions(), [Action::CancelDial { key }]);
    assert!(!rig.link.dialed(key, Ok(()), rig.now));
    assert_eq!(rig.packets(), []);
    assert_eq!((rig.link.tunnels(), rig.link.granted), (0, 0));
}

#[test]
fn an_agent_may_cancel_a_dial() {
    let mut rig = Rig::server(true);
    rig.dial();
    rig.packets();
    let dial = DialId(1);
    rig.receive(Packet::DialCls { dial });
    assert_eq!(failed(&rig.actions()[0]), (&DialFailure::Closed, true));
    assert_eq!(rig.link.tunnels(), 0);
}

#[test]
fn a_refused_dial_carries_the_text_of_the_agent() {
    let mut rig = Rig::server(true);
    rig.dial();
    rig.packets();
    let error = String::from("dial tcp: connect: connection refused");
    rig.receive(Packet::DialRsp {
        dial: DialId(1),
        conn: ConnId(0),
        error: error.clone(),
        window: 0,
    });
    let target = DialFailure::Target(error);
    assert_eq!(failed(&rig.actions()[0]), (&target, true));
    assert_eq!((rig.link.tunnels(), rig.link.granted), (0, 0));
}
