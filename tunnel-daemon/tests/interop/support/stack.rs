//! A running server with agents and targets, each in its own process.

use std::net::SocketAddr;
use std::path::Path;

use adit_testkit::http::{self, Answer};
use rustix::process::Signal;
use tempfile::TempDir;

use super::certs::Certs;
use super::combo::{Combo, Maker, Mode};
use super::metrics::Scrape;
use super::peer::{Peer, Report, Running};
use super::ports;
use super::process::Process;
use super::wait::{secs, until};

/// A server process and its ports. The flags are kept for a restart.
pub(crate) struct Server {
    pub(crate) process: Process,
    maker: Maker,
    args: Vec<String>,
    log: String,
    pub(crate) agent_port: u16,
    pub(crate) health_port: u16,
    admin_port: u16,
}

/// An agent process and its ports.
pub(crate) struct Agent {
    pub(crate) process: Process,
    pub(crate) health_port: u16,
}

/// Ports of the targets, as `peer target` reports them.
pub(crate) struct Targets {
    _process: Process,
    ports: serde_json::Value,
}

/// All processes and files of a test. Dropping it ends the processes.
pub(crate) struct Stack {
    pub(crate) agents: Vec<Agent>,
    pub(crate) server: Server,
    pub(crate) targets: Targets,
    pub(crate) certs: Certs,
    pub(crate) combo: Combo,
    // Last: the processes that write to it end first.
    pub(crate) dir: TempDir,
}

/// Prefix of all server metrics.
const SERVER_SERIES: &str = "konnectivity_network_proxy_server_";
/// Prefix of all agent metrics.
const AGENT_SERIES: &str = "konnectivity_network_proxy_agent_";

impl Stack {
    /// Starts a server, one agent and targets, and waits for the agent's link.
    pub(crate) fn start(combo: Combo) -> Self {
        Self::with(combo, 1, &[])
    }

    /// As [`Stack::start`], with this many agents and additional server flags.
    pub(crate) fn with(combo: Combo, agents: usize, server_flags: &[&str]) -> Self {
        let dir = TempDir::new().expect("a temporary directory can be made");
        let certs = Certs::write(dir.path());
        let targets = Targets::start(dir.path());
        let server = Server::start(combo, "server", dir.path(), &certs, server_flags);
        let mut stack = Self {
            agents: Vec::new(),
            server,
            targets,
            certs,
            combo,
            dir,
        };
        for n in 0..agents {
            stack.add_agent(&format!("agent-{n}"), &[]);
        }
        stack.await_backends(agents);
        stack
    }

    /// Starts another agent with this id, and waits until it is ready.
    pub(crate) fn add_agent(&mut self, id: &str, flags: &[&str]) -> &Agent {
        let name = format!("agent{}-{id}", self.agents.len());
        let (port, dir) = (self.server.agent_port, self.dir.path());
        let agent = Agent::start(self.combo.agent, &name, id, port, dir, &self.certs, flags);
        agent.await_ready();
        self.agents.push(agent);
        self.agents.last().expect("just pushed")
    }

    /// Waits until the server counts this many agents.
    pub(crate) fn await_backends(&self, count: usize) {
        let want = f64::from(u32::try_from(count).expect("tests have few agents"));
        until(&format!("server sees {count} agents"), secs(15), || {
            (self.server.metric("ready_backend_connections", &[]) == want).then_some(())
        });
    }

    /// A client subcommand for this server's frontend and the named target.
    pub(crate) fn client(&self, subcommand: &str, target: &str) -> Peer<'_> {
        self.client_to(subcommand, &self.targets.address(target))
    }

    /// As [`Stack::client`], for any address.
    pub(crate) fn client_to(&self, subcommand: &str, address: &str) -> Peer<'_> {
        Peer::new(subcommand, self.dir.path())
            .flag("mode", self.combo.mode.flag())
            .flag("uds", self.socket())
            .flag("target", address)
    }

    /// Starts a client. The words are its subcommand, the name or address of its target, and flags as `NAME=VALUE`.
    pub(crate) fn begin(&self, words: &str) -> Running {
        let mut words = words.split(' ');
        let mut next = || words.next().expect("a subcommand and a target");
        let client = match (next(), next()) {
            (command, address) if address.contains(':') => self.client_to(command, address),
            (command, target) => self.client(command, target),
        };
        let flags = words.map(|word| word.split_once('=').expect("NAME=VALUE"));
        let client = flags.fold(client, |client, (name, value)| client.flag(name, value));
        client.begin()
    }

    /// As [`Stack::begin`], to its end.
    pub(crate) fn run(&self, words: &str) -> Report {
        self.begin(words).report()
    }

    /// As [`Stack::run`], for a client that must succeed.
    #[track_caller]
    pub(crate) fn good(&self, words: &str) -> Report {
        self.run(words).good()
    }

    /// As [`Stack::run`], for a client that must fail.
    #[track_caller]
    pub(crate) fn bad(&self, words: &str) -> Report {
        self.run(words).bad()
    }

    /// As [`Stack::start`], with a stub of this mode instead of the agent.
    pub(crate) fn with_stub(combo: Combo, mode: &str) -> (Self, Process) {
        let stack = Self::with(combo, 0, &[]);
        let stub = stack.stub_agent(mode).start();
        stub.named_event("linked", secs(10));
        stack.await_backends(1);
        (stack, stub)
    }

    pub(crate) fn stub_agent(&self, mode: &str) -> Peer<'_> {
        Peer::new("agent-stub", self.dir.path())
            .flag("server", format!("127.0.0.1:{}", self.server.agent_port))
            .flag("ca", self.certs.ca.display())
            .flag("cert", self.certs.agent_cert.display())
            .flag("key", self.certs.agent_key.display())
            .flag("mode", mode)
    }

    /// Path of the frontend's unix socket.
    pub(crate) fn socket(&self) -> String {
        self.dir.path().join("server.sock").display().to_string()
    }

    /// Whether the client speaks gRPC.
    pub(crate) fn is_grpc(&self) -> bool {
        self.combo.mode == Mode::Grpc
    }

    /// Checks a plain request through a tunnel. Tests use it to show that other tunnels still work.
    #[track_caller]
    pub(crate) fn assert_serves(&self) {
        let report = self.client("get", "http").run().good();
        assert_eq!(report.text("body"), "hello from the target\n");
    }

    /// Waits until a metric of agent 0 has a value.
    pub(crate) fn await_agent_metric(&self, name: &str, labels: &[(&str, &str)], want: f64) {
        let what = format!("agent metric {name}{labels:?} is {want}");
        let is_it = || (self.agents[0].metric(name, labels) == want).then_some(());
        until(&what, secs(15), is_it);
    }

    /// Waits until a server metric has a value.
    pub(crate) fn await_server_metric(&self, name: &str, labels: &[(&str, &str)], want: f64) {
        let what = format!("server metric {name}{labels:?} is {want}");
        let is_it = || (self.server.metric(name, labels) == want).then_some(());
        until(&what, secs(15), is_it);
    }
}

impl Server {
    /// Starts a server with the socket `NAME.sock` in the directory, and waits for its health probe.
    pub(crate) fn start(
        combo: Combo,
        name: &str,
        dir: &Path,
        certs: &Certs,
        flags: &[&str],
    ) -> Self {
        let [agent_port, health_port, admin_port] = [(); 3].map(|()| ports::free());
        let (_, mut args) = combo.server.server();
        args.extend([
            format!("--mode={}", combo.mode.flag()),
            format!("--uds-name={}", dir.join(format!("{name}.sock")).display()),
            "--server-port=0".to_owned(),
            format!("--agent-port={agent_port}"),
            format!("--health-port={health_port}"),
            format!("--admin-port={admin_port}"),
            format!("--cluster-cert={}", certs.server_cert.display()),
            format!("--cluster-key={}", certs.server_key.display()),
            format!("--cluster-ca-cert={}", certs.ca.display()),
            format!("--server-id={name}"),
            "--v=2".to_owned(),
        ]);
        args.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let process = Process::service(name, &combo.server.server().0, &args, dir);
        let mut server = Self {
            process,
            maker: combo.server,
            args,
            log: name.to_owned(),
            agent_port,
            health_port,
            admin_port,
        };
        server.await_health();
        server
    }

    /// Restarts it with the same flags after it was killed.
    pub(crate) fn start_again(&mut self, dir: &Path) {
        self.process = Process::service(&self.log, &self.maker.server().0, &self.args, dir);
        self.await_health();
    }

    fn await_health(&mut self) {
        let port = self.health_port;
        let process = &mut self.process;
        until("server answers /healthz", secs(20), || {
            assert!(
                process.is_running(),
                "the server ended at start; its log is below"
            );
            get(port, "/healthz").filter(|answer| answer.status == 200)
        });
    }

    /// Status of its readiness probe; 0 without an answer.
    pub(crate) fn ready_status(&self) -> u16 {
        get(self.health_port, "/readyz").map_or(0, |answer| answer.status)
    }

    /// Value of a metric, named without its prefix. Read from the admin port, because each release exports metrics there.
    pub(crate) fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        value(self.admin_port, SERVER_SERIES, name, labels)
    }

    /// Value of one of Adit's own metrics, named without its prefix; 0 if it was never set.
    pub(crate) fn adit_metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        value(self.admin_port, "adit_", name, labels)
    }
}

impl Agent {
    /// Starts an agent for a server port of this host, without waiting for its link.
    pub(crate) fn start(
        maker: Maker,
        name: &str,
        id: &str,
        server_port: u16,
        dir: &Path,
        certs: &Certs,
        flags: &[&str],
    ) -> Self {
        Self::start_by(&[], maker, name, id, server_port, dir, certs, flags)
    }

    /// As [`Agent::start`], by a command that runs the words after its own.
    #[expect(clippy::too_many_arguments, reason = "a command line")]
    pub(crate) fn start_by(
        command: &[&str],
        maker: Maker,
        name: &str,
        id: &str,
        server_port: u16,
        dir: &Path,
        certs: &Certs,
        flags: &[&str],
    ) -> Self {
        let [health_port, admin_port] = [(); 2].map(|()| ports::free());
        let (program, mut args) = maker.agent();
        args.extend([
            "--proxy-server-host=127.0.0.1".to_owned(),
            format!("--proxy-server-port={server_port}"),
            format!("--ca-cert={}", certs.ca.display()),
            format!("--agent-cert={}", certs.agent_cert.display()),
            format!("--agent-key={}", certs.agent_key.display()),
            format!("--agent-id={id}"),
            format!("--health-server-port={health_port}"),
            format!("--admin-server-port={admin_port}"),
            "--sync-interval=200ms".to_owned(),
            "--sync-interval-cap=1s".to_owned(),
            "--probe-interval=100ms".to_owned(),
            "--v=2".to_owned(),
        ]);
        args.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let mut program = program;
        if let Some((first, words)) = command.split_first() {
            args.insert(0, program.display().to_string());
            args.splice(0..0, words.iter().map(|word| (*word).to_owned()));
            program = first.into();
        }
        Self {
            process: Process::service(name, &program, &args, dir),
            health_port,
        }
    }

    /// Waits until it is ready.
    pub(crate) fn await_ready(&self) {
        until("agent answers /readyz with 200", secs(20), || {
            (self.ready_status() == 200).then_some(())
        });
    }

    /// Status of its readiness probe; 0 without an answer.
    pub(crate) fn ready_status(&self) -> u16 {
        get(self.health_port, "/readyz").map_or(0, |answer| answer.status)
    }

    /// Value of a metric, named without its prefix.
    pub(crate) fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        value(self.health_port, AGENT_SERIES, name, labels)
    }

    /// Sends the SIGTERM by which Kubernetes drains it.
    pub(crate) fn drain(&self) {
        self.process.signal(Signal::TERM);
    }
}

impl Targets {
    /// Starts all targets.
    pub(crate) fn start(dir: &Path) -> Self {
        let process = Peer::new("target", dir).start();
        let ports = process.named_event("listening", secs(20))["ports"].clone();
        Self {
            _process: process,
            ports,
        }
    }

    /// `127.0.0.1:PORT` of a target: http, echo, source, sink, banner, stalled, closed, black_hole.
    pub(crate) fn address(&self, name: &str) -> String {
        format!("127.0.0.1:{}", self.port(name))
    }

    fn port(&self, name: &str) -> u16 {
        let port = self.ports[name]
            .as_u64()
            .unwrap_or_else(|| panic!("there is no target {name}: {}", self.ports));
        u16::try_from(port).expect("ports fit")
    }

    /// What the sink `id` received: bytes, intact, done.
    pub(crate) fn received(&self, id: &str) -> serde_json::Value {
        let answer = get(self.port("http"), &format!("/sink?id={id}")).expect("the target answers");
        serde_json::from_str(answer.body()).expect("the target speaks JSON")
    }
}

/// A sample of the metrics at a port; not a number without an answer.
fn value(port: u16, prefix: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let answer = get(port, "/metrics").filter(|answer| answer.status == 200);
    let scrape = answer.map(|answer| Scrape::parse(answer.body()));
    let series = format!("{prefix}{name}");
    scrape.map_or(f64::NAN, |scrape| scrape.value(&series, labels))
}

/// Requests a path from a port of this host.
pub(crate) fn get(port: u16, path: &str) -> Option<Answer> {
    http::get(SocketAddr::from(([127, 0, 0, 1], port)), path).ok()
}
