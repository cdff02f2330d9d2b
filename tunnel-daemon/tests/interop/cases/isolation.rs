//! Slow clients and targets beside fast ones, and bytes right before a close.

use std::path::Path;

use crate::support::combo::Combo;
use crate::support::peer::Peer;
use crate::support::process::Process;
use crate::support::stack::Stack;
use crate::support::wait::{is_nightly, secs, until};

/// Echo messages in one round of a measurement.
const MESSAGES: u32 = 400;
/// Number of rounds. The median of their ratios counts.
const ROUNDS: usize = 3;

/// Median echo time in microseconds of one round.
fn echo_p50(stack: &Stack) -> f64 {
    let report = stack.good(&format!("echo echo messages={MESSAGES} size=64 read=64"));
    report.number("p50_us")
}

/// Ratio of echo times with and without a disturbance: the median of several rounds.
fn ratio_beside(stack: &Stack, mut disturb: impl FnMut() -> Process) -> f64 {
    echo_p50(stack); // the first connections of a process are slower
    let mut ratios: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let calm = echo_p50(stack);
            let disturbance = disturb();
            let beside = echo_p50(stack);
            drop(disturbance);
            beside / calm
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios[ROUNDS / 2]
}

/// In upstream, a stalled client stalls the others, so its server is no baseline.
///
/// Limit (isolation): Echo p50 beside 4 stalled clients, with a Go agent | at most 3 times that without them
/// Upstream (tunnels): Stalled clients and targets do not slow other tunnels of their agent.
fn four_stalled_clients_do_not_slow_an_echo(combo: Combo) {
    let stack = Stack::start(combo);
    let ratio = ratio_beside(&stack, || {
        let stalled = stack.client("stall", "source").flag("streams", 4).start();
        stalled.named_event("stalled", secs(10));
        stalled
    });
    // 3 is the documented limit with a Go agent. With ours it is 1.5 on an idle machine, as `cargo xtask perf` measures.
    assert!(
        ratio <= 3.0,
        "echo beside stalled clients takes {ratio:.2} times as long"
    );
    stack.assert_serves();
}
rows!(four_stalled_clients_do_not_slow_an_echo: our_server_both);

/// The server charges queued bytes to the stalled clients, so a download beside them completes.
fn a_download_beside_stalled_clients_arrives_whole(combo: Combo) {
    let stack = Stack::start(combo);
    let stalled = stack.client("stall", "source").flag("streams", 4).start();
    stalled.named_event("stalled", secs(10));
    stack.good("bulk-down source bytes=268435456");
    drop(stalled);
    stack.assert_serves();
}
rows!(a_download_beside_stalled_clients_arrives_whole: our_server_both);

/// The targets read nothing. A Go agent is no row, because its own loop stalls.
///
/// Upstream (tunnels): Stalled clients and targets do not slow other tunnels of their agent.
fn stalled_target_does_not_slow_an_echo(combo: Combo) {
    let stack = Stack::start(combo);
    let dir: &Path = stack.dir.path();
    let ratio = ratio_beside(&stack, || {
        let upload = Peer::new("bulk-up", dir)
            .flag("mode", combo.mode.flag())
            .flag("uds", stack.socket())
            .flag("target", stack.targets.address("stalled"))
            .flag("streams", 4)
            .flag("bytes", 256 << 20)
            .start();
        let open = |stack: &Stack| stack.agents[0].metric("open_endpoint_connections", &[]) >= 4.0;
        until("four uploads are open", secs(10), || {
            open(&stack).then_some(())
        });
        upload
    });
    assert!(
        ratio <= 3.0,
        "echo beside stalled targets takes {ratio:.2} times as long"
    );
    stack.assert_serves();
}
rows!(stalled_target_does_not_slow_an_echo: adit_adit adit_adit_connect adit_aditlink adit_aditlink_connect go_adit go_adit_connect);

/// Upstream's agent may lose the last bytes.
///
/// Upstream (tunnels): An upload before an immediate close reaches the target completely.
fn upload_then_close_delivers_every_byte(combo: Combo) {
    const BYTES: u64 = 5_000_011;
    let stack = Stack::start(combo);
    for round in 0..5 {
        let id = format!("round-{round}");
        stack.good(&format!(
            "bulk-up sink bytes={BYTES} id={id} close-at-once=true"
        ));
        let got = until("the sink saw the end", secs(10), || {
            let got = stack.targets.received(&format!("{id}-0"));
            (got["done"] == true).then_some(got)
        });
        assert_eq!(got["bytes"], BYTES, "{got}");
        assert_eq!(got["intact"], true, "{got}");
    }
}
rows!(upload_then_close_delivers_every_byte: go_adit adit_adit adit_adit_connect adit_aditlink
    aditprevious_adit adit_aditprevious_connect);

/// The Go library closes a tunnel whose packet waits ten seconds, so the server must not send larger packets to a slow
/// reader.
///
/// Limit (isolation): A client that reads 20 KB/s for 60 s | keeps its tunnel; with a Go agent while its target is at
/// most 4 MiB ahead
fn slow_reader_keeps_its_tunnel(combo: Combo) {
    assert_slow_reader_is_served(combo, 0);
}
// Only rows where credit stops an endless source: a Go agent sends as fast as the link takes bytes.
rows!(slow_reader_keeps_its_tunnel: adit_adit adit_adit_connect adit_aditlink);

/// For an agent without credit, the source stays ahead of the reader by less than the tunnel's 4 MiB.
///
/// Limit (isolation): A client that reads 20 KB/s for 60 s
fn slow_reader_of_three_mebibytes_keeps_its_tunnel(combo: Combo) {
    assert_slow_reader_is_served(combo, 3 << 20);
}
rows!(slow_reader_of_three_mebibytes_keeps_its_tunnel: adit_go adit_go_connect);

/// The source is endless. When the bytes of one reader fill the agent's budget, the server closes that tunnel with reason
/// `budget`. Other slow tunnels continue.
///
/// Limit (isolation): A client that reads 20 KB/s from an endless target, with a Go agent | cut alone when the 64 MiB
/// of the link are full
fn slow_reader_of_an_endless_source_is_cut_alone(combo: Combo) {
    let stack = Stack::start(combo);
    let slow = |lasting: &str, bytes: u64| {
        stack
            .client("slow-read", "source")
            .flag("rate", 20_000)
            .flag("for", lasting)
            .flag("bytes", bytes)
    };
    let other = slow("20s", 3 << 20).begin();
    let cut = slow("30s", 0).begin();
    let closed = |reason: &str| {
        let series = [("reason", reason)];
        stack.server.adit_metric("tunnels_closed_total", &series)
    };
    until("the tunnel is cut for the budget", secs(25), || {
        (closed("budget") == 1.0).then_some(())
    });
    other.report().good();
    // The client still reads bytes that were queued, which may take until its end.
    let report = cut.report();
    assert_eq!(*report.get("intact"), true, "{report:?}");
    for (reason, cut) in [("budget", 1.0), ("stalled", 0.0), ("half_closed_idle", 0.0)] {
        assert_eq!(closed(reason), cut, "{reason}");
    }
    stack.assert_serves();
}
rows!(slow_reader_of_an_endless_source_is_cut_alone: adit_go adit_go_connect);

/// Reads 20 KB/s from a source of `bytes` bytes (0: endless), and checks that no tunnel is cut. It takes a minute at night,
/// else longer than the ten seconds after which the Go library gives up.
fn assert_slow_reader_is_served(combo: Combo, bytes: u64) {
    const RATE: u64 = 20_000;
    let length = if is_nightly() { 60 } else { 14 };
    let stack = Stack::start(combo);
    let report = stack.good(&format!(
        "slow-read source rate={RATE} for={length}s bytes={bytes}"
    ));
    let least = (length - 4) * RATE;
    assert!(report.number("bytes") > least as f64, "{report:?}");
    for reason in ["budget", "stalled", "half_closed_idle"] {
        let cut = stack
            .server
            .adit_metric("tunnels_closed_total", &[("reason", reason)]);
        assert_eq!(cut, 0.0, "tunnels cut for {reason}");
    }
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
}
