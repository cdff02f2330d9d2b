//! Tests of servers that never answer, on paused time: each attempt has one deadline for all its stages.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use adit_core::ids::AgentId;
use adit_core::session::{Isolation, ProcessBudget};
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{Extensions, PeerVersion};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;
use crate::connector::{ForwardProxies, RecentServers};
use crate::link::tests::open_dialer;
use adit_config::plan::CountSource;
use adit_config::plan::ForwardProxy;
use adit_config::tls_policy::TlsPolicy;
use adit_host::descriptors::Descriptors;
use adit_net::resolve::{Answer, Resolve, SrvRecord};
use adit_telemetry::AgentMetrics;
use adit_testkit::certificates::ThrowawayFiles;
use adit_tls::reload::Reloadable;
use adit_tls::tls::{Alpn, ClientTls};
use adit_tunnel::lane::LaneRoom;

/// Every name resolves to this address; with `None` a lookup never ends.
struct Names(Option<Ipv4Addr>);

impl Resolve for Names {
    fn lookup_ip<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<IpAddr>> {
        Box::pin(async {
            match self.0 {
                Some(ip) => Ok(vec![ip.into()]),
                None => std::future::pending().await,
            }
        })
    }

    fn lookup_srv<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<SrvRecord>> {
        Box::pin(std::future::pending())
    }
}

/// An agent that connects to a server at this address.
fn agent(names: Names, server: SocketAddr, proxy: ForwardProxy) -> (Servers, AgentMetrics, Tasks) {
    let files = ThrowawayFiles::create(&["server.test".to_owned()]).expect("certificates");
    let tls = Reloadable::load(ClientTls {
        crl: None,
        ca: files.ca_file(),
        identity: None,
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc::<&str>(&[]),
    })
    .expect("they were just made");
    let resolver: Arc<dyn Resolve> = Arc::new(names);
    let (metrics, tasks) = (AgentMetrics::new(), Tasks::new(10));
    let context = LinkContext {
        agent: AgentId::new("a"),
        dialer: Arc::new(open_dialer(Arc::clone(&resolver))),
        isolation: Isolation::default(),
        budget: Arc::new(ProcessBudget::new(1 << 30)),
        metrics: metrics.clone(),
        tasks: tasks.clone(),
        dials: Arc::default(),
        warn_on_channel_limit: false,
        lane_room: Arc::new(LaneRoom::new(100, Arc::new(Descriptors::unlimited()))),
        lane_watch: Arc::default(),
        relay: None,
        asker: None,
    };
    let settings = ServersSettings {
        addresses: vec![ServerAddress::Host {
            host: "server.test".to_owned(),
            port: server.port(),
        }],
        connector: ServerConnector {
            resolver,
            tls,
            proxies: ForwardProxies::new(
                &proxy,
                &TlsPolicy::default(),
                &Arc::new(ProcessBudget::new(1 << 20)),
                &adit_net::self_sockets::OwnSockets::off(),
            ),
            accounts: adit_net::accounts::Accounts::off(),
            own_sockets: adit_net::self_sockets::OwnSockets::off(),
            agent: AgentId::new("a"),
            recent_servers: RecentServers::default(),
        },
        hello: AgentHello {
            agent: AgentId::new("a"),
            identifiers: Identifiers::default(),
            extensions: Extensions::default(),
            version: PeerVersion::default(),
            peer: None,
            zone: None,
        },
        token_path: None,
        lanes_max: 0,
        lane_security: LaneSecurity::Tls,
        serves_node: false,
        count_source: CountSource::default(),
        policy: SyncPolicy {
            interval: Duration::from_secs(1),
            interval_cap: Duration::from_secs(1),
            forever: false,
            rules: SearchRules::Native,
        },
        keepalive: Duration::from_secs(3600),
    };
    let servers = Servers::start(settings, context, &tasks);
    (servers, metrics, tasks)
}

/// Time until the first attempt counts as failed.
async fn first_failure(names: Names, server: SocketAddr, proxy: ForwardProxy) -> Duration {
    let started = Instant::now();
    let (servers, metrics, _tasks) = agent(names, server, proxy);
    let failed = "server_connection_failure_count{direction=\"to_server\"} 1";
    while !metrics.scrape().text().contains(failed) {
        assert!(started.elapsed() < Duration::from_secs(120), "it hangs");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(servers.connected().load(Relaxed), 0);
    started.elapsed()
}

async fn fault() -> LinkExit {
    panic!("planted fault of a test")
}

/// A panic ends only the link's task. If the server stayed held, it would never be tried again.
#[tokio::test]
async fn a_server_whose_link_panicked_is_released() {
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, 8091));
    let (servers, _metrics, tasks) = agent(Names(None), server, ForwardProxy::default());
    let shared = &servers.shared;
    let server = ServerId::new("server");
    let new = Attempt::New {
        server: server.clone(),
        count: 1,
    };
    locked(&shared.state).attempted(0, new, Instant::now(), 0.0);
    assert_eq!(locked(&shared.state).held(), 1);
    let held = HeldServer {
        shared: Arc::clone(shared),
        server,
        serial: 1,
        lanes: None,
        _version: shared
            .context
            .metrics
            .adit()
            .link_of_version(PeerVersion::default()),
    };
    tasks
        .spawn("link", held.until(fault(), Silence::none()))
        .unwrap();
    while tasks.panics() == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(locked(&shared.state).held(), 0);
}

/// Without a DRAIN the server would keep sending dials to an agent that is shutting down.
#[tokio::test]
async fn a_link_with_a_full_command_queue_still_gets_the_drain() {
    let (commands, mut queue) = mpsc::channel(1);
    commands.try_send(Command::Stop).expect("it is empty");
    let link = AgentLink {
        server: ServerId::new("server"),
        commands,
        lanes: None,
        dirty_list: Arc::default(),
        credit: false,
        version: PeerVersion::default(),
        address: Arc::from(""),
        since: std::time::Instant::now(),
        is_silent: false,
    };
    announce_drain(&link, &Tasks::new(1));
    drop(link);
    assert!(matches!(queue.recv().await, Some(Command::Stop)));
    assert!(matches!(queue.recv().await, Some(Command::Drain)));
    assert!(queue.recv().await.is_none(), "once");
}

/// The deadline of 20 s, plus the polling interval of the test.
fn assert_twenty_seconds(took: Duration) {
    let seconds = took.as_secs_f64();
    assert!((20.0..20.1).contains(&seconds), "gave up after {took:?}");
}

/// A listener with a full accept queue: the kernel drops further SYNs, and a connect waits.
async fn black_hole() -> (SocketAddr, Vec<std::net::TcpStream>, socket2::Socket) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())
        .unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let mut queued = Vec::new();
    let short = Duration::from_millis(200);
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, short) {
        queued.push(stream);
        assert!(queued.len() < 100, "the queue has no end");
    }
    (address, queued, socket)
}

/// Limit (times): Connecting a link: lookup, TCP, proxy, TLS and response headers | 20 s together
#[tokio::test(start_paused = true)]
async fn an_unresponsive_server_times_out_after_twenty_seconds() {
    let (server, _queued, _socket) = black_hole().await;
    let took = first_failure(
        Names(Some(Ipv4Addr::LOCALHOST)),
        server,
        ForwardProxy::default(),
    );
    assert_twenty_seconds(took.await);
}

/// Limit (times): Connecting a link: lookup, TCP, proxy, TLS and response headers
#[tokio::test(start_paused = true)]
async fn an_unanswered_name_lookup_times_out_after_twenty_seconds() {
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, 8091));
    let took = first_failure(Names(None), server, ForwardProxy::default());
    assert_twenty_seconds(took.await);
}

/// Limit (times): Connecting a link: lookup, TCP, proxy, TLS and response headers
#[tokio::test(start_paused = true)]
async fn an_unresponsive_forward_proxy_times_out_after_twenty_seconds() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let proxy = ForwardProxy {
        https_proxy: Some(format!("http://{address}")),
        ..ForwardProxy::default()
    };
    // The kernel accepts the connection, and the request is never read.
    let took = first_failure(Names(None), address, proxy);
    assert_twenty_seconds(took.await);
}

#[test]
fn a_file_without_a_token_is_named() {
    let path = Path::new("/var/run/secrets/token");
    for text in ["", " \n", "two words", "t\u{f6}ken", "a\nb"] {
        let error = token_in(path, text.to_owned()).unwrap_err().to_string();
        assert!(
            error.starts_with("the file /var/run/secrets/token holds no token"),
            "{error}"
        );
    }
    let token = token_in(path, "a.b-_.c\n".to_owned()).unwrap();
    assert_eq!(token.reveal(), "a.b-_.c\n");
}
