//! Processes of a measurement: each has a log, ends with this process, and is killed on drop.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use adit_perf_plan::{Dialect, Shape};
use anyhow::{Context as _, ensure};

use super::long_path::{AGENT_END, LongPath, SERVER_END};
use super::programs::Programs;
use crate::steps::{Running, output_of};

/// Folder of the programs' logs, within a site's folder.
const LOGS: &str = "logs";
/// Time limit for a program to become ready.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Addresses by name, as `adit-load target` printed them.
pub(crate) type Targets = BTreeMap<String, String>;

/// Where a process runs.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// In the namespaces and cgroup of this process.
    Host,
    /// In another network namespace; holds the argument of `nsenter` that selects it.
    Namespace(String),
    /// In this cgroup.
    Cgroup(PathBuf),
}

/// The folder of one stack: sockets, certificates, configuration, logs. Dropping this removes it.
pub(crate) struct Site {
    folder: tempfile::TempDir,
    load: PathBuf,
    go_load: Option<PathBuf>,
    /// Place of the server and the load, and the server's address as the agent sees it.
    pub(crate) near: Place,
    pub(crate) near_host: &'static str,
    /// Place of the agent and the targets, and their address from either end.
    pub(crate) far: Place,
    pub(crate) far_host: &'static str,
    _long_path: Option<LongPath>,
}

impl Site {
    /// Creates the folder with throw-away certificates, and with a shape also a long path between server and agent.
    ///
    /// # Errors
    /// The folder cannot be created, the tool fails, or this host does not support a long path.
    pub(crate) fn new(programs: &Programs, long_path: Option<&Shape>) -> anyhow::Result<Self> {
        // Short, since a unix socket's path is limited to 108 bytes.
        let folder = tempfile::Builder::new().prefix("adit-perf-").tempdir()?;
        let mut site = Self {
            folder,
            load: programs.load.clone(),
            go_load: programs.go_load.get().cloned(),
            near: Place::Host,
            near_host: "127.0.0.1",
            far: Place::Host,
            far_host: "127.0.0.1",
            _long_path: None,
        };
        let certificates = [
            "certs".to_owned(),
            site.at(""),
            format!("--name={SERVER_END}"),
        ];
        site.load(&Place::Host, &certificates, START_LIMIT)
            .context("writing certificates")?;
        fs::create_dir(site.path(LOGS))?;
        if let Some(shape) = long_path {
            let path = LongPath::new(&site, shape)?;
            [site.near, site.far] = path.namespaces.each_ref().map(|one| one.place.clone());
            (site.near_host, site.far_host) = (SERVER_END, AGENT_END);
            site._long_path = Some(path);
        }
        Ok(site)
    }

    /// The load tool of a dialect.
    ///
    /// # Errors
    /// It is the Go load tool, which was not built.
    pub(crate) fn load_tool(&self, dialect: Dialect) -> anyhow::Result<&Path> {
        let tool = match dialect {
            Dialect::GrpcGo | Dialect::GrpcGoReused | Dialect::GrpcGoTls => self.go_load.as_ref(),
            Dialect::Grpc | Dialect::HttpConnect | Dialect::Socks5 | Dialect::Tcp => {
                Some(&self.load)
            }
        };
        Ok(tool.context("the Go load tool is not built")?)
    }

    /// The path of a file in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The path of a file in the folder as text, for flags and configuration files.
    pub(crate) fn at(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// A command that is killed when this process ends, in whatever way it ends.
    pub(crate) fn command(&self, place: &Place, program: &Path) -> Command {
        let mut command = Command::new(&self.load);
        command.args(["tie", "--parent", &std::process::id().to_string(), "--"]);
        match place {
            Place::Host => (),
            Place::Namespace(namespace) => {
                command.arg("nsenter").arg(namespace).arg("--");
            }
            Place::Cgroup(cgroup) => {
                let enter = r#"echo 0 > "$1/cgroup.procs" && shift && exec "$@""#;
                command.args(["sh", "-c", enter, "sh"]).arg(cgroup);
            }
        }
        command.arg(program).current_dir(self.folder.path());
        command
    }

    /// Starts a program that logs its output to `logs/NAME.log`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub(crate) fn spawn(
        &self,
        name: &str,
        place: &Place,
        program: &Path,
        args: &[String],
    ) -> anyhow::Result<Running> {
        // Not in the certificates' folder: programs that watch it would be notified of every log line.
        let log = File::create(self.path(LOGS).join(format!("{name}.log")))?;
        let child = self
            .command(place, program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Running::of(child))
    }

    /// Starts the load tool in a role that prints one line of addresses and ends when its standard input closes.
    ///
    /// # Errors
    /// The tool cannot be started, or prints something else.
    pub(crate) fn serve(
        &self,
        place: &Place,
        args: &[String],
    ) -> anyhow::Result<(Running, Targets)> {
        let mut child = self
            .command(place, &self.load)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the load tool")?;
        let stdout = child.stdout.take();
        let running = Running::of(child);
        let mut line = String::new();
        BufReader::new(stdout.context("stdout is piped")?).read_line(&mut line)?;
        let addresses = serde_json::from_str(&line).context("the load tool prints addresses")?;
        Ok((running, addresses))
    }

    /// Runs the load tool in a role that ends by itself.
    ///
    /// # Errors
    /// The tool fails, or exceeds `limit`; the error contains the end of every log.
    fn load(&self, place: &Place, args: &[String], limit: Duration) -> anyhow::Result<()> {
        let mut command = self.command(place, &self.load);
        let output = output_of(command.args(args), limit);
        output.with_context(|| self.logs()).map(drop)
    }

    /// Waits until the server or agent with this health port reports ready.
    ///
    /// # Errors
    /// It is not ready within [`START_LIMIT`]; the error contains the end of every log.
    pub(crate) fn wait_until_ready(&self, health_port: u16) -> anyhow::Result<()> {
        let args = ["ready".to_owned(), format!("127.0.0.1:{health_port}")];
        self.load(&self.near, &args, START_LIMIT * 2)
    }

    /// Waits until an echo comes back over plain ports.
    ///
    /// # Errors
    /// No echo comes back; the error contains the end of every log.
    pub(crate) fn wait_for_echo(&self, place: &Place, targets: &Targets) -> anyhow::Result<()> {
        let args = ["probe".to_owned(), targets["echo"].clone()];
        self.load(place, &args, START_LIMIT * 2)
    }

    /// Waits until `ready` returns true.
    ///
    /// # Errors
    /// It does not within [`START_LIMIT`]; the error contains the end of every log.
    pub(crate) fn wait_for(&self, what: &str, ready: impl Fn() -> bool) -> anyhow::Result<()> {
        let end = Instant::now() + START_LIMIT;
        while !ready() {
            ensure!(
                Instant::now() < end,
                "{what} was not ready within {} s{}",
                START_LIMIT.as_secs(),
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The end of every log.
    pub(crate) fn logs(&self) -> String {
        let mut text = String::new();
        let entries = fs::read_dir(self.path(LOGS)).into_iter().flatten();
        for entry in entries.flatten() {
            let log = fs::read_to_string(entry.path()).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines.get(lines.len().saturating_sub(8)..);
            let last = last.unwrap_or_default().join("\n");
            text.push_str(&format!("\n--- {}\n{last}", entry.file_name().display()));
        }
        text
    }
}
