//! Two servers, which are peers, and two agents, each with a link to both servers. One server runs with upstream's command line. All of
//! them count leases, at a stand-in for the Kubernetes API.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use xtask_kit::net::free_port;

use crate::stack::{Ports, Process, certificates};

/// Names of the agents.
const AGENTS: [&str; 2] = ["north", "south"];
/// A flag that gives up a protection, so that its metric has a series.
const INSECURE: &str = "--lane-security=plaintext";

/// Processes of one kind, and where Prometheus scrapes them.
pub(super) struct Job {
    pub(super) name: &'static str,
    pub(super) targets: Vec<String>,
}

/// It runs until dropped.
pub(super) struct Fleet {
    /// Sockets of HTTP CONNECT, one of each server.
    pub(super) frontends: Vec<PathBuf>,
    pub(super) jobs: Vec<Job>,
    processes: Vec<Process>,
}

impl Fleet {
    /// Starts all of it, with files in `folder`; `kubernetes` is the stand-in.
    ///
    /// # Errors
    /// A process cannot be started.
    pub(super) fn start(program: &Path, kubernetes: &Path, folder: &Path) -> anyhow::Result<Self> {
        let pki = folder.display().to_string();
        let of_pki = |args: &[&str]| {
            let mut command = Command::new(program);
            command.arg("pki").args(args);
            Ok(command)
        };
        certificates(&of_pki, &pki, &AGENTS)?;
        let kubeconfig = folder.join("kubeconfig");
        let mut command = Command::new(kubernetes);
        let mut api = Process::start("kubernetes", command.arg(&kubeconfig), Some(folder))?;
        api.until("a kubeconfig", || {
            fs::read(&kubeconfig).is_ok_and(|text| !text.is_empty())
        })?;
        let mut fleet = Self {
            frontends: Vec::new(),
            jobs: Vec::new(),
            processes: vec![api],
        };
        let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
        let mut start = |name, flags: Vec<String>, of_kind: &[&str], variables: &[(_, String)]| {
            let mut command = Command::new(program);
            command.args(of_kind).args(flags).arg(&kubeconfig);
            command.envs(variables.iter().cloned());
            let process = Process::start(name, &mut command, Some(folder))?;
            fleet.processes.push(process);
            anyhow::Ok(())
        };
        let (mut calls, mut agents) = (Vec::new(), Vec::new());
        let peers = [free_port()?, free_port()?].map(|port| format!("127.0.0.1:{port}"));
        let mut peer_of = peers.iter().zip(peers.iter().rev());
        // A tunnel on a plaintext raw lane does not count in `full_receive_channels`: the server of upstream has none. Health is
        // scraped of one, and of the other the admin port, as KKP does.
        for (name, job, is_compat, flag) in [
            ("native", "adit-server", false, INSECURE),
            ("compat", "konnectivity-server", true, "--compat"),
        ] {
            let (ports, frontend) = (Ports::free()?, folder.join(format!("{name}.sock")));
            let mut flags = ports.server(&pki, &frontend, is_compat);
            flags.push(format!("--server-id={name}"));
            let (own, other) = peer_of.next().context("two servers")?;
            let variables = [
                ("ADIT_PEER_BIND", own.clone()),
                ("ADIT_PEER", other.clone()),
                ("ADIT_PEER_CERT", format!("{pki}/server-peer.crt")),
                ("ADIT_PEER_KEY", format!("{pki}/server-peer.key")),
                ("ADIT_PEER_CA_CERT", format!("{pki}/peers-ca.crt")),
            ];
            let kind = ["server", flag, "--enable-lease-controller"];
            start(name, flags, &kind, &variables)?;
            calls.push(format!("--proxy-server-host=127.0.0.1:{}", ports.agents));
            fleet.frontends.push(frontend);
            let scraped = if is_compat { ports.admin } else { ports.health };
            let targets = vec![format!("127.0.0.1:{scraped}")];
            fleet.jobs.push(Job { name: job, targets });
        }
        for name in AGENTS {
            let ports = Ports::free()?;
            let mut flags = ports.agent(&pki, name, false);
            flags.extend(calls.iter().cloned());
            flags.push(format!("--agent-id={name}"));
            start(
                name,
                flags,
                &["agent", INSECURE, "--count-server-leases"],
                &[],
            )?;
            agents.push(format!("127.0.0.1:{}", ports.health));
        }
        fleet.jobs.push(Job {
            name: "adit-agent",
            targets: agents,
        });
        Ok(fleet)
    }

    /// Whether all processes run.
    ///
    /// # Errors
    /// One has ended; with the last line of its log.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        let mut processes = self.processes.iter_mut();
        processes.try_for_each(|process| process.check(Duration::ZERO))
    }
}
