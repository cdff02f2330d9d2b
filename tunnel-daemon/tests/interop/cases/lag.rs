//! How far the server's reading of a Go agent's link may fall behind because some of its clients do not read.
//!
//! There is no counter of it: an echo crosses the link both ways, so what it takes longer bounds what waited in there.

use crate::support::combo::Combo;
use crate::support::stack::Stack;
use crate::support::wait::{secs, until};

/// Rounds with stalled clients and without, in turn; medians count.
const ROUNDS: usize = 5;
/// How often it may be measured before it is too late.
const TRIES: usize = 3;
/// Promised.
const LAG_MAX_US: f64 = 5_000.0;
/// Loose: one echo in a hundred meets whatever else a machine of two processors does. Or this many times what it takes without.
const TAIL_MAX_US: f64 = 50_000.0;
const TAIL_RATIO_MAX: f64 = 10.0;
/// What the server holds for clients that do not read, at least: the rest is with them.
const HELD_BYTES: f64 = 8e6;

/// What 400 echoes took, in microseconds.
#[derive(Clone, Copy)]
struct Times {
    p50: f64,
    p99: f64,
}

fn echoes(stack: &Stack) -> Times {
    let report = stack
        .client("echo", "echo")
        .flag("messages", 400)
        .flag("size", 64)
        .flag("read", 64)
        .run()
        .good();
    Times {
        p50: report.number("p50_us"),
        p99: report.number("p99_us"),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// While the agent's budget runs full of what they do not read, and they are cut for it.
///
/// Limit (isolation): Delay of the link reader beside stalled clients, with a Go agent | p50 below 5 ms; p99 at most 50
/// ms, or 10 times that without them
/// Upstream (tunnels): Stalled clients and targets do not slow other tunnels of their agent.
fn stalled_clients_do_not_delay_the_reading_of_their_agents_link(combo: Combo) {
    assert_no_lag(&Stack::start(combo), 0);
}
rows!(stalled_clients_do_not_delay_the_reading_of_their_agents_link: adit_go adit_go_connect);

/// The budget has room for all of it, so they keep their tunnels.
///
/// Limit (isolation): Delay of the link reader beside stalled clients, with a Go agent
/// Upstream (tunnels): Stalled clients and targets do not slow other tunnels of their agent.
fn stalled_clients_that_stay_do_not_delay_the_reading_of_their_agents_link(combo: Combo) {
    let stack = Stack::start(combo);
    assert_no_lag(&stack, 15 << 20);
    for reason in ["budget", "stalled"] {
        let cut = stack
            .server
            .adit_metric("tunnels_closed_total", &[("reason", reason)]);
        assert_eq!(cut, 0.0, "tunnels cut for {reason}");
    }
}
rows!(stalled_clients_that_stay_do_not_delay_the_reading_of_their_agents_link: adit_go adit_go_connect);

/// Beside four clients that read nothing, with so many bytes for each of them (0: without end).
fn assert_no_lag(stack: &Stack, bytes: u64) {
    echoes(stack); // the first connections of a process are slower
    // Other tests run beside this one: what is late because of them is not late every time.
    let late: Vec<String> = (0..TRIES)
        .map_while(|_| judge(stack, bytes).err())
        .collect();
    assert!(late.len() < TRIES, "{}", late.join("; "));
    stack.assert_serves();
}

/// # Errors
/// What comes too late beside them.
fn judge(stack: &Stack, bytes: u64) -> Result<(), String> {
    let held = || stack.server.adit_metric("held_bytes", &[]);
    let rounds: Vec<(Times, Times)> = (0..ROUNDS)
        .map(|_| {
            let calm = echoes(stack);
            let stalled = stack
                .client("stall", "source")
                .flag("streams", 4)
                .flag("bytes", bytes)
                .start();
            stalled.named_event("stalled", secs(10));
            if bytes > 0 {
                until("the server holds what nobody reads", secs(10), || {
                    (held() > HELD_BYTES).then_some(())
                });
            }
            let beside = echoes(stack);
            drop(stalled);
            stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
            until("nothing is held", secs(15), || {
                (held() == 0.0).then_some(())
            });
            (calm, beside)
        })
        .collect();
    let later = |(calm, beside): &(Times, Times)| beside.p50 - calm.p50;
    let lag = median(rounds.iter().map(later).collect());
    if lag >= LAG_MAX_US {
        return Err(format!(
            "half of the echoes come {lag} us later beside stalled clients"
        ));
    }
    let tail = median(rounds.iter().map(|(_, beside)| beside.p99).collect());
    let calm = median(rounds.iter().map(|(calm, _)| calm.p99).collect());
    if tail >= TAIL_MAX_US.max(calm * TAIL_RATIO_MAX) {
        return Err(format!(
            "one echo in a hundred takes {tail} us beside stalled clients, and {calm} us without"
        ));
    }
    Ok(())
}
