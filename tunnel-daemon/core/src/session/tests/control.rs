//! Tests of what links hold for peers that do not read: its sum, and which link ends.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Wake, Waker};

use proptest::prelude::*;

use super::super::control_pool::{FRAMES_MAX, FRAMES_MAX_SHORT, LINK_BYTES_MIN};
use super::super::{ControlShare, LinkFailure};
use super::*;
use crate::wire::encode::MessageBuf;

/// The smallest pool.
const POOL_BYTES: u64 = 1 << 20;
const OVERFLOW: Action = Action::Failed(LinkFailure::ControlOverflow);

fn small_budget() -> Arc<ProcessBudget> {
    Arc::new(ProcessBudget::new(4 << 20))
}

fn flooded(role: Role, budget: &Arc<ProcessBudget>, owner: &str) -> Rig {
    let unlimited = LinkConfig {
        control_max: usize::MAX,
        ..config(role, true)
    };
    Rig::of_peer(unlimited, budget, owner)
}

/// Sends DATA for this many unknown connections; returns whether the link has ended.
fn flood(rig: &mut Rig, count: usize) -> bool {
    for _packet in 0..count {
        rig.dials += 1;
        rig.data(rig.dials, 1);
    }
    has_ended(rig)
}

fn has_ended(rig: &mut Rig) -> bool {
    rig.link.handle_tick(rig.now);
    rig.actions().contains(&OVERFLOW)
}

/// Limit (memory): Control packets and HTTP/2 frames that wait for peers that do not read | 3/16 of `--process-budget`, at
/// least 1 MiB. Beyond that the link furthest over 64 KiB ends, of the owner whose links are
#[test]
fn closes_of_unknown_connections_count_and_the_link_furthest_over_ends() {
    let budget = small_budget();
    let mut links: Vec<_> = (0..12)
        .map(|_link| flooded(Role::Server, &budget, "one"))
        .collect();
    for link in &mut links {
        // Less than the minimum of a link.
        assert!(!flood(link, 2_000));
    }
    assert_eq!(budget.queued_bytes(), 12 * 2_000 * 32, "they count");
    let (worst, others) = links.split_first_mut().unwrap();
    let ended = (0..20).position(|_thousand| flood(worst, 1_000));
    assert_eq!(ended, Some(8), "more than its 64 KiB is lent");
    assert!(others.iter_mut().all(|link| !flood(link, 10)));
    links.remove(0);
    assert_eq!(budget.queued_bytes(), 11 * 2_010 * 32);
    links.clear();
    assert_eq!(budget.used_bytes(), 0, "all is given back");
}

/// Limit (memory): Control packets and HTTP/2 frames that wait for peers that do not read
#[test]
fn a_flood_ends_no_link_of_another_owner() {
    let budget = small_budget();
    let mut honest = flooded(Role::Server, &budget, "honest");
    assert!(!flood(&mut honest, 3_000), "more than 64 KiB");
    for round in 0..100 {
        let mut hostile: Vec<_> = (0..16)
            .map(|_link| flooded(Role::Server, &budget, "hostile"))
            .collect();
        for link in &mut hostile {
            flood(link, 4_000);
        }
        hostile.retain(|link| !link.link.control_share().must_end());
        assert!(!hostile.is_empty() && hostile.len() < 16, "{round}");
        assert!(budget.queued_bytes() <= POOL_BYTES);
        assert!(!has_ended(&mut honest), "{round}");
    }
}

/// All agents may share one certificate behind one address.
#[test]
fn a_thousand_honest_links_of_a_flooding_owner_stay() {
    let budget = small_budget();
    let mut links: Vec<_> = (0..1_000)
        .map(|_link| flooded(Role::Server, &budget, "shared"))
        .collect();
    for link in &mut links {
        assert!(!flood(link, 10));
    }
    let mut hostile = flooded(Role::Server, &budget, "shared");
    assert!(flood(&mut hostile, 40_000));
    assert!(links.iter_mut().all(|link| !has_ended(link)));
}

#[test]
fn an_agent_bounds_what_it_queues_for_its_servers() {
    let budget = small_budget();
    let mut honest = flooded(Role::Agent, &budget, "");
    assert!(!flood(&mut honest, 100));
    let mut closes = flooded(Role::Agent, &budget, "");
    assert!(flood(&mut closes, 40_000));
    drop(closes);
    let mut dials = flooded(Role::Agent, &budget, "");
    let refused = |rig: &mut Rig| {
        for _dial in 0..1_000 {
            rig.receive(Packet::DialReq {
                dial: DialId(1),
                protocol: String::from("tcp"),
                address: String::from("10.0.0.1:80"),
                window: 0,
            });
        }
        has_ended(rig)
    };
    assert!((0..20).any(|_thousand| refused(&mut dials)));
    assert!(!has_ended(&mut honest));
}

#[test]
fn an_empty_control_queue_keeps_no_memory() {
    let budget = small_budget();
    let mut rig = flooded(Role::Server, &budget, "one");
    for _again in 0..3 {
        assert!(!flood(&mut rig, 20_000));
        assert!(budget.queued_bytes() > 0);
        assert_eq!(rig.packets().len(), 20_000);
        assert_eq!(budget.queued_bytes(), 0);
    }
}

/// Limit (memory): Ids that a link remembers, of closed connections and of cancelled dials | 4,096 and 1,024; 256 and 64 while
/// all links together remember more than 1/16 of `--process-budget`
#[test]
fn remembered_ids_of_all_links_are_bounded_together() {
    let budget = small_budget();
    let mut links: Vec<_> = (0..16)
        .map(|_link| flooded(Role::Server, &budget, "one"))
        .collect();
    for link in &mut links {
        assert!(!flood(link, 5_000));
        link.packets();
    }
    assert!(budget.used_bytes() <= (4 << 20) / 16);
    let [first, .., last] = &mut links[..] else {
        panic!("16 links");
    };
    let answers = |link: &mut Rig, conn: i64| {
        link.data(conn, 1);
        link.packets().len()
    };
    assert_eq!(answers(first, 5_000 - 4_095), 0, "remembered");
    assert_eq!(answers(last, 5_000 - 255), 0, "remembered");
    assert_eq!(answers(last, 5_000 - 257), 1, "forgotten");
    drop(links);
    assert_eq!(budget.used_bytes(), 0, "all is given back");
}

#[derive(Default)]
struct Counted(AtomicUsize);

impl Wake for Counted {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Limit (memory): HTTP/2 frames of a link that wait for its socket | 256; 32 while half of what may wait for all peers waits
#[test]
fn frames_that_wait_for_a_socket_are_bounded_and_count() {
    let budget = small_budget();
    let rig = flooded(Role::Server, &budget, "one");
    let share = rig.link.control_share();
    let woken = Arc::new(Counted::default());
    share.wake_by(Waker::from(Arc::clone(&woken)));
    let message = || MessageBuf::packet(close_req(1)).counted(share.frame());
    let mut waiting: Vec<_> = (0..8).map(|_frame| message()).collect();
    assert_eq!(budget.queued_bytes(), 0, "a few are part of each link");
    while share.has_room() {
        waiting.push(message());
    }
    assert_eq!(waiting.len(), FRAMES_MAX);
    assert_eq!(budget.queued_bytes(), 448 * (FRAMES_MAX as u64 - 8));
    waiting.truncate(FRAMES_MAX / 2 + 1);
    assert_eq!(woken.0.load(Relaxed), 0);
    waiting.pop();
    assert_eq!(woken.0.load(Relaxed), 1, "woken once");
    waiting.truncate(1);
    assert_eq!(woken.0.load(Relaxed), 1, "woken once");

    let mut other = flooded(Role::Server, &budget, "two");
    assert!(!flood(&mut other, 20_000), "more than half of the pool");
    while share.has_room() {
        waiting.push(message());
    }
    assert_eq!(waiting.len(), FRAMES_MAX_SHORT);
    drop((waiting, other));
    assert_eq!(budget.queued_bytes(), 0);
}

/// A link that must make room learns it although its own peer sends nothing.
#[test]
fn a_link_that_must_end_is_woken() {
    let budget = small_budget();
    let mut worst = flooded(Role::Server, &budget, "one");
    let woken = Arc::new(Counted::default());
    worst
        .link
        .control_share()
        .wake_by(Waker::from(Arc::clone(&woken)));
    assert!(!flood(&mut worst, 30_000));
    let mut small = flooded(Role::Server, &budget, "two");
    assert!(!flood(&mut small, 5_000));
    assert_eq!(woken.0.load(Relaxed), 1);
    assert!(has_ended(&mut worst));
}

proptest! {
    /// Whatever links add and release: those that stay are within the pool, and no link ends with less than its minimum while the
    /// pool has the minimum of each, or less than an equal part of its owner otherwise.
    #[test]
    fn the_sum_is_bounded_and_no_link_ends_below_its_minimum(
        owners in proptest::collection::vec(0usize..4, 1..40),
        steps in proptest::collection::vec((0usize..40, 0u64..200_000, any::<bool>()), 1..200),
    ) {
        const NAMES: [&str; 4] = ["a", "b", "c", "d"];
        let budget = small_budget();
        let shares: Vec<_> = owners
            .iter()
            .map(|owner| ControlShare::new(Arc::clone(&budget.control), NAMES[*owner].into()))
            .collect();
        let mut ended = vec![false; shares.len()];
        for (index, bytes, adds) in steps {
            let index = index % shares.len();
            if ended[index] {
                continue;
            }
            let before: Vec<_> = shares.iter().map(|share| share.bytes()).collect();
            if adds {
                shares[index].add(bytes);
            } else {
                shares[index].subtract(bytes.min(before[index]));
            }
            let kept: u64 = shares
                .iter()
                .filter(|share| !share.must_end())
                .map(|share| share.bytes())
                .sum();
            prop_assert!(kept <= POOL_BYTES);
            let busy: Vec<_> = (0..shares.len())
                .filter(|i| !ended[*i] && shares[*i].bytes() > 0)
                .collect();
            for (victim, share) in shares.iter().enumerate() {
                if ended[victim] || !share.must_end() {
                    continue;
                }
                let of = |i: &&usize| owners[**i] == owners[victim];
                let held: u64 = busy.iter().filter(of).map(|i| shares[*i].bytes()).sum();
                let is_crowded = busy.len() as u64 * LINK_BYTES_MIN > POOL_BYTES;
                let is_over_its_part = held * NAMES.len() as u64 > POOL_BYTES;
                prop_assert!(
                    share.bytes() > LINK_BYTES_MIN || (is_crowded && is_over_its_part)
                );
                ended[victim] = true;
                share.subtract(share.bytes());
            }
        }
        for share in shares {
            share.subtract(share.bytes());
        }
        prop_assert_eq!(budget.queued_bytes(), 0);
    }
}
