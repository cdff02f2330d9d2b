//! Servers, agents and targets that a check starts: certificates, flags, probes, and tunnels through them.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context as _, bail, ensure};

use xtask_kit::net::{free_port, http_get};

use crate::steps::{MINUTES_5, Running, output_of};

/// Longest time until a program answers: an emulator on a busy host is slow.
const START: Duration = Duration::from_secs(60);
/// How often a program is asked whether it is there: the precision of start times.
const ASK: Duration = Duration::from_millis(2);
/// Longest wait for a byte.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest head of an answer.
const HEAD_MAX: usize = 4096;

/// A program that serves. It is killed on drop.
pub(crate) struct Process {
    name: &'static str,
    pub(crate) running: Running,
    /// Where it logs, unless it has our standard error.
    log: Option<PathBuf>,
}

impl Process {
    /// Starts a program; with a log in this folder, if there is one.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(
        name: &'static str,
        command: &mut Command,
        logs: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let log = logs.map(|folder| folder.join(format!("{name}.log")));
        if let Some(log) = &log {
            command.stderr(fs::File::create(log)?);
        }
        let child = command.stdin(Stdio::null()).spawn();
        let running = Running::of(child.with_context(|| format!("start {name}"))?);
        Ok(Self { name, running, log })
    }

    /// Whether it still runs after this time.
    ///
    /// # Errors
    /// It has ended; with the last line of its log.
    pub(crate) fn check(&mut self, within: Duration) -> anyhow::Result<()> {
        if let Some(status) = self.running.ends_within(within)? {
            let log = self.log.as_ref().map(fs::read_to_string);
            let log = log.and_then(Result::ok).unwrap_or_default();
            let line = log.lines().next_back().unwrap_or_default();
            bail!("{} ended with {status}: {line}", self.name);
        }
        Ok(())
    }

    /// Time until it is true.
    ///
    /// # Errors
    /// The program ends before that, or it takes too long.
    pub(crate) fn until(&mut self, what: &str, is: impl Fn() -> bool) -> anyhow::Result<Duration> {
        let since = Instant::now();
        while !is() {
            self.check(ASK)?;
            ensure!(
                since.elapsed() < START,
                "{}: not in time: {what}",
                self.name
            );
        }
        Ok(since.elapsed())
    }

    /// Time until a probe is answered with 200.
    ///
    /// # Errors
    /// As [`Process::until`].
    pub(crate) fn until_200(&mut self, port: u16, probe: &str) -> anyhow::Result<Duration> {
        self.until(probe, || {
            let answer = http_get(&format!("127.0.0.1:{port}"), probe);
            answer.is_ok_and(|text| text.split(' ').nth(1) == Some("200"))
        })
    }
}

/// Makes the certificates of a server on this host and of agents, with a command of `adit pki`. Those of the demo expire within
/// days.
///
/// # Errors
/// The command fails.
pub(crate) fn certificates(
    pki: &dyn Fn(&[&str]) -> anyhow::Result<Command>,
    folder: &str,
    agents: &[&str],
) -> anyhow::Result<()> {
    let agents = agents.iter().map(|name| vec!["agent", name]);
    let server = vec!["server", "127.0.0.1", "localhost"];
    for words in [vec!["init"], server].into_iter().chain(agents) {
        let mut command = pki(&[&words[..], &["--dir", folder]].concat())?;
        output_of(&mut command, MINUTES_5)
            .with_context(|| format!("make certificates: {words:?}"))?;
    }
    Ok(())
}

/// Ports of a server, or of an agent, which has none for agents.
pub(crate) struct Ports {
    pub(crate) agents: u16,
    pub(crate) health: u16,
    pub(crate) admin: u16,
}

impl Ports {
    /// # Errors
    /// None is free.
    pub(crate) fn free() -> anyhow::Result<Self> {
        let (agents, health, admin) = (free_port()?, free_port()?, free_port()?);
        Ok(Self {
            agents,
            health,
            admin,
        })
    }

    /// Flags of a server with a frontend of HTTP CONNECT on a socket, by upstream's names if `is_compat`.
    pub(crate) fn server(&self, pki: &str, frontend: &Path, is_compat: bool) -> Vec<String> {
        let Self {
            agents,
            health,
            admin,
        } = self;
        let frontend = frontend.display();
        let mut flags = vec![
            "--agent-bind-address=127.0.0.1".to_owned(),
            format!("--agent-port={agents}"),
            "--health-bind-address=127.0.0.1".to_owned(),
            format!("--health-port={health}"),
            format!("--admin-port={admin}"),
            format!("--cluster-cert={pki}/server-cluster.crt"),
            format!("--cluster-key={pki}/server-cluster.key"),
            format!("--cluster-ca-cert={pki}/agents-ca.crt"),
        ];
        if is_compat {
            flags.extend(["--mode=http-connect", "--server-port=0"].map(str::to_owned));
            flags.push(format!("--uds-name={frontend}"));
        } else {
            flags.push(format!("--frontend=http-connect=unix:{frontend}"));
        }
        flags
    }

    /// Flags of an agent, but those that name its servers.
    pub(crate) fn agent(&self, pki: &str, name: &str, is_compat: bool) -> Vec<String> {
        let mut flags = vec![
            "--health-server-host=127.0.0.1".to_owned(),
            format!("--health-server-port={}", self.health),
            format!("--admin-server-port={}", self.admin),
            format!("--ca-cert={pki}/agents-ca.crt"),
            format!("--agent-cert={pki}/agent-{name}.crt"),
            format!("--agent-key={pki}/agent-{name}.key"),
        ];
        if !is_compat {
            flags.push("--allow-target=127.0.0.0/8".to_owned());
        }
        flags
    }
}

/// Serves each connection on a thread. The listener lives as long as the process.
///
/// # Errors
/// No port is free.
pub(crate) fn target(serve: fn(TcpStream) -> io::Result<()>) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // An error is the end of its tunnel.
            thread::spawn(move || serve(stream).ok());
        }
    });
    Ok(address)
}

/// A target that sends back what it receives.
///
/// # Errors
/// As [`target`].
pub(crate) fn echo_target() -> anyhow::Result<SocketAddr> {
    target(|mut stream| {
        let mut writer = stream.try_clone()?;
        io::copy(&mut stream, &mut writer).map(drop)
    })
}

/// Sends bytes through a tunnel to an echo target, and compares what comes back.
///
/// # Errors
/// There is no tunnel, or other bytes come back.
pub(crate) fn echo(frontend: &Path, target: SocketAddr, bytes: &[u8]) -> anyhow::Result<()> {
    let (status, mut stream) =
        connect(frontend, target).with_context(|| format!("connect to {}", frontend.display()))?;
    ensure!(status == 200, "CONNECT is answered with {status}");
    stream.write_all(bytes)?;
    let mut back = vec![0; bytes.len()];
    stream.read_exact(&mut back)?;
    ensure!(back == bytes, "the target's bytes come back changed");
    Ok(())
}

/// The status of a CONNECT, and the tunnel behind it.
///
/// # Errors
/// There is no answer, or none of HTTP.
pub(crate) fn connect(frontend: &Path, target: SocketAddr) -> anyhow::Result<(u16, UnixStream)> {
    let mut stream = UnixStream::connect(frontend)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"
    )?;
    let mut head = Vec::new();
    // Byte by byte: what follows belongs to the tunnel.
    while !head.ends_with(b"\r\n\r\n") && head.len() < HEAD_MAX {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    let head = String::from_utf8_lossy(&head);
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    Ok((status.context("a status")?, stream))
}
