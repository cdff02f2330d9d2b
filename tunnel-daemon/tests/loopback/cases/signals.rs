//! Signals that do not end a program, sent to the binary.

use std::fs;
use std::process::Command;

use adit::status::Socket;
use adit::status::model::{Log, Status};
use rustix::process::Signal;

use super::processes::Processes;
use crate::support::process::{Process, metric, program};
use crate::support::wait::until;
use crate::support::world::World;
use crate::support::{connect, targets};

const LINKS: &str = "adit_links{peer=\"adit\"}";
const READING: &str = "SIGHUP received: reading files again";

/// Starts the binary with the SIGHUP disposition that `env` sets, whatever these tests inherited.
fn start(world: &World, hangup: &str, name: &str, args: &[String]) -> Process {
    let mut command = Command::new("env");
    command.args([hangup, "--"]).arg(program()).args(&args[1..]);
    Process::start_command(name, command, world.dir.path())
}

async fn logs(process: &Process, text: &str, times: usize) {
    let what = format!("{times} times {text:?}");
    until(&what, || process.log().matches(text).count() == times).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signals_reread_files_and_switch_debug_logging_and_end_neither_program() {
    let (target, _echo) = targets::local_echo().await;
    let admin = "--admin-socket={certs}/admin.sock";
    let mut world = World::start(&["--log-format=json", admin]).await;
    world.stop_server(std::time::Duration::ZERO).await;
    let socket = world.admin_socket();
    let default = "--default-signal=HUP";
    let server = start(&world, default, "server", &world.server_args("0"));
    let (agents, health) = (server.address("agents"), server.address("health"));
    let of_agent = |flags: &[&str]| world.agent_args("a", agents.port(), flags);
    let agent = start(&world, default, "a", &of_agent(&["--log-format=json"]));
    metric(health, LINKS, 1.0).await;
    let mut stream = connect::open(&world.connect(), &target).await;

    for process in [&server, &agent] {
        process.signal(Signal::HUP);
        logs(process, READING, 1).await;
        process.signal(Signal::USR2);
        logs(process, "SIGUSR2 received: it has no effect", 1).await;
        assert!(!process.log().contains("\"level\":\"DEBUG\""));
        process.signal(Signal::USR1);
        logs(
            process,
            "\"message\":\"debug logging is on\",\"by\":\"SIGUSR1\",\"minutes\":15",
            1,
        )
        .await;
    }
    connect::echo(&mut stream, b"after all of them").await;
    let mut other = connect::open(&world.connect(), &target).await;
    connect::echo(&mut other, b"debugged").await;
    drop(other);
    for process in [&server, &agent] {
        process.logs("\"level\":\"DEBUG\"").await;
    }

    let asked = Socket::new(&socket);
    let status: Status = asked.ask("/v1/status").expect("an answer");
    assert_eq!(status.log.level, "debug");
    assert!(status.log.debug_seconds_left.is_some_and(|left| left > 800));
    let off: Log = asked.change("/v1/log?debug=off").expect("an answer");
    let off = off.log;
    assert_eq!((off.level.as_str(), off.debug_seconds_left), ("info", None));
    logs(
        &server,
        "\"message\":\"debug logging is off\",\"by\":\"the admin socket\"",
        1,
    )
    .await;
    let on: Log = asked.change("/v1/log?debug=on").expect("an answer");
    assert_eq!(on.log.level, "debug");
    let error = asked.change::<Log>("/v1/log?debug=2").unwrap_err();
    assert!(
        format!("{error:#}").contains("write debug=on or debug=off"),
        "{error:#}"
    );

    // An agent's token is in no log line, either.
    let token = world.dir.path().join("token");
    fs::write(
        &token,
        "eyJhbGciOiJub25lIn0.very-secret-claims.very-secret-signature",
    )
    .unwrap();
    let flag = format!("--token-path={}", token.display());
    let args = of_agent(&["--log-format=json", "--log-level=debug", flag.as_str()]);
    let with_token = start(&world, default, "b", &args);
    metric(health, LINKS, 2.0).await;
    for process in [&server, &agent, &with_token] {
        assert!(!process.log().contains("very-secret"), "{}", process.log());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hangup_that_was_ignored_at_the_start_stays_ignored() {
    let processes = Processes::start(&[]).await;
    let args = processes
        .world
        .agent_args("a", processes.agents.port(), &["--log-format=json"]);
    let agent = start(&processes.world, "--ignore-signal=HUP", "nohup", &args);
    processes.links(1.0).await;
    agent.signal(Signal::HUP);
    agent.signal(Signal::USR1);
    logs(&agent, "debug logging is on", 1).await;
    assert!(!agent.log().contains(READING));
}
