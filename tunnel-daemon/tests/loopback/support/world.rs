//! A server with its frontends, agents, certificates and sockets, all in this process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use adit::agent::{self, RunningAgent};
use adit::demo::grpc_client::{self, GrpcTunnel};
use adit::server::{self, RunningServer};
use adit_config::plan::{ConnectPlan, IsolationPlan};
use adit_net::tasks::Tasks;
use adit_telemetry::Scrape;
use adit_telemetry::labels::{EndClass, Label as _};
use adit_testkit::args;
pub(crate) use adit_testkit::args::{agent_plan, agent_plan_in, proxy_plan, server_plan};
use adit_testkit::certificates::ThrowawayFiles;
pub(crate) use adit_testkit::scrape::sample;
use bytes::Bytes;
use tempfile::TempDir;
use tokio::net::UnixStream;
use tonic::transport::Channel;

use super::peers::PeerFiles;
use super::wait::{until, within};

/// Changes limits that have no flag.
type Adjust = fn(&mut IsolationPlan, &mut ConnectPlan);

/// One server, which tests may restart, and what it needs.
pub(crate) struct World {
    pub(crate) files: ThrowawayFiles,
    pub(crate) dir: TempDir,
    server: Option<RunningServer>,
    flags: Vec<String>,
    adjust: Adjust,
    /// Where the agents are, in tests of clients that run a second time through a peer.
    holder: Option<Holder>,
}

/// A server whose agents another one reaches as its peer.
struct Holder {
    server: RunningServer,
    files: PeerFiles,
}

/// Environment variable with which the clients' server of a world has no agents and reaches them through a peer.
const THROUGH_PEER: &str = "ADIT_THROUGH_PEER";

impl World {
    /// A server with both dialects on unix sockets, and no agents. `flags` are added to the command line. In them `{certs}` is
    /// the directory of the certificates, and `!--NAME` removes a default flag.
    pub(crate) async fn start(flags: &[&str]) -> Self {
        Self::start_with(|_files| (), flags).await
    }

    /// As [`World::start`], with changed limits that have no flag.
    pub(crate) async fn start_adjusted(flags: &[&str], adjust: Adjust) -> Self {
        Self::start_as(|_files| (), flags, adjust).await
    }

    /// As [`World::start`], after `prepare` has added to the certificates.
    pub(crate) async fn start_with(prepare: impl FnOnce(&ThrowawayFiles), flags: &[&str]) -> Self {
        Self::start_as(prepare, flags, |_isolation, _heads| ()).await
    }

    async fn start_as(
        prepare: impl FnOnce(&ThrowawayFiles),
        flags: &[&str],
        adjust: Adjust,
    ) -> Self {
        // The last name is not in DNS: only a test's own proxy, name server or hosts file resolves it.
        let names = ["127.0.0.1", "::1", "localhost", "server.test"].map(str::to_owned);
        let mut world = Self {
            files: ThrowawayFiles::create(&names).expect("certificates"),
            dir: TempDir::new().expect("a directory"),
            server: None,
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            adjust,
            holder: None,
        };
        prepare(&world.files);
        if std::env::var_os(THROUGH_PEER).is_some() {
            world.holder = Some(world.hold().await);
        }
        world.serve("0").await;
        if world.holder.is_some() {
            until("the peer", || world.server().linked_peers() == 1).await;
        }
        world
    }

    /// Starts the server that has the agents, where tests run through a peer.
    async fn hold(&self) -> Holder {
        let files = PeerFiles::new();
        let mut args = self.other_args("0", ".holder");
        // The clients' own server judges them.
        args.retain(|arg| !arg.starts_with("--client-allow-target"));
        args.extend(files.flags("holder"));
        args.extend(["--peer-bind=127.0.0.1:0", "--server-id=holder"].map(str::to_owned));
        let plan = server_plan(&args).expect("flags are right");
        let plan = plan.adjusted(self.adjust);
        let server = server::start(&plan).await.expect("the server starts");
        Holder { server, files }
    }

    /// A world with one linked agent, `agent-1`.
    pub(crate) async fn with_agent() -> (Self, RunningAgent) {
        Self::linked(&[], &[]).await
    }

    /// As [`World::with_agent`], with a target that echoes.
    pub(crate) async fn with_echo() -> (Self, RunningAgent, String, Tasks) {
        let (world, agent) = Self::with_agent().await;
        let (target, echo) = super::targets::local_echo().await;
        (world, agent, target, echo)
    }

    /// As [`World::with_agent`], with flags for the server and for the agent.
    pub(crate) async fn linked(flags: &[&str], of_agent: &[&str]) -> (Self, RunningAgent) {
        let world = Self::start(flags).await;
        let agent = world.agent("agent-1", of_agent).await;
        world.links(1).await;
        (world, agent)
    }

    /// As [`World::linked`], with lanes that wait for tunnels.
    pub(crate) async fn warm(flags: &[&str], of_agent: &[&str]) -> (Self, RunningAgent) {
        let (world, agent) = Self::linked(flags, of_agent).await;
        super::lanes::warm(&world).await;
        (world, agent)
    }

    /// As [`World::linked`], with tunnels on lanes that wait for them, or on the link.
    pub(crate) async fn on(lanes: bool, flags: &[&str]) -> (Self, RunningAgent) {
        if lanes {
            return Self::warm(flags, &[]).await;
        }
        Self::linked(&[&["--lanes-per-link=0"], flags].concat(), &[]).await
    }

    /// As [`World::server_args`], for another server beside this one. Its sockets end in `suffix` in place of `.sock`.
    pub(crate) fn other_args(&self, agent_port: &str, suffix: &str) -> Vec<String> {
        let args = self.server_args(agent_port).into_iter();
        args.map(|arg| arg.replace(".sock", suffix)).collect()
    }

    /// Starts another server; see [`World::other_args`].
    pub(crate) async fn other_server(&self, suffix: &str) -> RunningServer {
        let plan = server_plan(&self.other_args("0", suffix)).expect("flags are right");
        server::start(&plan).await.expect("the server starts")
    }

    /// The command line of this world's server, program name included.
    pub(crate) fn server_args(&self, agent_port: &str) -> Vec<String> {
        let mut args = args::server(&self.files, "127.0.0.1", agent_port);
        args.extend([
            format!("--frontend=grpc=unix:{}", self.grpc().display()),
            format!("--frontend=http-connect=unix:{}", self.connect().display()),
        ]);
        let certs = self.files.dir().display().to_string();
        let flags = self.flags.iter();
        with_flags(&mut args, flags.map(|flag| flag.replace("{certs}", &certs)));
        args
    }

    /// The command line of an agent of this world's server, program name included.
    pub(crate) fn agent_args(&self, id: &str, port: u16, flags: &[&str]) -> Vec<String> {
        let mut args = args::agent(&self.files, &format!("127.0.0.1:{port}"), id);
        args.push("--sync-interval-cap=200ms".to_owned());
        with_flags(&mut args, flags.iter().map(|flag| (*flag).to_owned()));
        args
    }

    async fn serve(&mut self, port: &str) {
        let mut args = self.server_args(port);
        if let Some(holder) = &self.holder {
            let address = holder.server.peers.expect("it serves peers");
            args.extend(holder.files.flags("front"));
            args.push(format!("--peer={address}"));
        }
        let plan = server_plan(&args).expect("flags are right");
        let plan = plan.adjusted(self.adjust);
        self.server = Some(server::start(&plan).await.expect("the server starts"));
    }

    /// Stops the server at once, and starts another on the same agent port and sockets.
    pub(crate) async fn restart_server(&mut self) {
        let port = self.server().agents.port().to_string();
        self.stop_server(Duration::ZERO).await;
        self.serve(&port).await;
    }

    /// Starts a server after [`World::stop_server`].
    pub(crate) async fn start_server(&mut self, port: u16) {
        self.serve(&port.to_string()).await;
    }

    pub(crate) async fn stop_server(&mut self, grace: Duration) {
        let server = self.server.take().expect("it runs");
        within("the server's end", server.stop(Some(grace))).await;
    }

    /// The server, to stop it in a task of its own.
    pub(crate) fn take_server(&mut self) -> RunningServer {
        self.server.take().expect("it runs")
    }

    pub(crate) fn server(&self) -> &RunningServer {
        self.server.as_ref().expect("the server runs")
    }

    /// The server that agents link to.
    pub(crate) fn of_agents(&self) -> &RunningServer {
        let holder = self.holder.as_ref().map(|holder| &holder.server);
        holder.unwrap_or_else(|| self.server())
    }

    /// Starts an agent; does not wait for its link.
    pub(crate) async fn agent(&self, id: &str, flags: &[&str]) -> RunningAgent {
        let port = self.of_agents().agents.port();
        self.agent_of(port, id, flags).await
    }

    /// Starts an agent with these identifiers.
    pub(crate) async fn agent_for(&self, id: &str, identifiers: &str) -> RunningAgent {
        let flag = format!("--agent-identifiers={identifiers}");
        self.agent(id, &[&flag]).await
    }

    /// Starts an agent of the server at this port of the host.
    pub(crate) async fn agent_of(&self, port: u16, id: &str, flags: &[&str]) -> RunningAgent {
        let plan = agent_plan(&self.agent_args(id, port, flags)).expect("flags are right");
        agent::start(&plan).await.expect("the agent starts")
    }

    /// Waits until the server holds this many links.
    pub(crate) async fn links(&self, count: usize) {
        let of_agents = self.of_agents();
        until(&format!("{count} links"), || of_agents.links() == count).await;
        if self.holder.is_some() {
            let has_keys = || self.server().reachable_keys() > 0;
            until("what the peer announces", || has_keys() == (count > 0)).await;
        }
    }

    /// Waits until a series of the server has this value. `series` includes its labels, as exported.
    pub(crate) async fn server_metric(&self, series: &str, value: f64) {
        scraped(&self.server().metrics.scrape(), series, value).await;
    }

    /// Waits until this many tunnels of the server have ended for this reason; behind a peer for whatever reason the peer has told.
    pub(crate) async fn ended(&self, reason: &str, tunnels: f64) {
        if self.holder.is_some() {
            let metrics = || self.server().metrics.scrape().text();
            let all = || {
                EndClass::ALL
                    .iter()
                    .filter_map(|end| sample(&metrics(), &super::lanes::ended(end.as_str())))
            };
            return until("ended tunnels", || all().sum::<f64>() >= tunnels).await;
        }
        self.server_metric(&super::lanes::ended(reason), tunnels)
            .await;
    }

    /// Asserts that the server has lost no lane.
    pub(crate) fn assert_no_lane_lost(&self) {
        assert_eq!(
            super::lanes::value(self, &super::lanes::closed("lost")),
            0.0
        );
    }

    /// The admin socket of a server with the flag `--admin-socket={certs}/admin.sock`.
    pub(crate) fn admin_socket(&self) -> PathBuf {
        self.files.dir().join("admin.sock")
    }

    pub(crate) fn grpc(&self) -> PathBuf {
        self.dir.path().join("grpc.sock")
    }

    pub(crate) fn connect(&self) -> PathBuf {
        self.dir.path().join("connect.sock")
    }

    /// A connection to the HTTP-CONNECT frontend, before any request.
    pub(crate) async fn client(&self) -> UnixStream {
        let stream = UnixStream::connect(self.connect()).await;
        stream.expect("the frontend listens")
    }

    /// A connection to the gRPC frontend, before any byte.
    pub(crate) async fn grpc_socket(&self) -> UnixStream {
        let stream = UnixStream::connect(self.grpc()).await;
        stream.expect("the frontend listens")
    }

    pub(crate) async fn channel(&self) -> Channel {
        channel(&self.grpc()).await
    }

    /// A gRPC tunnel on a connection of its own.
    pub(crate) async fn tunnel(&self, target: &str) -> GrpcTunnel {
        open(self.channel().await, target).await
    }

    /// Asserts that both frontends carry an echo to `target`, on new tunnels.
    pub(crate) async fn assert_serves(&self, target: &str) {
        let mut tunnel = self.tunnel(target).await;
        echo(&mut tunnel, b"grpc still works").await;
        tunnel.close().await.expect("a clean close");
        let mut stream = super::connect::open(&self.connect(), target).await;
        super::connect::echo(&mut stream, b"connect still works").await;
    }
}

/// Adds flags. A flag that begins with `!` removes the flag that it names.
fn with_flags(args: &mut Vec<String>, flags: impl Iterator<Item = String>) {
    for flag in flags {
        match flag.strip_prefix('!') {
            Some(name) => args.retain(|arg| arg.split('=').next() != Some(name)),
            None => args.push(flag),
        }
    }
    // The default socket is one for the whole host.
    if !args.iter().any(|arg| arg.starts_with("--admin-socket")) {
        args.push("--admin-socket=off".to_owned());
    }
}

/// Waits until the agent has this many connections to targets.
pub(crate) async fn endpoints_left(agent: &RunningAgent, count: i64) {
    let open = || agent.metrics.open_endpoint_connections();
    until(&format!("{count} connections to targets"), || {
        open() == count
    })
    .await;
}

/// Waits until a series of the agent has this value.
pub(crate) async fn agent_metric(agent: &RunningAgent, series: &str, value: f64) {
    scraped(&agent.metrics.scrape(), series, value).await;
}

/// Waits until a series has this value.
pub(crate) async fn scraped(scrape: &Scrape, series: &str, value: f64) {
    let what = format!("{series} = {value}");
    until(&what, || sample(&scrape.text(), series) == Some(value)).await;
}

/// A gRPC client connection.
pub(crate) async fn channel(socket: &Path) -> Channel {
    within("a client connection", grpc_client::connect(socket))
        .await
        .expect("the frontend listens")
}

/// Opens a gRPC tunnel.
pub(crate) async fn open(channel: Channel, target: &str) -> GrpcTunnel {
    within("a dial", GrpcTunnel::open(channel, target))
        .await
        .unwrap_or_else(|error| panic!("dialing {target}: {error}"))
}

/// Sends `text` and expects it back.
pub(crate) async fn echo(tunnel: &mut GrpcTunnel, text: &[u8]) {
    tunnel
        .write(Bytes::copy_from_slice(text))
        .await
        .expect("the tunnel takes bytes");
    let mut back = Vec::new();
    while back.len() < text.len() {
        let read = within("an echo", tunnel.read())
            .await
            .expect("the tunnel lives");
        back.extend_from_slice(&read.expect("the tunnel is open"));
    }
    assert_eq!(back, text);
}
