//! Tests of relay threads whose kernel refuses to wait for events, by a real seccomp filter on that thread only.

use std::collections::BTreeMap;

use adit_relay::{Engine, Outcome, Pair, PairEnd, Why};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::support::{Setup, Tunnel, World, first_to_end, matrix};

matrix!(
    thread_without_events_resets_its_pairs_and_takes_no_more,
    ring_without_events_is_followed_by_epoll,
    thread_without_events_leaves_the_others_alone,
);

const RINGS: &[i64] = &[libc::SYS_io_uring_enter];
const ALL: &[i64] = &[
    libc::SYS_io_uring_enter,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];

/// From here on these system calls fail on this thread.
fn forbid(calls: &[i64]) {
    let rules: BTreeMap<_, _> = calls.iter().map(|call| (*call, Vec::new())).collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        std::env::consts::ARCH.try_into().unwrap(),
    )
    .unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

/// Breaks the thread that gets the next pair: the pair is cancelled at once, and its callback installs the filter.
fn break_a_thread(world: &World, calls: &'static [i64]) {
    let ((_client, a), (_target, b)) = (world.sockets(), world.sockets());
    let done = Box::new(move |_outcome: Outcome| forbid(calls));
    let pair = Pair::new(a.into(), b.into());
    world.handle.submit(pair, done).unwrap().cancel();
}

fn assert_failed(outcome: &Outcome) {
    let PairEnd::DriverFailed { error } = &outcome.end else {
        panic!("{outcome:?}");
    };
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    assert_eq!((outcome.to_b.bytes, outcome.to_a.bytes), (5, 4));
}

/// Limit (isolation): A relay thread whose `epoll_wait` fails | 10 attempts per second; takes no tunnels meanwhile
fn thread_without_events_resets_its_pairs_and_takes_no_more(setup: &Setup) {
    let world = setup.start();
    let tunnels = [world.open(), world.open()];
    tunnels.iter().for_each(Tunnel::echo);
    assert!(world.handle.is_able());
    break_a_thread(&world, ALL);
    for tunnel in &tunnels {
        assert_failed(&tunnel.outcome());
    }
    world.until("suspended", |stats| stats.suspended_threads == 1);
    assert!(!world.handle.is_able());
    let stats = world.stats();
    assert_eq!((stats.thread_panics, stats.driver_errno), (0, libc::EPERM));
    assert!(stats.driver_failures >= 1, "{stats:?}");
    let ((_client, a), (_target, b)) = (world.sockets(), world.sockets());
    let pair = Pair::new(a.into(), b.into());
    let refused = world.handle.submit(pair, Box::new(drop)).unwrap_err();
    assert_eq!(refused.why, Why::Suspended);
    world.until_empty();
}

fn ring_without_events_is_followed_by_epoll(setup: &Setup) {
    if setup.engine != Engine::IoUring {
        return;
    }
    let world = setup.start();
    let tunnel = world.open();
    tunnel.echo();
    break_a_thread(&world, RINGS);
    assert_failed(&tunnel.outcome());
    world.until("again", |stats| {
        stats.driver_failures == 1 && stats.suspended_threads == 0
    });
    world.open().echo();
    assert_eq!(world.stats().driver_failures, 1);
}

fn thread_without_events_leaves_the_others_alone(setup: &Setup) {
    let mut config = setup.config();
    config.threads = 2;
    let world = setup.start_with(&config);
    // Each pair goes to the thread with the fewest pairs.
    let tunnels = [world.open(), world.open()];
    tunnels.iter().for_each(Tunnel::echo);
    break_a_thread(&world, ALL);
    let (ended, other) = first_to_end(&world, &tunnels);
    assert_failed(&ended);
    world.until("suspended", |stats| stats.suspended_threads == 1);
    other.echo();
    // The failed thread has the fewest pairs, and gets none.
    for _ in 0..3 {
        world.open().echo();
    }
    other.echo();
    assert!(world.handle.is_able() && other.outcome.try_recv().is_err());
}
