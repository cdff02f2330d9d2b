//! The relay's engine and the reason for it: the log, the health port and the metrics of server and agent agree, and so does
//! the access event of each tunnel.

use adit_relay::{Basis, Choice, Preference, probe};
use serde_json::Value;

use super::processes::Processes;
use crate::support::process::{Process, ask, at_least, json_lines, scrape};
use crate::support::skip::skip_unprivileged;
use crate::support::wait::until;
use crate::support::{connect, targets};

const IDLE: &str = "adit_lanes{state=\"idle\"}";
/// Start of the warning about plaintext lanes.
const CLEAR_TEXT: &str = "--lane-security=plaintext: lanes carry tunnels in clear text";
/// Fields of an access event that say how its bytes moved.
const MOVED: [&str; 5] = ["path", "engine", "driver", "driver_reason", "end"];

/// The reason as metrics and access events spell it.
fn word(basis: Basis) -> &'static str {
    match basis {
        Basis::Asked => "asked",
        Basis::Measured => "measured",
        Basis::Forbidden => "forbidden",
        Basis::Kernel => "kernel",
        Basis::Resources => "resources",
        Basis::Unknown => "other",
    }
}

/// Log events whose message starts like this.
fn events(process: &Process, message: &str) -> Vec<Value> {
    let log = process.log();
    let events = json_lines(&log);
    events
        .filter(|event| {
            let said = event["message"].as_str();
            said.is_some_and(|said| said.starts_with(message))
        })
        .collect()
}

/// Starts a server and an agent with these flags, and asserts that both report this engine everywhere. `used`: tunnels on
/// plaintext lanes may use the engine, and both programs warn about these lanes.
async fn told(flags: &[&str], choice: &Choice, used: bool) -> (Processes, Process) {
    let processes = Processes::start(flags).await;
    let agent = processes.agent("a", flags);
    at_least(processes.health, IDLE, 4.0).await;
    let name = choice.engine.name();
    for (process, health) in [
        (&processes.server, processes.health),
        (&agent, agent.address("health")),
    ] {
        let [line] = &events(process, "relay engine")[..] else {
            panic!("one line: {}", process.log());
        };
        assert_eq!(line["engine"], name);
        assert_eq!(line["reason"], choice.reason.as_str());
        assert_eq!(line["used"], used);
        let warnings = events(process, CLEAR_TEXT);
        assert_eq!(warnings.len(), usize::from(used), "{}", process.log());
        assert!(warnings.iter().all(|event| event["level"] == "WARN"));
        let ready = ask(health, "/readyz?verbose").await;
        let told = format!("[+]relay-engine {name}: {}\n", choice.reason);
        assert!(ready.contains(" 200 ") && ready.contains(&told), "{ready}");
        let text = scrape(health).await;
        let series: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("adit_relay_tunnels"))
            .collect();
        let expected = format!("adit_relay_tunnels{{driver=\"{name}\"}} 0");
        assert_eq!(
            series,
            if used {
                vec![expected.as_str()]
            } else {
                vec![]
            }
        );
    }
    (processes, agent)
}

/// Opens and closes a tunnel, and returns its access event.
async fn access_event(processes: &Processes) -> Value {
    let (target, _echo) = targets::local_echo().await;
    let mut stream = connect::open(&processes.world.connect(), &target).await;
    connect::echo_to_the_end(&mut stream, b"there and back").await;
    drop(stream);
    let ended = || events(&processes.server, "tunnel ended");
    until("an access event", || ended().len() == 1).await;
    let event = ended().remove(0);
    assert_eq!(event["target"], "adit::access");
    assert_eq!(event["destination"], target);
    assert_eq!(event["bytes_to_target"], 14);
    assert_eq!(event["bytes_to_client"], 14);
    event
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_and_its_reason_are_in_logs_readyz_and_access_events() {
    const PLAINTEXT: &str = "--lane-security=plaintext";
    for (preference, flags) in [
        (Preference::Auto, &[PLAINTEXT][..]),
        (Preference::Epoll, &[PLAINTEXT, "--relay-engine=epoll"]),
        (Preference::IoUring, &[PLAINTEXT, "--relay-engine=io-uring"]),
    ] {
        let choice = match probe(preference) {
            Ok(choice) => choice,
            Err(why) => {
                skip_unprivileged(&format!("a relay by {preference:?}"), why);
                continue;
            }
        };
        let (processes, _agent) = told(flags, &choice, true).await;
        if preference != Preference::Auto {
            assert_eq!(choice.basis, Basis::Asked);
        }
        let event = access_event(&processes).await;
        let (driver, why) = (choice.engine.name(), word(choice.basis));
        let expected = ["raw-lane", "copy", driver, why, "clean"].map(Some);
        assert_eq!(
            MOVED.map(|field| event[field].as_str()),
            expected,
            "{event}"
        );
    }
}

/// The most common setup: lanes have TLS, and no tunnel uses the relay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unused_engine_is_reported_as_unused() {
    let choice = probe(Preference::Epoll).expect("always there");
    let (processes, _agent) = told(&["--relay-engine=epoll"], &choice, false).await;
    let event = access_event(&processes).await;
    let expected = ["lane", "copy", "task", "framed", "clean"].map(Some);
    assert_eq!(
        MOVED.map(|field| event[field].as_str()),
        expected,
        "{event}"
    );
}
