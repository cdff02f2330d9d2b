//! A server and an agent as separate processes, with their certificates and sockets.

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
/// Environment variable that a role takes as `HTTPS_PROXY`. A separate name keeps the variable of the test's user out.
pub(crate) const PROXY: &str = "ADIT_KERNEL_TEST_HTTPS_PROXY";

/// Certificates, sockets, and the address at which agents reach the server.
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

    /// Number of lanes opened since the start: open and closed lanes.
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

/// Number of lanes opened since the start, from the text of a scrape: open and closed lanes.
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

/// A port's HTTP answer, including the head.
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

/// Main function of the server process: prints its addresses, and runs until its input is closed.
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

/// Main function of the agent process.
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
