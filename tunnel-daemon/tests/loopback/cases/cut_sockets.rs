//! What clients and targets see when a process ends at once: a reset, so that a truncated stream does not look complete.

use std::io::ErrorKind;
use std::time::Duration;

use adit_net::tasks::Tasks;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

use super::processes::Processes;
use crate::support::clients::{Io, Kind};
use crate::support::connect::{end, hears, say};
use crate::support::lanes::IDLE;
use crate::support::process::{Process, access_events, at_least};
use crate::support::targets;
use crate::support::wait::within;

/// Bytes that a target sends before the process ends.
const HALF: usize = 100_000;
/// Client kinds whose sockets can report a reset, and whether their tunnels use lanes.
const ROWS: [(Kind, bool); 4] = [
    (Kind::Tcp, true),
    (Kind::Tcp, false),
    (Kind::Tls, true),
    (Kind::Tls, false),
];

/// Processes with a tunnel that has carried bytes in both directions and is not finished.
struct Midway {
    processes: Processes,
    agent: Process,
    what: String,
    target: String,
    client: Box<dyn Io>,
    /// How the target's read ends.
    heard: mpsc::Receiver<Result<(), ErrorKind>>,
    _target: Tasks,
}

/// A target that sends `HALF` bytes and then reads to the end.
async fn half_way() -> (u16, Tasks, mpsc::Receiver<Result<(), ErrorKind>>) {
    let (reports, heard) = mpsc::channel(1);
    let (port, tasks) = targets::serve(move |mut stream| {
        let reports = reports.clone();
        async move {
            stream.write_all(&targets::pattern(0, HALF)).await?;
            let end = stream.read_to_end(&mut Vec::new()).await;
            let end = end.map(|_bytes| ()).map_err(|error| error.kind());
            let _test_over = reports.send(end).await;
            Ok(())
        }
    })
    .await;
    (port, tasks, heard)
}

impl Midway {
    async fn start((kind, lanes): (Kind, bool), flags: &[&str]) -> Self {
        let by_link: &[&str] = if lanes { &[] } else { &["--lanes-per-link=0"] };
        let flags = [kind.flags(), by_link, flags].concat();
        let (processes, agent) = Processes::linked(&flags, &[]).await;
        if lanes {
            at_least(processes.health, IDLE, 4.0).await;
        }
        let (port, tasks, heard) = half_way().await;
        let target = format!("127.0.0.1:{port}");
        let frontend = Some(processes.server.address("frontends"));
        let mut client = kind.open_at(&processes.world, frontend, &target).await;
        hears(&mut client, &targets::pattern(0, HALF)).await;
        say(&mut client, b"some of it").await;
        Self {
            processes,
            agent,
            what: format!("{kind:?}, lanes: {lanes}"),
            target,
            client,
            heard,
            _target: tasks,
        }
    }

    /// Asserts that client and target both see a reset.
    async fn assert_cut(mut self) {
        let (_rest, seen) = end(&mut self.client).await;
        assert_eq!(seen, Err(ErrorKind::ConnectionReset), "{}", self.what);
        let heard = within("the target's end", self.heard.recv()).await;
        let reset = Some(Err(ErrorKind::ConnectionReset));
        assert_eq!(heard, reset, "target: {}", self.what);
    }
}

/// Limit (isolation): TCP clients and targets of a killed process | see a RST, never a FIN. So they do after a second
/// SIGTERM
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_and_targets_of_a_killed_server_see_a_reset() {
    for row in ROWS {
        let mut midway = Midway::start(row, &[]).await;
        midway.processes.server.kill();
        midway.assert_cut().await;
    }
}

/// Limit (isolation): TCP clients and targets of a killed process
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_and_targets_of_a_killed_agent_see_a_reset() {
    for row in ROWS {
        let mut midway = Midway::start(row, &[]).await;
        midway.agent.kill();
        midway.assert_cut().await;
    }
}

/// The access log has an entry for each tunnel that was cut.
///
/// Limit (isolation): TCP clients and targets of a killed process
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_and_targets_of_a_server_after_a_second_sigterm_see_a_reset() {
    for row in ROWS {
        let mut midway = Midway::start(row, &["--shutdown-grace=60s"]).await;
        let server = &mut midway.processes.server;
        server.signal(Signal::TERM);
        server.logs("shutting down").await;
        server.signal(Signal::TERM);
        let status = server.wait(Duration::from_secs(20));
        assert_eq!(status.code(), Some(1), "{}", midway.what);
        let events = access_events(&server.log()).into_iter();
        let cut: Vec<_> = events.map(|event| event["destination"].clone()).collect();
        assert_eq!(cut, [midway.target.as_str()], "{}", midway.what);
        midway.assert_cut().await;
    }
}
