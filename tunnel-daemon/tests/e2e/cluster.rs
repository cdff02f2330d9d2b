//! A control plane, and our server beside its API server.

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use adit::net::selfsigned::{ThrowawayFiles, Usage};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::ports;
use crate::process::Process;
use crate::wait::{secs, until};

/// Where `cargo xtask e2e` has put the programs.
const PROGRAMS: &str = "ADIT_E2E_PROGRAMS";
const ADMIN_TOKEN: &str = "admin-of-the-test";
const SERVER_TOKEN: &str = "server-of-the-test";
const AGENT_TOKEN: &str = "agent-of-the-test";
pub(crate) const AUDIENCE: &str = "system:konnectivity-server";
pub(crate) const ISSUER: &str = "https://kubernetes.default.svc";
pub(crate) const AGENT: &str = "konnectivity-agent";

/// How the API server and our server talk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    Grpc,
    HttpConnect,
}

/// Both ends of a cable, on a network that no other test has: one of those for benchmarks (RFC 2544), by a port that no other
/// test is given.
fn cable() -> [Ipv4Addr; 2] {
    let network = u32::from(Ipv4Addr::new(198, 18, 0, 0)) + 4 * u32::from(ports::free());
    [1, 2].map(|end| Ipv4Addr::from(network + end))
}

/// The programs' folder; without it the test is skipped.
pub(crate) fn programs(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(PROGRAMS).map(PathBuf::from);
    if folder.is_none() {
        println!("SKIPPED {test}: `cargo xtask e2e` builds the control plane that it needs");
    }
    folder
}

pub(crate) struct Cluster {
    // Before the folder, in which their logs are.
    api: Process,
    _etcd: Process,
    pub(crate) dir: TempDir,
    pub(crate) files: ThrowawayFiles,
    /// Of this host and of the network that only the tunnel reaches.
    pub(crate) cable: [Ipv4Addr; 2],
    programs: PathBuf,
    api_port: u16,
}

impl Cluster {
    /// Starts one whose connections into the cluster go through `egress.sock` of its folder.
    pub(crate) fn start(programs: PathBuf, mode: Mode) -> Self {
        let dir = TempDir::new().expect("a folder");
        let cable = cable();
        let names = ["127.0.0.1", "localhost", &cable[0].to_string()].map(str::to_owned);
        let files = ThrowawayFiles::create(&names).expect("certificates");
        // Of service account tokens.
        files.issue("accounts", Usage::Server, &[]).expect("a key");
        let path = |name: &str| dir.path().join(name).display().to_string();
        let (client, peer, api_port) = (ports::free(), ports::free(), ports::free());
        let etcd = Process::service(
            "etcd",
            &programs.join("etcd"),
            &[
                format!("--data-dir={}", path("etcd")),
                format!("--listen-client-urls=http://127.0.0.1:{client}"),
                format!("--advertise-client-urls=http://127.0.0.1:{client}"),
                format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
                format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
                format!("--initial-cluster=default=http://127.0.0.1:{peer}"),
                "--unsafe-no-fsync".to_owned(),
            ],
            dir.path(),
        );
        let protocol = match mode {
            Mode::Grpc => "GRPC",
            Mode::HttpConnect => "HTTPConnect",
        };
        let egress = json!({
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [{"name": "cluster", "connection": {
                "proxyProtocol": protocol,
                "transport": {"uds": {"udsName": path("egress.sock")}},
            }}],
        });
        std::fs::write(path("egress.json"), egress.to_string()).expect("a file");
        let users = format!(
            "{ADMIN_TOKEN},admin,1,system:masters\n{SERVER_TOKEN},konnectivity-server,2\n{AGENT_TOKEN},lease-reader,3\n"
        );
        std::fs::write(path("tokens.csv"), users).expect("a file");
        let key = files.key("accounts").display().to_string();
        let api = Process::service(
            "kube-apiserver",
            &programs.join("kube-apiserver"),
            &[
                format!("--etcd-servers=http://127.0.0.1:{client}"),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--advertise-address={}", cable[0]),
                "--endpoint-reconciler-type=none".to_owned(),
                format!("--secure-port={api_port}"),
                format!("--tls-cert-file={}", files.cert("server").display()),
                format!("--tls-private-key-file={}", files.key("server").display()),
                format!("--cert-dir={}", path("certs")),
                format!("--token-auth-file={}", path("tokens.csv")),
                "--authorization-mode=RBAC".to_owned(),
                "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
                format!("--service-account-issuer={ISSUER}"),
                format!(
                    "--service-account-key-file={}",
                    files.cert("accounts").display()
                ),
                format!("--service-account-signing-key-file={key}"),
                format!("--api-audiences={ISSUER},{AUDIENCE}"),
                format!("--egress-selector-config-file={}", path("egress.json")),
                "--disable-admission-plugins=ServiceAccount".to_owned(),
            ],
            dir.path(),
        );
        let mut cluster = Self {
            dir,
            files,
            cable,
            programs,
            api_port,
            _etcd: etcd,
            api,
        };
        for (name, token) in [
            ("admin", ADMIN_TOKEN),
            ("server", SERVER_TOKEN),
            ("agent", AGENT_TOKEN),
        ] {
            std::fs::write(cluster.kubeconfig(name), cluster.access(token).to_string())
                .expect("a file");
        }
        until("an API server", secs(120), || {
            assert!(cluster.api.is_running(), "the API server has ended");
            cluster.try_kubectl(&["get", "--raw", "/readyz"], None).ok()
        });
        cluster.prepare();
        cluster
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The file of a user: `admin`, `server` or `agent`.
    pub(crate) fn kubeconfig(&self, user: &str) -> PathBuf {
        self.path(&format!("{user}.kubeconfig"))
    }

    fn access(&self, token: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://127.0.0.1:{}", self.api_port),
                "certificate-authority": self.files.ca_file(),
            }}],
            "users": [{"name": "test", "user": {"token": token}}],
        })
    }

    /// Accounts, rights, and a pod that is the endpoint.
    fn prepare(&self) {
        let subject = |name: &str| json!([{"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}]);
        let binding = |kind: &str, name: &str, of: &str, role: &str, user: &str| {
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": kind,
                "metadata": {"name": name, "namespace": if kind == "RoleBinding" { "kube-system" } else { "" }},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": of, "name": role},
                "subjects": subject(user),
            })
        };
        let role = |name: &str, verbs: &[&str]| {
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "Role",
                "metadata": {"name": name, "namespace": "kube-system"},
                "rules": [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": verbs}],
            })
        };
        let account = |namespace: &str, name: &str| json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}});
        let objects = [
            account("kube-system", AGENT),
            account("kube-system", "other"),
            account("default", AGENT),
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}}),
            // What docs/operations.md says they need, and no more.
            binding(
                "ClusterRoleBinding",
                "konnectivity-server",
                "ClusterRole",
                "system:auth-delegator",
                "konnectivity-server",
            ),
            role(
                "konnectivity-server",
                &["get", "create", "update", "list", "delete"],
            ),
            binding(
                "RoleBinding",
                "konnectivity-server",
                "Role",
                "konnectivity-server",
                "konnectivity-server",
            ),
            role("konnectivity-agent", &["list", "watch"]),
            binding(
                "RoleBinding",
                "konnectivity-agent",
                "Role",
                "konnectivity-agent",
                "lease-reader",
            ),
            json!({
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "hidden", "namespace": "default"},
                "spec": {"nodeName": "node-1", "containers": [{"name": "http", "image": "none"}]},
            }),
        ];
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        self.kubectl(&["create", "-f", "-"], Some(&list));
        // As a kubelet would.
        let status = json!({"status": {"phase": "Running", "podIP": "10.77.0.1", "podIPs": [{"ip": "10.77.0.1"}]}});
        let patch = format!("--patch={status}");
        self.kubectl(
            &["patch", "pod", "hidden", "--subresource=status", &patch],
            None,
        );
    }

    /// Runs kubectl as the administrator.
    pub(crate) fn kubectl(&self, args: &[&str], input: Option<&Value>) -> String {
        self.try_kubectl(args, input)
            .unwrap_or_else(|error| panic!("kubectl {args:?}: {error}"))
    }

    /// The same.
    ///
    /// # Errors
    /// What it has said.
    pub(crate) fn try_kubectl(
        &self,
        args: &[&str],
        input: Option<&Value>,
    ) -> Result<String, String> {
        let mut child = Command::new(self.programs.join("kubectl"))
            .arg("--kubeconfig")
            .arg(self.kubeconfig("admin"))
            .arg("--request-timeout=20s")
            .args(args)
            .env("HOME", self.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        let mut stdin = child.stdin.take().expect("it has one");
        if let Some(input) = input {
            stdin
                .write_all(input.to_string().as_bytes())
                .expect("it reads");
        }
        drop(stdin);
        let output = child.wait_with_output().expect("it ends");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        }
    }

    /// A token of an account, as the API server issues it.
    pub(crate) fn token(&self, namespace: &str, account: &str, more: &[&str]) -> String {
        let own = [
            "create",
            "token",
            account,
            "-n",
            namespace,
            "--duration=600s",
        ];
        self.kubectl(&[&own, more].concat(), None)
    }

    /// Our server, called as an installation of upstream calls it, with its usual flags.
    pub(crate) fn server(&self, called: &str, mode: Mode, flags: &[&str]) -> Server {
        let [agents, health, admin] = [(); 3].map(|()| ports::free());
        let program = self.path(called);
        if !program.exists() {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_adit"), &program).expect("a link");
        }
        let name = format!("{called}-{agents}");
        let mode = match mode {
            Mode::Grpc => "grpc",
            Mode::HttpConnect => "http-connect",
        };
        let mut args = vec![
            "--logtostderr=true".to_owned(),
            format!("--uds-name={}", self.path("egress.sock").display()),
            "--delete-existing-uds-file".to_owned(),
            format!("--cluster-cert={}", self.files.cert("server").display()),
            format!("--cluster-key={}", self.files.key("server").display()),
            format!("--mode={mode}"),
            "--server-port=0".to_owned(),
            format!("--agent-port={agents}"),
            format!("--admin-port={admin}"),
            format!("--health-port={health}"),
            "--agent-namespace=kube-system".to_owned(),
            format!("--agent-service-account={AGENT}"),
            format!("--kubeconfig={}", self.kubeconfig("server").display()),
            format!("--authentication-audience={AUDIENCE}"),
        ];
        args.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let process = Process::service(&name, &program, &args, self.dir.path());
        let server = Server {
            process,
            agents,
            health,
            log: self.path(&format!("{name}.log")),
        };
        until("our server", secs(20), || {
            ask(server.health, "/healthz").ok()
        });
        server
    }

    /// The flags of our agent of a server at this address; `token` is a file.
    pub(crate) fn agent_args(&self, host: &str, port: u16, token: &Path) -> Vec<String> {
        vec![
            "agent".to_owned(),
            format!("--proxy-server-host={host}:{port}"),
            format!("--ca-cert={}", self.files.ca_file().display()),
            format!("--token-path={}", token.display()),
            "--sync-interval=100ms".to_owned(),
            "--sync-interval-cap=500ms".to_owned(),
            "--health-server-port=off".to_owned(),
            "--admin-server-port=off".to_owned(),
        ]
    }

    /// Writes a token to a file.
    pub(crate) fn token_file(&self, name: &str, token: &str) -> PathBuf {
        let file = self.path(name);
        std::fs::write(&file, token).expect("a file");
        file
    }
}

/// Our server.
pub(crate) struct Server {
    pub(crate) process: Process,
    pub(crate) agents: u16,
    health: u16,
    log: PathBuf,
}

impl Server {
    /// A sample of its metrics.
    pub(crate) fn value(&self, series: &str) -> Option<f64> {
        let text = ask(self.health, "/metrics").ok()?;
        let line = text.lines().find(|line| {
            line.rsplit_once(' ')
                .is_some_and(|(name, _)| name == series)
        })?;
        line.rsplit_once(' ')?.1.parse().ok()
    }

    pub(crate) fn links(&self, count: f64) {
        let links = || {
            let all: f64 = ["adit", "go"]
                .iter()
                .filter_map(|peer| self.value(&format!("adit_links{{peer=\"{peer}\"}}")))
                .sum();
            (all == count).then_some(())
        };
        until(&format!("{count} links"), secs(30), links);
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("a log")
    }
}

/// The body of a GET.
fn ask(port: u16, path: &str) -> Result<String, String> {
    use std::io::Read as _;
    let failed = |error: std::io::Error| error.to_string();
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).map_err(failed)?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed)?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.starts_with("HTTP/1.1 200") => Ok(body.to_owned()),
        _ => Err(answer),
    }
}
