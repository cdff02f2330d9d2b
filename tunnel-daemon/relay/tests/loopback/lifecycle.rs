//! Tests of cancel, stop, refusal and panic: each pair receives its outcome once, and no resource is left.

use std::{
    io::Write,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use adit_relay::{Pair, PairEnd, Rejected, Relay, Side, Why};
use socket2::{Domain, Socket, Type};

use crate::support::{
    PATIENCE, Pattern, Setup, Transport, Tunnel, World, first_to_end, heard, matrix, promise,
    receive_all, receive_exactly, send_all, until,
};

matrix!(
    cancelled_pair_is_reset_and_says_so,
    cancel_of_an_ended_pair_changes_nothing,
    stop_lets_pairs_finish_before_the_deadline,
    stop_resets_what_is_left_at_the_deadline,
    dropped_relay_tells_every_owner,
    pair_that_waits_for_its_thread_is_armed_for_a_reset,
    stopped_relay_refuses_and_gives_the_pair_back,
    full_relay_refuses_and_gives_the_pair_back,
    panic_takes_its_own_pairs_and_the_thread_goes_on,
    panicking_callback_is_a_panic_of_its_thread,
    panic_of_a_thread_leaves_pairs_of_the_others_alone,
    submitting_from_many_threads_while_stopping_loses_no_callback,
    pair_without_a_pipe_is_copied_and_counted,
    socket_that_is_none_is_a_failure,
    owner_sees_a_half_close_and_the_way_to_each_peer,
    owner_sees_a_half_close_behind_bytes_that_nobody_takes,
    relay_dropped_by_a_callback_ends_without_it,
    relay_without_events_sleeps,
);

fn cancelled_pair_is_reset_and_says_so(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    (&tunnel.client).write_all(b"some").unwrap();
    receive_exactly(&tunnel.target, 4);
    tunnel.submitted.cancel();
    tunnel.submitted.cancel();
    let outcome = tunnel.outcome();
    assert!(matches!(outcome.end, PairEnd::Cancelled));
    assert_eq!(outcome.to_b.bytes, 4);
    let ended = receive_all(&tunnel.client, 16, 1);
    assert_eq!(ended.is_err(), setup.transport == Transport::Tcp);
    world.until_empty();
}

fn cancel_of_an_ended_pair_changes_nothing(setup: &Setup) {
    let world = setup.start();
    let first = world.open();
    first.client.shutdown(std::net::Shutdown::Both).unwrap();
    first.target.shutdown(std::net::Shutdown::Both).unwrap();
    let _end = first.outcome();
    world.until_empty();
    let second = world.open(); // Takes the slot of the first pair.
    (&second.client).write_all(b"a").unwrap();
    receive_exactly(&second.target, 1);
    first.submitted.cancel();
    (&second.client).write_all(b"b").unwrap();
    assert_eq!(receive_exactly(&second.target, 1), b"b");
}

fn unix_pair() -> (Socket, Socket) {
    Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap()
}

fn stop_lets_pairs_finish_before_the_deadline(setup: &Setup) {
    let world = setup.start();
    let handle = world.handle.clone();
    let tunnel = world.open();
    let bytes = Pattern::new(1).bytes(4 << 20);
    thread::scope(|scope| {
        let stopping = scope.spawn(|| world.stop(PATIENCE));
        let is_refused = || {
            let ((_client, a), (_target, b)) = (unix_pair(), unix_pair());
            let (done, _told) = promise();
            handle.submit(Pair::new(a.into(), b.into()), done).is_err()
        };
        until("the relay stops taking pairs", is_refused, String::new);
        scope.spawn(|| send_all(&tunnel.client, &bytes, 65_536, 1));
        assert!(receive_all(&tunnel.target, 65_536, 1).unwrap() == bytes);
        tunnel.target.shutdown(std::net::Shutdown::Write).unwrap();
        stopping.join().unwrap();
    });
    assert!(matches!(tunnel.outcome().end, PairEnd::Finished));
}

fn stop_resets_what_is_left_at_the_deadline(setup: &Setup) {
    let world = setup.start();
    let tunnels: Vec<_> = (0..20).map(|_| world.open()).collect();
    let start = Instant::now();
    world.stop(Duration::from_millis(50));
    assert!(start.elapsed() >= Duration::from_millis(50));
    assert!(start.elapsed() < PATIENCE / 2);
    for tunnel in tunnels {
        assert!(matches!(tunnel.outcome().end, PairEnd::Stopped));
        let ended = receive_all(&tunnel.client, 16, 1);
        assert_eq!(ended.is_err(), setup.transport == Transport::Tcp);
    }
}

fn dropped_relay_tells_every_owner(setup: &Setup) {
    let world = setup.start();
    let tunnels: Vec<_> = (0..50).map(|_| world.open()).collect();
    drop(world);
    for tunnel in tunnels {
        assert!(matches!(tunnel.outcome().end, PairEnd::Stopped));
    }
}

/// The thread is busy in a callback. It could exit, or its process be killed, before it serves the next pair.
fn pair_that_waits_for_its_thread_is_armed_for_a_reset(setup: &Setup) {
    let world = setup.start();
    let ((client, a), (target, b)) = (world.sockets(), world.sockets());
    let (tell, told) = mpsc::channel();
    let (go_on, held) = mpsc::channel::<()>();
    let done = Box::new(move |_outcome| {
        tell.send(()).unwrap();
        // Blocks until the other end is dropped.
        let _looked_at = held.recv_timeout(PATIENCE);
    });
    let pair = Pair::new(a.into(), b.into());
    world.handle.submit(pair, done).unwrap();
    drop((client, target));
    told.recv_timeout(PATIENCE).unwrap();
    let ((_client, a), (_target, b)) = (world.sockets(), world.sockets());
    let waiting = [&a, &b].map(|socket| socket.try_clone().unwrap());
    let (done, _outcome) = promise();
    let pair = Pair::new(a.into(), b.into());
    world.handle.submit(pair, done).unwrap();
    let lingers = waiting.map(|socket| socket.linger().unwrap());
    drop(go_on);
    assert_eq!(lingers, [Some(Duration::ZERO); 2]);
}

fn refused(setup: &Setup, world: &World) -> Rejected {
    let ((_client, a), (_target, b)) = (world.sockets(), world.sockets());
    let (done, told) = promise();
    let pair = Pair::new(a.into(), b.into());
    let rejected = world.handle.submit(pair, done).expect_err("refused");
    assert!(told.try_recv().is_err(), "{setup:?}: not called");
    rejected
}

fn stopped_relay_refuses_and_gives_the_pair_back(setup: &Setup) {
    let world = setup.start();
    let handle = world.handle.clone();
    let ((_client, a), (_target, b)) = (world.sockets(), world.sockets());
    world.stop(Duration::ZERO);
    let (done, told) = promise();
    let pair = Pair::new(a.into(), b.into());
    let rejected = handle.submit(pair, done).unwrap_err();
    assert_eq!(rejected.why, Why::Stopping);
    drop(rejected);
    assert!(told.recv().is_err(), "given back, not called");
}

fn full_relay_refuses_and_gives_the_pair_back(setup: &Setup) {
    let mut config = setup.config();
    config.pairs_max = 3;
    let world = setup.start_with(&config);
    let mut tunnels: Vec<_> = (0..3).map(|_| world.open()).collect();
    let rejected = refused(setup, &world);
    assert_eq!(rejected.why, Why::Full);
    assert_eq!(world.stats().active_pairs, 3);
    tunnels.pop().unwrap().submitted.cancel();
    world.until("there is room again", |stats| stats.active_pairs == 2);
    world.handle.submit(*rejected.pair, rejected.done).unwrap();
}

fn panic_takes_its_own_pairs_and_the_thread_goes_on(setup: &Setup) {
    let world = setup.start();
    let tunnels: Vec<_> = (0..5)
        .map(|_| {
            let tunnel = world.open();
            (&tunnel.client).write_all(b"abc").unwrap();
            receive_exactly(&tunnel.target, 3);
            tunnel
        })
        .collect();
    world.handle.plant_fault();
    for tunnel in &tunnels {
        let outcome = tunnel.outcome();
        assert!(matches!(outcome.end, PairEnd::Panicked), "{outcome:?}");
        assert_eq!(outcome.to_b.bytes, 3);
    }
    world.until("counted", |stats| stats.thread_panics == 1);
    world.until_empty();
    let next = world.open();
    // A cancellation of a pair from before the panic does not affect a new pair with the same key.
    tunnels[0].submitted.cancel();
    (&next.client).write_all(b"again").unwrap();
    assert_eq!(receive_exactly(&next.target, 5), b"again");
}

/// A pair that is cancelled at once, and whose callback panics.
fn panic_in_a_callback(world: &World) {
    let ((_client, a), (_target, b)) = (world.sockets(), world.sockets());
    let pair = Pair::new(a.into(), b.into());
    let done = Box::new(|_outcome| panic!("planted in a callback"));
    world.handle.submit(pair, done).unwrap().cancel();
}

fn panicking_callback_is_a_panic_of_its_thread(setup: &Setup) {
    let world = setup.start();
    let bystander = world.open();
    panic_in_a_callback(&world);
    assert!(matches!(bystander.outcome().end, PairEnd::Panicked));
    let next = world.open();
    (&next.client).write_all(b"on").unwrap();
    assert_eq!(receive_exactly(&next.target, 2), b"on");
    assert_eq!(world.stats().thread_panics, 1);
}

fn panic_of_a_thread_leaves_pairs_of_the_others_alone(setup: &Setup) {
    let mut config = setup.config();
    config.threads = 2;
    let world = setup.start_with(&config);
    // Each pair goes to the thread with the fewest pairs.
    let tunnels = [world.open(), world.open()];
    tunnels.iter().for_each(Tunnel::echo);
    panic_in_a_callback(&world);
    let (ended, other) = first_to_end(&world, &tunnels);
    assert!(matches!(ended.end, PairEnd::Panicked), "{ended:?}");
    other.echo();
    // The failed thread now has the fewest pairs.
    world.open().echo();
    other.echo();
    assert!(other.outcome.try_recv().is_err());
    assert_eq!(world.stats().thread_panics, 1);
}

fn submitting_from_many_threads_while_stopping_loses_no_callback(setup: &Setup) {
    let mut config = setup.config();
    config.threads = 2;
    let world = setup.start_with(&config);
    let handle = world.handle.clone();
    let (tell, told) = mpsc::channel();
    let accepted: usize = thread::scope(|scope| {
        let submitters: Vec<_> = (0..4)
            .map(|_| {
                let (handle, tell) = (handle.clone(), tell.clone());
                scope.spawn(move || {
                    let mut accepted = 0;
                    loop {
                        let (a, b) = unix_pair();
                        let tell = tell.clone();
                        let done = Box::new(move |_outcome| tell.send(()).unwrap());
                        match handle.submit(Pair::new(a.into(), b.into()), done) {
                            Ok(submitted) => {
                                accepted += 1;
                                submitted.cancel();
                            }
                            Err(rejected) if rejected.why == Why::Stopping => return accepted,
                            Err(_full) => thread::yield_now(),
                        }
                    }
                })
            })
            .collect();
        let some = || told.try_iter().count() > 0;
        until("some went through", some, String::new);
        // Outcomes received above are missing from the count below.
        world.stop(Duration::ZERO);
        submitters.into_iter().map(|one| one.join().unwrap()).sum()
    });
    drop(tell);
    assert!(told.iter().count() <= accepted);
    assert_eq!(handle.stats().active_pairs, 0, "every promise was kept");
}

fn pair_without_a_pipe_is_copied_and_counted(setup: &Setup) {
    let mut config = setup.config();
    config.pipe_budget_bytes = 0;
    let world = setup.start_with(&config);
    let tunnel = world.open();
    let bytes = Pattern::new(2).bytes(1 << 20);
    thread::scope(|scope| {
        scope.spawn(|| send_all(&tunnel.client, &bytes, 65_536, 1));
        assert!(receive_all(&tunnel.target, 65_536, 1).unwrap() == bytes);
    });
    let wants_pipes = config.thresholds.splice;
    world.until("counted", |stats| {
        (stats.pipes_exhausted > 0) == wants_pipes && stats.pipes_in_use == 0
    });
}

fn socket_that_is_none_is_a_failure(setup: &Setup) {
    let world = setup.start();
    let (_client, a) = world.sockets();
    let file = std::fs::File::open("/proc/self/status").unwrap();
    let (done, told) = promise();
    let pair = Pair::new(a.into(), file.into());
    world.handle.submit(pair, done).unwrap();
    let outcome = heard(&told);
    assert!(matches!(outcome.end, PairEnd::Failed { .. }), "{outcome:?}");
    world.until_empty();
}

fn owner_sees_a_half_close_and_the_way_to_each_peer(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    let submitted = tunnel.submitted.clone();
    let state = || format!("{submitted:?}");
    (&tunnel.client).write_all(b"hello").unwrap();
    receive_exactly(&tunnel.target, 5);
    until("five bytes", || submitted.progress().to_b == 5, state);
    assert!(!submitted.progress().is_half_closed);
    let is_tcp = setup.transport == Transport::Tcp;
    for side in [Side::A, Side::B] {
        assert_eq!(submitted.tcp_state(side).is_some(), is_tcp);
    }
    tunnel.client.shutdown(std::net::Shutdown::Write).unwrap();
    let is_half_closed = || submitted.progress().is_half_closed;
    until("the half-close is seen", is_half_closed, state);
    tunnel.target.shutdown(std::net::Shutdown::Write).unwrap();
    let _end = tunnel.outcome();
    assert!(!submitted.progress().is_half_closed);
    let state = submitted.tcp_state(Side::A);
    assert!(state.is_none(), "the socket is closed");
}

/// Undelivered bytes delay EOF for as long as the sink does not read, but the half-close is reported at once.
fn owner_sees_a_half_close_behind_bytes_that_nobody_takes(setup: &Setup) {
    let world = setup.start();
    let (client, a) = world.sockets();
    let (b, target) = unix_pair();
    b.set_nonblocking(true).unwrap();
    let mut before = 0;
    while let Ok(count) = (&b).write(&[1; 4096]) {
        before += count;
    }
    let (done, told) = promise();
    let pair = Pair::new(a.into(), b.into());
    let submitted = world.handle.submit(pair, done).unwrap();
    let state = || format!("{submitted:?}");
    // Some kernels splice pages into a Unix socket that is full for `write`.
    client.set_nonblocking(true).unwrap();
    let mut sent = 0;
    let wait = || {
        // Sends only when all earlier bytes are taken: FIN cannot arrive behind a full receive buffer.
        if submitted.progress().to_b == sent as u64 {
            sent += (&client).write(&[2; 5000]).unwrap_or(0);
        }
        let stats = world.stats();
        stats.buffer_bytes > 0 || stats.pipes_in_use > 0
    };
    until("bytes wait for the target", wait, state);
    assert!(!submitted.progress().is_half_closed, "a pause is no end");
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let is_half_closed = || submitted.progress().is_half_closed;
    until("the half-close is seen", is_half_closed, state);
    assert!(submitted.progress().to_b < sent as u64);
    // A target that reads again receives all bytes and EOF.
    target.shutdown(std::net::Shutdown::Write).unwrap();
    target.set_read_timeout(Some(PATIENCE)).unwrap();
    let heard = receive_all(&target, 65_536, 1).unwrap();
    assert_eq!(heard.len(), before + sent);
    let outcome = told.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(outcome.end, PairEnd::Finished), "{outcome:?}");
    assert!(!submitted.progress().is_half_closed);
}

/// A callback may hold the last owner of a relay.
fn relay_dropped_by_a_callback_ends_without_it(setup: &Setup) {
    let relay = Relay::start(&setup.config()).unwrap();
    let handle = relay.handle();
    let world = setup.start();
    let ((client, a), (target, b)) = (world.sockets(), world.sockets());
    let (tell, told) = mpsc::channel();
    let done = Box::new(move |outcome: adit_relay::Outcome| {
        drop(relay);
        tell.send(outcome.end.to_string()).unwrap();
    });
    handle.submit(Pair::new(a.into(), b.into()), done).unwrap();
    drop((client, target));
    assert_eq!(told.recv_timeout(PATIENCE).unwrap(), "finished");
    until(
        "no pair is left",
        || handle.stats().active_pairs == 0,
        || format!("{handle:?}"),
    );
}

/// Idle, half-closed and paused pairs cost no CPU: no thread polls for events within a second.
///
/// Limit (isolation): Wake-ups of a relay thread without events | none in 1 s
fn relay_without_events_sleeps(setup: &Setup) {
    let second = Duration::from_secs(1);
    let world = setup.start();
    let (idle, half_closed, paused) = (world.open(), world.open(), world.open());
    (&idle.client).write_all(b"hello").unwrap();
    receive_exactly(&idle.target, 5);
    half_closed
        .client
        .shutdown(std::net::Shutdown::Write)
        .unwrap();
    receive_all(&half_closed.target, 16, 1).unwrap();
    paused.client.set_nonblocking(true).unwrap();
    let mut before = world.stats();
    let mut quiet_since = Instant::now();
    let mut is_quiet_for_a_second = || {
        let is_full = (&paused.client).write(&[1; 4096]).is_err();
        let now = world.stats();
        if !is_full || (now.wakeups, now.syscalls) != (before.wakeups, before.syscalls) {
            (before, quiet_since) = (now, Instant::now());
        }
        thread::sleep(Duration::from_millis(1));
        quiet_since.elapsed() > second
    };
    until(
        "a second without a wake-up",
        &mut is_quiet_for_a_second,
        || format!("{:?}", world.stats()),
    );
    assert!(before.wakeups > 0 && before.active_pairs == 3);
}
