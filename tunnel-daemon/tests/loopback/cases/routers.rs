//! Routers between agents and the servers of several installations, with the configurations of docs/guides/routers.md: HAProxy, nginx
//! and Envoy, where they are installed.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use adit::agent::{self, RunningAgent};
use adit::server::{self, RunningServer};
use adit_testkit::certificates::Usage;
use adit_testkit::scrape;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::forward_proxy::{ESTABLISHED, Proxy};
use crate::support::lanes::{HITS, IDLE, MISSES, value, warm};
use crate::support::process::{self, Process};
use crate::support::routers::{Kind, Router};
use crate::support::wait::{until, within};
use crate::support::world::{World, agent_plan_in, server_plan};
use crate::support::{connect, targets, tls};

/// An installation whose servers have a certificate for this name alone.
async fn installation(name: &str, flags: &[&str]) -> World {
    let names = [name.to_owned()];
    let prepare = |files: &adit_testkit::certificates::ThrowawayFiles| {
        files
            .issue("server", Usage::Server, &names)
            .expect("a certificate");
    };
    World::start_with(prepare, flags).await
}

/// The command line of an agent that dials this name.
fn args_of(world: &World, name: &str) -> Vec<String> {
    let server = format!("--proxy-server-host={name}:443");
    world.agent_args("agent-1", 443, &["!--proxy-server-host", &server])
}

/// An agent that dials this name, which only the proxy can resolve.
async fn agent_of(world: &World, name: &str, proxy: &Proxy) -> RunningAgent {
    let env = [("HTTPS_PROXY", format!("http://{}", proxy.address))];
    let plan = agent_plan_in(&env, &args_of(world, name)).expect("flags are right");
    agent::start(&plan).await.expect("the agent starts")
}

/// A server, its socket for clients, and how many of its dials have taken a lane.
struct Behind<'a> {
    server: &'a RunningServer,
    socket: PathBuf,
}

impl Behind<'_> {
    fn value(&self, series: &str) -> f64 {
        scrape::value(&self.server.metrics.scrape().text(), series)
    }

    /// One agent has a link and lanes, and a tunnel takes a lane.
    async fn serves(&self, target: &str) {
        until("a link and its lanes", || {
            self.server.links() == 1 && self.value(IDLE) >= 4.0
        })
        .await;
        let before = self.value(HITS);
        let mut stream = connect::open(&self.socket, target).await;
        connect::echo(&mut stream, b"on a lane").await;
        assert_eq!(self.value(HITS), before + 1.0);
    }
}

/// Links and lanes of both installations lead to their own servers, also after the router was away.
async fn by_name(kind: Kind, test: &str) {
    if !kind.is_here(test) {
        return;
    }
    let (target, _echo) = targets::local_echo().await;
    let a = installation("a.example", &["--server-count=2"]).await;
    let b = installation("b.example", &[]).await;
    let second = a.other_server(".other").await;
    let servers = [a.server().agents, second.agents, b.server().agents];
    let mut router = Router::by_name(kind, servers);
    let proxy = Proxy::start(router.address, &[ESTABLISHED]).await;
    let _agents = [
        agent_of(&a, "a.example", &proxy).await,
        agent_of(&b, "b.example", &proxy).await,
    ];
    let behind = [
        (a.server(), a.connect()),
        (&second, a.dir.path().join("connect.other")),
        (b.server(), b.connect()),
    ]
    .map(|(server, socket)| Behind { server, socket });
    for restarts in 0..=2 {
        if restarts > 0 {
            router.run();
        }
        for one in &behind {
            one.serves(&target).await;
        }
        let mut cut = connect::open(&behind[0].socket, &target).await;
        connect::echo(&mut cut, b"until the router stops").await;
        router.stop();
        let (rest, _reset_or_not) = connect::end(&mut cut).await;
        assert_eq!(rest, b"");
        until("no link and no lane without the router", || {
            let mut left = behind
                .iter()
                .map(|one| (one.server.links(), one.value(IDLE)));
            left.all(|left| left == (0, 0.0))
        })
        .await;
    }
    within("its end", second.stop(Some(Duration::ZERO))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn haproxy_leads_agents_of_two_installations_by_name() {
    by_name(
        Kind::HaProxy,
        "haproxy_leads_agents_of_two_installations_by_name",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_leads_agents_of_two_installations_by_name() {
    by_name(
        Kind::Nginx,
        "nginx_leads_agents_of_two_installations_by_name",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_leads_agents_of_two_installations_by_name() {
    by_name(
        Kind::Envoy,
        "envoy_leads_agents_of_two_installations_by_name",
    )
    .await;
}

/// A kube-apiserver's port: TLS for HTTP alone, which echoes here.
pub(super) struct ApiServer {
    pub(super) address: SocketAddr,
    _accepting: JoinSet<()>,
}

impl ApiServer {
    pub(super) async fn start(world: &World) -> Self {
        let mut config = tls::server_config(world, "server");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut serving = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                serving.spawn(async move {
                    let stream = acceptor.accept(stream).await?;
                    let (mut read, mut write) = tokio::io::split(stream);
                    tokio::io::copy(&mut read, &mut write).await
                });
            }
        });
        Self {
            address,
            _accepting: accepting,
        }
    }

    /// A client of the API server connects at this address.
    pub(super) async fn is_at(world: &World, address: SocketAddr) {
        let client = async {
            loop {
                // The router may still be starting.
                if let Ok(client) = tls::dial_to(world, b"http/1.1", address, None).await {
                    return client;
                }
                tokio::task::yield_now().await;
            }
        };
        let mut client = within("a client of the API server", client).await;
        connect::echo(&mut client, b"not for an agent port").await;
    }
}

/// One name for agents and other clients. By an ALPN name of their own all of an agent's connections reach its server. A router that
/// lets only `h2` pass takes its lanes elsewhere: no dial is lost, and the log says so.
async fn by_alpn(kind: Kind, test: &str) {
    if !kind.is_here(test) {
        return;
    }
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let other = ApiServer::start(&world).await;
    let agent_of = |router: &Router, name: &str| {
        let args = world.agent_args(name, router.address.port(), &["--alpn-proto=konnectivity"]);
        Process::start(name, &args, world.dir.path())
    };
    let server = world.server().agents;
    let router = Router::by_alpn(kind, "h2", server, other.address);
    let agent = agent_of(&router, "astray");
    world.links(1).await;
    for _dial in 0..4 {
        world.assert_serves(&target).await;
    }
    agent
        .logs("no lane can be opened, so tunnels use the link")
        .await;
    world.assert_serves(&target).await;
    assert_eq!((value(&world, HITS), value(&world, MISSES)), (0.0, 10.0));
    drop((agent, router));
    world.links(0).await;

    let router = Router::by_alpn(kind, "konnectivity", server, other.address);
    let _agent = agent_of(&router, "routed");
    warm(&world).await;
    world.assert_serves(&target).await;
    assert_eq!(value(&world, HITS), 2.0);
    ApiServer::is_at(&world, router.address).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn haproxy_leads_links_and_lanes_by_alpn() {
    by_alpn(Kind::HaProxy, "haproxy_leads_links_and_lanes_by_alpn").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_leads_links_and_lanes_by_alpn() {
    by_alpn(Kind::Nginx, "nginx_leads_links_and_lanes_by_alpn").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_leads_links_and_lanes_by_alpn() {
    by_alpn(Kind::Envoy, "envoy_leads_links_and_lanes_by_alpn").await;
}

/// The log of an agent of `a.example` whose router leads to `server`, and `adit check --connect`, contain `cause`.
async fn names_both(a: &World, name: &str, server: SocketAddr, cause: &str) {
    let router = Proxy::start(server, &[ESTABLISHED]).await;
    let run = |command: &[&str]| {
        let args = args_of(a, "a.example");
        let mut run = Command::new(process::program());
        run.arg0("adit").args(command).args(&args[1..]);
        run.env("HTTPS_PROXY", format!("http://{}", router.address));
        run
    };
    let agent = Process::start_command(name, run(&[]), a.dir.path());
    agent.logs(cause).await;
    // On a busy host a check may give up before the handshake ends.
    until("a check that names both", || {
        let checked = run(&["check", "--connect"]).output().expect("it runs");
        assert!(!checked.status.success());
        let said = [checked.stdout, checked.stderr].concat();
        // A table, which breaks lines.
        let said = String::from_utf8_lossy(&said);
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        said.contains(cause)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_is_led_to_another_installation_names_both_names() {
    const NAMES: &str = "the peer's certificate is not for a.example, but for b.example";
    let a = installation("a.example", &[]).await;
    let b = installation("b.example", &[]).await;
    let cause = format!("{NAMES}, and is signed by no CA that is trusted here");
    names_both(&a, "other-ca", b.server().agents, &cause).await;

    // Installations of one CA.
    let names = ["b.example".to_owned()];
    let issued = a.files.issue("other", Usage::Server, &names);
    issued.expect("a certificate");
    let args = a.other_args("0", ".other").into_iter();
    let args: Vec<String> = args
        .map(|arg| match arg.split_once("/server.") {
            Some((dir, kind)) => format!("{dir}/other.{kind}"),
            None => arg,
        })
        .collect();
    let plan = server_plan(&args).expect("flags are right");
    let other = server::start(&plan).await.expect("the server starts");
    let cause = format!("{NAMES}: dial such a name");
    names_both(&a, "same-ca", other.agents, &cause).await;
    within("its end", other.stop(Some(Duration::ZERO))).await;
}
