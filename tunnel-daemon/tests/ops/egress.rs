//! `adit check --egress-config`: files of kube-apiserver beside a running server, and beside the flags of one.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};

use adit_testkit::certificates::{ThrowawayFiles, Usage};
use adit_testkit::process::KillOnDrop;
use serde_json::{Value, json};

use crate::check::says;
use crate::support::{adit, text};

/// Certificates of a server for 127.0.0.1 and of a client, and what is checked with them.
struct Installation(ThrowawayFiles);

impl Installation {
    fn new() -> Self {
        let files = ThrowawayFiles::create(&["127.0.0.1".to_owned()]).expect("certificates");
        Self(files)
    }

    fn path(&self, name: &str) -> String {
        self.0.dir().join(name).display().to_string()
    }

    /// Flags of a server with two unix sockets, and with HTTP CONNECT at a TCP port.
    fn server(&self, port: u16) -> Vec<String> {
        let mut flags = vec![
            "server".to_owned(),
            "--agent-port=0".to_owned(),
            "--health-port=off".to_owned(),
            "--admin-port=off".to_owned(),
            "--admin-socket=off".to_owned(),
            format!("--frontend=grpc=unix:{}", self.path("grpc.sock")),
            format!("--frontend=http-connect=unix:{}", self.path("connect.sock")),
            format!("--frontend=http-connect=tcp:127.0.0.1:{port}"),
        ];
        for flag in ["cluster", "server"] {
            flags.push(format!("--{flag}-cert={}", self.path("server.crt")));
            flags.push(format!("--{flag}-key={}", self.path("server.key")));
            flags.push(format!("--{flag}-ca-cert={}", self.path("ca.crt")));
        }
        flags
    }

    /// Checks a file with one selection of this connection, before these arguments. Returns report and exit code.
    fn check(&self, connection: &Value, args: &[String]) -> (Value, Option<i32>) {
        let file = json!({
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [{"name": "cluster", "connection": connection}],
        });
        let path = self.path("egress.yaml");
        fs::write(&path, file.to_string()).expect("a file");
        checked(&path, args)
    }

    /// HTTPConnect to `url`, with the certificate and key `client`, and the CA in `ca`.
    fn tcp(&self, url: &str, ca: &Path, client: &str, server_name: &str) -> Value {
        let tls = json!({
            "caBundle": ca.display().to_string(),
            "clientCert": self.path(&format!("{client}.crt")),
            "clientKey": self.path(&format!("{client}.key")),
            "tlsServerName": server_name,
        });
        let transport = json!({"tcp": {"url": url, "tlsConfig": tls}});
        json!({"proxyProtocol": "HTTPConnect", "transport": transport})
    }

    fn unix(&self, protocol: &str, socket: &str) -> Value {
        json!({"proxyProtocol": protocol, "transport": {"uds": {"udsName": self.path(socket)}}})
    }
}

fn checked(path: &str, args: &[String]) -> (Value, Option<i32>) {
    let args = args.iter().map(String::as_str);
    let args: Vec<&str> = ["check", "--json", "--egress-config", path]
        .into_iter()
        .chain(args)
        .collect();
    let output = adit(&args);
    let json = serde_json::from_slice(&output.stdout);
    let json = json.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
    (json, output.status.code())
}

/// A running server.
struct Server {
    _child: KillOnDrop,
    /// Not read any further, but kept open while the server writes.
    _log: BufReader<ChildStderr>,
    port: u16,
}

impl Server {
    fn start(of: &Installation) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        command.args(of.server(0)).stdin(Stdio::null());
        let mut child = KillOnDrop(
            command
                .stderr(Stdio::piped())
                .spawn()
                .expect("the server starts"),
        );
        let mut log = BufReader::new(child.0.stderr.take().expect("piped"));
        let mut said = String::new();
        while !said.contains("server is up") {
            let read = log.read_line(&mut said).expect("a line");
            assert_ne!(read, 0, "ended:\n{said}");
        }
        let port = said.split("http-connect=tcp:127.0.0.1:").nth(1);
        let port = port.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
        let port = port.and_then(|port| port.parse().ok());
        Self {
            _child: child,
            _log: log,
            port: port.unwrap_or_else(|| panic!("no port in\n{said}")),
        }
    }
}

#[test]
fn egress_config_is_tried_at_the_sockets_of_a_running_server() {
    let installation = Installation::new();
    let _server = Server::start(&installation);
    for (protocol, socket, verdict, part) in [
        (
            "GRPC",
            "grpc.sock",
            "ok",
            "Konnectivity server that speaks gRPC",
        ),
        (
            "HTTPConnect",
            "connect.sock",
            "ok",
            "Konnectivity server that speaks HTTP CONNECT",
        ),
        (
            "GRPC",
            "connect.sock",
            "missing",
            "speaks HTTP/1.1, and no gRPC",
        ),
        (
            "HTTPConnect",
            "grpc.sock",
            "missing",
            "speaks HTTP/2 (gRPC), and no HTTP CONNECT",
        ),
        ("GRPC", "other.sock", "missing", "there is no such socket"),
        (
            "GRPC",
            "server.crt",
            "missing",
            "no process listens at this path",
        ),
    ] {
        let (json, code) = installation.check(&installation.unix(protocol, socket), &[]);
        says(&json, "egress", verdict, part);
        // The host itself may lack something, but a wrong file always shows.
        assert!(verdict == "ok" || code == Some(2), "{json}");
    }
}

#[test]
fn egress_config_is_tried_at_the_tls_port_of_a_running_server() {
    let installation = Installation::new();
    let server = Server::start(&installation);
    let ca = installation.0.ca_file();
    let strangers = Installation::new();
    let stranger = installation.0.dir().join("stranger");
    for ending in ["crt", "key"] {
        let from = strangers.0.dir().join(format!("client.{ending}"));
        fs::copy(from, stranger.with_extension(ending)).expect("a copy");
    }
    let url = |host: &str| format!("https://{host}:{}", server.port);
    let says_of = |connection: Value, verdict: &str, part: &str| {
        let (json, _) = installation.check(&connection, &[]);
        says(&json, "egress", verdict, part);
    };
    let own = url("127.0.0.1");
    let answers = "answers as a Konnectivity server that speaks HTTP CONNECT";
    says_of(installation.tcp(&own, &ca, "client", ""), "ok", answers);
    let named = installation.tcp(&url("localhost"), &ca, "client", "");
    says_of(named, "missing", "is not for localhost");
    let named = installation.tcp(&url("localhost"), &ca, "client", "127.0.0.1");
    says_of(named, "ok", answers);
    let foreign = installation.tcp(&own, &strangers.0.ca_file(), "client", "");
    says_of(
        foreign,
        "missing",
        "does not match the CA of that name here",
    );
    let refused = installation.tcp(&own, &ca, "stranger", "");
    says_of(
        refused,
        "missing",
        "closed the connection behind the handshake: ",
    );
    let mixed = installation.tcp(&own, &ca, "client", "");
    let mixed = mixed.to_string().replace("client.key", "stranger.key");
    let mixed = serde_json::from_str(&mixed).expect("JSON");
    says_of(
        mixed,
        "missing",
        "not tried: its certificates cannot be used",
    );
}

#[test]
fn egress_config_is_compared_with_the_flags_of_a_server() {
    let installation = Installation::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let flags = installation.server(port);
    let ca = installation.0.ca_file();
    installation
        .0
        .issue("agent-only", Usage::Server, &[])
        .expect("a certificate");
    let tcp = |port: u16, client: &str, name: &str| {
        installation.tcp(&format!("https://127.0.0.1:{port}"), &ca, client, name)
    };
    for (connection, verdict, part) in [
        (
            installation.unix("GRPC", "grpc.sock"),
            "ok",
            "speaks grpc, as GRPC needs",
        ),
        (
            installation.unix("GRPC", "connect.sock"),
            "missing",
            "speaks http-connect, and proxyProtocol is GRPC",
        ),
        (
            installation.unix("GRPC", "other.sock"),
            "degraded",
            "no frontend of this command line",
        ),
        (
            tcp(port, "client", ""),
            "ok",
            "accept each other's certificates",
        ),
        (
            tcp(port, "client", "konnectivity"),
            "missing",
            "kube-apiserver's side: ",
        ),
        (
            tcp(port, "agent-only", ""),
            "missing",
            "the server's side: ",
        ),
        (
            tcp(1, "client", ""),
            "degraded",
            "no frontend of this command line",
        ),
    ] {
        let (json, _) = installation.check(&connection, &flags);
        says(&json, "egress", verdict, part);
        // Only --connect calls a server behind which flags stand.
        let lines = json["lines"].as_array().expect("lines");
        let tried = |line: &&Value| {
            line["text"]
                .as_str()
                .is_some_and(|text| text.contains("no such socket"))
        };
        assert_eq!(lines.iter().filter(tried).count(), 0, "{json}");
    }
    let connection = installation.unix("GRPC", "grpc.sock");
    let args: Vec<String> = std::iter::once("--connect".to_owned())
        .chain(flags)
        .collect();
    let (json, _) = installation.check(&connection, &args);
    says(&json, "egress", "missing", "there is no such socket");
}

#[test]
fn egress_config_with_flaws_says_what_kube_apiserver_does() {
    let installation = Installation::new();
    let (json, code) = installation.check(&json!({"proxyProtocol": "httpConnect"}), &[]);
    says(
        &json,
        "egress",
        "missing",
        "unknown: kube-apiserver does not start",
    );
    assert_eq!(code, Some(2), "{json}");
    let (json, _) = checked("/nonexistent/egress.yaml", &[]);
    says(&json, "egress", "missing", "/nonexistent/egress.yaml");
    let (json, _) = installation.check(&json!({"proxyProtocol": "Direct"}), &[]);
    says(&json, "egress", "degraded", "without a tunnel");
}
