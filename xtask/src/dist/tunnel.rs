//! A server, an agent and a target: their probes answer, bytes go through the tunnel and back, and both end in order.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::Signal;

use super::{Arch, TOOL};
use crate::stack::{Ports, Process, certificates, echo, echo_target};
use crate::steps::run_command;
use crate::workspace::fresh;

/// Longest time for an end: longer than the grace for open tunnels.
const END: Duration = Duration::from_secs(40);
/// How long an agent that drains without a limit is watched.
const DRAIN: Duration = Duration::from_secs(1);

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
    certificates(place.pki, &pki, &["one"])?;
    let (server_ports, agent_ports) = (Ports::free()?, Ports::free()?);
    let frontend = place.sockets.0.join("frontend.sock");
    let server_flags = server_ports.server(&pki, &frontend, place.is_compat);
    let mut agent_flags = agent_ports.agent(&pki, "one", place.is_compat);
    agent_flags.push("--proxy-server-host=127.0.0.1".to_owned());
    agent_flags.push(format!("--proxy-server-port={}", server_ports.agents));
    let mut command = (place.server)(&strs(&server_flags))?;
    let mut server = Process::start("the server", &mut command, None)?;
    let server_start = server.until_200(server_ports.health, "/healthz")?;
    let mut command = (place.agent)(&strs(&agent_flags))?;
    let mut agent = Process::start("the agent", &mut command, None)?;
    let agent_start = agent.until_200(agent_ports.health, "/readyz")?;
    server.until_200(server_ports.health, "/readyz")?;
    (place.inspect)(server.running.id())?;
    (place.inspect)(agent.running.id())?;
    let frontend = place.sockets.1.join("frontend.sock");
    echo(&frontend, echo_target()?, b"through the tunnel and back")?;
    end(&mut agent, place.is_compat)?;
    end(&mut server, false)?;
    Ok(Times {
        server: server_start,
        agent: agent_start,
    })
}

fn strs(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// Sends SIGTERM, and waits for an orderly end. An agent with upstream's flags drains until a second signal, as upstream does.
fn end(process: &mut Process, drains_on: bool) -> anyhow::Result<()> {
    process.running.signal(Signal::TERM)?;
    if drains_on {
        process.check(DRAIN).context("it does not drain")?;
        process.running.signal(Signal::TERM)?;
    }
    let status = process.running.ends_within(END)?;
    let status = status.context("server or agent does not end")?;
    ensure!(status.success(), "server or agent ended with {status}");
    Ok(())
}
