//! Two servers and two agents, each agent with a link to both servers. One server runs with upstream's command line. All of them
//! count leases, at a stand-in for the Kubernetes API.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::slice::from_ref;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::perf::free_port;
use crate::steps::{Running, output_of};

/// Names of the agents.
const AGENTS: [&str; 2] = ["north", "south"];
/// Longest time to make certificates.
const PKI: Duration = Duration::from_secs(20);
/// Longest time for the stand-in to write its kubeconfig, and between two looks at that.
const KUBERNETES: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(20);
/// A flag that gives up a protection, so that its metric has a series.
const INSECURE: &str = "--lane-security=plaintext";

/// The job of the server with upstream's command line.
const COMPAT: &str = "konnectivity-server";

/// Processes of one kind, and where Prometheus scrapes them.
pub(super) struct Job {
    pub(super) name: &'static str,
    pub(super) targets: Vec<String>,
}

/// It runs until dropped.
pub(super) struct Fleet {
    frontends: Vec<PathBuf>,
    jobs: Vec<Job>,
    processes: Vec<Process>,
}

/// A server or an agent, and where it logs.
struct Process {
    name: &'static str,
    running: Running,
    log: PathBuf,
}

impl Fleet {
    /// Starts all of it, with files in `folder`; `kubernetes` is the stand-in.
    ///
    /// # Errors
    /// A process cannot be started.
    pub(super) fn start(program: &Path, kubernetes: &Path, folder: &Path) -> anyhow::Result<Self> {
        certificates(program, folder)?;
        let file = |name: &str| folder.join(name).display().to_string();
        let start = |name: &'static str, program: &Path, args: &[String]| {
            let log = folder.join(format!("{name}.log"));
            let child = Command::new(program)
                .args(args)
                .stdin(Stdio::null())
                .stderr(fs::File::create(&log)?)
                .spawn();
            let running = Running::of(child.with_context(|| format!("start {name}"))?);
            anyhow::Ok(Process { name, running, log })
        };
        let kubeconfig = file("kubeconfig");
        let mut processes = vec![start("kubernetes", kubernetes, from_ref(&kubeconfig))?];
        wait_for(Path::new(&kubeconfig))?;
        let kubeconfig = format!("--kubeconfig={kubeconfig}");
        let spawn = |name, args: &[String]| start(name, program, args);
        let (mut frontends, mut calls) = (Vec::new(), Vec::new());
        let mut jobs = Vec::new();
        for name in ["native", "compat"] {
            let frontend = folder.join(format!("{name}.sock"));
            let (agents, health, admin) = (free_port()?, free_port()?, free_port()?);
            let socket = frontend.display();
            let mut args = vec!["server".to_owned()];
            if name == "compat" {
                args.extend([
                    "--compat".to_owned(),
                    "--mode=http-connect".to_owned(),
                    format!("--uds-name={socket}"),
                    "--server-port=0".to_owned(),
                ]);
            } else {
                args.extend([
                    format!("--frontend=http-connect=unix:{socket}"),
                    // Not for the other server: tunnels on plaintext raw lanes do not count in `full_receive_channels`.
                    INSECURE.to_owned(),
                ]);
            }
            args.extend([
                format!("--server-id={name}"),
                "--enable-lease-controller".to_owned(),
                kubeconfig.clone(),
                "--agent-bind-address=127.0.0.1".to_owned(),
                format!("--agent-port={agents}"),
                "--health-bind-address=127.0.0.1".to_owned(),
                format!("--health-port={health}"),
                format!("--admin-port={admin}"),
                format!("--cluster-cert={}", file("server-cluster.crt")),
                format!("--cluster-key={}", file("server-cluster.key")),
                format!("--cluster-ca-cert={}", file("agents-ca.crt")),
            ]);
            processes.push(spawn(name, &args)?);
            frontends.push(frontend);
            calls.push(format!("--proxy-server-host=127.0.0.1:{agents}"));
            // The health port of the one, the admin port of the other, as KKP scrapes it.
            let scraped = if name == "compat" { admin } else { health };
            jobs.push(Job {
                name: if name == "compat" {
                    COMPAT
                } else {
                    "adit-server"
                },
                targets: vec![format!("127.0.0.1:{scraped}")],
            });
        }
        let mut agents = Vec::new();
        for name in AGENTS {
            let health = free_port()?;
            let mut args = vec!["agent".to_owned(), INSECURE.to_owned()];
            args.extend(calls.iter().cloned());
            args.extend([
                format!("--agent-id={name}"),
                "--count-server-leases".to_owned(),
                kubeconfig.clone(),
                "--allow-target=127.0.0.1".to_owned(),
                "--health-server-host=127.0.0.1".to_owned(),
                format!("--health-server-port={health}"),
                "--admin-server-port=off".to_owned(),
                format!("--ca-cert={}", file("agents-ca.crt")),
                format!("--agent-cert={}", file(&format!("agent-{name}.crt"))),
                format!("--agent-key={}", file(&format!("agent-{name}.key"))),
            ]);
            processes.push(spawn(name, &args)?);
            agents.push(format!("127.0.0.1:{health}"));
        }
        jobs.push(Job {
            name: "adit-agent",
            targets: agents,
        });
        Ok(Self {
            frontends,
            jobs,
            processes,
        })
    }

    /// Sockets of HTTP CONNECT, one of each server.
    pub(super) fn frontends(&self) -> &[PathBuf] {
        &self.frontends
    }

    pub(super) fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// Whether all processes run.
    ///
    /// # Errors
    /// One has ended; with the last line of its log.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        for process in &mut self.processes {
            if let Some(status) = process.running.ends_within(Duration::ZERO)? {
                let line = last_line(&process.log);
                bail!("{} ended with {status}: {line}", process.name);
            }
        }
        Ok(())
    }
}

/// Until a file is there, with all that is to be in it.
fn wait_for(file: &Path) -> anyhow::Result<()> {
    let until = Instant::now() + KUBERNETES;
    while fs::read_to_string(file).unwrap_or_default().is_empty() {
        ensure!(Instant::now() < until, "no {} in time", file.display());
        thread::sleep(LOOK);
    }
    Ok(())
}

/// Of a log; empty if it cannot be read.
fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().next_back().unwrap_or_default().to_owned()
}

/// Makes an installation's certificates. Those of the demo expire within days, and the alerts would fire.
fn certificates(program: &Path, folder: &Path) -> anyhow::Result<()> {
    let mut commands = vec![["init"].as_slice(), &["server", "127.0.0.1"]];
    let agents = AGENTS.map(|name| ["agent", name]);
    commands.extend(agents.iter().map(<[_; 2]>::as_slice));
    for words in commands {
        let mut pki = Command::new(program);
        pki.arg("pki").args(words).arg("--dir").arg(folder);
        output_of(&mut pki, PKI)?;
    }
    Ok(())
}
