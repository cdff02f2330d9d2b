//! Rule 14: how far the server's reading of a Go agent's link may fall behind because some of its clients do not read.
//!
//! There is no counter of it: an echo crosses the link both ways, so what it takes longer bounds what waited in there.

use crate::support::combo::Combo;
use crate::support::stack::Stack;
use crate::support::wait::secs;

/// Rounds with stalled clients and without, in turn; medians count.
const ROUNDS: usize = 5;
/// Promised.
const LAG_MAX_US: f64 = 5_000.0;
/// Loose: one echo in a hundred meets whatever else a machine of two processors does. Or this many times what it takes without.
const TAIL_MAX_US: f64 = 50_000.0;
const TAIL_RATIO_MAX: f64 = 10.0;

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

fn stalled_clients_do_not_delay_the_reading_of_their_agents_link(combo: Combo) {
    let stack = Stack::start(combo);
    echoes(&stack); // the first connections of a process are slower
    let rounds: Vec<(Times, Times)> = (0..ROUNDS)
        .map(|_| {
            let calm = echoes(&stack);
            let stalled = stack.client("stall", "source").flag("streams", 4).start();
            stalled.named_event("stalled", secs(10));
            let beside = echoes(&stack);
            drop(stalled);
            stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
            (calm, beside)
        })
        .collect();
    let later = |(calm, beside): &(Times, Times)| beside.p50 - calm.p50;
    let lag = median(rounds.iter().map(later).collect());
    assert!(
        lag < LAG_MAX_US,
        "half of the echoes come {lag} us later beside stalled clients"
    );
    let tail = median(rounds.iter().map(|(_, beside)| beside.p99).collect());
    let calm = median(rounds.iter().map(|(calm, _)| calm.p99).collect());
    assert!(
        tail < TAIL_MAX_US.max(calm * TAIL_RATIO_MAX),
        "one echo in a hundred takes {tail} us beside stalled clients, and {calm} us without"
    );
    stack.assert_serves();
}
rows!(stalled_clients_do_not_delay_the_reading_of_their_agents_link: adit_go adit_go_connect);
