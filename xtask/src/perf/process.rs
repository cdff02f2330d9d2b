//! Processes of a measurement: started with a log each, tied to this one's life, killed when dropped.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::long_path::{self, LongPath};

/// The folder of what programs print, within a site's.
const LOGS: &str = "logs";

/// A child that is killed when dropped.
pub(crate) struct Running(Child);

impl Running {
    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The kernel does not say.
    pub(crate) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// How it ended; `None` if it is still running after `limit`.
    ///
    /// # Errors
    /// As [`Running::ended`].
    pub(crate) fn ends_within(&mut self, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
        let end = Instant::now() + limit;
        loop {
            let ended = self.ended()?;
            if ended.is_some() || Instant::now() >= end {
                return Ok(ended);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that it has ended already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Addresses that `adit-load target` printed.
pub(crate) type Targets = BTreeMap<String, String>;

/// How long a program may take to be ready.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(20);

/// A folder of its own for one stack: sockets, certificates, configuration, logs. It goes away with the value.
pub(crate) struct Site {
    folder: tempfile::TempDir,
    load: PathBuf,
    long_path: Option<LongPath>,
}

impl Site {
    /// Makes the folder and throw-away certificates in it. `load` is the load tool.
    ///
    /// # Errors
    /// The folder cannot be made or the tool fails.
    pub(crate) fn new(load: &Path) -> anyhow::Result<Self> {
        // Short, because a unix socket's path may not exceed 108 bytes.
        let folder = tempfile::Builder::new().prefix("adit-perf-").tempdir()?;
        let site = Self {
            folder,
            load: load.to_owned(),
            long_path: None,
        };
        let status = Command::new(load)
            .arg("certs")
            .arg(site.folder.path())
            .args(["--name", long_path::NEAR])
            .status()
            .context("starting the load tool")?;
        ensure!(
            status.success(),
            "the load tool could not write certificates"
        );
        fs::create_dir(site.path(LOGS))?;
        Ok(site)
    }

    /// The same with a long path under it, for peers that can span one.
    ///
    /// # Errors
    /// As [`Site::new`], or this host can build no such path.
    pub(crate) fn apart(load: &Path, shape: &long_path::Shape) -> anyhow::Result<Self> {
        let mut site = Self::new(load)?;
        site.long_path = Some(LongPath::new(&site, shape)?);
        Ok(site)
    }

    /// The long path under it.
    pub(crate) fn long_path(&self) -> Option<&LongPath> {
        self.long_path.as_ref()
    }

    /// The path of a file in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The same as text, for flags and configuration files.
    pub(crate) fn at(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// A command that ends with this process, however that ends.
    fn tied(&self, inside: Inside<'_>, program: &Path) -> Command {
        let mut command = Command::new(&self.load);
        command.args(["tie", "--parent", &std::process::id().to_string(), "--"]);
        match inside {
            Inside::Host => (),
            Inside::Namespace(namespace) => {
                command.arg("nsenter").arg(namespace).arg("--");
            }
            Inside::Cgroup(cgroup) => {
                let enter = r#"echo 0 > "$1/cgroup.procs" && shift && exec "$@""#;
                command.args(["sh", "-c", enter, "sh"]).arg(cgroup);
            }
        }
        command.arg(program);
        command
    }

    /// Starts a program, with `logs/NAME.log` for what it prints.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn spawn(
        &self,
        name: &str,
        inside: Inside<'_>,
        program: &Path,
        args: &[String],
    ) -> anyhow::Result<Running> {
        // Not beside the certificates: programs that watch those would be told of every line.
        let log = File::create(self.path(LOGS).join(format!("{name}.log")))?;
        let child = self
            .tied(inside, program)
            .args(args)
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Running(child))
    }

    /// Starts the load tool in a role that prints one line of addresses and ends when its input closes.
    ///
    /// # Errors
    /// It cannot be started, or prints something else.
    pub(crate) fn serving(
        &self,
        inside: Inside<'_>,
        args: &[String],
    ) -> anyhow::Result<(Running, Targets)> {
        let mut child = self
            .tied(inside, &self.load)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the load tool")?;
        let stdout = child.stdout.take();
        let running = Running(child);
        let mut line = String::new();
        BufReader::new(stdout.context("stdout is piped")?).read_line(&mut line)?;
        let addresses = serde_json::from_str(&line).context("the load tool prints addresses")?;
        Ok((running, addresses))
    }

    /// Starts the targets on an address.
    ///
    /// # Errors
    /// They cannot be started or listen there.
    pub(crate) fn targets(
        &self,
        inside: Inside<'_>,
        host: &str,
    ) -> anyhow::Result<(Running, Targets)> {
        self.serving(inside, &["target".to_owned(), format!("--host={host}")])
    }

    /// Starts who reviews the tokens of agents, with a `kubeconfig` for it and a `token` in the folder.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn reviews(&self, inside: Inside<'_>) -> anyhow::Result<(Running, Targets)> {
        self.serving(inside, &["reviews".to_owned(), self.at("")])
    }

    /// Starts the bare relay in front of targets.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn relay(
        &self,
        targets: &Targets,
        options: &[String],
    ) -> anyhow::Result<(Running, Targets)> {
        let mut args = vec![
            "relay".to_owned(),
            format!("--targets={}", serde_json::to_string(targets)?),
        ];
        args.extend_from_slice(options);
        self.serving(Inside::Host, &args)
    }

    /// Starts a slowdown in front of a frontend; clients use `listen`.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn throttle(&self, listen: &Path, to: &Path) -> anyhow::Result<Running> {
        let args = [
            "throttle".to_owned(),
            format!("--listen={}", listen.display()),
            format!("--to={}", to.display()),
        ];
        let running = self.spawn("throttle", Inside::Host, &self.load, &args)?;
        self.wait_for("the throttle", || listen.exists())?;
        Ok(running)
    }

    /// The load tool, for a command with output.
    pub(crate) fn load(&self, inside: Inside<'_>) -> Command {
        self.tied(inside, &self.load)
    }

    /// The Go load tool in its place.
    pub(crate) fn go_load(&self, inside: Inside<'_>, program: &Path) -> Command {
        self.tied(inside, program)
    }

    /// Waits until a server at the near end has its agent, by its own account.
    ///
    /// # Errors
    /// It has none within [`START_LIMIT`]; the error has the end of every log.
    pub(crate) fn wait_until_ready(&self, health_port: u16) -> anyhow::Result<()> {
        let mut ready = self.load(self.near());
        ready.args([
            "ready".to_owned(),
            format!("--address=127.0.0.1:{health_port}"),
        ]);
        output_within(ready, self, START_LIMIT * 2)
            .map(drop)
            .map_err(|error| error.context(self.logs()))
    }

    /// Waits until `ready`.
    ///
    /// # Errors
    /// It is not within [`START_LIMIT`]; the error has the end of every log.
    pub(crate) fn wait_for(&self, what: &str, ready: impl Fn() -> bool) -> anyhow::Result<()> {
        let end = Instant::now() + START_LIMIT;
        while !ready() {
            if Instant::now() > end {
                bail!(
                    "{what} was not ready within {} s{}",
                    START_LIMIT.as_secs(),
                    self.logs()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The last lines of all logs.
    pub(crate) fn logs(&self) -> String {
        let mut text = String::new();
        let Ok(entries) = fs::read_dir(self.path(LOGS)) else {
            return text;
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|ending| ending == "log") {
                let log = fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let last = lines
                    .get(lines.len().saturating_sub(8)..)
                    .unwrap_or_default();
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                text.push_str(&format!("\n--- {name}\n{}", last.join("\n")));
            }
        }
        text
    }
}

/// Where a process runs.
#[derive(Clone, Copy)]
pub(crate) enum Inside<'a> {
    /// With us.
    Host,
    /// In another network namespace: the argument of `nsenter` that names it.
    Namespace(&'a str),
    /// In a cgroup.
    Cgroup(&'a Path),
}

/// Waits for a child with captured output, and kills it past the deadline.
///
/// # Errors
/// It failed, with what it printed, or was still running.
pub(crate) fn output_within(
    mut command: Command,
    folder: &Site,
    limit: Duration,
) -> anyhow::Result<String> {
    // Files, not pipes: a child that prints much must not wait for us.
    let (out, err) = (folder.path("load.out"), folder.path("load.err"));
    let child = command
        .stdin(Stdio::null())
        .stdout(File::create(&out)?)
        .stderr(File::create(&err)?)
        .spawn()
        .context("starting the load tool")?;
    let ended = Running(child).ends_within(limit)?;
    let status =
        ended.with_context(|| format!("the load was still running after {} s", limit.as_secs()))?;
    ensure!(
        status.success(),
        "{}",
        fs::read_to_string(&err)?.trim().replace('\n', " ")
    );
    Ok(fs::read_to_string(&out)?)
}

/// A port inside the range that upstream's flag check allows, free at this moment.
///
/// # Errors
/// None is.
pub(crate) fn free_port() -> anyhow::Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(14_000);
    for _ in 0..8_000 {
        let port = NEXT.fetch_add(1, Ordering::Relaxed);
        if port > 22_000 {
            NEXT.store(14_000, Ordering::Relaxed);
        }
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no free port from 14000 on")
}
