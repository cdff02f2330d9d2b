//! Hosts that refuse threads (pids limit): a failed start logs one error, and a running process needs no further thread.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use adit_testkit::certificates::Usage;

use super::least_privilege::deadly;
use crate::support::blocking;
use crate::support::confined::{self, Rights};
use crate::support::process::{Process, ask, at_least};
use crate::support::skip::skip_unprivileged;
use crate::support::targets;
use crate::support::wait::within;
use crate::support::world::World;

/// More threads than any start needs.
const THREADS_MAX: u64 = 64;
/// Time for a process to start or to exit on a busy machine.
const START: Duration = Duration::from_secs(15);
/// More than the 5 s between the resolver's checks of its files.
const RESOLVER_LOOKS_AGAIN: Duration = Duration::from_millis(5_500);
const RELOADED: &str = "adit_tls_reloads_total{result=\"ok\"}";

/// Starts `program` with one more thread each time until it is up. The returned process can start no further thread.
fn with_least_threads(world: &World, name: &str, args: &[String], up: &str) -> Process {
    for threads in 1..THREADS_MAX {
        // Each attempt has its own user, because the limit counts all processes of a user.
        let user = 0x4000_0000 + std::process::id() * 64 + u32::try_from(threads).expect("few");
        confined::give(world.dir.path(), user);
        confined::give(world.files.dir(), user);
        let rights = Rights {
            user: Some(user),
            threads: Some(threads),
            ..deadly(name)
        };
        let label = format!("{name}-{threads}");
        let mut process = confined::start(&label, &rights, args, world.dir.path());
        let ended: Option<ExitStatus> = blocking::until(&label, START, || {
            let ended = process.ended();
            (ended.is_some() || process.log().contains(up)).then_some(ended)
        });
        let Some(status) = ended else {
            assert!(threads > 2, "a program without threads is none");
            return process;
        };
        let log = process.log();
        assert_eq!(status.code(), Some(1), "with {threads}: {log}");
        assert!(!log.contains("panicked"), "with {threads}: {log}");
        let fatal: Vec<&str> = log
            .lines()
            .filter(|line| line.starts_with("error: "))
            .collect();
        assert_eq!(fatal.len(), 1, "with {threads}: {log}");
        assert_eq!(fatal.last().copied(), log.lines().last(), "{log}");
        assert!(
            fatal[0].contains("Resource temporarily unavailable"),
            "{log}"
        );
    }
    panic!("{name} does not start with {THREADS_MAX} threads");
}

fn may_limit(test: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skip_unprivileged(test, "only root may become a user without processes");
    }
    is_root
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_at_its_thread_limit_reloads_certificates() {
    if !may_limit("a server without a thread to spare") {
        return;
    }
    let mut world = World::start(&[]).await;
    world.stop_server(Duration::ZERO).await;
    let args = world.server_args("0");
    let server = with_least_threads(&world, "server", &args, "server is up");
    let health = server.listener("health");
    for reloads in [1.0, 2.0] {
        let names = ["127.0.0.1".to_owned()];
        let issued = world.files.issue("server", Usage::Server, &names);
        issued.expect("the files are writable");
        at_least(health, RELOADED, reloads).await;
    }
    let readiness = ask(health, "/readyz").await;
    assert!(
        readiness.ends_with("no connection to any proxy agent"),
        "{readiness}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_at_its_thread_limit_dials_by_name() {
    if !may_limit("an agent without a thread to spare") {
        return;
    }
    let world = World::start(&[]).await;
    let started = Instant::now();
    let args = world.agent_args("agent-1", world.server().agents.port(), &[]);
    let agent = with_least_threads(&world, "agent", &args, "agent started");
    let health = agent.listener("health");
    world.links(1).await;
    let (port, _echo) = targets::echo().await;
    let target = format!("localhost:{port}");
    within("dials by name", async {
        while started.elapsed() < RESOLVER_LOOKS_AGAIN {
            world.assert_serves(&target).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await;
    world.assert_serves(&target).await;
    assert!(ask(health, "/readyz").await.ends_with("ok"));
}
