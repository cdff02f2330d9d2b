//! A server and an agent as separate processes, with their certificates and sockets.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use adit::{agent, server};
use adit_config::plan::{AgentPlan, ServerPlan};
use adit_testkit::certificates::ThrowawayFiles;
use adit_testkit::{args, blocking, http, scrape};
use tempfile::TempDir;

use super::cgroup::Cgroup;
use super::namespace;
use super::role::{Role, tell, told};

const LIMIT: Duration = Duration::from_secs(20);
/// Environment variable that a role takes as `HTTPS_PROXY`. A separate name keeps the variable of the test's user out.
pub(crate) const PROXY: &str = "ADIT_KERNEL_TEST_HTTPS_PROXY";

/// Certificates, sockets, and the address at which agents reach the server.
pub(crate) struct World {
    ip: IpAddr,
    files: ThrowawayFiles,
    dir: TempDir,
}

/// A server that dials `api` for its agents, and the cgroup of a node's processes.
pub(crate) fn nodes_of(api: SocketAddr) -> (World, ServerProcess, Cgroup) {
    let world = World::new();
    let server = world.server(None, &[format!("--allowed-destination={api}")]);
    (world, server, Cgroup::new())
}

/// A server's process.
pub(crate) struct ServerProcess {
    pub(crate) role: Role,
    pub(crate) agents: SocketAddr,
    pub(crate) health: SocketAddr,
    /// Listeners for captured connections.
    pub(crate) listeners: Vec<SocketAddr>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::at(Ipv4Addr::LOCALHOST.into())
    }

    /// Prepares a server that agents reach at this address.
    pub(crate) fn at(ip: IpAddr) -> Self {
        Self {
            ip,
            files: ThrowawayFiles::create(&[ip.to_string()]).expect("certificates"),
            dir: TempDir::new().expect("a directory"),
        }
    }

    /// Folder of sockets.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Folder of certificates and keys.
    pub(crate) fn certificates(&self) -> &Path {
        self.files.dir()
    }

    pub(crate) fn server_args(&self, flags: &[String]) -> Vec<String> {
        let mut args = args::server(&self.files, &self.ip.to_string(), "0");
        let socket = self.dir.path().join("c");
        args.push(format!("--frontend=http-connect=unix:{}", socket.display()));
        args.extend_from_slice(flags);
        args
    }

    pub(crate) fn agent_args(&self, agents: SocketAddr) -> Vec<String> {
        let mut args = self.probed_agent_args(agents);
        args.retain(|arg| !arg.starts_with("--health-server-"));
        args.push("--health-server-port=off".to_owned());
        args
    }

    /// As [`World::agent_args`], with a health port.
    pub(crate) fn probed_agent_args(&self, agents: SocketAddr) -> Vec<String> {
        args::agent(&self.files, &agents.to_string(), "kernel")
    }

    /// Starts a server with these flags, in a cgroup if one is given.
    pub(crate) fn server(&self, cgroup: Option<&Path>, flags: &[String]) -> ServerProcess {
        let program = std::env::current_exe().expect("this test");
        self.server_by(std::process::Command::new(program), cgroup, flags)
    }

    /// As [`World::server`], by a command that runs the given program and arguments.
    pub(crate) fn server_by(
        &self,
        command: std::process::Command,
        cgroup: Option<&Path>,
        flags: &[String],
    ) -> ServerProcess {
        let args = self.server_args(flags).join("\t");
        let mut role = Role::start_by(command, "server", cgroup, &args);
        let told = role.hear();
        let mut addresses = told
            .split(' ')
            .map(|text| text.parse().expect("an address"));
        let (agents, health) = (addresses.next(), addresses.next());
        ServerProcess {
            role,
            agents: agents.expect("told"),
            health: health.expect("told"),
            listeners: addresses.collect(),
        }
    }

    /// Starts an agent of that server, and waits for its link.
    pub(crate) fn agent(&self, server: &ServerProcess, cgroup: Option<&Path>) -> Role {
        self.agent_with(server, cgroup, &[])
    }

    /// As [`World::agent`], with more flags.
    pub(crate) fn agent_with(
        &self,
        server: &ServerProcess,
        cgroup: Option<&Path>,
        flags: &[&str],
    ) -> Role {
        let program = std::env::current_exe().expect("this test");
        self.agent_by(std::process::Command::new(program), server, cgroup, flags)
    }

    /// As [`World::agent_with`], by a command that runs the given program and arguments.
    pub(crate) fn agent_by(
        &self,
        command: std::process::Command,
        server: &ServerProcess,
        cgroup: Option<&Path>,
        flags: &[&str],
    ) -> Role {
        let args = self.agent_args(server.agents);
        linked(command, server, cgroup, args, flags).0
    }

    /// As [`World::agent_by`], and returns its health port.
    pub(crate) fn probed_agent_by(
        &self,
        command: std::process::Command,
        server: &ServerProcess,
        cgroup: Option<&Path>,
        flags: &[&str],
    ) -> (Role, SocketAddr) {
        let args = self.probed_agent_args(server.agents);
        let (role, health) = linked(command, server, cgroup, args, flags);
        (role, health.expect("told"))
    }
}

/// Starts an agent, and returns it with its health port, if it has one.
fn linked(
    command: std::process::Command,
    server: &ServerProcess,
    cgroup: Option<&Path>,
    mut args: Vec<String>,
    flags: &[&str],
) -> (Role, Option<SocketAddr>) {
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let mut role = Role::start_by(command, "agent", cgroup, &args.join("\t"));
    // Waits for the whole start: the link may exist before the redirect does.
    let told = role.hear();
    let health = told.strip_prefix("up ");
    server.until("the agent is linked", || {
        is_ready(server.health).then_some(())
    });
    (role, health.map(|at| at.parse().expect("an address")))
}

impl ServerProcess {
    /// A sample of its metrics; `series` with its labels.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        sample(self.health, series).unwrap_or_else(|| panic!("no series {series}"))
    }

    /// Number of lanes opened since the start: open and closed lanes.
    pub(crate) fn lanes_opened(&self) -> f64 {
        scrape::lanes_opened(&get(self.health, "/metrics"))
    }

    /// Waits for a value of a series.
    pub(crate) fn metric_is(&self, series: &str, value: f64) {
        self.until(&format!("{series} = {value}"), || {
            (self.metric(series) == value).then_some(())
        });
    }

    #[track_caller]
    pub(crate) fn until<T>(&self, what: &str, condition: impl FnMut() -> Option<T>) -> T {
        blocking::until(what, LIMIT, condition)
    }

    pub(crate) fn readyz(&self) -> String {
        get(self.health, "/readyz?verbose")
    }
}

/// A sample of the metrics at a health port, if the series is there.
pub(crate) fn sample(health: SocketAddr, series: &str) -> Option<f64> {
    scrape::sample(&get(health, "/metrics"), series)
}

/// Whether the health port says that the program is ready.
pub(crate) fn is_ready(health: SocketAddr) -> bool {
    http::get(health, "/readyz").is_ok_and(|answer| answer.status == 200)
}

/// The series of calls with this outcome.
pub(crate) fn calls(outcome: &str) -> String {
    format!("adit_redirect_calls_total{{outcome=\"{outcome}\"}}")
}

/// A port's HTTP answer, including the head.
pub(crate) fn get(at: SocketAddr, path: &str) -> String {
    http::get(at, path).expect("the health port answers").text
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// The plan of a server with this command line.
pub(crate) fn server_plan(args: &[String]) -> ServerPlan {
    args::server_plan(args).expect("flags are right")
}

/// The plan of an agent with this command line.
pub(crate) fn agent_plan(args: &[String]) -> AgentPlan {
    let proxy = std::env::var(PROXY)
        .ok()
        .map(|proxy| ("HTTPS_PROXY", proxy));
    args::agent_plan_in(proxy.as_slice(), args).expect("flags are right")
}

fn split(arguments: &str) -> Vec<String> {
    arguments.split('\t').map(str::to_owned).collect()
}

/// Main function of the server process: prints its addresses, and runs until its input is closed.
pub(super) fn play_server(arguments: &str) {
    namespace::helped_by_ourselves();
    let plan = server_plan(&split(arguments));
    let runtime = runtime();
    let running = runtime
        .block_on(server::start(&plan))
        .expect("the server starts");
    let health = running.health.expect("a health port");
    let mut line = format!("{} {health}", running.agents);
    for listener in running.redirect_listeners() {
        line.push_str(&format!(" {listener}"));
    }
    tell(&line);
    while told().is_some() {
        runtime.block_on(async { tokio::task::yield_now().await });
    }
}

/// Main function of the agent process.
pub(super) fn play_agent(arguments: &str) {
    namespace::helped_by_ourselves();
    let plan = agent_plan(&split(arguments));
    let runtime = runtime();
    let running = runtime
        .block_on(agent::start(&plan))
        .expect("the agent starts");
    match running.health {
        Some(health) => tell(&format!("up {health}")),
        None => tell("up"),
    }
    while told().is_some() {}
}
