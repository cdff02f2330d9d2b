//! Tests of isolation: between links, and between the tunnels of one link.

use super::*;
use crate::session::Event;
use crate::wire::packet::Violation;

/// Limit (times): Pending dials of a lost link | fail at once there; each asks another agent of its key
/// Upstream (agents): The end of a link ends its own dials and tunnels and no others.
/// Upstream (dials): A dial fails at once when its agent is lost.
#[test]
fn a_lost_link_fails_its_dials_and_ends_its_tunnels_at_once_and_no_others() {
    let budget = Arc::new(ProcessBudget::new(1 << 40));
    let mut lost = Rig::with_budget(config(Role::Server, true), &budget);
    let mut lives = Rig::with_budget(config(Role::Server, true), &budget);
    let (open, conn) = lost.open(1_000);
    lost.dial();
    lost.packets();
    lost.data(conn, 50);
    lost.actions();
    let (other, other_conn) = lives.open(1_000);
    assert_eq!(conn, other_conn, "ids are a link's own");
    lost.link.lost(lost.now);
    let actions = lost.actions();
    assert_eq!(actions.len(), 2);
    assert!(actions.contains(&Action::Ended {
        key: open,
        end: TunnelEnd::LinkLost
    }));
    assert_eq!(lost.link.held_bytes(), 0);
    lost.gone(open);
    assert_eq!((lost.link.tunnels(), lost.link.granted), (0, 0));
    assert_eq!(lost.packets(), []);
    lives.data(other_conn, 5);
    assert!(matches!(lives.actions()[..], [Action::Deliver { key, .. }] if key == other));
}

/// Upstream (agents): A link that breaks during a dial leaves nothing behind at the agent.
#[test]
fn a_lost_link_cancels_the_dials_of_an_agent() {
    let mut rig = Rig::agent(true);
    let key = rig.dial_req(1, 1_000);
    rig.link.lost(rig.now);
    assert_eq!(rig.actions(), [Action::CancelDial { key }]);
    assert!(!rig.link.dialed(key, Ok(()), rig.now));
    assert_eq!((rig.link.tunnels(), rig.link.granted), (0, 0));
}

/// On another link the id or dial does not exist; the other agent's tunnel and dial are unaffected.
///
/// Upstream (packets): An answer or data of an agent for a tunnel of another one is refused.
#[test]
fn a_foreign_agent_cannot_answer_or_write_for_another() {
    let mut victim = Rig::server(true);
    let mut foreign = Rig::server(true);
    let (open, conn) = victim.open(1_000);
    let pending = victim.dial();
    victim.packets();
    foreign.dial_rsp(victim.dials, 40, 1_000);
    foreign.data(conn, 10);
    foreign.receive(close_rsp(conn, "mine now"));
    assert_eq!(foreign.actions(), []);
    assert_eq!(foreign.packets(), [close_req(40), close_req(conn)]);
    victim.dial_rsp(2, 2, 1_000);
    let done = ConnId(2);
    assert_eq!(
        victim.actions(),
        [Action::DialDone {
            key: pending,
            conn: done
        }]
    );
    assert!(victim.endpoint_data(open, bytes(3)));
    assert_eq!(victim.packets(), [payload(conn, 3)]);
}

#[test]
fn an_answer_with_an_id_in_use_does_not_touch_its_owner() {
    let mut rig = Rig::server(true);
    let (owner, conn) = rig.open(1_000);
    rig.dial();
    rig.packets();
    rig.dial_rsp(2, conn, 1_000);
    assert!(matches!(
        failed(&rig.actions()[0]).0,
        DialFailure::Target(_)
    ));
    rig.data(conn, 5);
    assert!(matches!(rig.actions()[..], [Action::Deliver { key, .. }] if key == owner));
    assert_eq!(rig.packets(), []);
}

/// Two streams of one agent have equal connection ids.
///
/// Upstream (agents): Two links with one agent id do not mix their tunnels.
#[test]
fn two_streams_of_one_agent_do_not_mix() {
    let mut streams = [Rig::server(true), Rig::server(true)];
    for (index, rig) in streams.iter_mut().enumerate() {
        let (key, conn) = rig.open(1_000);
        assert_eq!(conn, 1);
        rig.endpoint_data(key, bytes(10 + index as u64));
        rig.data(conn, 20 + index as u64);
    }
    for (index, rig) in streams.iter_mut().enumerate() {
        assert_eq!(rig.packets(), [payload(1, 10 + index as u64)]);
        assert_eq!(rig.link.held_bytes(), 20 + index as u64);
    }
}

/// Upstream (packets): Packets of 4 MiB pass; a larger one ends its own tunnel only.
#[test]
fn an_oversized_message_ends_the_connection_it_names() {
    let mut rig = Rig::agent(true);
    let (bad, conn) = rig.open(1_000);
    let (good, _) = rig.open(1_000);
    for named in [Some(ConnId(conn)), Some(ConnId(88)), None] {
        let oversize = Received::Violation(Violation::Oversize(named));
        rig.link.handle_packet(oversize, rig.now);
    }
    assert_eq!(rig.end_of(bad), Some(TunnelEnd::Oversize));
    assert!(rig.endpoint_data(good, bytes(1)));
}

/// Upstream (packets): Empty, mismatched and unknown packets, and those with id 0, hurt no other tunnel.
#[test]
fn invalid_packets_are_counted_and_change_nothing() {
    let mut rig = Rig::server(true);
    rig.open(1_000);
    rig.receive(close_req(1));
    rig.receive(Packet::DialReq {
        dial: DialId(1),
        protocol: String::new(),
        address: String::new(),
        window: 0,
    });
    rig.receive(Packet::DialCls { dial: DialId(9) });
    rig.receive(close_rsp(55, ""));
    rig.link.handle_packet(Received::Unknown(42), rig.now);
    let mut counted = 0;
    while let Some(action) = rig.link.poll_action() {
        assert!(matches!(action, Action::Count(event) if event != Event::LateCredit));
        counted += 1;
    }
    assert_eq!((counted, rig.packets()), (5, vec![]));
    assert_eq!(rig.link.tunnels(), 1);
}

#[test]
fn late_endpoint_events_do_not_reach_a_newer_tunnel() {
    let mut rig = Rig::server(true);
    let (old, conn) = rig.open(1_000);
    rig.receive(close_rsp(conn, ""));
    rig.gone(old);
    let (new, new_conn) = rig.open(1_000);
    assert_eq!(old.slot, new.slot);
    rig.actions();
    rig.data(new_conn, 10);
    assert!(!rig.endpoint_data(old, bytes(1)));
    rig.link.endpoint_drained(old, 10, rig.now);
    rig.link.endpoint_close(old, String::new(), rig.now);
    rig.gone(old);
    assert_eq!((rig.link.tunnels(), rig.link.held_bytes()), (1, 10));
    assert_eq!(rig.packets(), []);
}

#[test]
fn a_draining_agent_sends_drain_and_no_tunnel_ends() {
    let mut agent = Rig::agent(false);
    agent.open(0);
    agent.link.drain();
    assert_eq!(agent.packets(), [Packet::Drain]);
    let mut server = Rig::server(false);
    server.open(0);
    server.receive(Packet::Drain);
    assert_eq!(server.actions(), [Action::PeerDraining]);
    assert_eq!(server.link.tunnels(), 1);
}

/// The text stays in memory until each endpoint takes it, and there may be many endpoints.
///
/// Limit (sizes): Text of a failed dial or close
#[test]
fn long_texts_of_agents_are_truncated() {
    let mut rig = Rig::server(true);
    let (key, conn) = rig.open(1_000);
    rig.receive(close_rsp(conn, &"\u{fc}".repeat(1 << 20)));
    let Some(TunnelEnd::Closed { error }) = rig.end_of(key) else {
        panic!("a close");
    };
    assert!(error.len() == 4096 && error.capacity() < 8192);
    rig.dial();
    rig.packets();
    rig.receive(Packet::DialRsp {
        dial: DialId(2),
        conn: ConnId(0),
        error: "x".repeat(1 << 20),
        window: 0,
    });
    let kept = DialFailure::Target("x".repeat(4096));
    assert_eq!(failed(&rig.actions()[0]), (&kept, true));
}

/// A budget counts only the queued bytes, so these must not keep the larger read buffer alive.
///
/// Limit (memory): Small chunks queued for a slow endpoint | coalesced from 64 chunks on, up to 16 KiB each
#[test]
fn queued_bytes_of_a_slow_endpoint_do_not_keep_the_read_buffer() {
    for mut rig in [Rig::server(true), Rig::agent(true), Rig::server(false)] {
        let (_key, conn) = rig.open(1_000);
        rig.data(conn, 10);
        rig.now = rig.now.after(seconds(1));
        let buffer = bytes(200_000);
        rig.receive(Packet::Data {
            conn: ConnId(conn),
            bytes: buffer.slice(..2_000),
        });
        assert!(buffer.is_unique());
        assert_eq!(rig.link.held_bytes(), 2_010);
    }
}
