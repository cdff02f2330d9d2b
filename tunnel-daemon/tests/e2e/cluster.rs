//! A control plane, and our server beside its API server.

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use adit_testkit::certificates::{ThrowawayFiles, Usage};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::ports;
use crate::process::Process;
use crate::wait::{secs, until};

/// Environment variable with the programs' folder. `cargo xtask e2e` sets it.
const PROGRAMS: &str = "ADIT_E2E_PROGRAMS";
/// Address of the API server's Service.
pub(crate) const SERVICE: &str = "10.96.0.1";
/// Host name of aggregated API server and webhooks in certificates.
pub(crate) const EXTENSIONS: &str = "extensions.default.svc";
pub(crate) const ADMIN_TOKEN: &str = "admin-of-the-test";
const SERVER_TOKEN: &str = "server-of-the-test";
pub(crate) const AGENT_TOKEN: &str = "agent-of-the-test";
pub(crate) const AUDIENCE: &str = "system:konnectivity-server";
pub(crate) const ISSUER: &str = "https://kubernetes.default.svc";
pub(crate) const AGENT: &str = "konnectivity-agent";

/// Protocol between API server and our server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    Grpc,
    HttpConnect,
}

/// Origin of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MadeBy {
    Adit,
    Upstream,
}

/// How the API server reaches our server.
pub(crate) enum Egress {
    /// Over a unix socket with this path.
    Socket(String),
    /// Over TLS with a client certificate, at this host and port.
    Tcp(String),
    /// Without the server: it connects to nodes directly.
    Direct,
}

impl Egress {
    fn configuration(&self, mode: Mode, files: &ThrowawayFiles) -> Value {
        let protocol = match mode {
            Mode::Grpc => "GRPC",
            Mode::HttpConnect => "HTTPConnect",
        };
        let transport = match self {
            Self::Direct => Value::Null,
            Self::Socket(path) => json!({"uds": {"udsName": path}}),
            Self::Tcp(address) => json!({"tcp": {
                "url": format!("https://{address}"),
                "tlsConfig": {
                    "caBundle": files.ca_file(),
                    "clientCert": files.cert("kube-apiserver"),
                    "clientKey": files.key("kube-apiserver"),
                },
            }}),
        };
        let connection = match self {
            Self::Direct => json!({"proxyProtocol": "Direct"}),
            _ => json!({"proxyProtocol": protocol, "transport": transport}),
        };
        json!({
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [{"name": "cluster", "connection": connection}],
        })
    }
}

/// How agents authenticate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Proof {
    Token,
    Certificate,
    Both,
}

/// Number of nodes with certificates, addresses and veth pairs.
pub(crate) const NODES: usize = 3;

/// Addresses of both ends of a veth pair. The network is unique among tests: it lies in the range for benchmarks (RFC 2544),
/// and a reserved port selects it.
fn cable() -> [Ipv4Addr; 2] {
    let network = u32::from(Ipv4Addr::new(198, 18, 0, 0)) + 4 * u32::from(ports::free());
    [1, 2].map(|end| Ipv4Addr::from(network + end))
}

/// A flag whose value is a path.
pub(crate) fn flag(name: &str, path: impl AsRef<Path>) -> String {
    format!("--{name}={}", path.as_ref().display())
}

/// The programs' folder. Without it the test prints that it is skipped.
pub(crate) fn programs(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(PROGRAMS).map(PathBuf::from);
    if folder.is_none() {
        println!("SKIPPED {test}: `cargo xtask e2e` builds the control plane that it needs");
    }
    folder
}

pub(crate) struct Cluster {
    // First: the processes end before their log folder is removed.
    api: Process,
    api_args: Vec<String>,
    _etcd: Process,
    pub(crate) dir: TempDir,
    pub(crate) files: ThrowawayFiles,
    /// Addresses of this host and of the node, for each node.
    pub(crate) cables: [[Ipv4Addr; 2]; NODES],
    programs: PathBuf,
    pub(crate) api_port: u16,
    pub(crate) mode: Mode,
}

impl Cluster {
    /// Starts a cluster, as [`Cluster::start`], if there are programs.
    pub(crate) fn of(test: &str, mode: Mode) -> Option<Self> {
        programs(test).map(|programs| Self::start(programs, mode))
    }

    /// Starts a cluster whose API server connects through `egress.sock` in its folder.
    pub(crate) fn start(programs: PathBuf, mode: Mode) -> Self {
        Self::start_with(programs, mode, None)
    }

    /// Starts a cluster whose API server connects by `egress`.
    pub(crate) fn start_with(programs: PathBuf, mode: Mode, egress: Option<Egress>) -> Self {
        let dir = TempDir::new().expect("a folder");
        let cables = [(); NODES].map(|()| cable());
        let mut names = ["127.0.0.1", "localhost", SERVICE]
            .map(str::to_owned)
            .to_vec();
        names.extend(cables.iter().map(|[here, _there]| here.to_string()));
        let files = ThrowawayFiles::create(&names).expect("certificates");
        let mut names: Vec<String> = (0..NODES)
            .map(|number| Self::node_address(number).to_string())
            .collect();
        names.push(EXTENSIONS.to_owned());
        for (name, usage, names) in [
            // Signs service account tokens.
            ("accounts", Usage::Server, &[][..]),
            ("node", Usage::Server, &names),
            ("kube-apiserver", Usage::Client, &[]),
            ("kubelet-client", Usage::Client, &[]),
            ("front-proxy", Usage::Client, &[]),
        ] {
            files.issue(name, usage, names).expect("a certificate");
        }
        let path = |name: &str| dir.path().join(name).display().to_string();
        let (client, peer, api_port) = (ports::free(), ports::free(), ports::free());
        let etcd_args = [
            format!("--data-dir={}", path("etcd")),
            format!("--listen-client-urls=http://127.0.0.1:{client}"),
            format!("--advertise-client-urls=http://127.0.0.1:{client}"),
            format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-cluster=default=http://127.0.0.1:{peer}"),
            "--unsafe-no-fsync".to_owned(),
        ];
        let service =
            |name: &str, args| Process::service(name, &programs.join(name), args, dir.path());
        let etcd = service("etcd", &etcd_args[..]);
        let egress = egress.unwrap_or_else(|| Egress::Socket(path("egress.sock")));
        let egress = egress.configuration(mode, &files);
        std::fs::write(path("egress.json"), egress.to_string()).expect("a file");
        let users = format!(
            "{ADMIN_TOKEN},admin,1,system:masters\n{SERVER_TOKEN},konnectivity-server,2\n{AGENT_TOKEN},lease-reader,3\n"
        );
        std::fs::write(path("tokens.csv"), users).expect("a file");
        let key = files.key("accounts").display().to_string();
        let api_args = vec![
            format!("--etcd-servers=http://127.0.0.1:{client}"),
            "--bind-address=0.0.0.0".to_owned(),
            format!("--advertise-address={}", cables[0][0]),
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--secure-port={api_port}"),
            flag("tls-cert-file", files.cert("server")),
            flag("tls-private-key-file", files.key("server")),
            format!("--cert-dir={}", path("certs")),
            format!("--token-auth-file={}", path("tokens.csv")),
            "--authorization-mode=RBAC".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
            format!("--service-account-issuer={ISSUER}"),
            flag("service-account-key-file", files.cert("accounts")),
            format!("--service-account-signing-key-file={key}"),
            format!("--api-audiences={ISSUER},{AUDIENCE}"),
            format!("--egress-selector-config-file={}", path("egress.json")),
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            flag("kubelet-certificate-authority", files.ca_file()),
            flag("kubelet-client-certificate", files.cert("kubelet-client")),
            flag("kubelet-client-key", files.key("kubelet-client")),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
            "--enable-aggregator-routing=true".to_owned(),
            flag("proxy-client-cert-file", files.cert("front-proxy")),
            flag("proxy-client-key-file", files.key("front-proxy")),
            flag("requestheader-client-ca-file", files.ca_file()),
            "--enable-bootstrap-token-auth=true".to_owned(),
            "--requestheader-allowed-names=front-proxy".to_owned(),
            "--requestheader-username-headers=X-Remote-User".to_owned(),
            "--requestheader-group-headers=X-Remote-Group".to_owned(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        ];
        let api = service("kube-apiserver", &api_args[..]);
        let mut cluster = Self {
            dir,
            files,
            cables,
            programs,
            api_port,
            mode,
            _etcd: etcd,
            api,
            api_args,
        };
        for (name, token) in [
            ("admin", ADMIN_TOKEN),
            ("server", SERVER_TOKEN),
            ("agent", AGENT_TOKEN),
        ] {
            cluster.write_kubeconfig(name, &format!("127.0.0.1:{api_port}"), token);
        }
        // On the first node the API server has another address.
        cluster.write_kubeconfig("node", &cluster.api_address(), AGENT_TOKEN);
        cluster.until_ready();
        cluster.prepare();
        cluster
    }

    fn until_ready(&mut self) {
        until("an API server", secs(120), || {
            assert!(self.api.is_running(), "the API server has ended");
            self.try_kubectl(&["get", "--raw", "/readyz"], None).ok()
        });
    }

    /// Stops the API server gracefully, and starts it again.
    pub(crate) fn restart_api_server(&mut self) {
        self.stop_api_server();
        self.start_api_server();
    }

    pub(crate) fn stop_api_server(&mut self) {
        self.api.signal(Signal::TERM);
        self.api.wait(secs(60));
    }

    /// Starts the API server again, and waits until it is ready.
    pub(crate) fn start_api_server(&mut self) {
        let program = self.program("kube-apiserver");
        self.api = Process::service("kube-apiserver", &program, &self.api_args, self.dir.path());
        self.until_ready();
    }

    /// Another API server on the same etcd, at this port. It connects into the cluster as the first one does, or directly.
    pub(crate) fn another_api_server(&self, port: u16, by_egress: bool) -> Process {
        let egress = by_egress.then(|| self.path("egress.json"));
        self.api_server_at(port, egress)
    }

    /// As [`Self::another_api_server`], over a socket of its own.
    pub(crate) fn api_server_over(&self, port: u16, socket: &Path) -> Process {
        let egress = Egress::Socket(socket.display().to_string());
        let text = egress.configuration(self.mode, &self.files).to_string();
        let file = self.path(&format!("egress-{port}.json"));
        std::fs::write(&file, text).expect("a file");
        self.api_server_at(port, Some(file))
    }

    fn api_server_at(&self, port: u16, egress: Option<PathBuf>) -> Process {
        let args = self.api_args.iter();
        let args = args.filter_map(|arg| match arg.split_once('=') {
            Some(("--secure-port", _)) => Some(format!("--secure-port={port}")),
            Some(("--egress-selector-config-file", _)) => None,
            _ => Some(arg.clone()),
        });
        let egress = egress.map(|file| flag("egress-selector-config-file", file));
        let args: Vec<String> = args.chain(egress).collect();
        let (name, program) = (
            format!("kube-apiserver-{port}"),
            self.program("kube-apiserver"),
        );
        Process::service(&name, &program, &args, self.dir.path())
    }

    /// A kubeconfig of the administrator for the API server at this port.
    pub(crate) fn administrator_at(&self, port: u16) -> PathBuf {
        let user = format!("admin-{port}");
        self.write_kubeconfig(&user, &format!("127.0.0.1:{port}"), ADMIN_TOKEN)
    }

    /// Address and port of the API server as the first node sees it.
    pub(crate) fn api_address(&self) -> String {
        format!("{}:{}", self.cables[0][0], self.api_port)
    }

    /// A file with the administrator's token.
    pub(crate) fn administrators_token(&self) -> PathBuf {
        self.token_file("admin.token", ADMIN_TOKEN)
    }

    /// A kubeconfig of the administrator for the API server as the first node sees it, by this proxy.
    pub(crate) fn administrator_by(&self, name: &str, proxy: &str) -> PathBuf {
        let seen = std::fs::read_to_string(self.kubeconfig("node")).expect("it is written");
        let mut access: Value = serde_json::from_str(&seen).expect("JSON");
        access["users"][0]["user"]["token"] = json!(ADMIN_TOKEN);
        access["clusters"][0]["cluster"]["proxy-url"] = json!(proxy);
        self.token_file(&format!("{name}.kubeconfig"), &access.to_string())
    }

    /// Writes the kubeconfig of a user for the API server at `address`, which includes the port.
    fn write_kubeconfig(&self, user: &str, address: &str, token: &str) -> PathBuf {
        let access = self.access_at(address, token).to_string();
        self.token_file(&format!("{user}.kubeconfig"), &access)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// Folder with a file for each running container. The file has the pod's name and contains the process id.
    pub(crate) fn containers(&self) -> PathBuf {
        self.path("containers")
    }

    /// Folder with all renderings of the chart.
    pub(crate) fn renderings(&self) -> PathBuf {
        self.program("rendered")
    }

    /// Address of node `number`, counted from 0.
    pub(crate) fn node_address(number: usize) -> Ipv4Addr {
        let last = u8::try_from(number + 1).expect("few nodes");
        Ipv4Addr::new(10, 77, 0, last)
    }

    /// Kubeconfig of a user: `admin`, `server` or `agent`. `node` is for the agent on the first node.
    pub(crate) fn kubeconfig(&self, user: &str) -> PathBuf {
        self.path(&format!("{user}.kubeconfig"))
    }

    /// A kubeconfig for the API server at `address`, which includes the port.
    pub(crate) fn access_at(&self, address: &str, token: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://{address}"),
                "certificate-authority-data": self.authority(),
            }}],
            "users": [{"name": "test", "user": {"token": token}}],
        })
    }

    /// Runs kubectl as the administrator.
    pub(crate) fn kubectl(&self, args: &[&str], input: Option<&Value>) -> String {
        self.try_kubectl(args, input)
            .unwrap_or_else(|error| panic!("kubectl {args:?}: {error}"))
    }

    /// As [`Cluster::kubectl`], without a panic.
    ///
    /// # Errors
    /// The error output of kubectl.
    pub(crate) fn try_kubectl(
        &self,
        args: &[&str],
        input: Option<&Value>,
    ) -> Result<String, String> {
        let mut child = self
            .kubectl_command(&["--request-timeout=20s"])
            .args(args)
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

    /// Creates an object.
    pub(crate) fn create(&self, object: &Value) {
        self.kubectl(&["create", "-f", "-"], Some(object));
    }

    /// Changes the status of an object, as its kubelet or controller would. `more` are further words for kubectl.
    pub(crate) fn patch_status(&self, object: [&str; 3], status: &Value, more: &[&str]) {
        let [namespace, kind, name] = object;
        let patch = format!("--patch={}", json!({"status": status}));
        let words = ["patch", kind, name, "-n", namespace, "--subresource=status"];
        self.kubectl(&[&words[..], &[&patch], more].concat(), None);
    }

    /// Deletes a pod at once.
    pub(crate) fn delete_pod(&self, namespace: &str, name: &str) {
        let words = ["delete", "pod", name, "-n", namespace, "--force"];
        self.kubectl(&[&words[..], &["--grace-period=0"]].concat(), None);
    }

    /// A kubectl command as the administrator.
    pub(crate) fn kubectl_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("kubectl"));
        command
            .arg("--kubeconfig")
            .arg(self.kubeconfig("admin"))
            .args(args)
            .env("HOME", self.dir.path());
        command
    }

    /// A token of an account, issued by the API server.
    pub(crate) fn token(&self, namespace: &str, account: &str, more: &[&str]) -> String {
        let own = ["create", "token", account, "-n", namespace];
        self.kubectl(&[&own[..], &["--duration=600s"], more].concat(), None)
    }

    /// Writes a token to a file.
    pub(crate) fn token_file(&self, name: &str, token: &str) -> PathBuf {
        let file = self.path(name);
        std::fs::write(&file, token).expect("a file");
        file
    }
}
