//! Server, agent and target of one measurement, as processes that end with it.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

/// Whose programs are measured.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Maker {
    Upstream,
    Adit,
}

/// Dialect between client and server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mode {
    Grpc,
    HttpConnect,
}

impl Maker {
    /// Name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Upstream => "upstream",
            Self::Adit => "adit",
        }
    }
}

impl Mode {
    /// Spelling on command lines.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::HttpConnect => "http-connect",
        }
    }
}

/// A running server with one agent and targets. Dropping it ends them and removes their directory.
pub(crate) struct Stack {
    server: Running,
    agent: Running,
    _target: Running,
    ports: String,
    mode: Mode,
    dir: PathBuf,
}

/// A child that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.dir).ok();
    }
}

/// Longest wait for a server to see its agent.
const START_LIMIT: Duration = Duration::from_secs(20);

impl Stack {
    /// Starts everything and waits until the server has its agent.
    pub(crate) fn start(
        load: &Path,
        server: (PathBuf, Vec<String>),
        agent: (PathBuf, Vec<String>),
        mode: Mode,
    ) -> anyhow::Result<Self> {
        // Short, because a unix socket's path may not exceed 108 bytes.
        let dir = std::env::temp_dir().join(format!("adit-perf-{}", std::process::id()));
        fs::remove_dir_all(&dir).ok();
        fs::create_dir_all(&dir)?;
        let status = Command::new(load).arg("certs").arg(&dir).status()?;
        ensure!(
            status.success(),
            "the load tool could not write certificates"
        );
        let (target, ports) = start_target(load)?;
        let [agent_port, health_port, admin_port] = [free_port()?, free_port()?, free_port()?];
        let at = |name: &str| dir.join(name).display().to_string();
        let server = start(
            &dir,
            "server",
            server,
            &[
                format!("--mode={}", mode.flag()),
                format!("--uds-name={}", at("s.sock")),
                "--server-port=0".to_owned(),
                format!("--agent-port={agent_port}"),
                format!("--health-port={health_port}"),
                format!("--admin-port={admin_port}"),
                format!("--cluster-cert={}", at("server.pem")),
                format!("--cluster-key={}", at("server.key")),
                format!("--cluster-ca-cert={}", at("ca.pem")),
                "--v=0".to_owned(),
            ],
        )?;
        let agent = start(
            &dir,
            "agent",
            agent,
            &[
                "--proxy-server-host=127.0.0.1".to_owned(),
                format!("--proxy-server-port={agent_port}"),
                format!("--ca-cert={}", at("ca.pem")),
                format!("--agent-cert={}", at("agent.pem")),
                format!("--agent-key={}", at("agent.key")),
                format!("--health-server-port={}", free_port()?),
                format!("--admin-server-port={}", free_port()?),
                "--sync-interval=200ms".to_owned(),
                "--sync-interval-cap=1s".to_owned(),
                "--v=0".to_owned(),
            ],
        )?;
        let stack = Self {
            server,
            agent,
            _target: target,
            ports,
            mode,
            dir,
        };
        let end = Instant::now() + START_LIMIT;
        while !is_ready(health_port) {
            if Instant::now() > end {
                bail!(
                    "the server did not get ready within {START_LIMIT:?}{}",
                    stack.logs()
                );
            }
            thread::sleep(Duration::from_millis(30));
        }
        Ok(stack)
    }

    /// The load tool, pointed at this stack.
    pub(crate) fn load(&self, load: &Path) -> Command {
        let mut command = Command::new(load);
        command.arg("run").args([
            format!("--mode={}", self.mode.flag()),
            format!("--uds={}", self.dir.join("s.sock").display()),
            format!("--ports={}", self.ports),
            format!("--server-pid={}", self.server.0.id()),
            format!("--agent-pid={}", self.agent.0.id()),
        ]);
        command
    }

    /// The last lines of both logs, for an error message.
    pub(crate) fn logs(&self) -> String {
        let mut text = String::new();
        for name in ["server", "agent"] {
            let log = fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            text.push_str(&format!(
                "\n--- {name}\n{}",
                lines[lines.len().saturating_sub(10)..].join("\n")
            ));
        }
        text
    }
}

fn start(
    dir: &Path,
    name: &str,
    program: (PathBuf, Vec<String>),
    flags: &[String],
) -> anyhow::Result<Running> {
    let (path, mut args) = program;
    args.extend_from_slice(flags);
    let log = File::create(dir.join(format!("{name}.log")))?;
    let child = Command::new(&path)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("starting {}", path.display()))?;
    Ok(Running(child))
}

/// Starts the targets and returns the line with their ports; they end when their stdin closes with the child.
fn start_target(load: &Path) -> anyhow::Result<(Running, String)> {
    let mut child = Command::new(load)
        .arg("target")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the targets")?;
    let stdout = child.stdout.take().context("stdout is piped")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    Ok((Running(child), line.trim().to_owned()))
}

/// A port inside the range that upstream's flag check allows, free at this moment.
fn free_port() -> anyhow::Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(14_000);
    for _ in 0..4_000 {
        let port = NEXT.fetch_add(1, Ordering::Relaxed);
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no free port from 14000 on")
}

fn is_ready(port: u16) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"GET /readyz HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.split_whitespace().nth(1) == Some("200"))
}
