//! Dials while one of the agents is stopped: its kernel acknowledges packets, and the process answers none.

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::combo::{Combo, Maker};
use crate::support::skip::skip;
use crate::support::stack::{Agent, Stack, get};
use crate::support::wait::{is_nightly, secs, until};

/// Number of dials in a test.
const DIALS: usize = 50;
/// Interval between dials.
const EVERY: Duration = Duration::from_millis(100);
/// Longest duration of a dial: shorter than the dial timeout, and long enough for a busy machine.
const SLOWEST: Duration = Duration::from_secs(15);

/// Sends a CONNECT, and returns the first line of the answer with its delay.
fn dial(socket: &str, target: &str) -> (String, Duration) {
    let began = Instant::now();
    let mut stream = UnixStream::connect(socket).expect("a server");
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("a server");
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\r\n") && stream.read(&mut byte).is_ok_and(|read| read > 0) {
        line.extend(byte);
    }
    let line = String::from_utf8_lossy(&line).trim().to_owned();
    (line, began.elapsed())
}

/// Starts ten dials a second. Returns the failed ones, and the slowest delay.
fn dials(stack: &Stack) -> (Vec<String>, Duration) {
    let (socket, target) = (stack.socket(), stack.targets.address("http"));
    thread::scope(|scope| {
        let dials: Vec<_> = (0..DIALS)
            .map(|_dial| {
                thread::sleep(EVERY);
                scope.spawn(|| dial(&socket, &target))
            })
            .collect();
        let (mut failed, mut slowest) = (Vec::new(), Duration::ZERO);
        for dial in dials {
            let (line, took) = dial.join().expect("no panic");
            slowest = slowest.max(took);
            if !line.contains(" 200 ") {
                failed.push(line);
            }
        }
        (failed, slowest)
    })
}

/// Number of dials that the server retried at another agent, because the first was slow or silent.
fn repeated(stack: &Stack) -> f64 {
    let of = |reason| {
        let labels = [("reason", reason)];
        stack.server.adit_metric("dial_retries_total", &labels)
    };
    of("slow") + of("silent")
}

/// Limit (times): Hedge of an unanswered dial
fn no_dial_fails_while_one_of_two_agents_is_stopped(combo: Combo) {
    let stack = Stack::with(combo, 2, &[]);
    let dead = &stack.agents[0].process;
    dead.signal(Signal::STOP);
    let (failed, slowest) = dials(&stack);
    println!(
        "of {DIALS} dials {} failed, the slowest took {slowest:?}",
        failed.len()
    );
    assert!(failed.is_empty(), "{failed:?}");
    assert!(slowest < SLOWEST, "{slowest:?}");
    assert!(repeated(&stack) >= 1.0, "no dial met the stopped agent");
    dead.signal(Signal::CONT);
    until("no link is silent", secs(15), || {
        (stack.server.adit_metric("links_silent", &[]) == 0.0).then_some(())
    });
    // A late answer to a retried dial does not count as a failure.
    assert_eq!(stack.server.metric("dial_failure_count", &[]), 0.0);
}
rows!(no_dial_fails_while_one_of_two_agents_is_stopped: adit_go_connect adit_go0303_connect adit_adit_connect adit_aditlink_connect);

/// User id whose packets the nftables rule drops.
const DROPPED: &str = "4242";
/// Environment variable of a test that already runs in its own network namespace.
const ENCLOSED: &str = "ADIT_FAILOVER_ENCLOSED";

/// Whether this process is in its own network namespace. If not, it runs the test again in one, or skips it without the
/// rights.
fn is_enclosed(test: &str) -> bool {
    if std::env::var_os(ENCLOSED).is_some() {
        return true;
    }
    let setup = "set -e; ip link set lo up; nft add table inet probe; command -v setpriv > /dev/null; exec \"$@\"";
    let enclosed = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command
            .args(["--net", "sh", "-c", setup, "sh"])
            .args(words)
            .env(ENCLOSED, "1");
        command.output().expect("a command")
    };
    let probe = enclosed(&["true"]);
    if !probe.status.success() {
        let why = String::from_utf8_lossy(&probe.stderr);
        skip(test, why.trim());
        return false;
    }
    let program = std::env::current_exe().expect("this test");
    let program = program.display().to_string();
    let output = enclosed(&[&program, "--exact", test, "--nocapture"]);
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
    false
}

/// Name of this test in the harness.
fn own_name() -> String {
    thread::current()
        .name()
        .expect("a test's thread has its name")
        .to_owned()
}

/// The agent's packets are dropped, including acknowledgements, so the server sends into a black hole.
fn no_dial_fails_while_one_of_two_agents_is_in_a_black_hole(combo: Combo) {
    if !is_enclosed(&own_name()) {
        return;
    }
    let mut stack = Stack::with(combo, 1, &[]);
    for path in [stack.dir.path(), &stack.certs.agent_key] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).expect("it is ours");
    }
    let reuid = format!("--reuid={DROPPED}");
    let agent = Agent::start_by(
        &["setpriv", &reuid, "--clear-groups"],
        combo.agent,
        "dropped",
        "dropped",
        stack.server.agent_port,
        stack.dir.path(),
        &stack.certs,
        &[],
    );
    agent.await_ready();
    stack.agents.push(agent);
    stack.await_backends(2);
    let rules = format!(
        "table inet probe {{ chain out {{ type filter hook output priority 0; meta skuid {DROPPED} oifname lo tcp dport {port} drop; }}; }}",
        port = stack.server.agent_port
    );
    let nft = Command::new("nft").arg(&rules).status();
    assert!(nft.is_ok_and(|status| status.success()), "{rules}");
    let (failed, slowest) = dials(&stack);
    println!(
        "black hole: of {DIALS} dials {} failed, the slowest took {slowest:?}",
        failed.len()
    );
    assert!(failed.is_empty(), "{failed:?}");
    assert!(slowest < SLOWEST, "{slowest:?}");
    assert!(repeated(&stack) >= 1.0, "no dial met the black hole");
}
rows!(no_dial_fails_while_one_of_two_agents_is_in_a_black_hole: adit_go_connect adit_adit_connect adit_aditlink_connect);

/// In compat mode readiness follows registration: an unready server would drop out of its Service, and lose its agents.
fn the_only_agent_that_is_stopped_is_told_of_and_leaves_readiness_alone(combo: Combo) {
    let stack = Stack::start(combo);
    stack.agents[0].process.signal(Signal::STOP);
    until("the link is silent", secs(15), || {
        (stack.server.adit_metric("links_silent", &[]) == 1.0).then_some(())
    });
    assert_eq!(stack.server.ready_status(), 200);
    stack.agents[0].process.signal(Signal::CONT);
    until("the link is heard", secs(15), || {
        (stack.server.adit_metric("links_silent", &[]) == 0.0).then_some(())
    });
    stack.assert_serves();
}
rows!(the_only_agent_that_is_stopped_is_told_of_and_leaves_readiness_alone: our_server);

/// An agent may ping a Go server only every 30 s. The kernel of a stopped server still acknowledges.
///
/// Limit (times): A silent server
fn a_stopped_server_is_told_of_within_a_minute(combo: Combo) {
    if matches!(combo.server, Maker::Upstream(_)) && !is_nightly() {
        println!("a server of Go only at night: it takes most of a minute");
        return;
    }
    let stack = Stack::start(combo);
    let [agent] = &stack.agents[..] else {
        panic!("one agent");
    };
    let is_told = || {
        let has_link = agent.metric("open_server_connections", &[]) > 0.0;
        let answer = get(agent.health_port, "/readyz?verbose");
        let is_silent = answer.is_some_and(|it| it.text.contains("[-]servers 1 silent"));
        (is_silent || !has_link).then_some(())
    };
    let began = Instant::now();
    stack.server.process.signal(Signal::STOP);
    until("the link is silent or gone", secs(55), is_told);
    println!("told of after {:?}", began.elapsed());
    stack.server.process.signal(Signal::CONT);
    let began = Instant::now();
    until("there is a link", secs(30), || {
        (agent.metric("open_server_connections", &[]) > 0.0).then_some(())
    });
    println!("back after {:?}", began.elapsed());
    stack.assert_serves();
}
rows!(a_stopped_server_is_told_of_within_a_minute: our_agent);
