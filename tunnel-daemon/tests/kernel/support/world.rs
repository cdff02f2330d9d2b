//! A server and an agent as processes of their own, and what they need.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use adit::{agent, server};
use adit_config::{Command, parse};
use adit_tls::selfsigned::ThrowawayFiles;
use tempfile::TempDir;

use super::namespace;
use super::role::{Role, tell, told};

const LIMIT: Duration = Duration::from_secs(20);
/// What is `HTTPS_PROXY` to a role. Under a name of its own: the one of whoever runs the tests is no concern of theirs.
pub(crate) const PROXY: &str = "ADIT_KERNEL_TEST_HTTPS_PROXY";

/// Certificates and sockets, and where agents find the server.
pub(crate) struct World {
    ip: IpAddr,
    files: ThrowawayFiles,
    dir: TempDir,
}

/// A server's process.
pub(crate) struct ServerProcess {
    pub(crate) role: Role,
    pub(crate) agents: SocketAddr,
    pub(crate) health: SocketAddr,
    /// Where captured connections go.
    pub(crate) listeners: Vec<SocketAddr>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::at(Ipv4Addr::LOCALHOST.into())
    }

    /// With a server that agents find at this address.
    pub(crate) fn at(ip: IpAddr) -> Self {
        Self {
            ip,
            files: ThrowawayFiles::create(&[ip.to_string()]).expect("certificates"),
            dir: TempDir::new().expect("a directory"),
        }
    }

    /// Where sockets are.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where certificates and keys are.
    pub(crate) fn certificates(&self) -> &Path {
        self.files.dir()
    }

    pub(crate) fn server_args(&self, flags: &[String]) -> Vec<String> {
        let mut args = vec![
            "adit".to_owned(),
            "server".to_owned(),
            format!(
                "--frontend=http-connect=unix:{}",
                self.dir.path().join("c").display()
            ),
            format!("--cluster-cert={}", self.files.cert("server").display()),
            format!("--cluster-key={}", self.files.key("server").display()),
            format!("--cluster-ca-cert={}", self.files.ca_file().display()),
            format!("--agent-bind-address={}", self.ip),
            "--agent-port=0".to_owned(),
            "--health-bind-address=127.0.0.1".to_owned(),
            "--health-port=0".to_owned(),
            "--admin-port=off".to_owned(),
        ];
        args.extend_from_slice(flags);
        args
    }

    pub(crate) fn agent_args(&self, agents: SocketAddr) -> Vec<String> {
        vec![
            "adit".to_owned(),
            "agent".to_owned(),
            format!("--proxy-server-host={agents}"),
            format!("--ca-cert={}", self.files.ca_file().display()),
            format!("--agent-cert={}", self.files.cert("agent").display()),
            format!("--agent-key={}", self.files.key("agent").display()),
            "--agent-id=kernel".to_owned(),
            "--sync-interval=50ms".to_owned(),
            "--health-server-port=off".to_owned(),
            "--admin-server-port=off".to_owned(),
        ]
    }

    /// As [`World::agent_args`], with a health port.
    pub(crate) fn probed_agent_args(&self, agents: SocketAddr) -> Vec<String> {
        let mut args = self.agent_args(agents);
        args.retain(|arg| !arg.starts_with("--health-server-port"));
        args.push("--health-server-host=127.0.0.1".to_owned());
        args.push("--health-server-port=0".to_owned());
        args
    }

    /// A server with these flags, in a cgroup or not.
    pub(crate) fn server(&self, cgroup: Option<&Path>, flags: &[String]) -> ServerProcess {
        let program = std::env::current_exe().expect("this test");
        self.server_by(std::process::Command::new(program), cgroup, flags)
    }

    /// As [`World::server`], by a command that runs the program and arguments it is given.
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

    /// An agent of that server, linked when this returns.
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

    /// As [`World::agent_with`], by a command that runs the program and arguments it is given.
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

    /// As [`World::agent_by`], and its health port.
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

/// An agent and its health port, if it has one.
fn linked(
    command: std::process::Command,
    server: &ServerProcess,
    cgroup: Option<&Path>,
    mut args: Vec<String>,
    flags: &[&str],
) -> (Role, Option<SocketAddr>) {
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let mut role = Role::start_by(command, "agent", cgroup, &args.join("\t"));
    // All of it has started: the link may be there before the redirect is.
    let told = role.hear();
    let health = told.strip_prefix("up ");
    server.until("the agent is linked", || {
        let ready = get(server.health, "/readyz");
        ready.starts_with("HTTP/1.1 200").then_some(())
    });
    (role, health.map(|at| at.parse().expect("an address")))
}

impl ServerProcess {
    /// A sample of its metrics; `series` with its labels.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        sample(self.health, series).unwrap_or_else(|| panic!("no series {series}"))
    }

    /// Lanes that were bound since the start: those that are open, and those that were closed.
    pub(crate) fn lanes_opened(&self) -> f64 {
        lanes_opened(&get(self.health, "/metrics"))
    }

    /// Waits for a value of a series.
    pub(crate) fn metric_is(&self, series: &str, value: f64) {
        self.until(&format!("{series} = {value}"), || {
            (self.metric(series) == value).then_some(())
        });
    }

    pub(crate) fn until<T>(&self, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(found) = condition() {
                return found;
            }
            assert!(Instant::now() < deadline, "not in time: {what}");
            std::thread::yield_now();
        }
    }

    pub(crate) fn readyz(&self) -> String {
        get(self.health, "/readyz?verbose")
    }
}

/// A sample of the metrics at a health port, if the series is there.
pub(crate) fn sample(health: SocketAddr, series: &str) -> Option<f64> {
    let text = get(health, "/metrics");
    text.lines()
        .filter_map(|line| line.rsplit_once(' '))
        .find(|(name, _)| *name == series)
        .and_then(|(_, value)| value.parse().ok())
}

/// Lanes that were bound since the start, by the text of a scrape: those that are open, and those that were closed.
pub(crate) fn lanes_opened(text: &str) -> f64 {
    let is_lane = |name: &str| {
        name.starts_with("adit_lanes{") || name.starts_with("adit_lanes_closed_total{")
    };
    text.lines()
        .filter_map(|line| line.rsplit_once(' '))
        .filter(|(name, _)| is_lane(name))
        .map(|(_, value)| value.parse::<f64>().expect("a number"))
        .sum()
}

/// What a port answers, head included.
pub(crate) fn get(at: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(at).expect("the health port listens");
    stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    )
    .expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it answers");
    text
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

pub(crate) fn command(args: impl IntoIterator<Item = String>) -> Command {
    let environment = |name: &str| match name {
        "HTTPS_PROXY" => std::env::var(PROXY).ok(),
        _ => None,
    };
    match parse(args.into_iter().map(OsString::from), &environment) {
        Ok(parsed) => parsed.command,
        Err(error) => panic!("{}", error.message()),
    }
}

/// The server's process: tells its addresses, lives until the test lets go.
pub(super) fn play_server(arguments: &str) {
    namespace::helped_by_ourselves();
    let Command::Server(plan) = command(arguments.split('\t').map(str::to_owned)) else {
        panic!("no server");
    };
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

/// The agent's.
pub(super) fn play_agent(arguments: &str) {
    namespace::helped_by_ourselves();
    let Command::Agent(plan) = command(arguments.split('\t').map(str::to_owned)) else {
        panic!("no agent");
    };
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
