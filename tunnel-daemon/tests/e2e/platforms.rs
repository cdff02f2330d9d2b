//! Each platform's own command lines with a real API server. One end after the other changes from upstream's program to
//! ours, and back. The commands come from the platform's page if it has one.
//!
//! Files have the platform's paths, in a separate file system and network. The programs run as user 65532 without
//! capabilities. Their root is read-only, except for the volumes of socket and log. `kubectl logs` works with each pair.
//! docs/reference/platforms.md contains the table of this run.

use std::fs::{self, Permissions};
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use adit_testkit::certificates::Usage;
use adit_testkit::platforms::{End, PLATFORMS, Platform};

use crate::balance::{balance, forward_proxy};
use crate::client::Client;
use crate::cluster::{AGENT_TOKEN, AUDIENCE, Cluster, Egress, MadeBy, Mode, programs};
use crate::go::{self, Program, Release};
use crate::inside::{add_address, add_host, inside_of, own_folders, put, run};
use crate::namespace::{BODY, Node};
use crate::pages;
use crate::process::Process;
use crate::wait::{poll, secs};

/// Names the platform. Set in the process with its own file system and network.
const INSIDE: &str = "ADIT_TEST_PLATFORM_INSIDE";
/// The page with the table.
const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/reference/platforms.md"
);
/// Folder of the programs, which their user can execute.
const PROGRAMS: &str = "/mnt/programs";
const SECRETS: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// User id of upstream's images.
const USER: u32 = 65532;
/// Script that makes mounts read-only, except for `$WRITABLE`, verifies that, and runs its arguments.
const READ_ONLY: &str = r#"
for folder in $WRITABLE; do mount --bind "$folder" "$folder" || exit 97; done
for mount in / /etc /var /run /mnt; do mount -o remount,bind,ro "$mount" || exit 97; done
for folder in / /etc /tmp /var /run; do
  if touch "$folder/written" 2>/dev/null; then echo "$folder is not read-only" >&2; exit 97; fi
done
exec "$@"
"#;
/// Name of OCM's managed cluster, which is an identifier of its agent.
const MANAGED: &str = "cluster1";
/// Agents that [`Installation::by_hand`] starts.
const AGENTS_STARTED: usize = 3;
/// Flag that only older releases of upstream's agent have.
const RETIRED: &str = "--apiserver-port-mapping";
/// A server for agents of platforms that provide the server.
const OTHERS: End = End {
    called: "proxy-server",
    env: &[],
    flags: &[
        "--uds-name=/run/konnectivity/konnectivity-server.socket",
        "--cluster-cert=/etc/konnectivity/tls.crt",
        "--cluster-key=/etc/konnectivity/tls.key",
        "--server-port=0",
        "--agent-port=8132",
        "--health-port=8134",
        "--mode=grpc",
    ],
};

/// Value of a flag of `end`.
fn value<'a>(end: &'a End, name: &str) -> Option<&'a str> {
    end.flags.iter().find_map(|flag| {
        let (flag, value) = flag.split_once('=')?;
        (flag == name).then_some(value)
    })
}

/// Final command lines of both ends.
struct Ends {
    server: Vec<String>,
    agent: Vec<String>,
    /// Environment variables of the agent.
    env: &'static [(&'static str, &'static str)],
    server_name: &'static str,
    agent_port: u16,
}

impl Ends {
    fn of(platform: &Platform) -> Self {
        let agent = platform.agent.as_ref().expect("each has an agent");
        let server = platform.server.as_ref().unwrap_or(&OTHERS);
        let owned = |end: &End| end.flags.iter().map(|flag| (*flag).to_owned()).collect();
        let mut flags: Vec<String> = owned(server);
        if platform.server.is_none() {
            flags.extend(match platform.proof {
                "certificate" => vec!["--cluster-ca-cert=/etc/konnectivity/ca.crt".to_owned()],
                _ => vec![
                    "--agent-namespace=kube-system".to_owned(),
                    "--agent-service-account=konnectivity-agent".to_owned(),
                    "--kubeconfig=/etc/konnectivity/kubeconfig".to_owned(),
                    format!("--authentication-audience={AUDIENCE}"),
                ],
            });
        }
        let port = value(server, "--agent-port").unwrap_or("8091");
        Self {
            server: flags,
            agent: owned(agent),
            env: agent.env,
            server_name: server.called,
            agent_port: port.parse().expect("a port"),
        }
    }

    fn flag(flags: &[String], name: &str) -> Option<String> {
        flags.iter().find_map(|flag| {
            let (flag, value) = flag.split_once('=')?;
            (flag == name && !value.is_empty()).then(|| value.to_owned())
        })
    }

    /// Host and port of the proxy between the agent and its server.
    fn proxy(&self) -> Option<(&'static str, u16)> {
        let (_name, url) = self.env.iter().find(|(name, _)| *name == "HTTPS_PROXY")?;
        let (_user, authority) = url.rsplit_once('@').expect("a password");
        let (host, port) = authority.split_once(':').expect("a port");
        Some((host, port.parse().expect("a port")))
    }

    fn egress(&self) -> Egress {
        match (self.mode(), Self::flag(&self.server, "--uds-name")) {
            (_, Some(path)) => Egress::Socket(path),
            (Mode::HttpConnect, None) => Egress::Tcp(format!("127.0.0.1:{}", self.server_port())),
            // No kube-apiserver speaks gRPC over TCP, so the platform has its own clients.
            (Mode::Grpc, None) => Egress::Direct,
        }
    }

    fn server_port(&self) -> u16 {
        Self::flag(&self.server, "--server-port").map_or(8090, |port| port.parse().expect("a port"))
    }

    fn mode(&self) -> Mode {
        match Self::flag(&self.server, "--mode").as_deref() {
            Some("http-connect") => Mode::HttpConnect,
            _ => Mode::Grpc,
        }
    }
}

/// Copies the programs to a folder where any user can execute them.
fn prepare_programs() {
    fs::create_dir(PROGRAMS).expect("a folder");
    let adit = Path::new(env!("CARGO_BIN_EXE_adit")).to_owned();
    for (name, program) in [
        ("adit", adit),
        (
            "upstream-server",
            go::binary(Program::Server(Release::V0360)),
        ),
        ("upstream-agent", go::binary(Program::Agent(Release::V0360))),
    ] {
        fs::copy(program, format!("{PROGRAMS}/{name}")).expect("a copy");
    }
    for name in ["proxy-server", "proxy-agent", "konnectivity-server"] {
        std::os::unix::fs::symlink("adit", format!("{PROGRAMS}/{name}")).expect("a link");
    }
}

/// Writes the files that the flags name.
fn put_files(cluster: &Cluster, flags: &[String]) {
    let of = |path: PathBuf| fs::read(path).expect("a file");
    let files = &cluster.files;
    for flag in flags {
        let Some((name, path)) = flag
            .split_once('=')
            .filter(|(_, path)| path.starts_with('/'))
        else {
            continue;
        };
        match name {
            "--kubeconfig" => put(path, &of(cluster.kubeconfig("server"))),
            "--service-account-token-path" => put(path, token(cluster, flags).as_bytes()),
            "--uds-name" => {
                put(&format!("{path}.folder"), b"");
                let folder = Path::new(path).parent().expect("it is absolute");
                fs::set_permissions(folder, Permissions::from_mode(0o777)).expect("it is ours");
            }
            "--log-file" => {
                put(path, b"");
                fs::set_permissions(path, Permissions::from_mode(0o666)).expect("it is ours");
            }
            "--agent-cert" => put(path, &of(files.cert("agent"))),
            "--agent-key" => put(path, &of(files.key("agent"))),
            name if name.ends_with("ca-cert") => put(path, &of(files.ca_file())),
            name if name.ends_with("-cert") => put(path, &of(files.cert("platform"))),
            name if name.ends_with("-key") => put(path, &of(files.key("platform"))),
            other => panic!("{other} names a file that no platform has"),
        }
    }
}

/// A token for the account that the file's name implies: KKP's, or the usual account.
fn token(cluster: &Cluster, flags: &[String]) -> String {
    let path = Ends::flag(flags, "--service-account-token-path").expect("it has one");
    let account = if path.contains("system-konnectivity-agent") {
        "system-konnectivity-agent"
    } else {
        "konnectivity-agent"
    };
    cluster.token("kube-system", account, &["--audience", AUDIENCE])
}

/// Starts a program in a container with a read-only root, as upstream's images do.
fn start(
    node: Option<&Node>,
    cluster: &Cluster,
    name: &str,
    program: &str,
    flags: &[String],
    env: &[(&str, &str)],
) -> Process {
    let user = USER.to_string();
    let volumes = ["--uds-name", "--log-file"].into_iter();
    let volumes = volumes.filter_map(|name| Ends::flag(flags, name));
    let volumes = volumes.filter_map(|file| Some(Path::new(&file).parent()?.display().to_string()));
    let writable = format!("WRITABLE={}", volumes.collect::<Vec<_>>().join(" "));
    let mut words: Vec<String> = [
        "unshare",
        "--mount",
        "env",
        &writable,
        "sh",
        "-c",
        READ_ONLY,
        "sh",
        "setpriv",
        &format!("--reuid={user}"),
        &format!("--regid={user}"),
        "--clear-groups",
        "--no-new-privs",
        "--inh-caps=-all",
        "--bounding-set=-all",
        "env",
    ]
    .map(str::to_owned)
    .to_vec();
    // Variables that Kubernetes sets in a pod.
    words.push(format!("KUBERNETES_SERVICE_HOST={}", cluster.cables[0][0]));
    words.push(format!("KUBERNETES_SERVICE_PORT={}", cluster.api_port));
    words.extend(env.iter().map(|(name, value)| format!("{name}={value}")));
    words.push(format!("{PROGRAMS}/{program}"));
    words.extend_from_slice(flags);
    let dir = cluster.dir.path();
    match node {
        Some(node) => node.run(name, Path::new(&words[0]), &words[1..], dir),
        None => Process::service(name, Path::new(&words[0]), &words[1..], dir),
    }
}

/// A platform's installation with the test's API server.
pub(crate) struct Installation<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) node: &'a Node,
    ends: &'a Ends,
    /// Set if the server's client is not kube-apiserver.
    client: Option<&'a Client>,
}

impl Installation<'_> {
    pub(crate) fn server(&self, made_by: MadeBy) -> Process {
        let program = match made_by {
            MadeBy::Adit => self.ends.server_name,
            MadeBy::Upstream => "upstream-server",
        };
        // Upstream's server fails if an old socket exists, unless a flag removes it. A new pod starts without one.
        if let Egress::Socket(path) = self.ends.egress() {
            fs::remove_file(path).ok();
        }
        start(
            None,
            self.cluster,
            &format!("{made_by:?}-server"),
            program,
            &self.ends.server,
            &[],
        )
    }

    pub(crate) fn agent(&self, made_by: MadeBy) -> Process {
        let (program, flags) = match made_by {
            MadeBy::Adit => ("proxy-agent", self.ends.agent.clone()),
            MadeBy::Upstream => {
                let known = |flag: &&String| !flag.starts_with(RETIRED);
                (
                    "upstream-agent",
                    self.ends.agent.iter().filter(known).cloned().collect(),
                )
            }
        };
        start(
            Some(self.node),
            self.cluster,
            &format!("{made_by:?}-agent"),
            program,
            &flags,
            self.ends.env,
        )
    }

    /// Runs `kubectl logs` through the running programs, or a request of the platform's own client.
    pub(crate) fn assert_logs(&self, what: &str) {
        let began = Instant::now();
        if let Some(client) = self.client {
            let answer = poll(secs(90), || client.get(&format!("{MANAGED}:8080")));
            let took = began.elapsed().as_secs_f64();
            let expected = format!("{BODY}{}", self.node.address);
            assert_eq!(answer, Some(expected), "{what}");
            println!("MEASURED {what}: an answer after {took:.1} s");
            return;
        }
        let logs = ["logs", "--tail=1", "pod-1", "-c", "main"];
        let log = poll(secs(90), || self.cluster.try_kubectl(&logs, None).ok());
        let took = began.elapsed().as_secs_f64();
        assert_eq!(log.as_deref(), Some("line 1000"), "{what}");
        println!("MEASURED {what}: kubectl logs after {took:.1} s");
    }

    /// Changes from upstream's programs to ours and back by the platform's page, then runs the pairs that the page left out.
    fn by_its_page(&self, page: &pages::Page) {
        let [go, ours] = [MadeBy::Upstream, MadeBy::Adit];
        let ran = page.follow(self);
        for (pair, what) in [
            ([ours, ours], "our programs"),
            ([ours, go], "our server, upstream's agent"),
        ] {
            if ran.contains(&pair) {
                continue;
            }
            let mut server = self.server(pair[0]);
            let mut agent = self.agent(pair[1]);
            self.assert_logs(what);
            server.kill();
            agent.kill();
        }
    }

    /// As [`Installation::by_its_page`], for a platform that has no setting for another image.
    fn by_hand(&self) {
        let [go, ours] = [MadeBy::Upstream, MadeBy::Adit];
        let mut server = self.server(go);
        let mut agent = self.agent(go);
        self.assert_logs("upstream's programs");
        agent.kill();
        let mut agent = self.agent(ours);
        self.assert_logs("upstream's server, our agent");
        server.kill();
        let mut server = self.server(ours);
        self.assert_logs("our programs");
        server.kill();
        let mut server = self.server(go);
        self.assert_logs("back to upstream's server");
        agent.kill();
        let mut agent = self.agent(go);
        self.assert_logs("back to upstream's programs");
        server.kill();
        let mut server = self.server(ours);
        self.assert_logs("our server, upstream's agent");
        server.kill();
        agent.kill();
    }
}

/// Maps the managed cluster's name to its pod, and adds a route for the API server, which also serves the managed cluster.
/// Clients of the tunnel use neither.
fn join_networks(cluster: &Cluster, node: &Node) {
    add_host(node.address, MANAGED);
    let address = node.address.to_string();
    let [_here, there] = cluster.cables[0].map(|end| end.to_string());
    run("ip", &["route", "add", &address, "via", &there]);
}

/// Row of the table, beginning with the platform's name.
fn row(platform: &Platform, ends: &Ends) -> String {
    let by = match (ends.mode(), ends.egress()) {
        _ if platform.server.is_none() => "theirs to run",
        (Mode::Grpc, Egress::Direct) => "none: OCM's clients by gRPC, mutual TLS",
        (Mode::Grpc, _) => "gRPC, unix socket",
        (Mode::HttpConnect, Egress::Socket(_)) => "CONNECT, unix socket",
        (Mode::HttpConnect, _) => "CONNECT, mutual TLS",
    };
    let Platform { name, proof, .. } = platform;
    format!("| {name} | {proof} | {by} | yes | yes | yes |")
}

/// Does nothing unless [`INSIDE`] is set: `inside_of` starts it in another process.
#[test]
fn inside() {
    let Some(name) = std::env::var_os(INSIDE) else {
        return;
    };
    let platform = PLATFORMS
        .iter()
        .find(|platform| *platform.name == *name)
        .expect("a platform");
    let ends = Ends::of(platform);
    let programs = programs(platform.name).expect("they are there");
    own_folders();
    prepare_programs();
    let cluster = Cluster::start_with(programs, ends.mode(), Some(ends.egress()));
    let node = Node::start(&cluster, 0);
    let host = Ends::flag(&ends.agent, "--proxy-server-host").expect("it has one");
    let names = ["127.0.0.1".to_owned(), host.clone()];
    cluster
        .files
        .issue("platform", Usage::Server, &names)
        .expect("a certificate");
    if host.parse::<IpAddr>().is_ok() {
        add_address(&host, &node);
    } else {
        add_host(node.host, &host);
    }
    // Stands for a load balancer, or a proxy that routes by host name, in front of the agent port.
    let outside = Ends::flag(&ends.agent, "--proxy-server-port")
        .map_or(8091, |port| port.parse().expect("a port"));
    if outside != ends.agent_port {
        balance(outside, vec![ends.agent_port]);
    }
    let proxied = ends.proxy().map(|(host, port)| {
        add_host(node.host, host);
        forward_proxy(port)
    });
    put(&format!("{SECRETS}/token"), AGENT_TOKEN.as_bytes());
    put(&format!("{SECRETS}/namespace"), b"kube-system");
    put(
        &format!("{SECRETS}/ca.crt"),
        &fs::read(cluster.files.ca_file()).expect("a file"),
    );
    put_files(&cluster, &ends.server);
    put_files(&cluster, &ends.agent);

    let client = matches!(ends.egress(), Egress::Direct).then(|| {
        join_networks(&cluster, &node);
        Client::start(&cluster, ends.server_port())
    });
    let installation = Installation {
        cluster: &cluster,
        node: &node,
        ends: &ends,
        client: client.as_ref(),
    };
    if platform.name == "KKP" {
        pages::openvpn::follow(&installation);
    }
    match pages::of(platform.name) {
        Some(page) => installation.by_its_page(page),
        None => installation.by_hand(),
    }
    // By all agents: each runs alone at some time.
    if let Some(proxied) = proxied {
        assert!(proxied.load(Relaxed) >= AGENTS_STARTED, "{proxied:?}");
    }
    println!("{}", row(platform, &ends));
}

fn platform(name: &str) {
    if programs(name).is_none() {
        return;
    }
    // Built before folders are mounted over, because the toolchain may keep files in them.
    for program in [
        Program::Server(Release::V0360),
        Program::Agent(Release::V0360),
        Program::Peer,
    ] {
        go::binary(program);
    }
    let platform = PLATFORMS
        .iter()
        .find(|platform| platform.name.starts_with(name))
        .expect("a platform");
    let said = inside_of("platforms::inside", INSIDE, platform.name);
    let row = row(platform, &Ends::of(platform));
    let page = fs::read_to_string(PAGE).expect("a page");
    assert!(
        said.contains(&row) && page.contains(&row),
        "docs/reference/platforms.md lacks this row: {row}"
    );
}

#[test]
fn the_kubernetes_documentation() {
    platform("Kubernetes documentation");
}

#[test]
fn kube_up_by_grpc() {
    platform("GCE kube-up, gRPC");
}

#[test]
fn kind_multinode() {
    platform("upstream's kind-multinode");
}

#[test]
fn kkp() {
    platform("KKP");
}

#[test]
fn kamaji() {
    platform("Kamaji");
}

#[test]
fn k0s() {
    platform("k0s");
}

#[test]
fn hosted_control_planes_of_the_cluster_api() {
    platform("CAPI");
}

#[test]
fn hypershift() {
    platform("HyperShift");
}

#[test]
fn open_cluster_management() {
    platform("OCM");
}

#[test]
fn agents_of_acm_behind_a_forward_proxy() {
    platform("ACM");
}

#[test]
fn the_bootstrap_machine_of_openshifts_installer() {
    platform("OpenShift installer");
}

#[test]
fn kube_up_by_http_connect() {
    platform("GCE kube-up, HTTP CONNECT");
}

#[test]
fn aks() {
    platform("AKS");
}

#[test]
fn vcluster() {
    platform("vcluster");
}
