//! Tests of links to peers without credit: shares, budgets, and which tunnels end when a budget is full.

use super::*;
use crate::session::MemoryPressure;

const MIB: u64 = 1 << 20;

fn rig(link_budget_bytes: u64) -> Rig {
    let mut small = config(Role::Server, false);
    small.isolation.link_budget_bytes = link_budget_bytes;
    Rig::new(small)
}

fn ends(rig: &mut Rig) -> Vec<(TunnelKey, TunnelEnd)> {
    rig.actions()
        .into_iter()
        .filter_map(|action| match action {
            Action::Ended { key, end } => Some((key, end)),
            _ => None,
        })
        .collect()
}

/// Limit (memory): Memory of the cgroup, without pages of files | from 60 % tunnels get small buffers, from 80 % dials
/// are refused. Below 512 MiB sockets are bounded (ADR 0054)
#[test]
fn memory_pressure_counts_as_budget_use() {
    let budget = ProcessBudget::new(MIB);
    for (pressure, is_half_full, is_full) in [
        (MemoryPressure::None, false, false),
        (MemoryPressure::High, true, false),
        (MemoryPressure::Critical, true, true),
        (MemoryPressure::None, false, false),
    ] {
        budget.set_pressure(pressure);
        assert_eq!(budget.is_half_full(), is_half_full);
        assert_eq!(budget.is_full(), is_full);
    }
}

#[test]
fn paused_reader_keeps_its_tunnel_while_memory_is_free() {
    let mut rig = rig(64 * MIB);
    let (_, conn) = rig.open(0);
    rig.data(conn, 60 * MIB);
    assert_eq!(ends(&mut rig), []);
}

/// Limit (memory): Bytes held for one link of an agent | 64 MiB, at most half of the memory limit of the process
#[test]
fn a_full_budget_ends_the_largest_stalled_tunnel_first() {
    let mut rig = rig(64 * MIB);
    let (small, small_conn) = rig.open(0);
    let (large, large_conn) = rig.open(0);
    let (_, over_conn) = rig.open(0);
    rig.data(small_conn, 3 * MIB);
    rig.data(large_conn, 40 * MIB);
    rig.data(over_conn, 20 * MIB);
    rig.data(small_conn, MIB);
    assert_eq!(ends(&mut rig), []);
    rig.data(small_conn, 1);
    assert_eq!(ends(&mut rig), [(large, TunnelEnd::Budget)]);
    assert_eq!(rig.link.held_bytes(), 24 * MIB + 1);
    assert!(rig.endpoint_data(small, bytes(1)));
    assert_eq!(rig.packets().len(), 2, "one close, one packet");
}

/// A fast download is not ended because other readers stall.
#[test]
fn a_full_budget_ends_stalled_readers_before_active_ones() {
    for (idle_ms, reads) in [(500, false), (501, true)] {
        let mut rig = rig(64 * MIB);
        let (stalled, stalled_conn) = rig.open(0);
        let (fast, fast_conn) = rig.open(0);
        rig.data(stalled_conn, 20 * MIB);
        rig.data(fast_conn, 43 * MIB);
        rig.now = rig.now.after(Duration::from_millis(idle_ms));
        rig.link.endpoint_drained(fast, MIB, rig.now);
        rig.data(fast_conn, 2 * MIB + 1);
        let ended = if reads { stalled } else { fast };
        assert_eq!(ends(&mut rig), [(ended, TunnelEnd::Budget)], "{idle_ms} ms");
    }
}

#[test]
fn no_tunnel_within_its_share_is_ended() {
    // Of 64 MiB, each of 16 tunnels owns 4 MiB, and each of 32 owns 2 MiB.
    let mut rig = rig(64 * MIB);
    let conns: Vec<_> = (0..32).map(|_| rig.open(0).1).collect();
    for conn in &conns {
        rig.data(*conn, 2 * MIB);
    }
    assert_eq!((ends(&mut rig).len(), rig.link.held_bytes()), (0, 64 * MIB));
    rig.data(conns[0], 1);
    assert_eq!(ends(&mut rig).len(), 1, "the one over its share");
}

/// Bytes that linger after a close count as memory.
///
/// Limit (memory): Bytes held for an endpoint after the other end closed | the budgets of link and process; they give
/// way first
#[test]
fn a_full_budget_ends_lingering_tunnels_first() {
    let mut rig = rig(64 * MIB);
    let (lingers, closed) = rig.open(0);
    let (_, lives) = rig.open(0);
    rig.data(closed, 50 * MIB);
    rig.receive(close_rsp(closed, ""));
    rig.actions();
    rig.data(lives, 15 * MIB);
    let actions = rig.actions();
    assert!(
        actions.contains(&Action::Abort {
            key: lingers,
            end: TunnelEnd::Budget
        }),
        "{}",
        actions.len()
    );
    assert_eq!(rig.link.held_bytes(), 15 * MIB);
}

fn two_links(peers: [&str; 2]) -> (Arc<ProcessBudget>, [Rig; 2]) {
    let budget = Arc::new(ProcessBudget::new(20 * MIB));
    let rigs = peers.map(|peer| Rig::of_peer(config(Role::Server, false), &budget, peer));
    (budget, rigs)
}

/// The link that adds the last byte is not necessarily the link that holds most.
///
/// Limit (memory): Bytes held by the process (`--process-budget`) | a quarter of the smallest `memory.max` of its
/// cgroups, else of the machine's memory; at least the budget of one link
#[test]
fn full_process_budget_ends_tunnels_of_the_largest_peer() {
    for peers in [["one", "other"], ["same", "same"]] {
        let (budget, [mut one, mut other]) = two_links(peers);
        let (paused, conn) = one.open(0);
        one.data(conn, 15 * MIB);
        one.pass(seconds(1));
        other.pass(seconds(1));
        let (_, upload) = other.open(0);
        other.data(upload, 6 * MIB);
        assert_eq!(ends(&mut other), [], "{peers:?}");
        assert_eq!(ends(&mut one), []);
        one.pass(seconds(1));
        assert_eq!(ends(&mut one), [(paused, TunnelEnd::Budget)]);
        assert_eq!(budget.held_bytes(), 6 * MIB);
        drop((one, other));
        assert_eq!(budget.held_bytes(), 0);
    }
}

/// Many small tunnels of one peer on several links do not end another peer's large tunnel.
///
/// Limit (memory): Bytes held by the process (`--process-budget`)
#[test]
fn links_of_one_peer_are_counted_together() {
    let budget = Arc::new(ProcessBudget::new(20 * MIB));
    let link = |peer| Rig::of_peer(config(Role::Server, false), &budget, peer);
    let mut many = [(); 4].map(|()| link("many"));
    let mut one = link("one");
    let (_, upload) = one.open(0);
    one.data(upload, 7 * MIB);
    for rig in &mut many {
        for _ in 0..3 {
            let (_, conn) = rig.open(0);
            rig.data(conn, MIB + MIB / 8);
        }
    }
    let ended: usize = many.iter_mut().map(|rig| ends(rig).len()).sum();
    assert!(budget.held_bytes() <= 20 * MIB, "{}", budget.held_bytes());
    assert_eq!((ended, ends(&mut one)), (1, Vec::new()));
}

/// A link whose peer holds most has one second to shrink; a link that adds too much meanwhile loses a tunnel at once.
///
/// Limit (memory): Bytes held by the process (`--process-budget`)
#[test]
fn a_link_far_over_the_process_budget_loses_a_tunnel_at_once() {
    let (budget, [mut one, mut other]) = two_links(["one", "other"]);
    let (_, quiet) = one.open(0);
    one.data(quiet, 15 * MIB);
    let (greedy, conn) = other.open(0);
    let (_, modest) = other.open(0);
    other.data(modest, MIB);
    other.data(conn, 7 * MIB);
    assert_eq!(ends(&mut other), [(greedy, TunnelEnd::Budget)]);
    assert_eq!(budget.held_bytes(), 16 * MIB);
}

/// Limit (times): A tunnel over its share without progress, on a link to a Go peer | ended after 5 min
#[test]
fn tunnel_over_its_share_ends_after_five_minutes_without_progress() {
    let mut rig = rig(64 * MIB);
    let (over, over_conn) = rig.open(0);
    let (_, under_conn) = rig.open(0);
    rig.data(over_conn, 5 * MIB);
    rig.data(under_conn, 4 * MIB);
    rig.pass(seconds(290));
    rig.link.endpoint_drained(over, 10, rig.now);
    rig.pass(seconds(299));
    assert_eq!(ends(&mut rig), []);
    rig.pass(seconds(2));
    assert_eq!(ends(&mut rig), [(over, TunnelEnd::Stalled)]);
}

/// Limit (memory): Share of a tunnel in the budget of a link to a Go peer | 4 MiB, or 64 MiB divided by the tunnels of
/// the link if that is less
#[test]
fn a_share_that_shrinks_makes_a_quiet_tunnel_stalled() {
    let mut rig = rig(64 * MIB);
    let (paused, conn) = rig.open(0);
    rig.data(conn, 3 * MIB);
    for _more in 0..63 {
        rig.open(0);
    }
    rig.pass(seconds(302));
    assert_eq!(ends(&mut rig), [(paused, TunnelEnd::Stalled)]);
}

#[test]
fn with_credit_a_paused_reader_has_no_time_limit() {
    let mut rig = Rig::server(true);
    let (_, conn) = rig.open(1_000);
    rig.data(conn, 256 << 10);
    rig.pass(seconds(4_000));
    assert_eq!(ends(&mut rig), []);
}

/// Queued bytes of a closed client count as memory until the peer takes them or the tunnel ends.
///
/// Limit (memory): Bytes queued of a client or target that has closed | 256 KiB per tunnel, counted by
/// `--process-budget`
#[test]
fn bytes_of_a_closed_client_count_as_queued() {
    for credit in [true, false] {
        let mut rig = Rig::server(credit);
        let (key, conn) = rig.open(0);
        assert!(rig.endpoint_data(key, bytes(70_000)));
        rig.link.endpoint_close(key, String::new(), rig.now);
        rig.link.endpoint_gone(key, rig.now);
        assert_eq!(rig.link.budget().queued_bytes(), 70_000);
        if credit {
            rig.pass(Isolation::default().linger_timeout + seconds(1));
        } else {
            rig.packets();
        }
        assert_eq!(rig.link.budget().queued_bytes(), 0, "{credit}");
        rig.receive(close_rsp(conn, ""));

        let (key, _) = rig.open(0);
        assert!(rig.endpoint_data(key, bytes(70_000)));
        let budget = Arc::clone(rig.link.budget());
        drop(rig);
        assert_eq!(budget.queued_bytes(), 0, "a link that ends owes nothing");
    }
}
