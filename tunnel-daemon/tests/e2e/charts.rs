//! The Helm chart, installed by Helm into a real API server: with combinations of values of `deploy/chart/ci`, and by the
//! commands of the install page. Pods run as described in `pods`, and `kubectl logs` uses their tunnel.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use adit_testkit::certificates::Usage;
use serde_json::{Value, json};

use crate::cluster::{Cluster, Egress, Mode, programs};
use crate::inside::{add_address, add_host, inside_of, own_folders, put};
use crate::manifests::PREPARED;
use crate::namespace::Node;
use crate::pages;
use crate::pods::{Pod, get, list};
use crate::process::Process;
use crate::wait::{poll, secs};

/// Names the installation. Set in the process with its own file system and network.
const INSIDE: &str = "ADIT_TEST_CHART_INSIDE";
/// Value of [`INSIDE`] for the install page.
const PAGE: &str = "page";
/// Path of the server's socket in the chart's values.
const SOCKET: &str = "/run/konnectivity/konnectivity-server.socket";
/// A host name of servers in values and on the page.
const SERVERS: &str = "konnectivity.example.org";
/// Name of the agents' account in the chart's values.
const AGENT: &str = "konnectivity-agent";

/// The repository's folder. Commands name the chart relative to it.
pub(crate) const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// One or two releases that install a server and an agent.
struct Installation {
    name: &'static str,
    mode: Mode,
    /// Address at which the API server reaches the server by TLS. Without one it uses the socket.
    frontend: Option<&'static str>,
    releases: &'static [Release],
    /// Host names of the server for its API server and its agents.
    hosts: &'static [&'static str],
    /// Secrets that exist before the releases are installed.
    secrets: &'static [Secret],
    /// A folder of the node with `apiserver.crt` and `apiserver.key` of a server.
    node_files: Option<&'static str>,
}

/// A release that Helm installs.
struct Release {
    /// A file of `deploy/chart/ci`, without its extension.
    values: &'static str,
    namespace: &'static str,
    /// Values that replace examples in the file.
    set: &'static [&'static str],
}

/// Namespace, name and content.
type Secret = (&'static str, &'static str, Content);

enum Content {
    /// Certificate and key of a server with the installation's hosts, and the CA certificate.
    Server,
    /// Certificate and key of agents, and the CA certificate.
    Agent,
    /// The CA certificate, also in place of a certificate.
    Authority,
    /// A kubeconfig of the server's user.
    Kubeconfig,
}

const INSTALLATIONS: &[Installation] = &[
    Installation {
        name: "native, certificates and tokens, CONNECT",
        mode: Mode::HttpConnect,
        frontend: Some("adit-server.kube-system.svc:8090"),
        releases: &[Release {
            values: "all-in-one-cert-manager",
            namespace: "kube-system",
            set: &[],
        }],
        hosts: &[
            "adit-server.kube-system.svc",
            "adit-server-agents.kube-system.svc",
        ],
        secrets: &[],
        node_files: None,
    },
    Installation {
        name: "native, tokens and leases, two releases",
        mode: Mode::HttpConnect,
        frontend: Some("adit-server.cluster-example.svc:8090"),
        releases: &[
            Release {
                values: "server-hosted-token-leases",
                namespace: "cluster-example",
                set: &[],
            },
            Release {
                values: "agent-deployment-token-leases",
                namespace: "kube-system",
                // Network of the test's nodes.
                set: &["agent.allowTargets={10.77.0.0/16}"],
            },
        ],
        hosts: &["adit-server.cluster-example.svc", SERVERS],
        secrets: &[
            (
                "cluster-example",
                "konnectivity-server-agents",
                Content::Server,
            ),
            (
                "cluster-example",
                "konnectivity-server-clients",
                Content::Server,
            ),
            (
                "cluster-example",
                "konnectivity-server-kubeconfig",
                Content::Kubeconfig,
            ),
        ],
        node_files: None,
    },
    Installation {
        name: "upstream's flags, tokens and leases, gRPC",
        mode: Mode::Grpc,
        frontend: None,
        releases: &[Release {
            values: "compat-daemonset-token-leases",
            namespace: "kube-system",
            set: &[],
        }],
        hosts: &["203.0.113.7"],
        secrets: &[],
        node_files: Some("/etc/kubernetes/pki"),
    },
    Installation {
        name: "upstream's flags, certificates, CONNECT",
        mode: Mode::HttpConnect,
        frontend: Some("adit-server.hosted.svc:8090"),
        releases: &[Release {
            values: "compat-http-connect-mtls",
            namespace: "hosted",
            // The kernel tests cover accounting.
            set: &["server.account.enabled=false"],
        }],
        hosts: &["adit-server.hosted.svc", "adit-server-agents.hosted.svc"],
        secrets: &[
            ("hosted", "agents", Content::Server),
            ("hosted", "agents-ca", Content::Authority),
            ("hosted", "clients", Content::Server),
            ("hosted", "clients-ca", Content::Authority),
            ("hosted", AGENT, Content::Agent),
        ],
        node_files: None,
    },
];

impl Installation {
    fn install(&self, cluster: &Cluster) {
        let hosts = self.hosts.iter().map(|host| (*host).to_owned());
        let hosts: Vec<String> = hosts.collect();
        let files = &cluster.files;
        files.issue("hosts", Usage::Server, &hosts).expect("a pair");
        let of = |file: PathBuf| fs::read_to_string(file).expect("a file");
        let pair = [files.cert("hosts"), files.key("hosts")].map(of);
        let authority = of(files.ca_file());
        if let Some(folder) = self.node_files {
            for (name, content) in ["apiserver.crt", "apiserver.key"].iter().zip(&pair) {
                put(&format!("{folder}/{name}"), content.as_bytes());
            }
        }
        for namespace in self.releases.iter().map(|release| release.namespace) {
            if namespace != "kube-system" {
                cluster.kubectl(&["create", "namespace", namespace], None);
            }
        }
        cluster.define_kinds();
        // kube-controller-manager creates this object in a real cluster.
        let object = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "kube-root-ca.crt", "namespace": "kube-system"},
            "data": {"ca.crt": authority},
        });
        cluster.create(&object);
        for (namespace, name, content) in self.secrets {
            let data = match content {
                Content::Server => {
                    json!({"tls.crt": pair[0], "tls.key": pair[1], "ca.crt": authority})
                }
                Content::Agent => {
                    let [cert, key] = [files.cert("agent"), files.key("agent")].map(of);
                    json!({"tls.crt": cert, "tls.key": key, "ca.crt": authority})
                }
                Content::Authority => json!({"tls.crt": authority, "ca.crt": authority}),
                Content::Kubeconfig => json!({"kubeconfig": of(cluster.kubeconfig("server"))}),
            };
            create_secret(cluster, namespace, name, &data);
        }
        for release in self.releases {
            release.helm("install", cluster);
        }
        issue_certificates(cluster);
    }
}

impl Release {
    /// Runs `helm install` or `helm upgrade`.
    fn helm(&self, action: &str, cluster: &Cluster) {
        let values = format!("{REPOSITORY}/deploy/chart/ci/{}.yaml", self.values);
        let chart = format!("{REPOSITORY}/deploy/chart");
        let mut helm = Command::new(cluster.program("helm"));
        helm.args([action, "adit", &chart, "--values", &values])
            .args(["--namespace", self.namespace])
            .env("KUBECONFIG", cluster.kubeconfig("admin"))
            .env("HOME", cluster.dir.path());
        for set in self.set {
            helm.args(["--set", set]);
        }
        let output = helm.output().expect("helm starts");
        let said = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
        println!("{}", said.concat());
        assert!(output.status.success(), "{helm:?}");
    }
}

fn create_secret(cluster: &Cluster, namespace: &str, name: &str, data: &Value) {
    let object = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": data,
    });
    cluster.create(&object);
}

/// Replaces cert-manager: creates the Secret of each Certificate.
fn issue_certificates(cluster: &Cluster) {
    let certificates = get(cluster, &["certificates", "-A"]);
    for certificate in certificates["items"].as_array().expect("a list") {
        let spec = &certificate["spec"];
        let texts = |field: &str| {
            let texts = spec[field].as_array().into_iter().flatten();
            texts.map(|text| text.as_str().expect("text").to_owned())
        };
        let is_server = texts("usages").any(|usage| usage == "server auth");
        let usage = if is_server {
            Usage::Server
        } else {
            Usage::Client
        };
        let names: Vec<String> = texts("dnsNames").chain(texts("ipAddresses")).collect();
        let secret = spec["secretName"].as_str().expect("a name");
        let name = spec["commonName"].as_str().unwrap_or(secret);
        let files = &cluster.files;
        files.issue(name, usage, &names).expect("a certificate");
        let [cert, key, authority] = [files.cert(name), files.key(name), files.ca_file()]
            .map(|file| fs::read_to_string(file).expect("a file"));
        let data = json!({"tls.crt": cert, "tls.key": key, "ca.crt": authority});
        let namespace = certificate["metadata"]["namespace"].as_str();
        create_secret(cluster, namespace.expect("a name"), secret, &data);
    }
}

/// Removes what the test's clusters have for other tests.
fn delete_prepared(cluster: &Cluster) {
    for [kind, name] in PREPARED {
        cluster.kubectl(&["delete", kind, name, "-n", "kube-system"], None);
    }
}

/// Starts the pods of server and agent. Dropping the processes ends them.
pub(crate) fn run_pods(cluster: &Cluster, node: &Node) -> [Process; 2] {
    let server = Pod::of_component(cluster, "server");
    let server_process = server.start(None);
    server.until_ready(node.host);
    let agent = Pod::of_component(cluster, "agent");
    let agent_process = agent.start(Some(node));
    let [_here, there] = cluster.cables[0];
    agent.until_ready(there);
    [server_process, agent_process]
}

/// Does nothing unless [`INSIDE`] is set: `inside_of` starts it in another process.
#[test]
fn inside() {
    let Some(name) = std::env::var_os(INSIDE) else {
        return;
    };
    let programs = programs("chart").expect("they are there");
    own_folders();
    let installation = INSTALLATIONS.iter().find(|it| *it.name == *name);
    let frontend = installation.and_then(|it| it.frontend);
    let egress = frontend.map_or_else(
        || Egress::Socket(SOCKET.to_owned()),
        |address| Egress::Tcp(address.to_owned()),
    );
    let mode = installation.map_or(Mode::Grpc, |it| it.mode);
    let cluster = Cluster::start_with(programs, mode, Some(egress));
    let node = Node::start(&cluster, 0);
    for host in installation.map_or(&[SERVERS][..], |it| it.hosts) {
        if host.parse::<std::net::IpAddr>().is_ok() {
            add_address(host, &node);
        } else {
            add_host(node.host, host);
        }
    }
    delete_prepared(&cluster);
    // The chart creates this account itself.
    cluster.kubectl(
        &["delete", "serviceaccount", AGENT, "-n", "kube-system"],
        None,
    );
    let Some(installation) = installation else {
        assert_eq!(name, PAGE);
        pages::install::follow(&cluster, &node);
        return;
    };
    installation.install(&cluster);
    let _running = run_pods(&cluster, &node);
    let logs = ["logs", "--tail=1", "pod-1", "-c", "main"];
    let log = poll(secs(30), || cluster.try_kubectl(&logs, None).ok());
    assert_eq!(log.as_deref(), Some("line 1000"), "{}", installation.name);
    // Upstream's flags have no admin socket.
    if installation.name.starts_with("native") {
        kubectl_shows_the_fleet(&cluster, installation.releases[0].namespace);
    }
}

/// `kubectl adit status` as its page installs it: kubectl finds the plugin, and the plugin kubectl, by PATH.
fn kubectl_shows_the_fleet(cluster: &Cluster, namespace: &str) {
    let plugins = cluster.path("plugins");
    fs::create_dir(&plugins).expect("a folder");
    let plugin = plugins.join("kubectl-adit");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_adit"), plugin).expect("a link");
    let kubectl = cluster.program("kubectl");
    let folders = [plugins, kubectl.parent().expect("a folder").to_owned()];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = folders.into_iter().chain(std::env::split_paths(&path));
    let output = Command::new(&kubectl)
        .args(["adit", "status", "--json", "--namespace", namespace])
        .env("KUBECONFIG", cluster.kubeconfig("admin"))
        .env("HOME", cluster.dir.path())
        .env("PATH", std::env::join_paths(path).expect("folders"))
        .output()
        .expect("kubectl starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let fleet: Value = serde_json::from_str(&said).unwrap_or_else(|error| {
        panic!("{error}: {said}{}", String::from_utf8_lossy(&output.stderr))
    });
    let link = &fleet["agents"][0]["links"][0];
    assert_eq!(link["state"], "serving", "{fleet}");
    assert_eq!(fleet["missing"], json!([]), "{fleet}");
    // A release of two replicas has one pod here.
    let problems = list(&fleet, "/problems").iter();
    let mut texts = problems.map(|problem| problem["text"].to_string());
    assert!(
        texts.all(|text| text.contains("expects 2 servers")),
        "{fleet}"
    );
    let code = if fleet["verdict"] == "linked" { 0 } else { 2 };
    assert_eq!(output.status.code(), Some(code), "{fleet}");
}

fn install(name: &str) {
    if programs("chart").is_some() {
        inside_of("charts::inside", INSIDE, name);
    }
}

#[test]
fn native_programs_with_certificates_tokens_and_connect() {
    install(INSTALLATIONS[0].name);
}

#[test]
fn native_programs_of_two_releases_with_tokens_and_leases() {
    install(INSTALLATIONS[1].name);
}

#[test]
fn programs_with_upstreams_flags_tokens_leases_and_grpc() {
    install(INSTALLATIONS[2].name);
}

#[test]
fn programs_with_upstreams_flags_certificates_and_connect() {
    install(INSTALLATIONS[3].name);
}

#[test]
fn the_install_page_works_as_written() {
    install(PAGE);
}

/// With `replicas: null` an autoscaler sets them, here by hand.
#[test]
fn an_upgrade_keeps_the_replicas_of_an_autoscaler() {
    let Some(cluster) = Cluster::of("chart", Mode::Grpc) else {
        return;
    };
    delete_prepared(&cluster);
    let release = Release {
        values: "autoscaled",
        namespace: "kube-system",
        set: &[],
    };
    release.helm("install", &cluster);
    let scaled = [("adit-server", 3), ("adit-agent", 5)];
    for (name, replicas) in scaled {
        let replicas = format!("--replicas={replicas}");
        let scale = ["scale", "deployment", name, &replicas, "-n", "kube-system"];
        cluster.kubectl(&scale, None);
    }
    release.helm("upgrade", &cluster);
    for (name, replicas) in scaled {
        let found = get(&cluster, &["deployment", name, "-n", "kube-system"]);
        assert_eq!(found["spec"]["replicas"], replicas, "{name}");
    }
}
