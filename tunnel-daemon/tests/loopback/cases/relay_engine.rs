//! What drives the relay, and why: the same in the log, on the health port and in the metrics of server and agent, and in the
//! access event of each tunnel.

use adit_relay::{Choice, Preference, probe};
use serde_json::Value;

use super::processes::Processes;
use crate::support::process::{Process, ask, at_least, value};
use crate::support::skip::skip;
use crate::support::wait::until;
use crate::support::{connect, targets};

const IDLE: &str = "adit_lanes{state=\"idle\"}";
const ENGINES: [&str; 2] = ["epoll", "io-uring"];
/// How the warning about lanes in clear text begins.
const CLEAR_TEXT: &str = "lanes go on in clear text";

/// Events of a log whose message begins so.
fn events(process: &Process, message: &str) -> Vec<Value> {
    let log = process.log();
    let lines = log.lines();
    let events = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events
        .filter(|event| {
            let said = event["message"].as_str();
            said.is_some_and(|said| said.starts_with(message))
        })
        .collect()
}

/// Server and agent with these flags say everywhere that this is their engine; `used`: by some of their tunnels, on lanes in
/// clear text, about which both warn.
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
        for engine in ENGINES {
            let gauge = value(health, &format!("adit_relay_engine{{engine=\"{engine}\"}}")).await;
            assert_eq!(gauge, f64::from(u8::from(engine == name)), "{engine}");
        }
    }
    (processes, agent)
}

/// The access event of a tunnel from its beginning to its end.
async fn access_event(processes: &Processes) -> Value {
    let (port, _target) = targets::echo().await;
    let target = format!("127.0.0.1:{port}");
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
async fn the_engine_and_its_reason_are_told_wherever_they_are_looked_for() {
    const PLAINTEXT: &str = "--lane-security=plaintext";
    for (preference, flags) in [
        (Preference::Auto, &[PLAINTEXT][..]),
        (Preference::Epoll, &[PLAINTEXT, "--relay-engine=epoll"]),
        (Preference::IoUring, &[PLAINTEXT, "--relay-engine=io-uring"]),
    ] {
        let choice = match probe(preference) {
            Ok(choice) => choice,
            Err(why) => {
                assert!(std::env::var_os("CI").is_none(), "{why}");
                skip(&format!("a relay by {preference:?}"), why);
                continue;
            }
        };
        let (processes, _agent) = told(flags, &choice, true).await;
        let event = access_event(&processes).await;
        let moved = ["path", "engine", "driver", "end"].map(|field| event[field].as_str());
        let expected = ["raw-lane", "copy", choice.engine.name(), "clean"].map(Some);
        assert_eq!(moved, expected, "{event}");
    }
}

/// As most run it: lanes have TLS, and no tunnel is the relay's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_without_a_use_is_told_as_such() {
    let choice = probe(Preference::Epoll).expect("always there");
    let (processes, _agent) = told(&["--relay-engine=epoll"], &choice, false).await;
    let event = access_event(&processes).await;
    let moved = ["path", "engine", "driver", "end"].map(|field| event[field].as_str());
    assert_eq!(
        moved,
        ["lane", "copy", "task", "clean"].map(Some),
        "{event}"
    );
}
