//! Everything that the demo runs in this process: certificates, one server, two agents and two targets, over real sockets.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::net::TcpSocket;

use super::captured::CapturedCgroup;
use super::folder::Folder;
use super::frontend::Frontend;
use super::stats::Stats;
use super::targets;
use crate::{agent, server};
use adit_config::plan::LaneSecurity;
use adit_config::{Command, DemoOptions};
use adit_host::wait::wait_until;
use adit_net::tasks::Tasks;
use adit_tls::selfsigned::{ThrowawayCa, Usage};

/// Concurrent connections of targets and of the driver.
const TASKS_MAX: usize = 4096;
/// Time for the agents to connect: in the same process they need milliseconds.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// Tunnels still open at the end of the demo are cut after this time.
const STOP_GRACE: Duration = Duration::from_millis(300);

/// An agent.
pub(super) struct DemoAgent {
    /// Its id.
    pub(super) name: &'static str,
    pub(super) running: agent::RunningAgent,
}

/// A running demo.
pub(super) struct World {
    /// Holds files and sockets.
    pub(super) folder: Folder,
    pub(super) server: server::RunningServer,
    /// The agents of `web` and `bulk`, in this order.
    pub(super) agents: Vec<DemoAgent>,
    /// In the gRPC dialect, in HTTP CONNECT, and in HTTP CONNECT over TLS.
    pub(super) frontends: [Frontend; 3],
    /// Targets, each at the only address that the server sends through its agent.
    pub(super) web: SocketAddr,
    pub(super) bulk: SocketAddr,
    /// An address of the first agent that refuses connections.
    pub(super) closed: SocketAddr,
    /// Runs targets, and the tasks that drive tunnels.
    pub(super) tasks: Tasks,
    /// Bound and never listening: reserves the port of `closed`.
    _closed: TcpSocket,
    /// With --redirect: connections of processes in this cgroup are captured.
    pub(super) captured: Option<CapturedCgroup>,
    lanes: LaneSecurity,
    pub(super) stats: Stats,
}

const NORTH: (&str, Ipv4Addr) = ("north", Ipv4Addr::LOCALHOST);
/// All of 127/8 is loopback on Linux.
const SOUTH: (&str, Ipv4Addr) = ("south", Ipv4Addr::new(127, 0, 0, 2));
/// A second agent for the `bulk` target, for a while.
pub(super) const SPARE: (&str, Ipv4Addr) = ("spare", SOUTH.1);

/// The server's flags.
const SERVER: &str = "--frontend=grpc=unix:DIR/grpc.sock --frontend=http-connect=unix:DIR/http-connect.sock \
    --frontend=http-connect=tcp:127.0.0.1:0 --admin-socket=DIR/admin.sock --admin-port=off \
    --agent-bind-address=127.0.0.1 --agent-port=0 --proxy-strategies=destHost,default \
    --health-bind-address=127.0.0.1 --health-port=0 \
    --server-cert=DIR/server.crt --server-key=DIR/server.key --server-ca-cert=DIR/ca.crt \
    --cluster-cert=DIR/server.crt --cluster-key=DIR/server.key --cluster-ca-cert=DIR/ca.crt";

impl World {
    /// Starts all parts and waits until both agents are linked.
    ///
    /// # Errors
    /// The error names the step.
    pub(super) async fn start(options: &DemoOptions) -> anyhow::Result<Self> {
        let folder = Folder::make(options.dir.as_deref())?;
        certificates(&folder).context("certificates")?;
        let tasks = Tasks::new(TASKS_MAX);
        let serve =
            async |name: &'static str, ip: Ipv4Addr| targets::serve(&tasks, ip).await.context(name);
        let web = serve("web target", NORTH.1).await?;
        let bulk = serve("bulk target", SOUTH.1).await?;
        let closed_socket = TcpSocket::new_v4()?;
        closed_socket.bind((NORTH.1, 0).into())?;
        let captured = options.redirect.then(CapturedCgroup::make).transpose()?;
        let mut flags = SERVER.to_owned();
        if let Some(captured) = &captured {
            let cgroup = captured.path().display();
            flags += &format!(" --redirect={web} --redirect-cgroup={cgroup}");
        }
        let lanes = options.lane_security;
        let server = match command("server", &flags, &folder, lanes).context("server flags")? {
            Command::Server(plan) => server::start(&plan).await.context("server")?,
            other => bail!("the flags mean {other:?}"),
        };
        let [secure] = server.frontends[..] else {
            bail!(
                "server: {} TCP frontends instead of one",
                server.frontends.len()
            );
        };
        let mut world = Self {
            frontends: Frontend::all(&folder, secure).await?,
            folder,
            server,
            agents: Vec::new(),
            web,
            bulk,
            closed: closed_socket.local_addr()?,
            tasks,
            _closed: closed_socket,
            captured,
            lanes,
            stats: Stats::default(),
        };
        for agent in [NORTH, SOUTH] {
            let running = world.start_agent(agent).await?;
            world.agents.push(running);
        }
        Ok(world)
    }

    /// Starts an agent, and waits until it is linked.
    ///
    /// # Errors
    /// It does not start or connect.
    pub(super) async fn start_agent(
        &self,
        (name, reaches): (&'static str, Ipv4Addr),
    ) -> anyhow::Result<DemoAgent> {
        let links = self.server.links() + 1;
        let server = self.server.agents;
        let flags = format!(
            "--proxy-server-host={server} --agent-id={name} --agent-identifiers=ipv4={reaches} \
             --allow-target={reaches} --admin-socket=DIR/{name}-admin.sock --ca-cert=DIR/ca.crt \
             --agent-cert=DIR/{name}.crt --agent-key=DIR/{name}.key \
             --health-server-port=off --admin-server-port=off"
        );
        let running = match command("agent", &flags, &self.folder, self.lanes)? {
            Command::Agent(plan) => agent::start(&plan).await,
            other => bail!("the flags mean {other:?}"),
        };
        let running = running.with_context(|| format!("agent {name}"))?;
        wait_until(CONNECT_PATIENCE, || self.server.links() == links).await;
        ensure!(
            self.server.links() == links,
            "agent {name} has not connected within {CONNECT_PATIENCE:?}"
        );
        Ok(DemoAgent { name, running })
    }

    /// Value of one series of the server, as `/metrics` shows it.
    pub(super) fn series(&self, name: &str) -> u64 {
        series(&self.server.metrics.scrape().text(), name)
    }

    /// Number of open tunnels.
    pub(super) fn open_tunnels(&self) -> u64 {
        self.series("konnectivity_network_proxy_server_established_connections")
    }

    /// Number of all tunnels so far.
    pub(super) fn tunnels(&self) -> u64 {
        self.series("konnectivity_network_proxy_server_dial_duration_seconds_count")
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
    let pair = |name: &str, usage, names: &[String]| {
        let pair = ca.issue(usage, name, names)?;
        folder.write(&format!("{name}.crt"), &pair.cert_pem)?;
        folder.write(&format!("{name}.key"), &pair.key_pem)
    };
    pair("server", Usage::Server, &server_names)?;
    for name in [NORTH.0, SOUTH.0, SPARE.0, "client"] {
        pair(name, Usage::Client, &[])?;
    }
    Ok(())
}

/// What flags mean to a program, without the user's environment: its ids and proxies are for real agents. In `flags`, DIR is
/// the folder's path.
fn command(
    program: &str,
    flags: &str,
    folder: &Folder,
    lanes: LaneSecurity,
) -> anyhow::Result<Command> {
    let argv = format!("adit {program} --lane-security={} {flags}", lanes.name());
    let argv = argv.split_whitespace();
    let argv = argv.map(|word| word.replace("DIR", folder.path()).into());
    Ok(adit_config::parse(argv, &|_name| None)?.command)
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
