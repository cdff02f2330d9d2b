//! A node and two control planes in separate network namespaces. The node has no route to the API addresses of the control
//! planes. Both control planes use the same addresses, and each agent reaches its own control plane.
//!
//! The test needs root and the commands `unshare`, `nsenter` and `ip`. Without them it is skipped; as root with `CI` set it
//! fails instead.

use std::env;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::blocking;
use crate::support::process::{KillOnDrop, Process};
use crate::support::skip::{has_v6, skip_unprivileged};
use crate::support::world::World;

/// Environment variable with a peer's role: `listen ADDRESS WORD` or `connect ADDRESS`.
const ROLE: &str = "ADIT_TEST_NAMESPACE_PEER";

const V4: Addresses = Addresses {
    api: "10.96.0.1:6443",
    api_host: "10.96.0.1/32",
    cables: [
        ["192.0.2.1/24", "192.0.2.2/24"],
        ["198.51.100.1/24", "198.51.100.2/24"],
    ],
    loopback: "127.0.0.1",
};
const V6: Addresses = Addresses {
    api: "[fd96::1]:6443",
    api_host: "fd96::1/128",
    cables: [["fd92::1/64", "fd92::2/64"], ["fd93::1/64", "fd93::2/64"]],
    loopback: "[::1]",
};

/// Addresses of one IP family.
struct Addresses {
    /// API address of every control plane; the node has no route to it.
    api: &'static str,
    /// The API's host as a network, for `ip address add`.
    api_host: &'static str,
    /// Addresses at the node and at the control plane, for each control plane.
    cables: [[&'static str; 2]; 2],
    /// Host at which the agents listen.
    loopback: &'static str,
}

/// A network namespace that exists as long as its holder process.
struct Namespace(KillOnDrop);

impl Namespace {
    fn new() -> Result<Self, String> {
        let mut holder = Command::new("unshare")
            .args([
                "--net",
                "sh",
                "-c",
                "ip link set lo up && echo up && exec sleep 600",
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("running unshare: {error}"))?;
        let mut up = [0; 3];
        let mut output = holder.stdout.take().expect("piped");
        if output.read_exact(&mut up).is_ok() {
            return Ok(Self(KillOnDrop(holder)));
        }
        let mut why = String::new();
        let _read = holder
            .stderr
            .take()
            .expect("piped")
            .read_to_string(&mut why);
        let _ended = holder.wait();
        Err(why.trim().to_owned())
    }

    fn path(&self) -> String {
        format!("--net=/proc/{}/ns/net", self.0.0.id())
    }

    fn run(&self, words: &str) {
        let output = Command::new("nsenter")
            .arg(self.path())
            .args(words.split_whitespace())
            .output()
            .expect("nsenter runs");
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}: {why}");
    }

    /// Adds an address to a device.
    fn add(&self, address: &str, device: &str) {
        // Without duplicate address detection an IPv6 address is usable at once.
        let at_once = if address.contains(':') { " nodad" } else { "" };
        self.run(&format!("ip address add {address} dev {device}{at_once}"));
    }

    /// Creates a veth pair to another namespace, with these addresses at its ends.
    fn connect(&self, other: &Self, name: &str, here: &str, there: &str) {
        let pid = other.0.0.id();
        self.run(&format!(
            "ip link add {name} type veth peer name uplink netns {pid}"
        ));
        self.add(here, name);
        self.run(&format!("ip link set {name} up"));
        other.add(there, "uplink");
        other.run("ip link set uplink up");
    }

    /// Starts `adit` in the namespace.
    fn adit(&self, name: &str, args: &[String], dir: &Path) -> Process {
        let mut words = vec!["nsenter".to_owned(), self.path()];
        words.push(env!("CARGO_BIN_EXE_adit").to_owned());
        words.extend_from_slice(&args[1..]);
        Process::start_program(name, Path::new("nsenter"), &words, dir)
    }

    /// Starts this test binary in the namespace, as a peer.
    fn peer(&self, role: &str) -> Child {
        let program = env::current_exe().expect("this program");
        Command::new("nsenter")
            .arg(self.path())
            .arg(program)
            .args([
                "--exact",
                "cases::node_namespaces::a_peer",
                "--ignored",
                "--nocapture",
            ])
            .env(ROLE, role)
            .stdout(Stdio::piped())
            .spawn()
            .expect("nsenter runs")
    }
}

/// Not a test: the role of the child processes of the tests below.
#[test]
#[ignore = "a role in another test"]
fn a_peer() {
    let role = env::var(ROLE).expect("a role");
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["listen", address, word] => {
            let listener = TcpListener::bind(address).expect("its own address");
            for stream in listener.incoming() {
                let from = stream.and_then(|mut stream| {
                    stream.write_all(format!("<{word}>").as_bytes())?;
                    stream.peer_addr()
                });
                drop(from);
            }
        }
        ["connect", address] => {
            let address = address.parse().expect("an address");
            let stream = TcpStream::connect_timeout(&address, Duration::from_secs(10));
            let mut heard = String::new();
            let read = stream.and_then(|mut stream| stream.read_to_string(&mut heard));
            println!(
                "<{}>",
                read.map_or_else(|error| error.kind().to_string(), |_| heard)
            );
        }
        _ => panic!("{role}"),
    }
}

/// Output of a client in this namespace that connects to that address.
fn heard(namespace: &Namespace, address: &str) -> String {
    let peer = namespace.peer(&format!("connect {address}"));
    let output = peer.wait_with_output().expect("a client");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Limit (isolation): Agents of control planes with the same addresses | each reaches its own
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlapping_control_planes_are_reached_by_their_own_agents_only() {
    by_their_own_agents_only("overlapping control planes", &V4).await;
}

/// Limit (isolation): Agents of control planes with the same addresses
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlapping_control_planes_of_ipv6_are_reached_by_their_own_agents_only() {
    let test = "overlapping control planes of IPv6";
    if has_v6(test) {
        by_their_own_agents_only(test, &V6).await;
    }
}

async fn by_their_own_agents_only(test: &str, addresses: &Addresses) {
    let Addresses {
        api,
        api_host,
        cables,
        loopback,
    } = *addresses;
    let made = [Namespace::new(), Namespace::new(), Namespace::new()];
    let [Ok(node), Ok(first), Ok(second)] = made else {
        let why = made.into_iter().find_map(Result::err).unwrap_or_default();
        skip_unprivileged(test, format!("no network namespace: {why}"));
        return;
    };
    let world = World::start(&[]).await;
    let mut processes = Vec::new();
    let mut peers = Vec::new();
    for (plane, name, [here, there], local) in [
        (&first, "one", cables[0], "7001"),
        (&second, "two", cables[1], "7002"),
    ] {
        node.connect(plane, name, here, there);
        plane.add(api_host, "lo");
        peers.push(KillOnDrop(plane.peer(&format!("listen {api} {name}"))));
        let server: Vec<String> = world
            .server_args("8091")
            .into_iter()
            .filter(|arg| !arg.starts_with("--frontend") && !arg.starts_with("--agent-bind"))
            .chain([
                format!(
                    "--frontend=grpc=unix:{}",
                    world.dir.path().join(name).display()
                ),
                format!("--allowed-destination={api}"),
                "--log-format=json".to_owned(),
            ])
            .collect();
        processes.push(plane.adit(&format!("server-{name}"), &server, world.dir.path()));
        // The certificate names server.test, which the agent's own `/etc/hosts` resolves to its control plane.
        let hosts = world.dir.path().join(format!("hosts-{name}"));
        let (plane_ip, _length) = there.split_once('/').expect("with its length");
        std::fs::write(&hosts, format!("{plane_ip} server.test\n")).expect("a file");
        let id = format!("agent-{name}");
        let flags = [
            "!--proxy-server-host",
            "--proxy-server-host=server.test:8091",
            &format!("--target={local}:{api}"),
            &format!("--bind-address={loopback}"),
            "--log-format=json",
        ];
        let agent = world.agent_args(&id, 8091, &flags);
        processes.push(with_hosts(&node, &hosts, &id, &agent, world.dir.path()));
    }
    let direct = heard(&node, api);
    assert!(
        !direct.contains("<one>") && !direct.contains("<two>"),
        "{direct}"
    );
    for (port, name) in [("7001", "one"), ("7002", "two")] {
        let address = format!("{loopback}:{port}");
        blocking::until(
            &format!("the API of {name}"),
            Duration::from_secs(30),
            || {
                heard(&node, &address)
                    .contains(&format!("<<{name}>>"))
                    .then_some(())
            },
        );
        for _again in 0..5 {
            let word = heard(&node, &address);
            assert!(word.contains(&format!("<<{name}>>")), "{word}");
        }
    }
}

/// Starts `adit` in a network namespace, and in a mount namespace with this `/etc/hosts`.
fn with_hosts(node: &Namespace, hosts: &Path, name: &str, args: &[String], dir: &Path) -> Process {
    let mount = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
    let mut words = [
        "nsenter",
        &node.path(),
        "unshare",
        "--mount",
        "sh",
        "-c",
        mount,
    ]
    .map(str::to_owned)
    .to_vec();
    words.push(hosts.display().to_string());
    words.push(env!("CARGO_BIN_EXE_adit").to_owned());
    words.extend_from_slice(&args[1..]);
    Process::start_program(name, Path::new("nsenter"), &words, dir)
}
