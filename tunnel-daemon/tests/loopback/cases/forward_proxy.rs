//! Agents that reach their server through an HTTP proxy, as `HTTPS_PROXY` says.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use adit::agent::{self, RunningAgent};
use adit_testkit::certificates::ThrowawayFiles;
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::cases::processes::compat_agent;
use crate::support::clients::Io;
use crate::support::lanes::value;
use crate::support::process::Process;
use crate::support::skip::finds_program;
use crate::support::wait::until;
use crate::support::world::{World, agent_plan_in};
use crate::support::{ports, targets, tls};

/// What the proxy does with a request.
#[derive(Clone, Copy)]
pub(super) enum Answer {
    /// Connects to the server, regardless of the requested name, and answers with these bytes.
    Tunnel(&'static [u8]),
    /// Writes these bytes and closes.
    Say(&'static [u8]),
    /// Writes header lines until the agent closes the connection.
    Flood,
}

pub(super) const ESTABLISHED: Answer =
    Answer::Tunnel(b"HTTP/1.1 200 Connection established\r\n\r\n");

/// A CONNECT proxy that connects only to one server.
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    /// Answers requests in turn from `script`, and further ones with its last entry.
    pub(super) async fn start(server: SocketAddr, script: &'static [Answer]) -> Self {
        Self::start_with(server, script, None).await
    }

    /// As [`Self::start`], with TLS to its clients.
    pub(super) async fn start_with(
        server: SocketAddr,
        script: &'static [Answer],
        acceptor: Option<TlsAcceptor>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let mut tasks = JoinSet::new();
        let heads = Arc::clone(&asked);
        tasks.spawn(async move {
            let mut serving = JoinSet::new();
            for number in 0.. {
                let (stream, _) = listener.accept().await.expect("a connection");
                let answer = script.get(number).or_else(|| script.last());
                let answer = *answer.expect("a script is not empty");
                let (heads, acceptor) = (Arc::clone(&heads), acceptor.clone());
                serving.spawn(async move {
                    let _agent_left = match acceptor {
                        None => serve(stream, server, answer, &heads).await,
                        Some(acceptor) => {
                            let stream = acceptor.accept(stream).await?;
                            serve(stream, server, answer, &heads).await
                        }
                    };
                    std::io::Result::Ok(())
                });
            }
        });
        Self {
            address,
            asked,
            _tasks: tasks,
        }
    }

    pub(super) fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("nothing panics").clone()
    }
}

async fn serve(
    mut agent: impl Io,
    server: SocketAddr,
    answer: Answer,
    heads: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(agent.read_u8().await?);
    }
    let text = String::from_utf8(head).expect("heads are text");
    heads.lock().expect("nothing panics").push(text);
    match answer {
        Answer::Tunnel(text) => {
            let mut server = TcpStream::connect(server).await?;
            agent.write_all(text).await?;
            copy_bidirectional(&mut agent, &mut server).await?;
        }
        Answer::Say(text) => agent.write_all(text).await?,
        Answer::Flood => {
            agent.write_all(b"HTTP/1.1 200 OK\r\n").await?;
            loop {
                agent.write_all(b"X-More: and more\r\n").await?;
            }
        }
    }
    Ok(())
}

/// An agent whose server is `host` at this world's port, with these environment variables.
async fn agent_of(world: &World, host: &str, env: &[(&str, String)]) -> RunningAgent {
    let port = world.server().agents.port();
    let server = format!("--proxy-server-host={host}:{port}");
    let args = world.agent_args("proxied", port, &["!--proxy-server-host", &server]);
    let plan = agent_plan_in(env, &args).expect("flags are right");
    agent::start(&plan).await.expect("the agent starts")
}

/// Only the proxy can resolve the name. The CONNECT request equals upstream's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_reaches_its_server_through_the_proxy() {
    let (target, _echo) = targets::local_echo().await;
    for variable in ["HTTPS_PROXY", "https_proxy"] {
        let world = World::start(&[]).await;
        let server = world.server().agents;
        let proxy = Proxy::start(server, &[ESTABLISHED]).await;
        let env = [(variable, format!("http://{}", proxy.address))];
        let _agent = agent_of(&world, "server.test", &env).await;
        world.links(1).await;
        world.assert_serves(&target).await;
        let name = format!("server.test:{}", server.port());
        let head = format!("CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n\r\n");
        let asked = proxy.asked();
        // One request for the link and one for each lane.
        assert!(asked.iter().all(|other| *other == head), "{asked:?}");
        assert!(!asked.is_empty());
    }
}

/// User and password are those of the URL, without its escapes, and get to the proxy alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_for_the_proxy_is_sent_as_basic() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let proxy = Proxy::start(world.server().agents, &[ESTABLISHED]).await;
    let url = format!("http://us%40er:p%3Ass@{}", proxy.address);
    let _agent = agent_of(&world, "server.test", &[("HTTPS_PROXY", url)]).await;
    world.links(1).await;
    world.assert_serves(&target).await;
    let known = "\r\nProxy-Authorization: Basic dXNAZXI6cDpzcw==\r\n";
    let asked = proxy.asked();
    assert!(asked.iter().all(|head| head.contains(known)), "{asked:?}");
}

/// Link and lanes run inside TLS to the proxy, whose certificate is verified.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_https_proxy_is_spoken_to_by_tls() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let acceptor = tls::acceptor(&world, "server");
    let proxy = Proxy::start_with(world.server().agents, &[ESTABLISHED], Some(acceptor)).await;
    let port = world.server().agents.port();
    let ca = format!("--proxy-ca-cert={}", world.files.ca_file().display());
    let server = format!("--proxy-server-host=server.test:{port}");
    let args = world.agent_args("proxied", port, &["!--proxy-server-host", &server, &ca]);
    let env = [("HTTPS_PROXY", format!("https://a:b@{}", proxy.address))];
    let plan = agent_plan_in(&env, &args).expect("flags are right");
    let _agent = agent::start(&plan).await.expect("the agent starts");
    world.links(1).await;
    until("a lane through the proxy", || proxy.asked().len() > 1).await;
    for _tunnel in 0..8 {
        world.assert_serves(&target).await;
    }
    assert!(proxy.asked().iter().all(|head| head.contains("Basic YTpi")));

    // A proxy by another CA's certificate is asked for nothing.
    let strangers = ThrowawayFiles::create(&["127.0.0.1".to_owned()]).expect("certificates");
    let ca = format!("--proxy-ca-cert={}", strangers.ca_file().display());
    let args = world.agent_args("strange", port, &["!--proxy-server-host", &server, &ca]);
    let acceptor = tls::acceptor(&world, "server");
    let other = Proxy::start_with(world.server().agents, &[ESTABLISHED], Some(acceptor)).await;
    let env = [("HTTPS_PROXY", format!("https://a:b@{}", other.address))];
    let plan = agent_plan_in(&env, &args).expect("flags are right");
    let strange = agent::start(&plan).await.expect("the agent starts");
    let failures = "server_connection_failure_count{direction=\"to_server\"} 1";
    until("a refused proxy", || {
        strange.metrics.scrape().text().contains(failures)
    })
    .await;
    strange.stop().await;
    assert_eq!(other.asked(), [""; 0]);
}

/// Agents of Advanced Cluster Management, with upstream's flags. Their `https://` proxy's CA is in the file of `--ca-cert`, which
/// `ROOT_CA_CERT` names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_of_acm_reach_their_server_through_their_proxy() {
    let (target, _echo) = targets::local_echo().await;
    for (scheme, user) in [
        ("http", "us:s3cret@"),
        ("https", ""),
        ("https", "us:s3cret@"),
    ] {
        let world = World::start(&[]).await;
        let server = world.server().agents;
        let acceptor = (scheme == "https").then(|| tls::acceptor(&world, "server"));
        let proxy = Proxy::start_with(server, &[ESTABLISHED], acceptor).await;
        let env = [
            ("HTTPS_PROXY", format!("{scheme}://{user}{}", proxy.address)),
            ("NO_PROXY", ".cluster.local,.svc,172.30.0.1".to_owned()),
            ("ROOT_CA_CERT", world.files.ca_file().display().to_string()),
        ];
        let mut args = vec!["proxy-agent".to_owned()];
        args.extend(compat_agent(
            &world,
            server.port(),
            [(); 2].map(|()| ports::free()),
        ));
        // Of a flag given twice the last counts.
        args.push("--proxy-server-host=server.test".to_owned());
        let plan = agent_plan_in(&env, &args).expect("flags are right");
        let _agent = agent::start(&plan).await.expect("the agent starts");
        world.links(1).await;
        world.assert_serves(&target).await;
        let asked = proxy.asked();
        assert!(asked[0].starts_with("CONNECT server.test:"), "{asked:?}");
        let has_password = asked[0].contains("Basic dXM6czNjcmV0");
        assert_eq!(has_password, !user.is_empty(), "{asked:?}");
    }
}

/// squid with this configuration, which knows `server.test`.
fn squid(dir: &Path, config: &str) -> Process {
    let at = |name: &str| dir.join(name).display().to_string();
    fs::write(at("hosts"), "127.0.0.1 server.test\n").expect("a file");
    let config = format!(
        "{config}hosts_file {}\npid_filename none\naccess_log none\ncache_log stdio:/dev/stderr\ncache deny all\n\
         shutdown_lifetime 0 seconds\n",
        at("hosts")
    );
    fs::write(at("squid.conf"), config).expect("a file");
    // squid reads them as another user.
    let files = fs::read_dir(dir).expect("it is ours");
    let files = files.map(|file| file.expect("a file").path());
    for path in files.chain([dir.to_owned()]) {
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(path, mode).expect("it is ours");
    }
    let mut squid = Command::new("squid");
    squid.args(["-N", "-f", &at("squid.conf")]);
    Process::start_command("squid", squid, dir)
}

/// squid, in clear and by TLS, for those who have the password; and one who has not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_reach_their_server_through_squid() {
    const TEST: &str = "agents_reach_their_server_through_squid";
    const HELPER: &str = "/usr/lib/squid/basic_ncsa_auth";
    if !finds_program("squid", TEST) || !finds_program("openssl", TEST) {
        return;
    }
    let world = World::start(&[]).await;
    let dir = tempfile::TempDir::new().expect("a folder");
    let at = |name: &str| dir.path().join(name).display().to_string();
    let hash = Command::new("openssl")
        .args(["passwd", "-apr1", "p:ss"])
        .output();
    let hash = String::from_utf8(hash.expect("openssl runs").stdout).expect("text");
    fs::write(at("users"), format!("us@er:{hash}")).expect("a file");
    let [clear, secure] = [(); 2].map(|()| ports::free());
    let (cert, key) = (world.files.cert("server"), world.files.key("server"));
    let config = format!(
        "http_port 127.0.0.1:{clear}\nhttps_port 127.0.0.1:{secure} tls-cert={} tls-key={}\n\
         auth_param basic program {HELPER} {}\nacl known proxy_auth REQUIRED\nhttp_access allow known\n\
         http_access deny all\n",
        cert.display(),
        key.display(),
        at("users"),
    );
    let _squid = squid(dir.path(), &config);
    let (target, _echo) = targets::local_echo().await;
    let port = world.server().agents.port();
    let ca = format!("--proxy-ca-cert={}", world.files.ca_file().display());
    let server = format!("--proxy-server-host=server.test:{port}");
    let start = |name: &'static str, url: String| {
        let args = world.agent_args(name, port, &["!--proxy-server-host", &server, &ca]);
        let plan = agent_plan_in(&[("HTTPS_PROXY", url)], &args).expect("flags are right");
        async move { agent::start(&plan).await.expect("the agent starts") }
    };
    for (name, url) in [
        (
            "in-clear",
            format!("http://us%40er:p%3Ass@127.0.0.1:{clear}"),
        ),
        (
            "by-tls",
            format!("https://us%40er:p%3Ass@127.0.0.1:{secure}"),
        ),
    ] {
        let agent = start(name, url).await;
        world.links(1).await;
        world.assert_serves(&target).await;
        agent.stop().await;
        world.links(0).await;
    }
    let unknown = start("unknown", format!("http://127.0.0.1:{clear}")).await;
    let failures = "server_connection_failure_count{direction=\"to_server\"} 2";
    until("refusals", || {
        unknown.metrics.scrape().text().contains(failures)
    })
    .await;
    world.links(0).await;
}

/// squid allows an address three connections, and cuts those that are idle for ten seconds: the agent keeps its link, has as many
/// lanes as it gets, says so, and serves all tunnels.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_that_allows_few_connections_leaves_few_lanes_and_no_tunnel_fails() {
    const TEST: &str = "a_proxy_that_allows_few_connections_leaves_few_lanes_and_no_tunnel_fails";
    if !finds_program("squid", TEST) {
        return;
    }
    let world = World::start(&[]).await;
    let dir = tempfile::TempDir::new().expect("a folder");
    let port = ports::free();
    let config = format!(
        "http_port 127.0.0.1:{port}\nacl busy maxconn 3\nhttp_access deny busy\nhttp_access allow all\n\
         read_timeout 10 seconds\n",
    );
    let _squid = squid(dir.path(), &config);
    let (target, _echo) = targets::local_echo().await;
    let server = world.server().agents.port();
    let host = format!("--proxy-server-host=server.test:{server}");
    let mut args = world.agent_args("few", server, &["!--proxy-server-host", &host]);
    args.push(format!("--https-proxy=http://127.0.0.1:{port}"));
    let agent = Process::start("agent", &args, dir.path());
    agent
        .logs("no lane can be opened, so tunnels use the link")
        .await;
    let cut = "adit_lanes_closed_total{reason=\"lost\"}";
    until("lanes cut while idle", || value(&world, cut) >= 2.0).await;
    for _round in 0..10 {
        // More tunnels than connections at once.
        join_all((0..6).map(|_tunnel| world.assert_serves(&target))).await;
    }
    let log = agent.log();
    assert_eq!(log.matches("connected to a server").count(), 1, "{log}");
}

/// The agent counts each failure and retries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_and_malformed_answers_of_the_proxy_are_retried() {
    const BAD: &[Answer] = &[
        Answer::Say(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno"),
        Answer::Say(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"),
        Answer::Say(b"HTTP/1.1 204 No Content\r\n\r\n"),
        Answer::Say(b"\r\n\r\n"),
        Answer::Say(b"\x15\x03\x01\x00\x02\x02\x28 garbage\r\n\r\n"),
        // Not HTTP, although it contains 200.
        Answer::Tunnel(b"SSH-2.0 200 fine\r\n\r\n"),
        Answer::Say(b"HTTP/1.1 200 cut of"),
        Answer::Say(b""),
        Answer::Flood,
        ESTABLISHED,
    ];
    let world = World::start(&[]).await;
    let proxy = Proxy::start(world.server().agents, BAD).await;
    let env = [("HTTPS_PROXY", proxy.address.to_string())];
    let agent = agent_of(&world, "server.test", &env).await;
    world.links(1).await;
    assert!(proxy.asked().len() >= BAD.len());
    let failures = format!(
        "server_connection_failure_count{{direction=\"to_server\"}} {}",
        BAD.len() - 1
    );
    let text = agent.metrics.scrape().text();
    assert!(text.contains(&failures), "{failures}: {text}");
}

/// Loopback addresses bypass the proxy, and `NO_PROXY` names further exceptions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loopback_and_no_proxy_addresses_bypass_the_proxy() {
    let world = World::start(&[]).await;
    let proxy = Proxy::start(world.server().agents, &[ESTABLISHED]).await;
    let https_proxy = ("HTTPS_PROXY", format!("http://{}", proxy.address));
    let loopback = agent_of(&world, "127.0.0.1", std::slice::from_ref(&https_proxy)).await;
    world.links(1).await;
    loopback.stop().await;

    for variable in ["NO_PROXY", "no_proxy"] {
        let no_proxy = (
            variable,
            "other.test,.server.test,server.test:1,*.test.".to_owned(),
        );
        let proxied = agent_of(&world, "server.test", &[https_proxy.clone(), no_proxy]).await;
        until("the proxy is asked", || !proxy.asked().is_empty()).await;
        proxied.stop().await;
        proxy.asked.lock().expect("nothing panics").clear();

        // A documentation address (RFC 5737). The agent dials it directly, reachable or not, and never through the proxy.
        let no_proxy = (variable, "other.test, 192.0.2.0/24".to_owned());
        let direct = agent_of(&world, "192.0.2.1", &[https_proxy.clone(), no_proxy]).await;
        let proxied = agent_of(&world, "server.test", std::slice::from_ref(&https_proxy)).await;
        until("the proxy is asked", || !proxy.asked().is_empty()).await;
        assert!(
            proxy
                .asked()
                .iter()
                .all(|head| head.contains("server.test")),
            "{:?}",
            proxy.asked()
        );
        direct.stop().await;
        proxied.stop().await;
        proxy.asked.lock().expect("nothing panics").clear();
    }
}
