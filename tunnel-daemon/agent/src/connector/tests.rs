//! Tests of connecting to a server with several addresses, some of them unreachable; names, proxies and their exceptions.

use std::collections::HashSet;
use std::net::IpAddr;
use std::net::Ipv4Addr;

use socket2::{Domain, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::*;
use adit_config::plan::HttpProxy;
use adit_config::tls_policy::TlsPolicy;
use adit_net::resolve::{Answer, SrvRecord};
use adit_testkit::certificates::ThrowawayFiles;
use adit_tls::handshake::accept_tls;
use adit_tls::reload::Reloadable;
use adit_tls::tls::{Alpn, ClientTls, ServerTls};

const SERVER: &str = "server.test";
/// Far below the caller's timeout for all addresses, and far above the time of a successful connect.
const SOON: Duration = Duration::from_secs(10);

/// Every name has these addresses, in this order. Every service has an SRV record for each port, each of lower priority
/// than the one before; with `equal`, of equal priority and far lower weight.
struct Book {
    ips: Vec<IpAddr>,
    ports: Vec<u16>,
    equal: bool,
}

impl Resolve for Book {
    fn lookup_ip<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<IpAddr>> {
        Box::pin(async { Ok(self.ips.clone()) })
    }

    fn lookup_srv<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<SrvRecord>> {
        let record = |(rank, port): (u16, &u16)| SrvRecord {
            priority: if self.equal { 0 } else { rank },
            weight: u16::MAX >> (7 * rank),
            port: *port,
            target: format!("{SERVER}."),
        };
        let records = (0..).zip(&self.ports).map(record).collect();
        Box::pin(async move { Ok(records) })
    }
}

fn certificates() -> ThrowawayFiles {
    ThrowawayFiles::create(&[SERVER.to_owned()]).unwrap()
}

fn connector(files: &ThrowawayFiles, book: Book) -> ServerConnector {
    let tls = ClientTls {
        crl: None,
        ca: files.ca_file(),
        identity: None,
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc::<&str>(&[]),
    };
    ServerConnector {
        resolver: Arc::new(book),
        tls: Reloadable::load(tls).unwrap(),
        proxies: ForwardProxies::none(),
        accounts: Accounts::off(),
        own_sockets: OwnSockets::off(),
        agent: AgentId::new("a"),
        recent_servers: RecentServers::default(),
    }
}

/// Connects to a service whose records lead to 127.0.0.1 and these ports, in this order.
async fn connect(files: &ThrowawayFiles, ports: &[u16]) -> Result<Connected, ConnectorError> {
    connect_to(files, ports, false).await
}

/// `equal`: all records have the same priority.
async fn connect_to(
    files: &ThrowawayFiles,
    ports: &[u16],
    equal: bool,
) -> Result<Connected, ConnectorError> {
    let book = Book {
        ips: vec![Ipv4Addr::LOCALHOST.into()],
        ports: ports.to_vec(),
        equal,
    };
    let service = ServerAddress::Srv {
        name: "_adit._tcp.test".to_owned(),
    };
    connector(files, book).connect(&service).await
}

fn port_of(reached: &Connected) -> u16 {
    let PeerAddr::Tcp(address) = reached.stream.peer() else {
        panic!("it came by TCP");
    };
    address.port()
}

/// A TLS server with these certificates. It holds each connection until the client closes it, and counts failed
/// handshakes.
struct TlsServer {
    address: SocketAddr,
    refused: Arc<Semaphore>,
    _serving: JoinSet<()>,
}

impl TlsServer {
    async fn start(files: &ThrowawayFiles) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        Self::on(listener, files)
    }

    fn on(listener: TcpListener, files: &ThrowawayFiles) -> Self {
        let tls = Reloadable::load(ServerTls {
            cert: files.cert("server"),
            key: files.key("server"),
            client_ca: None,
            client_crl: None,
            client_may_be_anonymous: false,
            policy: TlsPolicy::default(),
            alpn: Alpn::grpc::<&str>(&[]),
        })
        .unwrap();
        let address = listener.local_addr().unwrap();
        let refused = Arc::new(Semaphore::new(0));
        let failed = Arc::clone(&refused);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (socket, peer) = listener.accept().await.unwrap();
                let (tls, failed) = (Arc::clone(&tls), Arc::clone(&failed));
                connections.spawn(async move {
                    let (socket, peer) = (Socket::Tcp(socket), PeerAddr::Tcp(peer));
                    match accept_tls(socket, peer, &tls, SOON).await {
                        Ok(mut stream) => drop(stream.read(&mut [0]).await),
                        Err(_refused) => failed.add_permits(1),
                    }
                });
            }
        });
        Self {
            address,
            refused,
            _serving: serving,
        }
    }

    fn port(&self) -> u16 {
        self.address.port()
    }
}

/// A port without a listener, reserved by a bound socket.
fn closed() -> (u16, socket2::Socket) {
    let socket = socket2::Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket.bind(&any.into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (address.port(), socket)
}

/// A listener with a full accept queue: the kernel drops further SYNs, and a connect waits.
fn black_hole() -> (u16, (socket2::Socket, Vec<std::net::TcpStream>)) {
    let (port, socket) = closed();
    socket.listen(0).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut queued = Vec::new();
    let short = Duration::from_millis(200);
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, short) {
        queued.push(stream);
        assert!(queued.len() < 100, "the queue has no end");
    }
    (port, (socket, queued))
}

/// A server that answers every connection with plaintext.
async fn clear_text() -> (u16, JoinSet<()>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut kept = Vec::new();
        loop {
            let (mut socket, _peer) = listener.accept().await.unwrap();
            let words = b"HTTP/1.1 400 Bad Request\r\n\r\n";
            socket.write_all(words).await.unwrap();
            kept.push(socket);
        }
    });
    (port, serving)
}

#[tokio::test]
async fn an_unresponsive_address_hardly_delays_the_next_one() {
    let files = certificates();
    let server = TlsServer::start(&files).await;
    let ((first, _one), (second, _other)) = (black_hole(), black_hole());
    let ports = [first, second, server.port()];
    let reached = timeout(SOON, connect_to(&files, &ports, true)).await;
    assert_eq!(port_of(&reached.unwrap().unwrap()), server.port());
    // With different priorities, each earlier priority has its share of the time.
    let connecting = timeout(limits::LINK_CONNECT_TIMEOUT, connect(&files, &ports));
    let reached = connecting.await.unwrap();
    assert_eq!(port_of(&reached.unwrap()), server.port());
}

/// RFC 2782: the accept queue of the first server is full at first. It accepts when the kernel retransmits the SYN, one
/// second later.
///
/// Limit (times): SRV records of one name | tried by priority; each priority has its share of 15 s
/// Limit (isolation): Several servers behind one name | the agent tries the least recently tried one first
#[tokio::test]
async fn a_slow_server_of_a_higher_srv_priority_is_preferred() {
    let files = certificates();
    let other = TlsServer::start(&files).await;
    let (port, (socket, _queued)) = black_hole();
    let ports = [port, other.port()];
    let connecting = timeout(SOON, connect(&files, &ports));
    let late = async {
        socket.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(socket.into()).unwrap();
        TlsServer::on(listener, &files)
    };
    let (reached, _server) = tokio::join!(connecting, late);
    assert_eq!(port_of(&reached.unwrap().unwrap()), port);
}

#[tokio::test]
async fn after_a_failed_tls_handshake_the_next_address_is_tried() {
    let (files, foreign) = (certificates(), certificates());
    let server = TlsServer::start(&files).await;
    let other = TlsServer::start(&foreign).await;
    let (garbage, _serving) = clear_text().await;
    let ports = [garbage, other.port(), server.port()];
    let reached = timeout(SOON, connect(&files, &ports)).await.unwrap();
    assert_eq!(port_of(&reached.unwrap()), server.port());
}

#[tokio::test]
async fn a_refused_certificate_is_reported_over_other_failures() {
    let (files, foreign) = (certificates(), certificates());
    let other = TlsServer::start(&foreign).await;
    let (garbage, _serving) = clear_text().await;
    let (closed, _socket) = closed();
    for ports in [
        [other.port(), garbage, closed],
        [closed, other.port(), garbage],
        [garbage, closed, other.port()],
    ] {
        let Err(error) = timeout(SOON, connect(&files, &ports)).await.unwrap() else {
            panic!("none of these is the server");
        };
        let text = error.to_string();
        assert!(text.contains("the peer's certificate "), "{text}");
    }
    let refused = timeout(SOON, connect(&files, &[closed])).await.unwrap();
    let text = refused.err().unwrap().to_string();
    assert!(
        text.starts_with(&format!("dial 127.0.0.1:{closed}: ")),
        "{text}"
    );
}

/// Time is paused once the certificate has been refused; then it advances whenever all tasks are idle.
#[tokio::test]
async fn a_refused_certificate_is_reported_within_the_callers_timeout() {
    let (files, foreign) = (certificates(), certificates());
    let other = TlsServer::start(&foreign).await;
    let (nowhere, _queued) = black_hole();
    let ports = [other.port(), nowhere];
    let connecting = timeout(limits::LINK_CONNECT_TIMEOUT, connect(&files, &ports));
    let begun = Instant::now();
    let refused = async {
        let _refused = other.refused.acquire().await.unwrap();
        tokio::time::pause();
    };
    let (ended, ()) = tokio::join!(connecting, refused);
    let error = ended.expect("an answer in time").err().unwrap();
    assert!(
        error.to_string().contains("the peer's certificate "),
        "{error}"
    );
    assert!(begun.elapsed() >= ADDRESSES_TIME, "the other had its time");
}

/// Limit (isolation): Several servers behind one name
#[tokio::test]
async fn an_agent_reaches_every_server_of_a_name_with_fixed_dns_order() {
    let files = certificates();
    let ips = [1, 2, 3].map(|last| Ipv4Addr::new(127, 0, 0, last));
    let listeners = on_one_port(ips).await;
    let port = listeners[0].local_addr().unwrap().port();
    let servers = listeners.map(|listener| TlsServer::on(listener, &files));
    let book = Book {
        ips: ips.map(IpAddr::from).to_vec(),
        ports: Vec::new(),
        equal: false,
    };
    let connector = connector(&files, book);
    let host = ServerAddress::Host {
        host: SERVER.to_owned(),
        port,
    };
    let mut reached_servers = Vec::new();
    for _ in 0..2 * servers.len() {
        let reached = timeout(SOON, connector.connect(&host)).await.unwrap();
        reached_servers.push(reached.unwrap().stream.peer().to_string());
    }
    let (first, again) = reached_servers.split_at(servers.len());
    let different: HashSet<&String> = first.iter().collect();
    assert_eq!(different.len(), servers.len(), "{reached_servers:?}");
    // The least recently tried server comes first, so the order repeats.
    assert_eq!(first, again);
}

/// A listener at each address, all on one port that is free at all of them.
async fn on_one_port<const N: usize>(ips: [Ipv4Addr; N]) -> [TcpListener; N] {
    for _ in 0..50 {
        let mut listeners = Vec::new();
        let mut port = 0;
        for ip in ips {
            let Ok(listener) = TcpListener::bind((ip, port)).await else {
                break;
            };
            port = listener.local_addr().unwrap().port();
            listeners.push(listener);
        }
        if let Ok(listeners) = listeners.try_into() {
            return listeners;
        }
    }
    panic!("no port is free at all of {ips:?}");
}

#[test]
fn addresses_share_the_tls_time_and_a_single_one_has_the_usual_limit() {
    for (left_seconds, addresses, seconds) in [
        (15, 1, 10),
        (15, 2, 7),
        (15, 3, 5),
        (8, 1, 8),
        (15, 64, 5),
        (0, 1, 5),
        (0, 0, 5),
    ] {
        let time = tls_time(Duration::from_secs(left_seconds), addresses);
        assert_eq!(time.as_secs(), seconds, "{left_seconds} s, {addresses}");
    }
}

#[test]
fn an_ipv6_address_is_bracketed_in_the_authority() {
    for (host, expected) in [
        ("fd00::1", "[fd00::1]"),
        ("10.0.0.1", "10.0.0.1"),
        ("server.test", "server.test"),
    ] {
        let authority = bracketed(host);
        assert_eq!(authority, expected);
        assert!(authority.parse::<http::uri::Authority>().is_ok());
    }
}

/// A connector without names, and the listener and address of its forward proxy.
async fn behind_a_proxy(files: &ThrowawayFiles) -> (ServerConnector, TcpListener, HttpProxy) {
    let book = Book {
        ips: Vec::new(),
        ports: Vec::new(),
        equal: false,
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let proxy = HttpProxy::parse(&address).unwrap();
    (connector(files, book), listener, proxy)
}

#[tokio::test]
async fn a_proxy_may_end_its_lines_without_carriage_returns() {
    let files = certificates();
    for (answer, taken) in [
        ("HTTP/1.1 200 OK\nVia: 1.1 old\n\n", true),
        ("HTTP/1.1 200 OK\nVia: 1.1 old\r\n\r\n", true),
        ("HTTP/1.1 200 OK\r\nVia: 1.1 old\n\r\n", true),
        ("HTTP/1.0 407 Who are you?\n\n", false),
    ] {
        let (connector, listener, through) = behind_a_proxy(&files).await;
        let proxy = async {
            let (mut agent, _) = listener.accept().await.unwrap();
            agent.write_all(answer.as_bytes()).await.unwrap();
            agent
        };
        let through = connector.through(&through, "server.test:8091", Purpose::Link);
        let both = async { tokio::join!(through, proxy) };
        // The proxy's socket stays open, so EOF cannot mark the end of the answer.
        let both = timeout(SOON, both).await;
        let (through, _open) = both.expect("it knows where the answer ends");
        assert_eq!(through.is_ok(), taken, "{answer:?}: {through:?}");
    }
}

#[tokio::test]
async fn a_proxy_that_closes_before_its_answer_is_reported() {
    let files = certificates();
    let (connector, listener, through) = behind_a_proxy(&files).await;
    let proxy = async {
        let (mut agent, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(agent.read_u8().await.unwrap());
        }
    };
    let address = format!("{}:{}", through.host, through.port);
    let through = connector.through(&through, "server.test:8091", Purpose::Link);
    let both = timeout(SOON, async { tokio::join!(through, proxy) }).await;
    let error = both.unwrap().0.unwrap_err().to_string();
    let end = "the proxy closed the connection before it answered";
    assert!(error.ends_with(end) && error.contains(&address), "{error}");
}
