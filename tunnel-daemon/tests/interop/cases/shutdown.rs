//! A server that receives SIGTERM exits within its grace period, whatever Go clients and agents do. Upstream's server waits
//! for its clients without limit, so it is no baseline.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::combo::Combo;
use crate::support::peer::Running;
use crate::support::process::Process;
use crate::support::stack::Stack;
use crate::support::wait::secs;

/// Grace period of the first test's server.
const GRACE: Duration = Duration::from_secs(2);
/// Additional time on a busy machine.
const SLACK: Duration = Duration::from_secs(5);

/// Starts a client that sends forever, and one that never reads its tunnels.
fn endless_clients(stack: &Stack) -> (Running, Process) {
    let talker = stack.begin("echo echo messages=1000000 gap=20ms");
    let stalled = stack.client("stall", "source").flag("streams", 2).start();
    stalled.named_event("stalled", secs(10));
    stack.await_server_metric("established_connections", &[], 3.0);
    (talker, stalled)
}

/// Sends one SIGTERM, and returns how long the exit took. It may take at most `limit`.
fn stop(stack: &mut Stack, limit: Duration) -> Duration {
    let since = Instant::now();
    stack.server.process.signal(Signal::TERM);
    let status = stack.server.process.wait(limit);
    assert_eq!(status.code(), Some(0));
    since.elapsed()
}

/// Clients are served until the end of the grace period. After it, targets have no connections left.
///
/// Limit (times): SIGTERM to exit of a server, compat mode | `--graceful-shutdown-timeout`, also with connected Go
/// clients
fn a_server_leaves_at_the_end_of_its_grace_though_clients_never_do(combo: Combo) {
    let mut stack = Stack::with(combo, 1, &["--graceful-shutdown-timeout=2s"]);
    let (talker, _stalled) = endless_clients(&stack);
    let took = stop(&mut stack, GRACE + SLACK);
    assert!(took >= GRACE * 9 / 10, "it left after {took:?}");
    let report = talker.report().bad();
    // The client started before the signal, so it lived through most of the grace period.
    let served = report.number("elapsed_ms");
    assert!(served >= 1_800.0, "cut after {served} ms: {report:?}");
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
}
rows!(a_server_leaves_at_the_end_of_its_grace_though_clients_never_do: adit_go adit_go_connect adit_adit adit_adit_connect adit_aditlink);

/// Upstream's default is no grace period.
///
/// Limit (times): SIGTERM to exit of a server, compat mode
fn a_server_without_a_grace_leaves_at_once(combo: Combo) {
    let mut stack = Stack::start(combo);
    let (talker, _stalled) = endless_clients(&stack);
    stop(&mut stack, SLACK);
    talker.report().bad();
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
}
rows!(a_server_without_a_grace_leaves_at_once: adit_go adit_go_connect adit_adit);

/// The agents keep running, and serve the next server on the same port.
fn agents_of_a_stopped_server_serve_the_next_one(combo: Combo) {
    let mut stack = Stack::with(combo, 1, &["--graceful-shutdown-timeout=1s"]);
    let (_talker, _stalled) = endless_clients(&stack);
    stop(&mut stack, SLACK);
    let dir = stack.dir.path().to_owned();
    stack.server.start_again(&dir);
    stack.await_backends(1);
    stack.assert_serves();
}
rows!(agents_of_a_stopped_server_serve_the_next_one: adit_go adit_go_connect adit_adit);
