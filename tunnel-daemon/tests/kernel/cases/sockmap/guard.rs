//! Growth, the guard against it, and what breaks the guard.

use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use adit_ebpf_abi::{Grant, Moved};

use super::{BOUND, GROWTH, UNGUARDED, limited};
use crate::support::privilege::ready;
use crate::support::sockmap::{
    Crossing, Direction, End, PATIENCE, QUIET, Sizes, Sockmap, Stop, is_readable, is_writable,
    pull, push, report, until,
};

const LIMIT: u64 = 256 * 1024;

/// Kernel memory that nobody can take back, KiB.
fn unreclaimable() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let available = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = available.and_then(|rest| rest.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[test]
fn without_a_guard_a_stalled_reader_holds_whatever_is_sent() {
    if !ready("growth without a guard") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = &crossing;
    let there = sockmap.join(a, b, UNGUARDED);
    let before = unreclaimable();
    let (sent, stop) = push(client, 0, GROWTH, PATIENCE);
    assert_eq!(
        (sent, stop),
        (GROWTH, Stop::All),
        "this kernel bounds it: ADR 0017 wants to know"
    );
    until("end of it at the relay", || {
        sockmap.moved(&there).forwarded_bytes == sent
    });
    let queued = there.queued(&sockmap.moved(&there), b);
    report(&format!(
        "no guard, stalled reader: {sent} bytes taken from the client, {queued} in the queue, {} KiB less available",
        before.saturating_sub(unreclaimable())
    ));
    assert!(queued > GROWTH / 2);
    assert_eq!(pull(target, 0, sent, PATIENCE), (sent, End::All));
}

#[test]
fn the_drain_test_says_when_nothing_is_left_to_lose() {
    if !ready("the drain test") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = &crossing;
    let there = sockmap.join(a, b, UNGUARDED);
    let (sent, _stop) = push(client, 0, GROWTH / 4, PATIENCE);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(pull(a, sent, 1, PATIENCE), (0, End::Eof));
    // What came from the client, less its FIN.
    let came = adit_relay::tcp_state(a).unwrap().bytes_received - 1;
    assert_eq!((came, sockmap.moved(&there).forwarded_bytes), (sent, sent));
    assert!(
        there.accepted(b) < came,
        "nothing waits, so nothing is tried"
    );
    thread::scope(|scope| {
        let reading = scope.spawn(|| pull(target, 0, sent + 1, PATIENCE));
        until("drained queue", || {
            let accepted = there.accepted(b);
            assert!(accepted <= came, "{accepted} of {came} bytes");
            accepted == came
        });
        b.shutdown(Shutdown::Write).unwrap();
        assert_eq!(reading.join().unwrap(), (sent, End::Eof));
    });
}

#[test]
fn the_guard_bounds_one_direction() {
    if !ready("the guard, one direction") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing { client, a, b, .. } = &crossing;
    let there = sockmap.join(a, b, limited(LIMIT));
    let (sent, stop) = push(client, 0, GROWTH, QUIET);
    let moved = sockmap.moved(&there);
    report(&format!(
        "guard of {LIMIT}, one direction, stalled reader: {sent} bytes taken from the client; {moved:?}"
    ));
    assert_eq!(stop, Stop::Stalled);
    assert!(sent < BOUND && moved.forwarded_bytes <= LIMIT && moved.passed_bytes > 0);
}

/// Does for a direction what a relay would: takes what was passed once the queue before it is drained, and says so.
fn relay(sockmap: &mut Sockmap, direction: &mut Direction, a: &TcpStream, b: &TcpStream) -> u64 {
    let moved = sockmap.moved(direction);
    let held = moved.passed_bytes - direction.grant.consumed_bytes;
    if held > 0 && direction.queued(&moved, b) == 0 {
        carry(a, b, held);
        direction.grant.consumed_bytes += held;
    }
    let queued = direction.queued(&moved, b);
    direction.grant.drained_bytes = moved.forwarded_bytes - queued;
    if queued == 0 {
        direction.grant.drained_packets = moved.forwarded_packets;
    }
    sockmap.tell(direction);
    held
}

fn carry(a: &TcpStream, b: &TcpStream, bytes: u64) {
    use std::io::{Read as _, Write as _};
    let mut buffer = vec![0; usize::try_from(bytes).unwrap()];
    let (mut read, mut written) = (0, 0);
    while read < buffer.len() {
        assert!(
            is_readable(a, PATIENCE),
            "{read} of {bytes} bytes that were passed"
        );
        read += (&*a).read(&mut buffer[read..]).unwrap_or(0);
    }
    while written < buffer.len() {
        assert!(is_writable(b, PATIENCE), "the sink takes no more");
        written += (&*b).write(&buffer[written..]).unwrap_or(0);
    }
}

#[test]
fn a_guarded_direction_goes_on_after_its_reader_does() {
    if !ready("the guard, a reader that goes on") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = &crossing;
    let mut there = sockmap.join(a, b, limited(LIMIT));
    let is_done = AtomicBool::new(false);
    let turns = thread::scope(|scope| {
        scope.spawn(|| push(client, 0, GROWTH, PATIENCE));
        scope.spawn(|| {
            let got = pull(target, 0, GROWTH, PATIENCE);
            is_done.store(true, Relaxed);
            assert_eq!(got, (GROWTH, End::All));
        });
        let mut turns = 0;
        while !is_done.load(Relaxed) {
            // A turn begins with bytes that are left to us.
            let _none_yet = is_readable(a, Duration::from_millis(1));
            turns += u64::from(relay(&mut sockmap, &mut there, a, b) > 0);
        }
        turns
    });
    let moved = sockmap.moved(&there);
    report(&format!(
        "guard of {LIMIT}, reader goes on: {turns} turns of user space; {moved:?}"
    ));
    assert_eq!(moved.forwarded_bytes + moved.passed_bytes, GROWTH);
    assert!(turns > 0 && moved.forwarded_bytes > 0);
    // Caught up, the kernel forwards again.
    relay(&mut sockmap, &mut there, a, b);
    assert_eq!(there.grant.consumed_bytes, moved.passed_bytes);
    push(client, GROWTH, LIMIT / 4, PATIENCE);
    assert_eq!(
        pull(target, GROWTH, LIMIT / 4, PATIENCE),
        (LIMIT / 4, End::All)
    );
    let again = sockmap.moved(&there).forwarded_bytes - moved.forwarded_bytes;
    assert_eq!(again, LIMIT / 4);
}

/// Whether a byte can be read within `patience`. Polling does not tell, as a test shows.
fn has_bytes(socket: &TcpStream, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        if socket.peek(&mut [0]).is_ok() {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        thread::park_timeout(Duration::from_millis(1));
    }
}

/// The target stalls, then the client sends while it stalls itself. What the relay's side looks like then.
struct Stalled {
    sent: u64,
    stop: Stop,
    there: Moved,
    /// Whether the socket says that user space can get at what the guard left to it, and whether it can.
    is_readable: bool,
    is_there: bool,
}

fn both_stalled(
    sockmap: &mut Sockmap,
    crossing: &Crossing,
    terms: Grant,
) -> (Stalled, Direction, u64) {
    let Crossing {
        client,
        a,
        b,
        target,
    } = crossing;
    let there = sockmap.join(a, b, terms);
    let back = sockmap.join(b, a, terms);
    // As much as the guard lets through, and no more: those that wait are at `a`.
    let (filled, _stop) = push(target, 0, terms.limit_bytes, PATIENCE);
    until("end of it at the relay", || {
        let moved = sockmap.moved(&back);
        moved.forwarded_bytes + moved.passed_bytes == filled
    });
    let (sent, stop) = push(client, 0, GROWTH, QUIET);
    let seen = Stalled {
        sent,
        stop,
        there: sockmap.moved(&there),
        is_readable: is_readable(a, QUIET),
        is_there: has_bytes(a, QUIET),
    };
    (seen, there, filled)
}

#[test]
fn the_guard_bounds_nothing_where_both_directions_stall() {
    if !ready("the guard, both directions") {
        return;
    }
    // More than `a` can send, so that some of it waits in its queue.
    const QUEUED: u64 = 2 << 20;
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let (seen, there, filled) = both_stalled(&mut sockmap, &crossing, limited(QUEUED));
    report(&format!(
        "guard of {QUEUED}, both directions stalled: {} bytes taken from the client ({:?}), what was passed polls readable: {}, can be read: {}; {:?}",
        seen.sent, seen.stop, seen.is_readable, seen.is_there, seen.there
    ));
    assert!(seen.there.passed_bytes > 0);
    assert!(
        !seen.is_there,
        "what was passed can be read: ADR 0017 wants to know"
    );
    assert_eq!(
        (seen.sent, seen.stop),
        (GROWTH, Stop::All),
        "this kernel bounds it: ADR 0017 wants to know"
    );
    // It comes free only when the client reads, which it may do never, or after the answer to what is stuck.
    let Crossing { client, a, .. } = &crossing;
    assert_eq!(pull(client, 0, filled, PATIENCE), (filled, End::All));
    let held = sockmap.moved(&there).passed_bytes;
    let from = sockmap.moved(&there).forwarded_bytes;
    assert_eq!(pull(a, from, held, PATIENCE), (held, End::All));
}

/// Has this thread's CPU do little else, the kernel's worker there included.
fn hog() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap());
    sched_setaffinity(None, &one).unwrap();
    // Of the calling thread alone, which ends with its test.
    rustix::process::setpriority_process(None, -20).unwrap();
}

/// Grants so little that the send buffer always takes it, while both directions stall; what is taken from the client.
fn little(bytes: u64) -> u64 {
    let relay = Sizes {
        receive: Sizes::SMALL.receive,
        send: 2 << 20,
    };
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::sized(Sizes::SMALL, relay));
    let (seen, ..) = both_stalled(&mut sockmap, &crossing, limited(bytes));
    assert!(seen.there.forwarded_bytes <= bytes && seen.there.passed_bytes > 0);
    // Nothing stands in the way for good.
    assert!(has_bytes(&crossing.a, PATIENCE));
    seen.sent
}

#[test]
fn a_limit_that_the_send_buffer_always_takes_holds_only_while_the_worker_is_in_time() {
    const FEW: u64 = 64 * 1024;
    const ROUNDS: usize = 5;
    if !ready("a limit below the send buffer") {
        return;
    }
    let quiet = little(FEW);
    let hogging = || {
        hog();
        let mut most = 0;
        for _ in 0..ROUNDS {
            if most < BOUND {
                most = most.max(little(FEW));
            }
        }
        most
    };
    let busy = thread::spawn(hogging).join().unwrap();
    // How late the worker is is the scheduler's word, so that is no claim of this test.
    report(&format!(
        "limit of {FEW} below the send buffer, both directions stalled: {quiet} bytes taken from the client, {busy} where its CPU is busy"
    ));
}
