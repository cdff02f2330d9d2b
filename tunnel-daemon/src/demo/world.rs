//! Everything that the demo runs in this process: certificates, one server, two agents and two targets, over real sockets.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::net::TcpSocket;

use super::captured_cgroup::CapturedCgroup;
use super::folder::Folder;
use super::frontend::Frontend;
use super::targets;
use crate::{agent, server};
use adit_config::plan::{AgentPlan, LaneSecurity, ServerPlan};
use adit_config::{Command, DemoOptions};
use adit_host::wait::wait_until;
use adit_net::tasks::Tasks;
use adit_tls::selfsigned::{ThrowawayCa, Usage};

/// Metric of open tunnels.
pub(super) const OPEN_TUNNELS: &str = "konnectivity_network_proxy_server_established_connections";
/// Metric of all tunnels so far.
pub(super) const TUNNELS: &str = "konnectivity_network_proxy_server_dial_duration_seconds_count";
/// Metric of links whose tunnels have credit.
pub(super) const CREDIT_LINKS: &str = "adit_links{peer=\"adit\"}";

/// Concurrent connections of targets and of the driver.
const TASKS_MAX: usize = 4096;
/// Time for the agents to connect: in the same process they need milliseconds.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// Tunnels still open at the end of the demo are cut after this time.
const STOP_GRACE: Duration = Duration::from_millis(300);

/// An agent, and the only address that the server sends through it.
pub(super) struct DemoAgent {
    /// Its id.
    pub(super) name: &'static str,
    /// The address it claims to reach.
    pub(super) reaches: Ipv4Addr,
    pub(super) running: agent::RunningAgent,
}

/// A running demo.
pub(super) struct World {
    /// Holds files and sockets.
    pub(super) folder: Folder,
    pub(super) server: server::RunningServer,
    pub(super) agents: Vec<DemoAgent>,
    pub(super) frontends: Vec<Frontend>,
    /// The target behind the first agent.
    pub(super) web: SocketAddr,
    /// The target behind the second agent.
    pub(super) bulk: SocketAddr,
    /// An address of the first agent that refuses connections.
    pub(super) closed: SocketAddr,
    /// Runs targets, and the tasks that drive tunnels.
    pub(super) tasks: Tasks,
    /// Bound and never listening: reserves the port of `closed`.
    _closed: TcpSocket,
    /// With --redirect: connections of processes in this cgroup are captured.
    pub(super) captured: Option<CapturedCgroup>,
}

/// The server's admin socket.
pub(super) const SERVER_ADMIN: &str = "admin.sock";

const NORTH: (&str, Ipv4Addr) = ("north", Ipv4Addr::LOCALHOST);
/// All of 127/8 is loopback on Linux.
const SOUTH: (&str, Ipv4Addr) = ("south", Ipv4Addr::new(127, 0, 0, 2));

impl World {
    /// Starts all parts and waits until both agents are linked.
    ///
    /// # Errors
    /// The error names the step.
    pub(super) async fn start(options: &DemoOptions) -> anyhow::Result<Self> {
        let lanes = options.lane_security;
        let folder = Folder::make(options.dir.as_deref())?;
        certificates(&folder).context("certificates")?;
        let tasks = Tasks::new(TASKS_MAX);
        let web = targets::serve(&tasks, NORTH.1.into())
            .await
            .context("web target")?;
        let bulk = targets::serve(&tasks, SOUTH.1.into())
            .await
            .context("bulk target")?;
        let (closed_socket, closed) = closed_port(NORTH.1.into()).context("closed port")?;
        let (grpc, connect) = (
            folder.socket("grpc.sock")?,
            folder.socket("http-connect.sock")?,
        );
        let captured = options.redirect.then(CapturedCgroup::make).transpose()?;
        let redirect = captured.as_ref().map(|captured| (web, captured));
        let plan =
            server_plan(&folder, &grpc, &connect, lanes, redirect).context("server flags")?;
        let server = server::start(&plan).await.context("server")?;
        let mut agents = Vec::new();
        for (name, reaches) in [NORTH, SOUTH] {
            let plan = agent_plan(&folder, name, reaches, server.agents, lanes)
                .with_context(|| format!("flags of agent {name}"))?;
            let running = agent::start(&plan)
                .await
                .with_context(|| format!("agent {name}"))?;
            agents.push(DemoAgent {
                name,
                reaches,
                running,
            });
        }
        wait_until(CONNECT_PATIENCE, || server.links() == agents.len()).await;
        ensure!(
            server.links() == agents.len(),
            "agents: {} of {} connected within {CONNECT_PATIENCE:?}",
            server.links(),
            agents.len()
        );
        let [secure] = server.frontends[..] else {
            bail!(
                "server: {} TCP frontends instead of one",
                server.frontends.len()
            );
        };
        let frontends = vec![
            Frontend::grpc(grpc).await.context("gRPC frontend")?,
            Frontend::connect(connect),
            Frontend::connect_tls(secure, &folder).context("TLS of the client")?,
        ];
        Ok(Self {
            folder,
            server,
            agents,
            frontends,
            web,
            bulk,
            closed,
            tasks,
            _closed: closed_socket,
            captured,
        })
    }

    /// The agent that dials this target.
    #[must_use]
    pub(super) fn agent_of(&self, target: SocketAddr) -> Option<&DemoAgent> {
        self.agents
            .iter()
            .find(|agent| IpAddr::V4(agent.reaches) == target.ip())
    }

    /// Value of one series of the server, as `/metrics` shows it.
    #[must_use]
    pub(super) fn series(&self, name: &str) -> u64 {
        series(&self.server.metrics.scrape().text(), name)
    }

    /// Whether the server exports this series, whatever its value.
    #[must_use]
    pub(super) fn has(&self, series: &str) -> bool {
        let text = self.server.metrics.scrape().text();
        text.lines().any(|line| line.starts_with(series))
    }

    /// Whether the metrics of both ends report lanes in clear text.
    #[must_use]
    pub(super) fn lanes_are_in_clear(&self) -> bool {
        const FLAG: &str = "adit_insecure_flags{flag=\"lane-security=plaintext\"}";
        let agents_too = self
            .agents
            .iter()
            .all(|agent| series(&agent.running.metrics.scrape().text(), FLAG) == 1);
        agents_too && self.series(FLAG) == 1
    }

    /// Stops all parts and removes files and sockets.
    pub(super) async fn stop(self) {
        drop(self.frontends);
        // The driver's connections first, so that the server has no client to wait for.
        let _cut = self.tasks.drain(Duration::ZERO).await;
        for agent in &self.agents {
            agent.running.drain();
        }
        self.server.stop(Some(STOP_GRACE)).await;
        for agent in self.agents {
            agent.running.stop().await;
        }
        drop(self.folder);
        // No program is attached to the cgroup any more.
        drop(self.captured);
    }
}

impl DemoAgent {
    /// Number of targets this agent has reached.
    #[must_use]
    pub(super) fn dials(&self) -> u64 {
        series(
            &self.running.metrics.scrape().text(),
            "konnectivity_network_proxy_agent_dial_duration_seconds_count",
        )
    }
}

/// A missing counter or gauge counts as 0.
fn series(text: &str, name: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        .find_map(|value| value.trim().parse::<f64>().ok())
        // Large counts are shown as 1.5e+08; they are integers nevertheless.
        .and_then(|value| format!("{value:.0}").parse().ok())
        .unwrap_or(0)
}

fn certificates(folder: &Folder) -> anyhow::Result<()> {
    let ca = ThrowawayCa::new("adit demo CA")?;
    folder.write("ca.crt", &ca.cert_pem())?;
    let server_names = [Ipv4Addr::LOCALHOST.to_string(), "localhost".to_owned()];
    let pairs: [(&str, Usage, &[String]); 4] = [
        ("server", Usage::Server, &server_names),
        (NORTH.0, Usage::Client, &[]),
        (SOUTH.0, Usage::Client, &[]),
        ("client", Usage::Client, &[]),
    ];
    for (name, usage, names) in pairs {
        let pair = ca.issue(usage, name, names)?;
        folder.write(&format!("{name}.crt"), &pair.cert_pem)?;
        folder.write(&format!("{name}.key"), &pair.key_pem)?;
    }
    Ok(())
}

fn closed_port(ip: IpAddr) -> std::io::Result<(TcpSocket, SocketAddr)> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((ip, 0).into())?;
    let address = socket.local_addr()?;
    Ok((socket, address))
}

fn server_plan(
    folder: &Folder,
    grpc: &Path,
    connect: &Path,
    lanes: LaneSecurity,
    redirect: Option<(SocketAddr, &CapturedCgroup)>,
) -> anyhow::Result<ServerPlan> {
    let frontend = |dialect: &str, path: &Path| {
        let mut text = OsString::from(format!("{dialect}=unix:"));
        text.push(path);
        text
    };
    let mut argv: Vec<OsString> = vec!["adit".into(), "server".into()];
    argv.extend(["--frontend".into(), frontend("grpc", grpc)]);
    argv.extend(["--frontend".into(), frontend("http-connect", connect)]);
    argv.extend(
        [
            "--frontend=http-connect=tcp:127.0.0.1:0",
            "--agent-bind-address=127.0.0.1",
            "--agent-port=0",
            "--proxy-strategies=destHost,default",
            "--health-bind-address=127.0.0.1",
            "--health-port=0",
            "--admin-port=off",
        ]
        .map(OsString::from),
    );
    argv.push(format!("--lane-security={}", lanes.name()).into());
    if let Some((target, captured)) = redirect {
        argv.push(format!("--redirect={target}").into());
        argv.extend(["--redirect-cgroup".into(), captured.path().into()]);
    }
    argv.extend(["--admin-socket".into(), folder.socket(SERVER_ADMIN)?.into()]);
    argv.extend(files(
        folder,
        &[
            ("--server-cert", "server.crt"),
            ("--server-key", "server.key"),
            ("--server-ca-cert", "ca.crt"),
            ("--cluster-cert", "server.crt"),
            ("--cluster-key", "server.key"),
            ("--cluster-ca-cert", "ca.crt"),
        ],
    ));
    match adit_config::parse(argv, &no_environment)?.command {
        Command::Server(plan) => Ok(*plan),
        other => bail!("the flags mean {other:?}"),
    }
}

fn agent_plan(
    folder: &Folder,
    name: &str,
    reaches: Ipv4Addr,
    server: SocketAddr,
    lanes: LaneSecurity,
) -> anyhow::Result<AgentPlan> {
    let flags = [
        format!("--proxy-server-host={server}"),
        format!("--agent-id={name}"),
        format!("--agent-identifiers=ipv4={reaches}"),
        format!("--allow-target={reaches}"),
        format!("--lane-security={}", lanes.name()),
        "--health-server-port=off".to_owned(),
        "--admin-server-port=off".to_owned(),
    ];
    let mut argv: Vec<OsString> = vec!["adit".into(), "agent".into()];
    argv.extend(flags.map(OsString::from));
    let admin = folder.socket(&format!("{name}-admin.sock"))?;
    argv.extend(["--admin-socket".into(), admin.into()]);
    argv.extend(files(
        folder,
        &[
            ("--ca-cert", "ca.crt"),
            ("--agent-cert", &format!("{name}.crt")),
            ("--agent-key", &format!("{name}.key")),
        ],
    ));
    match adit_config::parse(argv, &no_environment)?.command {
        Command::Agent(plan) => Ok(*plan),
        other => bail!("the flags mean {other:?}"),
    }
}

fn files<'a>(
    folder: &'a Folder,
    flags: &'a [(&'a str, &'a str)],
) -> impl Iterator<Item = OsString> + 'a {
    flags.iter().flat_map(|(flag, name)| {
        let path: PathBuf = folder.file(name);
        [OsString::from(flag), path.into_os_string()]
    })
}

/// Hides the user's environment: its ids and proxies are for real agents.
fn no_environment(_name: &str) -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_is_found_by_its_whole_name_only() {
        let text = "a_count_total 3\na_count 7\nb{peer=\"adit\"} 2\nlarge 1.34217728e+08\n";
        assert_eq!(series(text, "large"), 128 << 20);
        assert_eq!(series(text, "a_count"), 7);
        assert_eq!(series(text, "b{peer=\"adit\"}"), 2);
        assert_eq!(series(text, "missing"), 0);
    }
}
