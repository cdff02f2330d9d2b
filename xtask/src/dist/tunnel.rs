//! A server, an agent and a target: their probes answer, bytes go through the tunnel and back, and both end in order.

use std::fmt;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::{Arch, TOOL};
use crate::monitoring::connect;
use crate::perf::{free_port, http_get};
use crate::steps::{Running, run_command};
use crate::workspace::fresh;

/// Longest time until a program answers: an emulator on a busy host is slow.
const START: Duration = Duration::from_secs(60);
/// Longest time for an end: longer than the grace for open tunnels.
const END: Duration = Duration::from_secs(40);
/// How long an agent that drains without a limit is watched.
const DRAIN: Duration = Duration::from_secs(1);
/// How often a program is asked whether it is there: the precision of start times.
const ASK: Duration = Duration::from_millis(2);
/// What goes through the tunnel.
const BYTES: &[u8] = b"through the tunnel and back";

/// How programs are started, and where they find their files.
pub(super) struct Place<'a> {
    /// A command of each program, by its arguments.
    pub(super) pki: &'a dyn Fn(&[&str]) -> anyhow::Result<Command>,
    pub(super) server: &'a dyn Fn(&[&str]) -> anyhow::Result<Command>,
    pub(super) agent: &'a dyn Fn(&[&str]) -> anyhow::Result<Command>,
    /// Where certificates are, as the programs see it.
    pub(super) certificates: PathBuf,
    /// A folder for sockets as the server sees it, and as we do.
    pub(super) sockets: (PathBuf, PathBuf),
    /// Whether the programs take upstream's flags.
    pub(super) is_compat: bool,
    /// Looks at a process that serves.
    pub(super) inspect: &'a dyn Fn(u32) -> anyhow::Result<()>,
}

/// From exec to the first answer 200.
pub(super) struct Times {
    server: Duration,
    agent: Duration,
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "from start to /healthz of the server {} ms, to /readyz of the agent {} ms",
            self.server.as_millis(),
            self.agent.as_millis()
        )
    }
}

/// Runs a program as it is, on this host.
///
/// # Errors
/// As [`run`].
pub(super) fn plain(arch: Arch, program: &Path, trial: &Path) -> anyhow::Result<()> {
    let program = fs::canonicalize(program)?;
    let folder = trial.join("plain");
    fresh(&folder)?;
    let folder = fs::canonicalize(folder)?;
    run_command(arch.run(&program).arg("--version"), TOOL)?;
    let command = |first: &'static [&'static str]| {
        let program = &program;
        move |args: &[&str]| {
            let mut command = arch.run(program);
            command.args(first).args(args);
            Ok(command)
        }
    };
    // Sockets have short names: the path of a socket has 107 bytes at most.
    let sockets = tempfile::tempdir()?;
    let times = run(&Place {
        pki: &command(&["pki"]),
        server: &command(&["server"]),
        agent: &command(&["agent"]),
        certificates: folder,
        sockets: (sockets.path().to_path_buf(), sockets.path().to_path_buf()),
        is_compat: false,
        inspect: &|_process| Ok(()),
    })?;
    println!("{}: {times}", arch.name());
    Ok(())
}

/// Makes certificates, starts both, sends bytes there and back, and ends both.
///
/// # Errors
/// Something does not answer, gives other bytes, or ends with another code than 0.
pub(super) fn run(place: &Place<'_>) -> anyhow::Result<Times> {
    let pki = place.certificates.join("pki").display().to_string();
    for args in [
        vec!["init", "--dir", &pki],
        vec!["server", "--dir", &pki, "127.0.0.1", "localhost"],
        vec!["agent", "--dir", &pki, "one"],
    ] {
        let mut command = (place.pki)(&args)?;
        run_command(command.stdout(Stdio::null()), TOOL)
            .with_context(|| format!("make certificates: {args:?}"))?;
    }
    let file = |name: &str| format!("{pki}/{name}");
    let (agents, server_health, agent_health) = (free_port()?, free_port()?, free_port()?);
    let (server_admin, agent_admin) = (free_port()?, free_port()?);
    let socket = place.sockets.0.join("frontend.sock").display().to_string();
    let mut server_args = vec![
        format!("--cluster-cert={}", file("server-cluster.crt")),
        format!("--cluster-key={}", file("server-cluster.key")),
        format!("--cluster-ca-cert={}", file("agents-ca.crt")),
        format!("--agent-port={agents}"),
        format!("--health-port={server_health}"),
        format!("--admin-port={server_admin}"),
    ];
    let mut agent_args = vec![
        "--proxy-server-host=127.0.0.1".to_owned(),
        format!("--proxy-server-port={agents}"),
        format!("--ca-cert={}", file("agents-ca.crt")),
        format!("--agent-cert={}", file("agent-one.crt")),
        format!("--agent-key={}", file("agent-one.key")),
        format!("--health-server-port={agent_health}"),
        format!("--admin-server-port={agent_admin}"),
    ];
    if place.is_compat {
        server_args.extend([
            "--mode=http-connect".to_owned(),
            format!("--uds-name={socket}"),
            "--server-port=0".to_owned(),
        ]);
    } else {
        server_args.push(format!("--frontend=http-connect=unix:{socket}"));
        agent_args.push("--allow-target=127.0.0.0/8".to_owned());
    }
    let (mut server, server_start) = started(
        "server",
        (place.server)(&strs(&server_args))?,
        server_health,
        "/healthz",
    )?;
    let (mut agent, agent_start) = started(
        "agent",
        (place.agent)(&strs(&agent_args))?,
        agent_health,
        "/readyz",
    )?;
    let since = Instant::now();
    while !answers(server_health, "/readyz") {
        ensure!(since.elapsed() < START, "the server has no agent");
        sleep(ASK);
    }
    (place.inspect)(server.id())?;
    (place.inspect)(agent.id())?;
    echo(&place.sockets.1.join("frontend.sock"))?;
    ended("agent", &mut agent, place.is_compat)?;
    ended("server", &mut server, false)?;
    Ok(Times {
        server: server_start,
        agent: agent_start,
    })
}

fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// Starts a program, and waits until a probe is answered with 200.
fn started(
    name: &str,
    mut command: Command,
    port: u16,
    probe: &str,
) -> anyhow::Result<(Running, Duration)> {
    let since = Instant::now();
    let child: Child = command
        .stdin(Stdio::null())
        .spawn()
        .with_context(|| format!("start the {name}"))?;
    let mut running = Running::of(child);
    loop {
        if answers(port, probe) {
            return Ok((running, since.elapsed()));
        }
        if let Some(status) = running.ends_within(ASK)? {
            bail!("the {name} ended with {status}");
        }
        ensure!(
            since.elapsed() < START,
            "the {name} does not answer {probe} with 200"
        );
    }
}

fn answers(port: u16, probe: &str) -> bool {
    let answer = http_get(&format!("127.0.0.1:{port}"), probe);
    answer.is_ok_and(|text| text.split(' ').nth(1) == Some("200"))
}

/// Sends bytes through a frontend of HTTP CONNECT to a target that sends them back.
fn echo(socket: &Path) -> anyhow::Result<()> {
    let target = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let target_at = target.local_addr()?;
    std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = target.accept()?;
        let mut bytes = [0; 1024];
        loop {
            let count = stream.read(&mut bytes)?;
            if count == 0 {
                return Ok(());
            }
            stream.write_all(&bytes[..count])?;
        }
    });
    let (status, mut stream) =
        connect(socket, target_at).with_context(|| format!("connect to {}", socket.display()))?;
    ensure!(status == 200, "CONNECT is answered with {status}");
    stream.write_all(BYTES)?;
    let mut answer = vec![0; BYTES.len()];
    stream.read_exact(&mut answer)?;
    ensure!(answer == BYTES, "the target's bytes come back changed");
    Ok(())
}

/// Sends SIGTERM, and waits for an orderly end. An agent with upstream's flags drains until a second signal, as upstream does.
fn ended(name: &str, running: &mut Running, drains_on: bool) -> anyhow::Result<()> {
    let process = i32::try_from(running.id()).ok().and_then(Pid::from_raw);
    let process = process.context("a process")?;
    kill_process(process, Signal::TERM)?;
    if drains_on {
        let status = running.ends_within(DRAIN)?;
        ensure!(status.is_none(), "the {name} does not drain: {status:?}");
        kill_process(process, Signal::TERM)?;
    }
    let status = running.ends_within(END)?;
    let status = status.with_context(|| format!("the {name} does not end"))?;
    ensure!(status.success(), "the {name} ended with {status}");
    Ok(())
}
