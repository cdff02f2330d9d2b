//! `adit proxy` with names of another cluster, and as HyperShift's sidecars: Services, DNS behind the tunnel, customers' proxies.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use adit::agent::RunningAgent;
use adit::proxy::{self, RunningProxy};
use adit_config::plan::ProxyPlan;
use adit_config::{Command, parse};
use adit_net::tasks::Tasks;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::api::FakeApi;
use crate::support::clients::Io;
use crate::support::connect::read_head;
use crate::support::skip::{finds_program, skip, skip_unprivileged};
use crate::support::socks5::{ask, echo, hello};
use crate::support::wait::{until, within};
use crate::support::world::World;
use crate::support::{ports, targets, tls};

const SOCKS5: &str = "konnectivity-socks5-proxy";
const HTTPS: &str = "konnectivity-https-proxy";

/// What a name server answers for a name that it knows: addresses, or that it failed.
#[derive(Clone)]
enum Answer {
    Has(Vec<Ipv4Addr>),
    Failure,
}

/// A name server over TCP.
#[derive(Clone, Default)]
struct NameServer {
    answers: Arc<Mutex<HashMap<String, Answer>>>,
    asked: Arc<AtomicUsize>,
}

impl NameServer {
    fn set(&self, name: &str, answer: Answer) {
        self.answers
            .lock()
            .expect("no test panics with it")
            .insert(name.to_owned(), answer);
    }

    fn asked(&self) -> usize {
        self.asked.load(Relaxed)
    }

    fn serve(&self, listener: TcpListener) -> Tasks {
        let this = self.clone();
        targets::serve_on(listener, move |mut stream| {
            let this = this.clone();
            async move {
                loop {
                    let length = stream.read_u16().await?;
                    let mut question = vec![0; length.into()];
                    stream.read_exact(&mut question).await?;
                    let answer = this.answer(&question);
                    stream
                        .write_u16(u16::try_from(answer.len()).expect("a short answer"))
                        .await?;
                    stream.write_all(&answer).await?;
                }
            }
        })
    }

    /// An answer to one question (RFC 1035, section 4).
    fn answer(&self, question: &[u8]) -> Vec<u8> {
        let (mut at, mut labels) = (12, Vec::new());
        while question[at] > 0 {
            let end = at + 1 + usize::from(question[at]);
            labels.push(String::from_utf8_lossy(&question[at + 1..end]).into_owned());
            at = end;
        }
        let asks_v4 = question[at + 1..at + 3] == [0, 1];
        let known = self
            .answers
            .lock()
            .expect("no test panics with it")
            .get(&labels.join("."))
            .cloned();
        self.asked.fetch_add(1, Relaxed);
        let (code, addresses) = match known {
            Some(Answer::Has(ips)) if asks_v4 => (0, ips),
            Some(Answer::Has(_)) => (0, Vec::new()),
            Some(Answer::Failure) => (2, Vec::new()),
            None => (3, Vec::new()),
        };
        let mut message = question[..2].to_vec();
        message.extend([
            0x81,
            0x80 | code,
            0,
            1,
            0,
            u8::try_from(addresses.len()).expect("few"),
            0,
            0,
            0,
            0,
        ]);
        message.extend(&question[12..at + 5]);
        for address in addresses {
            message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
            message.extend(address.octets());
        }
        message
    }
}

/// A server with a frontend for proxies, an agent, and the API of its cluster.
struct Site {
    world: World,
    _agent: RunningAgent,
    api: FakeApi,
}

impl Site {
    async fn start() -> Self {
        let flags = [
            "--frontend=http-connect=tcp:127.0.0.1:0",
            "--server-cert={certs}/server.crt",
            "--server-key={certs}/server.key",
            "--server-ca-cert={certs}/ca.crt",
        ];
        let (world, agent) = World::linked(&flags, &[]).await;
        let api = FakeApi::start().await;
        api.write_kubeconfig(&world.dir.path().join("kubeconfig"));
        Self {
            world,
            _agent: agent,
            api,
        }
    }

    fn put_service(&self, namespace: &str, name: &str, ip: &str) {
        let service = json!({"metadata": {"namespace": namespace}, "spec": {"clusterIP": ip, "clusterIPs": [ip]}});
        self.api
            .state
            .lock()
            .expect("the state")
            .services
            .put(name, service);
    }

    /// The plan of a sidecar on a free port.
    fn plan(&self, argv: &[&str], env: &[(&str, &str)]) -> ProxyPlan {
        let files = &self.world.files;
        let server = self.world.server().frontends[0];
        let mut all: Vec<String> = argv.iter().map(|arg| (*arg).to_owned()).collect();
        all.extend([
            "--konnectivity-hostname=127.0.0.1".to_owned(),
            format!("--konnectivity-port={}", server.port()),
            format!("--serving-port={}", ports::free()),
            format!("--ca-cert-path={}", files.ca_file().display()),
            format!("--tls-cert-path={}", files.cert("client").display()),
            format!("--tls-key-path={}", files.key("client").display()),
        ]);
        let kubeconfig = self
            .world
            .dir
            .path()
            .join("kubeconfig")
            .display()
            .to_string();
        let value = |name: &str| {
            let given = env.iter().find(|(known, _)| *known == name);
            let given = given.map(|(_, value)| (*value).to_owned());
            given.or_else(|| (name == "KUBECONFIG").then(|| kubeconfig.clone()))
        };
        match parse(all.iter().map(Into::into), &value)
            .expect("flags are right")
            .command
        {
            Command::Proxy(plan) => *plan,
            other => panic!("{other:?}"),
        }
    }

    async fn sidecar(&self, argv: &[&str]) -> RunningProxy {
        proxy::start(&self.plan(argv, &[]))
            .await
            .expect("it starts")
    }
}

fn at(proxy: &RunningProxy) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, proxy.frontends[0].port()))
}

/// Opens a tunnel by SOCKS5; returns its code.
async fn dial(proxy: &RunningProxy, host: &str, port: u16) -> (TcpStream, u8) {
    let mut io = TcpStream::connect(at(proxy)).await.expect("it listens");
    let code = ask(&mut io, &hello(host, port)).await;
    (io, code)
}

async fn until_dialled(proxy: &RunningProxy, host: &str, port: u16) {
    within("the name is known", async {
        while dial(proxy, host, port).await.1 != 0 {}
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_is_known_by_name_from_a_watch_and_other_names_by_the_clusters_dns() {
    // On this address alone.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let _target = targets::echo_on(listener);
    let site = Site::start().await;
    site.put_service("shop", "web", "127.0.0.1");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    let dns = NameServer::default();
    let _dns = dns.serve(listener);
    dns.set(
        "login.example",
        Answer::Has(vec![Ipv4Addr::new(127, 0, 0, 9), Ipv4Addr::LOCALHOST]),
    );
    dns.set("broken.example", Answer::Failure);
    let files = &site.world.files;
    let frontend = site.world.server().frontends[0];
    let mut args = adit_testkit::args::proxy(files, &frontend.to_string());
    args.extend([
        "--frontend=socks5=tcp:127.0.0.1:0".to_owned(),
        format!(
            "--kubeconfig={}",
            site.world.dir.path().join("kubeconfig").display()
        ),
        format!("--guest-dns={server}"),
        "--resolve=svc=tunnel".to_owned(),
        "--resolve=example=tunnel".to_owned(),
        "--resolve=cluster.local=tunnel".to_owned(),
        "--resolve=here.example=here".to_owned(),
    ]);
    let plan = crate::support::world::proxy_plan(&args).expect("flags are right");
    let proxy = proxy::start(&plan).await.expect("it starts");
    for host in [
        "web.shop.svc",
        "WEB.shop.svc.cluster.local.",
        "login.example",
        "localhost",
    ] {
        let (mut io, code) = dial(&proxy, host, port).await;
        assert_eq!(code, 0, "{host}");
        echo(&mut io, 1000).await;
    }
    // The first address refuses, and the second is tried.
    let asked = dns.asked();
    assert_eq!(dial(&proxy, "login.example", port).await.1, 0);
    assert_eq!(dns.asked(), asked, "its answer is kept");
    for (host, code) in [
        ("nobody.example", 4),
        ("broken.example", 4),
        ("nobody.here.example", 4),
    ] {
        assert_eq!(dial(&proxy, host, port).await.1, code, "{host}");
    }
    // A Service that comes, one that moves.
    site.put_service("shop", "web", "127.0.0.9");
    site.put_service("shop", "new", "127.0.0.1");
    until_dialled(&proxy, "new.shop.svc", port).await;
    assert_eq!(
        dial(&proxy, "web.shop.svc", port).await.1,
        5,
        "it refuses there"
    );
    let requests = site.api.state.lock().unwrap().services.requests.clone();
    assert!(requests["GET"] <= 3, "{requests:?}");
}

/// A name that /etc/hosts gives a loopback or private address. The DNS library answers names of localhost by itself.
fn own_name() -> Option<String> {
    let hosts = std::fs::read_to_string("/etc/hosts").ok()?;
    hosts.lines().find_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let ip: IpAddr = words.next()?.parse().ok()?;
        let is_own = match ip {
            IpAddr::V4(ip) => ip.is_loopback() || ip.is_private(),
            IpAddr::V6(ip) => ip.is_loopback(),
        };
        let name = words.find(|name| *name != "localhost" && !name.ends_with(".localhost"))?;
        is_own.then(|| name.to_owned())
    })
}

/// Without the fallback nothing goes past the tunnel, and with it only to public addresses; a name that does not exist is neither.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dns_that_answers_is_final_and_one_that_does_not_opens_no_way_into_this_cluster() {
    const GUEST: &str = "127.0.77.53";
    let listener = match TcpListener::bind((GUEST, 53)).await {
        Ok(listener) => listener,
        Err(error) => {
            skip_unprivileged("a name server on port 53", error);
            return;
        }
    };
    let Some(own) = own_name() else {
        skip(
            "a name that this host alone knows",
            "/etc/hosts has none of this cluster",
        );
        return;
    };
    let (port, _target) = targets::echo().await;
    let site = Site::start().await;
    site.put_service("openshift-dns", "dns-default", GUEST);
    let dns = NameServer::default();
    let serving = dns.serve(listener);
    dns.set("idp.example", Answer::Has(vec![Ipv4Addr::LOCALHOST]));
    let flags = [SOCKS5, "run", "--resolve-from-guest-cluster-dns=true"];
    let with_fallback = [&flags[..], &["--resolve-from-management-cluster-dns=true"]].concat();
    let strict = site.sidecar(&flags).await;
    let lenient = site.sidecar(&with_fallback).await;
    for proxy in [&strict, &lenient] {
        let (mut io, code) = dial(proxy, "idp.example", port).await;
        assert_eq!(code, 0);
        echo(&mut io, 1000).await;
        // This host knows the name, and the guest cluster's DNS does not.
        assert_eq!(dial(proxy, &own, port).await.1, 4);
        assert_eq!(
            dial(proxy, "127.0.0.1", port).await.1,
            0,
            "the tunnel is in order"
        );
    }
    dns.set(&own, Answer::Failure);
    assert_eq!(dial(&strict, &own, port).await.1, 4);
    assert_eq!(dial(&strict, "127.0.0.1", port).await.1, 0);
    // Here the name has an address, which is none of the public internet. What needs no name server stays in the tunnel.
    assert_eq!(dial(&lenient, &own, port).await.1, 2);
    assert_eq!(
        dial(&lenient, "idp.example", port).await.1,
        1,
        "nobody knows it here"
    );
    assert_eq!(dial(&lenient, "127.0.0.1", port).await.1, 0);
    site.put_service("shop", "web", "127.0.0.1");
    until_dialled(&lenient, "web.shop", port).await;
    // Whoever may change Services does not lead dials past the tunnel.
    site.put_service("openshift-dns", "dns-default", "None");
    let without = site.sidecar(&with_fallback).await;
    until_dialled(&without, &own, port).await;
    let allowed = site
        .sidecar(&[&with_fallback[..], &["--direct-allow=127.0.0.0/8"]].concat())
        .await;
    site.put_service("openshift-dns", "dns-default", GUEST);
    let past = within("a tunnel past the server", async {
        loop {
            let (io, code) = dial(&allowed, &own, port).await;
            let open = allowed.metrics.adit().open_tunnels().all();
            if open
                .iter()
                .any(|tunnel| tunnel.view(std::time::Instant::now()).peer == "direct")
            {
                break (io, code);
            }
        }
    });
    let (mut io, code) = past.await;
    assert_eq!(code, 0);
    echo(&mut io, 1000).await;
    drop(serving);
}

/// A startup probe calls the pod's address; nobody is served there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sidecar_listens_on_all_addresses_and_serves_loopback_only() {
    let (port, _target) = targets::echo().await;
    let site = Site::start().await;
    // It needs no access to the cluster's API, and so no kubeconfig.
    std::fs::remove_file(site.world.dir.path().join("kubeconfig")).unwrap();
    let proxy = site
        .sidecar(&[SOCKS5, "--disable-resolver=true", "run"])
        .await;
    let at = proxy.frontends[0].port();
    for host in [IpAddr::from([127, 0, 0, 1]), "::1".parse().unwrap()] {
        let mut io = TcpStream::connect((host, at)).await.expect("it listens");
        assert_eq!(ask(&mut io, &hello("localhost", port)).await, 0, "{host}");
    }
    let probe = UdpSocket::bind("0.0.0.0:0").unwrap();
    // Nothing is sent: this asks for the address of this host towards a network that does not exist.
    let outer = probe
        .connect("192.0.2.1:9")
        .and_then(|()| probe.local_addr());
    let Some(outer) = outer.ok().filter(|outer| !outer.ip().is_loopback()) else {
        return;
    };
    let mut io = TcpStream::connect((outer.ip(), at))
        .await
        .expect("a probe succeeds");
    drop(io.write_all(&hello("localhost", port)).await);
    let answered = within("the end", io.read(&mut [0; 8])).await;
    assert!(matches!(answered, Ok(0) | Err(_)), "{answered:?}");
}

/// Without a kubeconfig at its start a sidecar runs, and finds it later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubeconfig_that_comes_late_is_found() {
    let (port, _target) = targets::echo().await;
    let site = Site::start().await;
    site.put_service("shop", "web", "127.0.0.1");
    let kubeconfig = site.world.dir.path().join("kubeconfig");
    std::fs::remove_file(&kubeconfig).unwrap();
    let proxy = site.sidecar(&[SOCKS5, "run"]).await;
    assert_eq!(dial(&proxy, "127.0.0.1", port).await.1, 0);
    site.api.write_kubeconfig(&kubeconfig);
    until_dialled(&proxy, "web.shop", port).await;
}

/// A customer's proxy: remembers what it is asked for, and connects every CONNECT to one port.
#[derive(Clone, Default)]
struct Customer(Arc<Mutex<Vec<String>>>);

impl Customer {
    async fn serve(self, mut stream: impl Io, port: u16) -> std::io::Result<()> {
        let head = read_head(&mut stream).await;
        let is_connect = head.starts_with("CONNECT ");
        let is_known = head
            .to_lowercase()
            .contains("proxy-authorization: basic dxnlcjpwqhnz");
        self.0.lock().expect("no test panics with it").push(head);
        if !is_known {
            let refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"x\"\r\nContent-Length: 0\r\n\r\n";
            return stream.write_all(refusal).await;
        }
        if !is_connect {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\npage")
                .await?;
            return stream.shutdown().await;
        }
        let mut target = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
        tokio::io::copy_bidirectional(&mut stream, &mut target)
            .await
            .map(drop)
    }

    fn heads(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().expect("no test panics with it"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_customers_proxy_behind_the_tunnel_gets_requests_and_tunnels_with_its_password_alone() {
    let (port, _target) = targets::echo().await;
    let (direct, _direct) = targets::serve(|mut stream| async move {
        let head = read_head(&mut stream).await;
        assert!(
            !head.to_lowercase().contains("proxy-authorization"),
            "{head}"
        );
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhere")
            .await
    })
    .await;
    let site = Site::start().await;
    let (customer, acceptor) = (Customer::default(), tls::acceptor(&site.world, "server"));
    let one = customer.clone();
    let (clear, _clear) = targets::serve(move |stream| one.clone().serve(stream, port)).await;
    let one = customer.clone();
    let (secure, _secure) = targets::serve(move |stream| {
        let (one, acceptor) = (one.clone(), acceptor.clone());
        async move { one.serve(acceptor.accept(stream).await?, port).await }
    })
    .await;
    let ca = site.world.files.ca_file().display().to_string();
    for https in [
        format!("http://user:p%40ss@127.0.0.1:{clear}"),
        format!("https://user:p%40ss@127.0.0.1:{secure}"),
    ] {
        let http = format!("--http-proxy={https}");
        let argv = [
            HTTPS,
            "run",
            &http,
            "--https-proxy",
            &https,
            "--no-proxy",
            ".svc",
        ];
        let plan = site.plan(&argv, &[("SSL_CERT_FILE", &ca)]);
        let proxy = proxy::start(&plan).await.expect("it starts");
        let ask = async |request: &str| {
            let mut io = TcpStream::connect(at(&proxy)).await.expect("it listens");
            io.write_all(request.as_bytes()).await.expect("it is taken");
            let head = read_head(&mut io).await;
            (io, head)
        };
        let (mut io, head) = ask("CONNECT idp.example:443 HTTP/1.1\r\nHost: x\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{https}: {head}");
        echo(&mut io, 300_000).await;
        let [asked] = &customer.heads()[..] else {
            panic!("one request")
        };
        assert!(
            asked.starts_with("CONNECT idp.example:443 HTTP/1.1\r\n"),
            "{asked}"
        );

        let (mut io, head) = ask("GET http://idp.example/page HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic Y2xpZW50\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{https}: {head}");
        let mut page = [0; 4];
        within("a page", io.read_exact(&mut page)).await.unwrap();
        assert_eq!(&page, b"page");
        let [asked] = &customer.heads()[..] else {
            panic!("one request")
        };
        assert!(
            asked.starts_with("GET http://idp.example/page HTTP/1.1\r\n"),
            "{asked}"
        );
        assert!(!asked.contains("Y2xpZW50"), "{asked}");

        // Addresses of loopback, and those that --no-proxy names, are reached without.
        let (_io, head) = ask(&format!(
            "GET http://127.0.0.1:{direct}/ HTTP/1.1\r\nHost: x\r\n\r\n"
        ))
        .await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(customer.heads().is_empty());
    }
    let wrong = format!("http://user:wrong@127.0.0.1:{clear}");
    let proxy = site.sidecar(&[HTTPS, "run", "--https-proxy", &wrong]).await;
    let mut io = TcpStream::connect(at(&proxy)).await.expect("it listens");
    io.write_all(b"CONNECT idp.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let head = read_head(&mut io).await;
    assert!(
        head.starts_with("HTTP/1.1 502 ") && !head.contains("wrong"),
        "{head}"
    );
    let mut body = vec![0; 1024];
    let read = within("its body", io.read(&mut body)).await.unwrap();
    let body = String::from_utf8_lossy(&body[..read]);
    assert!(body.contains("407"), "{body}");
    until("no tunnel is left", || {
        proxy.metrics.adit().open_tunnels().all().is_empty()
    })
    .await;
}

fn digest(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = "sha256:".to_owned();
    for octet in aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref() {
        let _infallible = write!(text, "{octet:02x}");
    }
    text
}

/// An image `app:1` of one layer, by the paths of a registry (OCI distribution, version 1).
fn image() -> HashMap<String, Vec<u8>> {
    let layer = targets::pattern(0, 400_000);
    let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]}});
    let config = config.to_string().into_bytes();
    let part = |kind: &str, bytes: &[u8]| json!({"mediaType": kind, "size": bytes.len(), "digest": digest(bytes)});
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": part("application/vnd.oci.image.config.v1+json", &config),
        "layers": [part("application/vnd.oci.image.layer.v1.tar", &layer)],
    });
    let blob = |bytes: &[u8]| format!("/v2/app/blobs/{}", digest(bytes));
    HashMap::from([
        ("/v2/".to_owned(), b"{}".to_vec()),
        (
            "/v2/app/manifests/1".to_owned(),
            manifest.to_string().into_bytes(),
        ),
        (blob(&config), config),
        (blob(&layer), layer),
    ])
}

/// Answers requests until the client closes.
async fn registry(
    mut stream: impl Io,
    image: Arc<HashMap<String, Vec<u8>>>,
) -> std::io::Result<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let path = head.split_whitespace().nth(1).unwrap_or_default();
        let (status, body) = match image.get(path) {
            Some(body) => ("200 OK", body.clone()),
            None => ("404 Not Found", Vec::new()),
        };
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let answer = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(answer.as_bytes()).await?;
        stream.write_all(&body).await?;
        stream.flush().await?;
    }
}

/// As a component of the control plane pulls release images: by the sidecar, the tunnel and the customer's proxy, with TLS to the
/// registry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skopeo_copies_an_image_through_the_customers_proxy() {
    if !finds_program(
        "skopeo",
        "skopeo_copies_an_image_through_the_customers_proxy",
    ) {
        return;
    }
    let site = Site::start().await;
    let (image, acceptor) = (Arc::new(image()), tls::acceptor(&site.world, "server"));
    let shared = Arc::clone(&image);
    let (port, _registry) = targets::serve(move |stream| {
        let (image, acceptor) = (Arc::clone(&shared), acceptor.clone());
        async move { registry(acceptor.accept(stream).await?, image).await }
    })
    .await;
    let customer = Customer::default();
    let one = customer.clone();
    let (at_customer, _customer) =
        targets::serve(move |stream| one.clone().serve(stream, port)).await;
    let https = format!("http://user:p%40ss@127.0.0.1:{at_customer}");
    let proxy = site.sidecar(&[HTTPS, "run", "--https-proxy", &https]).await;
    let (out, certs) = (
        site.world.dir.path().join("image"),
        site.world.dir.path().join("trusted"),
    );
    std::fs::create_dir(&certs).unwrap();
    std::fs::copy(site.world.files.ca_file(), certs.join("ca.crt")).unwrap();
    let (to, trusted, by) = (
        format!("dir:{}", out.display()),
        certs.display().to_string(),
        format!("http://{}", at(&proxy)),
    );
    let output = std::process::Command::new("timeout")
        .args([
            "60",
            "skopeo",
            "--insecure-policy",
            "copy",
            "--src-cert-dir",
            &trusted,
            "docker://server.test/app:1",
            &to,
        ])
        .env("HTTPS_PROXY", by)
        .output()
        .expect("timeout(1) is there");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for (path, bytes) in image.iter().filter(|(path, _)| path.contains("sha256:")) {
        let (_, name) = path.split_once("sha256:").unwrap();
        assert!(std::fs::read(out.join(name)).unwrap() == *bytes, "{path}");
    }
    let asked = customer.heads();
    assert!(
        !asked.is_empty()
            && asked
                .iter()
                .all(|head| head.starts_with("CONNECT server.test:443 ")),
        "{asked:?}"
    );
}

#[test]
fn the_operator_whose_place_adit_takes_does_the_rest() {
    let dir = tempfile::TempDir::new().unwrap();
    let (operator, original) = (
        dir.path().join("control-plane-operator"),
        dir.path().join("control-plane-operator.original"),
    );
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_adit"), &operator).unwrap();
    let run = |args: &[&str]| {
        let output = std::process::Command::new(&operator)
            .args(args)
            .output()
            .unwrap();
        let (out, err) = (output.stdout, output.stderr);
        let text = [out, err].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.code(), text)
    };
    let (code, [_out, err]) = run(&["run"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("control-plane-operator.original"), "{err}");
    std::fs::write(&original, "#!/bin/sh\necho original \"$@\"; exit 7\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&original, executable).unwrap();
    for args in [&["run", "--namespace", "clusters"][..], &[], &["--help"]] {
        let (code, [out, _err]) = run(args);
        assert_eq!(
            (code, out.trim_end()),
            (Some(7), format!("original {}", args.join(" ")).trim_end())
        );
    }
    for name in [SOCKS5, HTTPS] {
        let (code, [out, _err]) = run(&[name, "--help"]);
        assert_eq!(code, Some(0));
        assert!(out.contains(&format!("{name} run [flags]")), "{out}");
    }
}
