//! Invalid command lines and files, given to the real binary: both programs, with native flags and with upstream's. The
//! program exits with a code and one line on standard error. That line names the mistake and the remedy.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use super::least_privilege::deadly;
use super::processes::{compat_agent, compat_server, free_ports};
use crate::support::confined::{self, NOBODY, Rights};
use crate::support::process::Process;
use crate::support::world::World;

/// Program and flag set of a command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Line {
    Server,
    Agent,
    CompatServer,
    CompatAgent,
}

use Line::{Agent, CompatAgent, CompatServer, Server};

/// An invalid command line: a valid one without the flags that start with `without`, plus the flags `with`.
struct Wrong {
    line: Line,
    without: &'static [&'static str],
    with: &'static [&'static str],
    code: i32,
    /// The error line contains each of these.
    says: &'static [&'static str],
}

const fn wrong(
    line: Line,
    without: &'static [&'static str],
    with: &'static [&'static str],
    code: i32,
    says: &'static [&'static str],
) -> Wrong {
    Wrong {
        line,
        without,
        with,
        code,
        says,
    }
}

/// `{certs}` is the folder of the certificates, `{taken}` a port in use.
#[rustfmt::skip] // A table: one row a mistake, whatever its width.
const FILES_AND_PORTS: &[Wrong] = &[
    wrong(Server, &["--cluster-cert="], &["--cluster-cert=/nowhere/tls.crt"], 1, &["--cluster-cert /nowhere/tls.crt", "no such file"]),
    wrong(Server, &["--cluster-cert="], &["--cluster-cert={certs}/broken.pem"], 1, &["broken.pem", "give a PEM file"]),
    wrong(Server, &["--cluster-key="], &["--cluster-key={certs}/broken.pem"], 1, &["broken.pem", "give a PEM file"]),
    wrong(Server, &["--cluster-key="], &["--cluster-key={certs}/agent.key"], 1, &["agent.key", "server.crt", "give both files of one pair"]),
    wrong(Server, &["--cluster-ca-cert="], &["--cluster-ca-cert={certs}/broken.pem"], 1, &["broken.pem", "give a PEM file"]),
    wrong(Server, &[], &["--enable-lease-controller", "--kubeconfig=/nowhere/kubeconfig"], 1, &["kubeconfig /nowhere/kubeconfig: No such file or directory"]),
    wrong(Server, &["--agent-port="], &["--agent-port={taken}"], 1, &["agent port", ":{taken}", "in use", "give another one"]),
    wrong(Server, &["--health-port="], &["--health-port={taken}"], 1, &["health port", ":{taken}", "in use", "choose another"]),
    wrong(Server, &["--admin-port="], &["--admin-port={taken}"], 1, &["admin port", ":{taken}", "in use", "choose another"]),
    wrong(Server, &[], &["--frontend=http-connect=tcp:127.0.0.1:{taken}", "--server-cert={certs}/server.crt", "--server-key={certs}/server.key", "--server-ca-cert={certs}/ca.crt"], 1, &["http-connect frontend", ":{taken}", "in use", "give another one"]),
    wrong(Server, &["--frontend=grpc"], &["--frontend=grpc=unix:/nowhere/kas.sock"], 1, &["/nowhere/kas.sock", "create the directory"]),
    wrong(Server, &["--admin-socket="], &["--admin-socket=/nowhere/admin.sock"], 1, &["admin socket", "/nowhere/admin.sock", "create the directory"]),
    wrong(Agent, &["--ca-cert="], &["--ca-cert=/nowhere/ca.crt"], 1, &["--ca-cert /nowhere/ca.crt", "no such file"]),
    wrong(Agent, &["--ca-cert="], &["--ca-cert={certs}/broken.pem"], 1, &["broken.pem", "give a PEM file"]),
    wrong(Agent, &["--agent-cert="], &["--agent-cert={certs}/broken.pem"], 1, &["broken.pem", "give a PEM file"]),
    wrong(Agent, &["--agent-key="], &["--agent-key={certs}/server.key"], 1, &["server.key", "agent.crt", "give both files of one pair"]),
    wrong(Agent, &[], &["--service-account-token-path=/nowhere/token"], 1, &["--service-account-token-path /nowhere/token", "no such file"]),
    wrong(Agent, &["--health-server-port="], &["--health-server-port={taken}"], 1, &["health port", ":{taken}", "in use", "choose another"]),
    wrong(Agent, &[], &["--target={taken}:kube.test:6443"], 1, &[":{taken}", "in use"]),
    wrong(CompatServer, &[], &["--cluster-cert=/nowhere/tls.crt"], 1, &["cluster cert", "/nowhere/tls.crt", "no such file"]),
    wrong(CompatServer, &[], &["--cluster-cert={certs}/broken.pem"], 1, &["broken.pem", "give a PEM file"]),
    wrong(CompatServer, &[], &["--cluster-key={certs}/agent.key"], 1, &["agent.key", "server.crt", "give both files of one pair"]),
    wrong(CompatServer, &[], &["--agent-port={taken}"], 1, &["agent port", ":{taken}", "in use", "give another one"]),
    wrong(CompatServer, &[], &["--uds-name=/nowhere/kas.sock"], 1, &["/nowhere/kas.sock", "create the directory"]),
    wrong(CompatAgent, &[], &["--ca-cert=/nowhere/ca.crt"], 1, &["agent CA cert", "/nowhere/ca.crt", "no such file"]),
    wrong(CompatAgent, &[], &["--ca-cert={certs}/broken.pem"], 1, &["broken.pem", "give a PEM file"]),
    wrong(CompatAgent, &[], &["--agent-key={certs}/server.key"], 1, &["server.key", "agent.crt", "give both files of one pair"]),
    wrong(CompatAgent, &[], &["--service-account-token-path=/nowhere/token"], 1, &["service account token path", "/nowhere/token"]),
];

#[rustfmt::skip] // As above.
const VALUES: &[Wrong] = &[
    wrong(Server, &[], &["--no-such-flag"], 2, &["--no-such-flag"]),
    wrong(Server, &["--agent-port="], &["--agent-prot=0"], 2, &["--agent-prot", "--agent-port"]),
    wrong(Server, &["--agent-port="], &["--agent-port=70000"], 2, &["--agent-port", "70000", "65535"]),
    wrong(Server, &["--agent-port="], &["--agent-port=seven"], 2, &["--agent-port", "seven", "write a port, a number from 1 to 65535"]),
    wrong(Server, &["--health-port="], &["--health-port=none"], 2, &["--health-port", "write a port"]),
    wrong(Server, &[], &["--dial-timeout=soon"], 2, &["--dial-timeout", "write 500ms"]),
    wrong(Server, &[], &["--agent-budget=4QiB"], 2, &["--agent-budget", "write 65536, 64KiB"]),
    wrong(Server, &[], &["--frontend=ftp=unix:/run/kas.sock"], 2, &["--frontend", "ftp", "grpc, http-connect, http-proxy or socks5"]),
    wrong(Server, &[], &["--frontend=grpc=tcp:127.0.0.1"], 2, &["--frontend", "write HOST:PORT"]),
    wrong(Server, &[], &["--keepalive-time=0"], 1, &["--keepalive-time", "greater than 0"]),
    wrong(Server, &[], &["--half-closed-timeout=0"], 1, &["--half-closed-timeout", "greater than 0"]),
    wrong(Server, &[], &["--pending-dials=0"], 2, &["--pending-dials"]),
    wrong(Server, &[], &["--proxy-strategies=best"], 1, &["--proxy-strategies", "best"]),
    wrong(Server, &[], &["--tls-min-version=VersionTLS9"], 1, &["VersionTLS9", "supported values are"]),
    wrong(Server, &[], &["--cipher-suites=ROT13"], 1, &["cipher suite ROT13"]),
    wrong(Server, &[], &["--lane-security=rot13"], 2, &["--lane-security", "rot13"]),
    wrong(Server, &[], &["--log-format=xml"], 2, &["--log-format", "write text or json"]),
    wrong(Server, &[], &["--agent-grant=node-1"], 1, &["--agent-grant", "KEY=VALUE"]),
    wrong(Server, &[], &["--client-allow-target=id=a,10.0.0.1"], 1, &["--client-allow-target", "id=a", "write cn=, dns= or uri="]),
    wrong(Server, &[], &["--client-allow-target=10.0.0.0/99"], 1, &["--client-allow-target", "10.0.0.0/99", "use 0 to 32"]),
    wrong(Server, &[], &["--allowed-destination=10.0.0.1"], 1, &["--allowed-destination", "needs a port"]),
    wrong(Server, &[], &["--server-id=gr\u{fc}n"], 1, &["--server-id", "gRPC header"]),
    wrong(Agent, &[], &["--no-such-flag"], 2, &["--no-such-flag"]),
    wrong(Agent, &["--proxy-server-host="], &[], 2, &["--proxy-server-host"]),
    wrong(Agent, &["--proxy-server-host="], &["--proxy-server-host=a:b"], 1, &["--proxy-server-host"]),
    wrong(Agent, &[], &["--proxy-server-port=0"], 2, &["--proxy-server-port"]),
    wrong(Agent, &["--sync-interval="], &["--sync-interval=wrong"], 2, &["--sync-interval", "write 500ms"]),
    wrong(Agent, &[], &["--keepalive-time=1s"], 1, &["--keepalive-time", "below 30s"]),
    wrong(Agent, &[], &["--dial-timeout=0"], 1, &["--dial-timeout", "greater than 0"]),
    wrong(Agent, &[], &["--allow-target="], 1, &["--allow-target", "is empty"]),
    wrong(Agent, &[], &["--allow-target=none", "--allow-target=10.0.0.1"], 1, &["--allow-target", "none", "stands alone"]),
    wrong(Agent, &[], &["--allow-target=10.0.0.0/99"], 1, &["--allow-target", "10.0.0.0/99", "use 0 to 32"]),
    wrong(CompatAgent, &[], &["--allow-target=10.0.0.0/99"], 1, &["--allow-target", "10.0.0.0/99", "use 0 to 32"]),
    wrong(Agent, &[], &["--agent-identifiers=host=%zz"], 1, &["agent address is invalid"]),
    wrong(Agent, &[], &["--target=nowhere"], 1, &["--target", "nowhere"]),
    wrong(CompatServer, &[], &["--no-such-flag"], 1, &["unknown flag: --no-such-flag"]),
    wrong(CompatServer, &[], &["--agent-prot=1"], 1, &["--agent-prot", "did you mean --agent-port?"]),
    wrong(CompatServer, &[], &["--agent-port=abc"], 1, &["--agent-port", "abc"]),
    wrong(CompatServer, &[], &["--agent-port=80"], 1, &["reserved port 80", "agent port"]),
    wrong(CompatServer, &[], &["--agent-port=60000"], 1, &["ephemeral port 60000", "agent port"]),
    wrong(CompatServer, &[], &["--mode=carrier-pigeon"], 1, &["mode must be set to either", "carrier-pigeon"]),
    wrong(CompatServer, &[], &["--mode=socks5"], 1, &["mode must be set to either", "socks5"]),
    wrong(CompatServer, &[], &["--proxy-strategies=best"], 1, &["invalid proxy strategies", "best"]),
    wrong(CompatServer, &[], &["--backend-dial-timeout=-1s"], 1, &["backend-dial-timeout must be >= 0"]),
    wrong(CompatServer, &[], &["--xfr-channel-size=0"], 1, &["channel size 0 must be greater than 0"]),
    wrong(CompatServer, &[], &["--enable-lease-controller"], 1, &["failed to load kubernetes client config", "give --kubeconfig"]),
    wrong(CompatAgent, &[], &["--no-such-flag"], 1, &["unknown flag: --no-such-flag"]),
    wrong(CompatAgent, &[], &["--proxy-server-port=0"], 1, &["proxy server port 0 must be greater than 0"]),
    wrong(CompatAgent, &[], &["--sync-interval=soon"], 1, &["--sync-interval", "soon"]),
    wrong(CompatAgent, &[], &["--server-count-source=guess"], 1, &["--server-count-source", "guess"]),
    wrong(CompatAgent, &[], &["--count-server-leases"], 1, &["failed to load kubernetes client config", "give --kubeconfig"]),
];

#[rustfmt::skip] // As above.
const CONTRADICTIONS: &[Wrong] = &[
    wrong(Server, &["--frontend="], &[], 1, &["--frontend", "give at least one"]),
    wrong(Server, &[], &["--client-allow-target=cn=a,10.0.0.1"], 1, &["--client-allow-target", "no frontend asks", "--server-ca-cert"]),
    wrong(Server, &["--cluster-key="], &[], 2, &["--cluster-key"]),
    wrong(Server, &["--cluster-ca-cert="], &[], 1, &["--cluster-ca-cert", "--insecure-allow-unauthenticated-agents"]),
    wrong(Server, &[], &["--insecure-allow-unauthenticated-agents"], 2, &["--cluster-ca-cert", "--insecure-allow-unauthenticated-agents"]),
    wrong(Server, &[], &["--agent-proof=both"], 1, &["--agent-proof=both", "--agent-service-account"]),
    wrong(Server, &["--cluster-ca-cert="], &["--insecure-allow-unauthenticated-agents", "--agent-grant=cn=a,id=a"], 1, &["--agent-grant", "--cluster-ca-cert"]),
    wrong(Server, &["--cluster-ca-cert="], &["--insecure-allow-unauthenticated-agents", "--allowed-destination=10.0.0.1:1"], 1, &["--allowed-destination", "--insecure-allow-unauthenticated-agents", "drop one"]),
    wrong(Server, &[], &["--allowed-destination=10.0.0.1:1", "--lanes-per-link=0"], 1, &["--allowed-destination", "--lanes-per-link", "drop one"]),
    wrong(Server, &[], &["--destination-proxy-header"], 1, &["--destination-proxy-header", "--allowed-destination"]),
    wrong(Server, &[], &["--frontend=grpc=tcp:127.0.0.1:0"], 1, &["--server-cert", "--insecure-plaintext-frontend"]),
    wrong(Server, &[], &["--frontend=socks5=tcp:127.0.0.1:0"], 1, &["127.0.0.1:0", "--server-cert", "--insecure-plaintext-frontend"]),
    wrong(Server, &[], &["--frontend=http-connect=tcp:127.0.0.1:0", "--insecure-plaintext-frontend", "--frontend-users={certs}/ca.crt"], 1, &["--frontend-users", "socks5 and http-proxy", "drop it"]),
    wrong(Server, &[], &["--frontend=socks5=tcp::0", "--insecure-plaintext-frontend", "--frontend-users={certs}/ca.crt"], 1, &["--frontend-users", "ca.crt", "line 1", "NAME:PASSWORD"]),
    wrong(Server, &[], &["--frontend=socks5=tcp::0", "--insecure-plaintext-frontend"], 1, &["socks5", ":0", "open proxy", "127.0.0.1", "--server-ca-cert"]),
    wrong(Server, &[], &["--server-cert={certs}/server.crt"], 2, &["--server-key"]),
    wrong(Server, &[], &["--server-cert={certs}/server.crt", "--server-key={certs}/server.key", "--insecure-plaintext-frontend"], 2, &["--server-cert", "--insecure-plaintext-frontend"]),
    wrong(Server, &["--admin-socket="], &["--frontend=grpc=unix:{certs}/twice", "--frontend=grpc=unix:{certs}/twice"], 1, &["two frontends", "twice"]),
    wrong(Server, &["--admin-socket="], &["--frontend=grpc=unix:{certs}/twice", "--admin-socket={certs}/twice"], 1, &["--admin-socket", "twice", "give two paths"]),
    wrong(Server, &["--agent-port=", "--health-port="], &["--agent-port=8091", "--health-port=8091"], 1, &["two listeners", ":8091", "--agent-port", "--health-port", "change one"]),
    wrong(Server, &[], &["--pending-dials-per-agent=10", "--pending-dials=5"], 1, &["--pending-dials-per-agent 10", "--pending-dials 5"]),
    wrong(Server, &[], &["--agent-budget=1MiB"], 1, &["--agent-budget 1048576", "at least 4194304"]),
    wrong(Server, &[], &["--agent-budget=8MiB", "--process-budget=6MiB"], 1, &["--agent-budget", "--process-budget"]),
    wrong(Agent, &["--agent-key="], &[], 2, &["--agent-key"]),
    wrong(Agent, &["--sync-interval"], &["--sync-interval=5s", "--sync-interval-cap=1s"], 1, &["sync interval 5s", "sync interval cap 1s"]),
    wrong(Agent, &[], &["--lane-security=plaintext", "--service-account-token-path={certs}/agent.key"], 1, &["--lane-security=plaintext", "--service-account-token-path", "drop one"]),
    wrong(Agent, &[], &["--redirect-apiserver=10.96.0.1:443=kube.test:6443"], 2, &["--redirect-cgroup"]),
    wrong(Agent, &[], &["--target=8443:kube.test:6443", "--target=8443:kube.test:6444"], 1, &["8443", "by --target and --target"]),
    wrong(CompatServer, &[], &["--server-port=8090"], 1, &["server port should be set to 0", "8090"]),
    wrong(CompatServer, &[], &["--cluster-key="], 1, &["cluster key", "cluster cert"]),
    wrong(CompatServer, &[], &["--cluster-ca-cert="], 1, &["--cluster-ca-cert", "--insecure-allow-unauthenticated-agents"]),
    wrong(CompatServer, &[], &["--agent-namespace=a"], 1, &["--cluster-ca-cert"]),
    wrong(CompatServer, &[], &["--enable-contention-profiling"], 1, &["--enable-contention-profiling", "--enable-profiling"]),
    wrong(CompatAgent, &[], &["--ca-cert="], 1, &["--ca-cert is required"]),
    wrong(CompatAgent, &[], &["--agent-cert="], 1, &["agent cert", "agent key"]),
    wrong(CompatAgent, &[], &["--sync-interval=5m"], 1, &["sync interval 5m0s", "sync interval cap 10s"]),
];

/// A world without a running server, with the files and ports that the mistakes need.
struct Mistakes {
    world: World,
    compat: [Vec<String>; 2],
    taken: TcpListener,
}

impl Mistakes {
    async fn prepare() -> Self {
        let mut world = World::start(&[]).await;
        world.stop_server(Duration::ZERO).await;
        let certs = world.files.dir();
        fs::write(certs.join("broken.pem"), "not PEM at all").expect("writable");
        let [taken, agents, health, admin] = free_ports();
        let mut server = compat_server(&world, world.grpc(), [agents, health, admin]);
        server.push("--mode=grpc".to_owned());
        let agent = compat_agent(&world, agents, [health, admin]);
        Self {
            world,
            compat: [server, agent],
            taken: TcpListener::bind(("0.0.0.0", taken)).expect("it is free"),
        }
    }

    fn taken(&self) -> u16 {
        self.taken.local_addr().expect("bound").port()
    }

    /// Replaces the placeholders in `text`.
    fn filled(&self, text: &str) -> String {
        let certs = self.world.files.dir().display().to_string();
        text.replace("{certs}", &certs)
            .replace("{taken}", &self.taken().to_string())
    }

    fn args(&self, wrong: &Wrong) -> Vec<String> {
        let [server, agent] = &self.compat;
        let words = |words: &[&str]| -> Vec<String> {
            words.iter().map(|word| (*word).to_owned()).collect()
        };
        let mut args: Vec<String> = match wrong.line {
            Server => self.world.server_args("0"),
            Agent => self.world.agent_args("a", 1, &[]),
            CompatServer => [words(&["adit", "server", "--compat"]), server.clone()].concat(),
            CompatAgent => [words(&["adit", "agent", "--compat"]), agent.clone()].concat(),
        };
        args.retain(|arg| !wrong.without.iter().any(|flag| arg.starts_with(flag)));
        args.extend(wrong.with.iter().map(|flag| self.filled(flag)));
        args
    }

    /// How the program's reaction to this mistake deviates from the expected one.
    fn complaint(&self, number: usize, wrong: &Wrong) -> Option<String> {
        let name = format!("wrong-{number}");
        let args = self.args(wrong);
        let mut process = Process::start(&name, &args, self.world.dir.path());
        let status = process.wait(Duration::from_secs(20));
        let log = process.log();
        let flaw = flaw(&log, status.code(), wrong, |text| self.filled(text))?;
        let Wrong { line, with, .. } = wrong;
        Some(format!("{line:?} {with:?}: {flaw}\n{log}"))
    }

    fn assert_named(&self, mistakes: &[Wrong]) {
        let complaints: Vec<String> = mistakes
            .iter()
            .enumerate()
            .filter_map(|(number, wrong)| self.complaint(number, wrong))
            .collect();
        assert!(
            complaints.is_empty(),
            "{} of {} mistakes:\n{}",
            complaints.len(),
            mistakes.len(),
            complaints.join("\n")
        );
    }
}

/// The first deviation, if any. Expected are one `error: ` line at the end and only log lines before it.
fn flaw(
    log: &str,
    code: Option<i32>,
    wrong: &Wrong,
    filled: impl Fn(&str) -> String,
) -> Option<String> {
    if code != Some(wrong.code) {
        return Some(format!("exit code {code:?}"));
    }
    let complains = |line: &&str| line.starts_with("error: ");
    let complaints: Vec<&str> = log.lines().filter(complains).collect();
    let [complaint] = complaints[..] else {
        return Some(format!("{} lines complain", complaints.len()));
    };
    if complaint.contains("  ") || complaint.contains('\t') {
        return Some("a line has holes".to_owned());
    }
    if log.lines().last() != Some(complaint) {
        return Some("the complaint is not the last line".to_owned());
    }
    if let Some(word) = wrong
        .says
        .iter()
        .find(|word| !complaint.contains(&filled(word)))
    {
        return Some(format!("{word:?} is not said"));
    }
    let is_log = |line: &str| line.starts_with("ts=");
    let stray = log.lines().find(|line| *line != complaint && !is_log(line));
    stray.map(|line| format!("beside it: {line:?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_files_and_ports_are_named_with_the_remedy() {
    Mistakes::prepare().await.assert_named(FILES_AND_PORTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_values_are_named_with_the_remedy() {
    Mistakes::prepare().await.assert_named(VALUES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contradictory_flags_are_both_named() {
    Mistakes::prepare().await.assert_named(CONTRADICTIONS);
}

/// Root may read every file, so the program runs as another user.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_without_read_permission_are_named_with_the_remedy() {
    let mistakes = Mistakes::prepare().await;
    let (files, dir) = (&mistakes.world.files, mistakes.world.dir.path());
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        confined::give(dir, NOBODY);
        confined::give(files.dir(), NOBODY);
    }
    for (line, name, key) in [
        (Server, "server", "server"),
        (Agent, "agent", "agent"),
        (CompatServer, "server", "server"),
        (CompatAgent, "agent", "agent"),
    ] {
        let path = files.key(key);
        let mode = |bits| {
            let mode = fs::Permissions::from_mode(bits);
            fs::set_permissions(&path, mode).expect("it is there");
        };
        let path_text = path.display().to_string();
        let wrong = wrong(line, &[], &[], 1, &["ermission denied", "may read it"]);
        let args = mistakes.args(&wrong);
        let log = format!("unreadable-{line:?}");
        mode(0o000);
        let mut process = if is_root {
            let rights = Rights {
                deadly: false,
                user: Some(NOBODY),
                ..deadly(name)
            };
            confined::start(&log, &rights, &args, dir)
        } else {
            Process::start(&log, &args, dir)
        };
        let status = process.wait(Duration::from_secs(20));
        mode(0o600);
        let log = process.log();
        let flaw = flaw(&log, status.code(), &wrong, str::to_owned);
        assert_eq!(flaw, None, "{line:?}: {log}");
        assert!(log.contains(&path_text), "{line:?}: {log}");
    }
}
