//! The components of a HyperShift control plane that have its two proxies beside them, one after the other: their own command lines
//! in place of HyperShift's operator, and what each component asks for by them.
//!
//! The component is in a network of its own, which reaches the server, a cloud's host, and nothing of the cluster.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::thread;

use adit_testkit::certificates::Usage;
use serde_json::json;

use crate::cluster::{ADMIN_TOKEN, Cluster, Mode, Proof, flag, programs};
use crate::inside::{add_address, add_host, inside_of, own_folders, put};
use crate::namespace::{BODY, Node};
use crate::ports;
use crate::process::Process;
use crate::wait::{secs, until};

/// Set in the process with its own file system and network.
const INSIDE: &str = "ADIT_TEST_COMPONENTS_INSIDE";
const SERVER: &str = "konnectivity-server-local";
const SOCKS5: &str = "konnectivity-socks5-proxy";
const HTTPS: &str = "konnectivity-https-proxy";
/// A host of a cloud, whose address must be public.
const CLOUD: (&str, &str) = ("sts.amazonaws.com", "52.94.5.5");
/// Services of the cluster, whose node has their addresses.
const METRICS: &str = "10.96.77.77";
const DNS: &str = "10.96.0.10";

/// What a component asks for.
enum Ask {
    /// A pod by its address.
    Pod,
    /// A Service by its name.
    Service,
    /// A name that only the cluster's DNS knows.
    Guest,
    /// A name that only an agent's host knows.
    Worker,
    Cloud,
    /// A pod by HTTPS, through the customer's proxy.
    Customer,
}

struct Component {
    name: &'static str,
    /// Subcommand and flags of each proxy.
    proxies: &'static [&'static [&'static str]],
    /// The proxy settings in its environment, and what it asks for with them.
    asks: &'static [(&'static str, Ask)],
}

const BY_HTTP: &str = "http://127.0.0.1:8090";
const BY_SOCKS5: &str = "socks5h://127.0.0.1:8090";
/// The table of HyperShift's sources, and one more row with a customer's proxy.
const COMPONENTS: [Component; 7] = [
    Component {
        name: "cluster-network-operator",
        proxies: &[&[SOCKS5, "run", "--disable-resolver=true"]],
        asks: &[(BY_SOCKS5, Ask::Pod), (BY_SOCKS5, Ask::Worker)],
    },
    Component {
        name: "openshift-apiserver",
        proxies: &[&[HTTPS, "run"]],
        asks: &[
            (BY_HTTP, Ask::Pod),
            (BY_HTTP, Ask::Service),
            (BY_HTTP, Ask::Guest),
        ],
    },
    Component {
        name: "openshift-apiserver with a customer's proxy",
        proxies: &[&[
            HTTPS,
            "run",
            "--http-proxy",
            "",
            "--https-proxy=https://customer:secret@10.77.0.1:3129",
            "--no-proxy=.guest.example",
        ]],
        asks: &[
            (BY_HTTP, Ask::Customer),
            (BY_HTTP, Ask::Pod),
            (BY_HTTP, Ask::Guest),
        ],
    },
    Component {
        name: "ingress-operator",
        proxies: &[&[HTTPS, "run", "--connect-directly-to-cloud-apis=true"]],
        asks: &[
            (BY_HTTP, Ask::Cloud),
            (BY_HTTP, Ask::Service),
            (BY_HTTP, Ask::Guest),
        ],
    },
    Component {
        name: "oauth-openshift",
        proxies: &[
            &[
                HTTPS,
                "--serving-port=8092",
                "--connect-directly-to-cloud-apis=true",
                "run",
            ],
            &[
                SOCKS5,
                "--resolve-from-guest-cluster-dns=true",
                "--resolve-from-management-cluster-dns=true",
                "run",
            ],
        ],
        asks: &[
            ("http://127.0.0.1:8092", Ask::Cloud),
            ("http://127.0.0.1:8092", Ask::Guest),
            (BY_SOCKS5, Ask::Guest),
            (BY_SOCKS5, Ask::Service),
        ],
    },
    Component {
        name: "openshift-oauth-apiserver",
        proxies: &[&[SOCKS5, "run", "--resolve-from-guest-cluster-dns=true"]],
        asks: &[(BY_SOCKS5, Ask::Guest), (BY_SOCKS5, Ask::Service)],
    },
    Component {
        name: "OLM operator, catalog operator, packageserver",
        proxies: &[&[SOCKS5, "run"]],
        asks: &[(BY_SOCKS5, Ask::Service), (BY_SOCKS5, Ask::Pod)],
    },
];

/// Where components are, and what they reach.
struct Site {
    cluster: Cluster,
    worker: Node,
    pod: Node,
}

impl Site {
    /// The files of a component's pod, which its proxies find at their defaults.
    fn put_files(&self) {
        let files = &self.cluster.files;
        let of = |path: &Path| fs::read(path).expect("a file");
        put("/etc/konnectivity/proxy-ca/ca.crt", &of(&files.ca_file()));
        put(
            "/etc/konnectivity/proxy-client/tls.crt",
            &of(&files.cert("client")),
        );
        put(
            "/etc/konnectivity/proxy-client/tls.key",
            &of(&files.key("client")),
        );
        // The bundle that a pod mounts for the customer's proxy.
        put("/etc/pki/tls/certs/ca-bundle.crt", &of(&files.ca_file()));
        let api = format!("{}:{}", self.pod.host, self.cluster.api_port);
        let access = self.cluster.access_at(&api, ADMIN_TOKEN);
        put("/etc/kubernetes/kubeconfig", access.to_string().as_bytes());
    }

    /// The cluster's Services: metrics, and DNS.
    fn add_services(&self) {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "openshift-dns"}});
        self.cluster.create(&namespace);
        for (namespace, name, address, port) in [
            ("default", "metrics", METRICS, 9100),
            ("openshift-dns", "dns-default", DNS, 53),
        ] {
            self.cluster.create(&json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"clusterIP": address, "ports": [{"name": "main", "port": port}]},
            }));
            let address = format!("{address}/32");
            self.worker
                .command(&["ip", "address", "add", &address, "dev", "lo"]);
        }
    }

    fn proxy(&self, component: &str, words: &[&str]) -> Process {
        let operator = self
            .cluster
            .adit_as("control-plane-operator")
            .display()
            .to_string();
        // The bundle that it trusts is the pod's.
        let mut args = [
            "-u",
            "SSL_CERT_FILE",
            "KUBECONFIG=/etc/kubernetes/kubeconfig",
            &operator,
        ]
        .map(str::to_owned)
        .to_vec();
        args.extend(words.iter().map(|word| (*word).to_owned()));
        let name = format!("{component} {}", words[0]);
        self.pod
            .run(&name, Path::new("env"), &args, self.cluster.dir.path())
    }

    /// The body that a component gets for this URL, by its environment's proxy.
    fn get(&self, proxy: &str, url: &str) -> Result<String, String> {
        let settings =
            ["http_proxy", "HTTPS_PROXY", "ALL_PROXY"].map(|name| format!("{name}={proxy}"));
        let ca = self.cluster.files.ca_file();
        let output = self
            .pod
            .entering()
            .args(["env", "-u", "NO_PROXY", "-u", "no_proxy"])
            .args(settings)
            .args([
                "curl",
                "--silent",
                "--show-error",
                "--fail",
                "--max-time",
                "20",
                "--cacert",
            ])
            .arg(ca)
            .arg(url)
            .output()
            .expect("nsenter starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    /// Asks once the proxy has what it follows, and compares the answer.
    fn ask(&self, component: &str, proxy: &str, ask: &Ask) {
        let address = self.worker.address;
        let pod = format!("{BODY}{address}");
        let metrics = |at: &str| format!("reached{{at=\"{at}\"}} 1\n");
        let (url, expected) = match ask {
            Ask::Pod => (format!("http://{address}:8080/"), pod),
            Ask::Service => (
                "http://metrics.default.svc:9100/".to_owned(),
                metrics(METRICS),
            ),
            Ask::Guest => ("http://app.guest.example:8080/".to_owned(), pod),
            Ask::Worker => ("http://worker.example:8080/".to_owned(), pod),
            Ask::Cloud => (format!("http://{}/", CLOUD.0), "cloud".to_owned()),
            Ask::Customer => (
                format!("https://{address}:9443/"),
                metrics(&address.to_string()),
            ),
        };
        let what = format!("{component} by {proxy}: {url}");
        let answer = until(&what, secs(30), || {
            self.get(proxy, &url)
                .inspect_err(|error| eprintln!("{what}: {error}"))
                .ok()
        });
        assert_eq!(answer, expected, "{what}");
    }
}

/// A host of a cloud that answers every request.
fn serve_cloud() {
    let at = SocketAddr::new(CLOUD.1.parse().expect("an address"), 80);
    let listener = TcpListener::bind(at).expect("the address is ours");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let _request = stream.read(&mut [0; 4096]);
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\ncloud";
            let _gone = stream.write_all(answer);
        }
    });
}

/// Does nothing unless [`INSIDE`] is set: `inside_of` starts it in another process.
#[test]
fn inside() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    own_folders();
    let cluster = Cluster::start(programs("components").expect("they are there"), Mode::Grpc);
    let files = &cluster.files;
    files
        .issue("konnectivity", Usage::Server, &[SERVER.to_owned()])
        .expect("a certificate");
    let flags = [
        "--frontend=http-connect=tcp:0.0.0.0:8090".to_owned(),
        flag("server-cert", files.cert("konnectivity")),
        flag("server-key", files.key("konnectivity")),
        flag("server-ca-cert", files.ca_file()),
    ];
    let server = cluster.native_server_at([(); 3].map(|()| ports::free()), &flags);
    let worker = Node::start(&cluster, 0);
    let pod = Node::start(&cluster, 1);
    add_host(pod.host, SERVER);
    add_host(worker.address, "worker.example");
    add_host(CLOUD.1.parse().expect("an address"), CLOUD.0);
    add_address(CLOUD.1, &pod);
    let _agent = cluster.agent_on(&worker, &server, Proof::Token);
    server.links(1.0);
    serve_cloud();
    let site = Site {
        cluster,
        worker,
        pod,
    };
    site.put_files();
    site.add_services();

    for component in &COMPONENTS {
        let name = component.name;
        let mut proxies: Vec<Process> = component
            .proxies
            .iter()
            .map(|words| site.proxy(name, words))
            .collect();
        for (proxy, ask) in component.asks {
            site.ask(name, proxy, ask);
        }
        for proxy in &mut proxies {
            assert!(proxy.is_running(), "{name}");
            proxy.kill();
        }
    }
    let said = fs::read_to_string(site.cluster.path("node-1.log")).expect("a log");
    let by_customer: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("CONNECT"))
        .collect();
    assert!(
        matches!(by_customer[..], [line] if line.ends_with("CONNECT 10.77.0.1:9443")),
        "{by_customer:?}"
    );
}

#[test]
fn components_of_a_hosted_control_plane_reach_what_they_ask_for() {
    if programs("components").is_some() {
        inside_of("components::inside", INSIDE, "components");
    }
}
