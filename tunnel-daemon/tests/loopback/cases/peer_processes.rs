//! Servers that know each other, as processes: killed, stopped and continued while clients dial through a third.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use super::processes::Processes;
use super::silent_agents::stop;
use crate::support::peers::{PeerFiles, asker, linked};
use crate::support::process::Process;
use crate::support::wait::until;
use crate::support::{connect, targets};

/// Slowest dial while a path exists: a server counts as silent after four seconds, and dials are hedged long before.
const SLOWEST: Duration = Duration::from_secs(4);

/// Two servers with the same agent, and a third without, which asks both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_new_dial_fails_while_one_of_two_holders_is_frozen_or_killed() {
    let files = PeerFiles::new();
    let of_a = files.flags("a");
    let mut flags: Vec<&str> = of_a.iter().map(String::as_str).collect();
    flags.extend([
        "--peer-bind=127.0.0.1:0",
        "--server-id=a",
        "--server-count=2",
    ]);
    let a = Processes::start(&flags).await;
    let mut args = a.world.other_args("0", ".b");
    args.retain(|arg| !arg.starts_with("--peer-") && !arg.starts_with("--server-"));
    args.extend(files.flags("b"));
    args.extend(
        [
            "--peer-bind=127.0.0.1:0",
            "--server-id=b",
            "--server-count=2",
        ]
        .map(str::to_owned),
    );
    let mut b = Process::start("b", &args, a.world.dir.path());
    let other = format!("--proxy-server-host={}", b.address("agents"));
    let _agent = a.agent("agent-1", &[&other]);
    a.links(1.0).await;
    let peers = [a.server.address("peers"), b.address("peers")];
    let front = asker(&a.world, &files, "front", &peers, &["--server-count=1"]).await;
    linked(&front, 2).await;
    until("both have the agent", || front.holders_of_any() == 2).await;
    let (target, _echo) = targets::local_echo().await;
    let path = a.world.dir.path().join("connect.front");
    let dials = |count: usize| {
        let (path, target) = (path.clone(), target.clone());
        async move {
            let mut slowest = Duration::ZERO;
            for _dial in 0..count {
                let since = Instant::now();
                let mut stream = connect::open(&path, &target).await;
                connect::echo(&mut stream, b"there is a path").await;
                slowest = slowest.max(since.elapsed());
            }
            assert!(slowest <= SLOWEST, "{slowest:?}");
        }
    };
    dials(20).await;
    // A tunnel that it opened before it stood still would neither fail nor work.
    stop(&a.server).await;
    dials(40).await;
    a.server.signal(Signal::CONT);
    until("it answers again", || front.silent_peers() == 0).await;
    dials(20).await;
    b.kill();
    dials(40).await;
    until("its keys are gone", || front.holders_of_any() == 1).await;
}
