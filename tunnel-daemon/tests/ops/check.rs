//! `adit check`: what it finds in certificates, flags, servers and the host.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use adit_testkit::certificates::{ThrowawayFiles, Usage};
use adit_testkit::process::Process;
use serde_json::Value;
use socket2::{Domain, Socket, Type};

use crate::support::{Demo, adit, text};

struct Files(ThrowawayFiles);

impl Files {
    fn create() -> Self {
        let names = ["127.0.0.1".to_owned()];
        Self(ThrowawayFiles::create(&names).expect("certificates"))
    }

    fn path(&self, name: &str) -> String {
        self.0.dir().join(name).display().to_string()
    }

    /// Checks a server with this certificate and key. Returns the JSON report and the exit code.
    fn check(&self, cert: &Path, key: &Path) -> (Value, Option<i32>) {
        self.check_with(cert, key, &[])
    }

    /// As [`Files::check`], with additional flags.
    fn check_with(&self, cert: &Path, key: &Path, flags: &[String]) -> (Value, Option<i32>) {
        let output = Command::new(env!("CARGO_BIN_EXE_adit"))
            .args([
                "check",
                "--json",
                "server",
                "--agent-port=0",
                "--health-port=off",
            ])
            .arg("--admin-port=off")
            .arg(format!("--frontend=grpc=unix:{}", self.path("kas.sock")))
            .arg("--cluster-cert")
            .arg(cert)
            .arg("--cluster-key")
            .arg(key)
            .arg("--cluster-ca-cert")
            .arg(self.0.ca_file())
            .args(flags)
            .output()
            .expect("the binary runs");
        let json = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
        (json, output.status.code())
    }
}

/// Lines with this name, as (verdict, text).
fn lines_of(json: &Value, name: &str) -> Vec<(String, String)> {
    let lines = json["lines"].as_array().expect("lines");
    lines
        .iter()
        .filter(|line| line["name"] == name)
        .map(|line| {
            let word = |field: &str| line[field].as_str().expect("text").to_owned();
            (word("verdict"), word("text"))
        })
        .collect()
}

/// Asserts that a line of this name has this verdict, and contains `part`.
#[track_caller]
pub(crate) fn says(json: &Value, name: &str, verdict: &str, part: &str) {
    let lines = lines_of(json, name);
    let is_it = |(found, text): &(String, String)| found == verdict && text.contains(part);
    assert!(lines.iter().any(is_it), "{name}: {json}");
}

/// A self-signed certificate, valid from `days.0` to `days.1` relative to now.
#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn dated(files: &Files, name: &str, days: (i64, i64)) -> (PathBuf, PathBuf) {
    let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("names");
    let now = std::time::SystemTime::now();
    let at = |days: i64| {
        let span = std::time::Duration::from_secs(days.unsigned_abs() * 86_400 + 3600);
        if days < 0 { now - span } else { now + span }
    };
    (params.not_before, params.not_after) = (at(days.0).into(), at(days.1).into());
    written(files, name, &params)
}

/// Signs a certificate with its own key, and returns the paths of both.
fn written(files: &Files, name: &str, params: &rcgen::CertificateParams) -> (PathBuf, PathBuf) {
    let key = rcgen::KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate");
    let path = |ending: &str| PathBuf::from(files.path(&format!("{name}.{ending}")));
    let (cert_path, key_path) = (path("crt"), path("key"));
    fs::write(&cert_path, certificate.pem()).expect("a file");
    fs::write(&key_path, key.serialize_pem()).expect("a file");
    (cert_path, key_path)
}

/// Limit (operations): Remaining days of a certificate below which `adit check` reports `degraded`
#[test]
fn check_reports_invalid_and_expiring_certificates() {
    let files = Files::create();
    let (cert, key) = (files.0.cert("server"), files.0.key("server"));
    let (json, _) = files.check(&cert, &key);
    says(&json, "agent-listener", "ok", "certificate, key and CA fit");
    // Throw-away certificates are valid for one day only.
    says(&json, "agent-listener", "degraded", "expires in");
    says(&json, "frontend", "ok", "can be made");

    let valid = "is valid for 400 days, for ip:127.0.0.1";
    for (name, days, verdict, part) in [
        ("fresh", (-1, 400), "ok", valid),
        ("late", (-10, -2), "missing", "has expired, 2 days ago"),
        ("early", (3, 9), "missing", "is not valid yet"),
    ] {
        let (cert, key) = dated(&files, name, days);
        let (json, code) = files.check(&cert, &key);
        says(&json, "agent-listener", verdict, part);
        if verdict == "ok" {
            assert_eq!(code, Some(1), "the CA is about to expire: {json}");
        } else {
            assert_eq!((code, &json["result"]), (Some(2), &"missing".into()));
        }
    }

    let (json, code) = files.check(&files.0.cert("server"), &files.0.key("agent"));
    let mismatch = lines_of(&json, "agent-listener").remove(0);
    assert_eq!((mismatch.0.as_str(), code), ("missing", Some(2)), "{json}");
    assert!(mismatch.1.contains("agent.key"), "{json}");

    let folder = files.path("folder.crt");
    fs::create_dir(&folder).unwrap();
    let absent = "/nonexistent/tls.crt";
    for (cert, name, part) in [
        (&*folder, "agent-listener", "cannot read"),
        (
            absent,
            "configuration",
            "/nonexistent/tls.crt: no such file",
        ),
    ] {
        let (json, code) = files.check(Path::new(cert), &files.0.key("server"));
        says(&json, name, "missing", part);
        assert_eq!(code, Some(2));
    }
}

/// A self-signed CA certificate as `openssl req -x509` makes it. Returns the paths of certificate and key.
fn ca_as_a_server(files: &Files) -> (PathBuf, PathBuf) {
    let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("names");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    written(files, "ca-server", &params)
}

#[test]
fn a_ca_as_server_certificate_is_reported_by_check_and_at_startup() {
    let files = Files::create();
    let (cert, key) = ca_as_a_server(&files);
    let (json, code) = files.check(&cert, &key);
    let text = "says that it is a CA (basicConstraints CA:TRUE): Adit refuses it";
    says(&json, "agent-listener", "missing", text);
    assert_eq!(code, Some(2), "{json}");

    let mut server = Command::new(env!("CARGO_BIN_EXE_adit"));
    server
        .args([
            "server",
            "--agent-port=0",
            "--health-port=off",
            "--admin-port=off",
            "--insecure-allow-unauthenticated-agents",
        ])
        .arg(format!("--frontend=grpc=unix:{}", files.path("kas.sock")))
        .arg("--cluster-cert")
        .arg(&cert)
        .arg("--cluster-key")
        .arg(&key)
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let mut server = server.spawn().expect("the binary runs");
    let mut lines = BufReader::new(server.stderr.take().expect("piped"));
    let mut said = String::new();
    // The server starts anyway: agents in Go accept such a certificate.
    while !said.contains("server is up") {
        let read = lines.read_line(&mut said).expect("a line");
        assert_ne!(read, 0, "ended:\n{said}");
    }
    server.kill().expect("it runs");
    server.wait().expect("it has ended");
    let warning = said.lines().find(|line| line.contains(text));
    let is_warning = warning.is_some_and(|line| line.contains("level=warn"));
    assert!(is_warning, "{said}");
    assert!(said.contains("ca-server.crt"), "{said}");
}

#[test]
fn check_reports_problems_of_redirect_and_accounting() {
    let files = Files::create();
    let (cert, key) = (files.0.cert("server"), files.0.key("server"));
    let (json, _) = files.check(&cert, &key);
    for name in ["redirect", "redirect-cgroup", "account", "transparent"] {
        assert!(lines_of(&json, name).is_empty(), "nobody asked: {json}");
    }
    let rules = files.path("rules");
    fs::write(&rules, "redirect 192.0.2.0/24\n").expect("a file");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = listener.local_addr().expect("an address");
    let flags = [
        "--redirect=10.0.0.0/8".to_owned(),
        "--redirect-cgroup=/nonexistent/cgroup".to_owned(),
        format!("--redirect-file={rules}"),
        "--redirect-netns=/nonexistent/netns".to_owned(),
        "--account=auto".to_owned(),
        format!("--transparent-bind-address={taken}"),
    ];
    let (json, code) = files.check_with(&cert, &key, &flags);
    for (name, verdict, part) in [
        ("redirect-cgroup", "missing", "/nonexistent/cgroup"),
        ("redirect-rules", "ok", "2 of flags and file"),
        ("redirect-netns", "degraded", "/nonexistent/netns"),
        ("transparent", "missing", "cannot listen"),
    ] {
        says(&json, name, verdict, part);
    }
    // Their verdict depends on the host.
    for name in ["redirect", "account"] {
        assert_eq!(lines_of(&json, name).len(), 1, "{name}: {json}");
    }
    assert_eq!(code, Some(2));
    fs::write(&rules, "redirect nothing\n").expect("a file");
    let (json, _) = files.check_with(&cert, &key, &flags);
    says(&json, "redirect-rules", "missing", "line 1");
}

#[test]
fn check_connects_as_an_agent_would_and_registers_nothing() {
    let demo = Demo::start();
    let status = |socket: &str| {
        let status = adit(&["status", "--json", "--admin-socket", &demo.socket(socket)]);
        serde_json::from_slice::<Value>(&status.stdout).expect("JSON")
    };
    let of_north = status("north-admin.sock");
    let server = of_north["links"][0]["address"]
        .as_str()
        .expect("an address");
    let file = |name: &str| demo.dir.join(name).display().to_string();
    let host = format!("--proxy-server-host={server}");
    let check = |ca: &str, cert: &str, key: &str| {
        let output = adit(&[
            "check",
            "--json",
            "--connect",
            "agent",
            &host,
            "--health-server-port=off",
            "--admin-server-port=off",
            "--ca-cert",
            ca,
            "--agent-cert",
            cert,
            "--agent-key",
            key,
        ]);
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
    };
    let json = check(&file("ca.crt"), &file("north.crt"), &file("north.key"));
    says(&json, "server", "ok", "both ends accept each other");

    let strangers = Files::create();
    strangers
        .0
        .issue("stranger", Usage::Client, &[])
        .expect("a certificate");
    let [cert, key] = ["stranger.crt", "stranger.key"].map(|name| strangers.path(name));
    let json = check(&file("ca.crt"), &cert, &key);
    says(&json, "server", "missing", "refused");
    let ca = strangers.0.ca_file().display().to_string();
    let json = check(&ca, &cert, &key);
    says(&json, "server", "missing", server);

    let after = status("admin.sock");
    assert_eq!(after["links_total"], 2, "{after}");
}

/// Both have a server that is not there, which concerns other lines.
#[test]
fn proxies_on_the_way_to_targets_are_named_and_tried() {
    let files = Files::create();
    let [ca, cert, key] = [
        files.0.ca_file(),
        files.0.cert("agent"),
        files.0.key("agent"),
    ]
    .map(|path| path.display().to_string());
    let check = |connect: bool, command: &str, url: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_adit"))
            .args(["check", "--json"])
            .args(connect.then_some("--connect"))
            .args(command.split_whitespace())
            .env("HTTPS_PROXY", url)
            .env("ADIT_TARGET_PROXY", url)
            .env("NO_PROXY", "127.0.0.1")
            .output()
            .expect("the binary runs");
        let told = text(&output.stdout);
        assert!(!told.contains("s3cret"), "{told}");
        serde_json::from_str::<Value>(&told).expect("JSON")
    };
    let agent = format!(
        "agent --proxy-server-host=127.0.0.1:1 --health-server-port=off --admin-server-port=off \
         --ca-cert={ca} --agent-cert={cert} --agent-key={key}"
    );
    let sidecar = format!(
        "konnectivity-socks5-proxy run --disable-resolver --connect-directly-to-cloud-apis --konnectivity-hostname=127.0.0.1 --konnectivity-port=1 \
         --ca-cert-path={ca} --tls-cert-path={cert} --tls-key-path={key}"
    );
    for (command, what) in [
        (&agent, "targets are reached"),
        (&sidecar, "cloud APIs are reached"),
    ] {
        let proxy = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        proxy.bind(&any.into()).expect("a free port");
        let at = proxy.local_addr().expect("bound").as_socket();
        let at = at.expect("an address");
        let url = format!("http://user:s3cret@{at}");
        let text = format!("{what} through the proxy {at}");
        for (connect, verdict, more) in [
            (false, "info", "; --connect tries it"),
            (true, "missing", ": dial"),
        ] {
            let json = check(connect, command, &url);
            says(&json, "target-proxy", verdict, &format!("{text}{more}"));
        }
        proxy.listen(8).expect("it listens");
        let json = check(true, command, &url);
        says(&json, "target-proxy", "ok", "which takes connections");
    }
    let json = check(false, &sidecar, "https://user:s3cret@proxy.invalid");
    says(&json, "target-proxy", "missing", "write http://");
}

#[test]
fn check_of_the_host_prints_verdicts_and_exits_with_the_worst() {
    let output = adit(&["check"]);
    let lines = text(&output.stdout);
    let verdict = |name: &str| {
        let mut words = lines.lines().map(str::split_whitespace);
        words.find_map(|mut words| {
            let verdict = words.next()?;
            (words.next() == Some(name)).then_some(verdict)
        })
    };
    for name in ["seccomp", "descriptors", "memory", "clock"] {
        let judged = verdict(name);
        assert!(judged.is_some_and(|it| it != "info"), "{name} in\n{lines}");
    }
    // No flag requires these features, so an ordinary host counts as well.
    for name in [
        "kernel",
        "btf",
        "cgroup2",
        "capabilities",
        "io_uring",
        "splice",
        "kernel-tls",
        "ebpf",
    ] {
        assert_eq!(verdict(name), Some("info"), "{name} in\n{lines}");
    }
    assert!(!lines.contains("sockmap"), "{lines}");
    let worst = if lines.contains("missing ") {
        2
    } else if lines.contains("degraded ") {
        1
    } else {
        0
    };
    assert_eq!(output.status.code(), Some(worst), "{lines}");
    let refused = adit(&["check", "demo"]);
    assert_eq!(refused.status.code(), Some(2), "1 is a host that will do");
    assert!(text(&refused.stderr).contains("write server, agent or proxy"));
    let warned = adit(&["check", "server", "--nonsense"]);
    assert_eq!(warned.status.code(), Some(2));
    let told = text(&warned.stdout);
    assert!(told.contains("--nonsense"), "{told}");
}

/// A server that serves peers, and a command line that asks it.
#[test]
fn check_links_to_peers_and_names_the_hop_that_fails() {
    let [ours, strange] = ["peers", "strangers"].map(|_| {
        let pki = tempfile::tempdir().expect("a folder");
        let dir = pki.path().display().to_string();
        for words in [&["init"][..], &["server", "127.0.0.1"]] {
            let made = adit(&[&["pki"], words, &["--dir", &dir]].concat());
            assert!(made.status.success(), "{}", text(&made.stderr));
        }
        pki
    });
    let peers = |pki: &tempfile::TempDir| {
        [
            ("cert", "server-peer.crt"),
            ("key", "server-peer.key"),
            ("ca-cert", "peers-ca.crt"),
        ]
        .map(|(flag, name)| format!("--peer-{flag}={}", pki.path().join(name).display()))
    };
    let (of_ours, of_strange) = (peers(&ours), peers(&strange));
    let files = Files::create();
    let mut line = adit_testkit::args::server(&files.0, "127.0.0.1", "0");
    line.extend(of_ours.clone());
    line.push(format!("--frontend=grpc=unix:{}", files.path("own.sock")));
    line.extend(["--peer-bind=127.0.0.1:0", "--server-id=holder"].map(str::to_owned));
    let holder = Process::start("holder", &line, files.0.dir());
    let (address, agents) = (holder.listener("peers"), holder.listener("agents"));
    let closed = adit_testkit::ports::free();
    let check = |files_of_peer: &[String], flags: &[String]| {
        let output = Command::new(env!("CARGO_BIN_EXE_adit"))
            .args(["check", "--json", "--connect", "server", "--no-agents"])
            .args(["--health-port=off", "--admin-port=off"])
            .arg(format!("--frontend=grpc=unix:{}", files.path("kas.sock")))
            .args(files_of_peer)
            .args(flags)
            .output();
        let output = output.expect("the binary runs");
        serde_json::from_slice::<Value>(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)))
    };
    let peer = |address: &dyn std::fmt::Display| format!("--peer={address}");
    let json = check(&of_ours, &[peer(&address)]);
    says(
        &json,
        "peer",
        "ok",
        "is the server holder, and takes this one for a peer",
    );
    let json = check(&of_ours, &[peer(&address), "--server-id=holder".to_owned()]);
    says(
        &json,
        "peer",
        "ok",
        "is this server, or one with its --server-id",
    );
    let json = check(&of_ours, &[peer(&address), "--peer-group=other".to_owned()]);
    says(&json, "peer", "missing", "--peer-group must be the same");
    let json = check(&of_ours, &[peer(&agents)]);
    says(&json, "peer", "missing", "TLS handshake failed");
    let json = check(&of_ours, &[peer(&format!("127.0.0.1:{closed}"))]);
    says(&json, "peer", "missing", "refused");
    let json = check(&of_strange, &[peer(&address)]);
    says(
        &json,
        "peer",
        "missing",
        "is signed by no CA that is trusted here",
    );
    // It trusts the server's certificate, and is not trusted itself.
    let [cert, key, _] = of_strange;
    let json = check(&[cert, key, of_ours[2].clone()], &[peer(&address)]);
    says(&json, "peer", "missing", "refuses our certificate");
}
