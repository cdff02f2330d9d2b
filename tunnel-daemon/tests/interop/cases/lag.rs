//! How much stalled clients delay the server's reading of a Go agent's link.
//!
//! No counter measures that delay. An echo crosses the link in both directions, so its additional time is an upper bound.

use crate::support::combo::Combo;
use crate::support::stack::Stack;
use crate::support::wait::{secs, until};

/// Rounds, alternately without and with stalled clients. Medians count.
const ROUNDS: usize = 5;
/// Number of attempts before the test fails.
const TRIES: usize = 3;
/// The documented limit.
const LAG_MAX_US: f64 = 5_000.0;
/// Limit of p99: this time, or [`TAIL_RATIO_MAX`] times the p99 without stalled clients. Both are loose, since other work on
/// two processors delays one echo in a hundred.
const TAIL_MAX_US: f64 = 50_000.0;
const TAIL_RATIO_MAX: f64 = 10.0;
/// Least number of bytes that the server queues for stalled clients. The clients' buffers hold the rest.
const HELD_BYTES: f64 = 8e6;

/// Times of 400 echoes, in microseconds.
#[derive(Clone, Copy)]
struct Times {
    p50: f64,
    p99: f64,
}

fn echoes(stack: &Stack) -> Times {
    let report = stack.good("echo echo messages=400 size=64 read=64");
    Times {
        p50: report.number("p50_us"),
        p99: report.number("p99_us"),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The bytes for stalled clients fill the agent's budget, and the server closes their tunnels.
///
/// Limit (isolation): Delay of the link reader beside stalled clients, with a Go agent | p50 below 5 ms; p99 at most 50
/// ms, or 10 times that without them
/// Upstream (tunnels): Stalled clients and targets do not slow other tunnels of their agent.
fn stalled_clients_do_not_delay_the_reading_of_their_agents_link(combo: Combo) {
    assert_no_lag(&Stack::start(combo), 0);
}
rows!(stalled_clients_do_not_delay_the_reading_of_their_agents_link: adit_go adit_go_connect);

/// The budget has room for all bytes, so the stalled clients keep their tunnels.
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

/// Measures beside four clients that read nothing. Each has `bytes` bytes waiting (0: endless).
fn assert_no_lag(stack: &Stack, bytes: u64) {
    echoes(stack); // the first connections of a process are slower
    // Other tests run at the same time and may delay one attempt, but not each attempt.
    let late: Vec<String> = (0..TRIES)
        .map_while(|_| judge(stack, bytes).err())
        .collect();
    assert!(late.len() < TRIES, "{}", late.join("; "));
    stack.assert_serves();
}

/// # Errors
/// The limit that the echoes exceeded.
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
