//! Servers found by SRV records: an agent gets `srv:NAME` and a name server, and no address.
//!
//! The name server runs in this process, at a loopback address. Only a mount namespace can give the agent its own
//! `/etc/resolv.conf`, so the tests need root and the commands `unshare` and `mount`. Without them the tests are skipped; as
//! root with `CI` set they fail instead.

use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use adit_testkit::certificates::Usage;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

use crate::support::process::{Process, metric};
use crate::support::skip::skip_unprivileged;
use crate::support::targets;
use crate::support::wait::until;
use crate::support::world::World;

/// The service name that agents get.
const SERVICE: &str = "_konnectivity._tcp.adit.test";
/// The name in the server's certificate.
const SERVER: &str = "server.test";
/// A name that the server's certificate does not contain at first.
const OTHER: &str = "other.test";
/// Servers to which an agent is connected.
const HELD: &str = "konnectivity_network_proxy_agent_open_server_connections";

/// An SRV record of [`SERVICE`]. Every host has the address 127.0.0.1.
#[derive(Clone, Copy)]
struct Record {
    priority: u16,
    weight: u16,
    port: u16,
    host: &'static str,
}

impl Record {
    fn of(port: u16) -> Self {
        Self {
            priority: 0,
            weight: 1,
            port,
            host: SERVER,
        }
    }
}

/// A name server that knows one service and its hosts.
struct NameServer {
    ip: Ipv4Addr,
    records: Arc<Mutex<Vec<Record>>>,
    _serving: JoinSet<()>,
}

impl NameServer {
    /// Listens at the first address of 127.83.0.0/24 whose port 53 is free.
    async fn start(records: &[Record]) -> Result<Self, String> {
        let (socket, ip) = Self::bind().await?;
        let records = Arc::new(Mutex::new(records.to_vec()));
        let known = Arc::clone(&records);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut question = [0; 1500];
            while let Ok((length, from)) = socket.recv_from(&mut question).await {
                let known = known.lock().expect("nobody panics with it").clone();
                if let Some(answer) = answer(&question[..length], &known) {
                    // The client may have given up.
                    let _sent = socket.send_to(&answer, from).await;
                }
            }
        });
        Ok(Self {
            ip,
            records,
            _serving: serving,
        })
    }

    async fn bind() -> Result<(UdpSocket, Ipv4Addr), String> {
        for last in 1..=254 {
            let ip = Ipv4Addr::new(127, 83, 0, last);
            match UdpSocket::bind((ip, 53)).await {
                Ok(socket) => return Ok((socket, ip)),
                Err(error) if error.kind() == ErrorKind::AddrInUse => (),
                Err(error) => return Err(format!("listening on {ip}:53: {error}")),
            }
        }
        Err("port 53 is taken on all of 127.83.0.0/24".to_owned())
    }

    /// Replaces the records.
    fn say(&self, records: &[Record]) {
        *self.records.lock().expect("nobody panics with it") = records.to_vec();
    }
}

/// The answer to one question (RFC 1035, section 4); `None` if the query is malformed.
fn answer(query: &[u8], records: &[Record]) -> Option<Vec<u8>> {
    const HEADER: usize = 12;
    const A: u16 = 1;
    const SRV: u16 = 33;
    let end = query
        .get(HEADER..)?
        .iter()
        .position(|byte| *byte == 0)
        .map(|at| HEADER + at + 1)?;
    let question = query.get(HEADER..end + 4)?;
    let (name, kind) = question.split_at(end - HEADER);
    let kind = u16::from_be_bytes([kind[0], kind[1]]);
    let is = |known: &str| labels(known).eq_ignore_ascii_case(name);
    let is_host = is(SERVER) || is(OTHER);
    let data: Vec<Vec<u8>> = if is(SERVICE) && kind == SRV {
        let data = |record: &Record| {
            let numbers = [record.priority, record.weight, record.port];
            let mut data = numbers.map(u16::to_be_bytes).concat();
            data.extend(labels(record.host));
            data
        };
        records.iter().map(data).collect()
    } else if is_host && kind == A {
        vec![Ipv4Addr::LOCALHOST.octets().to_vec()]
    } else {
        Vec::new()
    };
    let count = u8::try_from(data.len()).ok()?;
    let exists = is_host || is(SERVICE);
    let mut answer = query.get(..2)?.to_vec();
    // Flags: an authoritative answer, recursion available, and code 3 for "no such name". Counts: one question, and the
    // answers.
    answer.extend([0x85, if exists { 0x80 } else { 0x83 }]);
    answer.extend([0, 1, 0, count, 0, 0, 0, 0]);
    answer.extend(question);
    for data in data {
        // A pointer to the question's name, the type, the class, and a TTL of 0.
        answer.extend([0xc0, 0x0c]);
        answer.extend(kind.to_be_bytes());
        answer.extend([0, 1, 0, 0, 0, 0]);
        answer.extend(u16::try_from(data.len()).ok()?.to_be_bytes());
        answer.extend(data);
    }
    Some(answer)
}

/// A name in wire format.
fn labels(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).expect("labels are short"));
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

/// Reports why this host cannot run the test; fails as root where `CI` is set.
fn skipped(why: &str) {
    skip_unprivileged("a name server of ours", why);
}

/// A name server with these records; `None` if this host does not allow one.
async fn name_server(records: &[Record]) -> Option<NameServer> {
    if !rustix::process::geteuid().is_root() {
        skipped("it takes root");
        return None;
    }
    match NameServer::start(records).await {
        Ok(server) => Some(server),
        Err(why) => {
            skipped(&why);
            None
        }
    }
}

/// An agent that finds servers only by [`SERVICE`], and asks this name server.
fn agent(world: &World, names: &NameServer) -> Process {
    let dir = world.dir.path();
    let conf = dir.join("resolv.conf");
    fs::write(&conf, format!("nameserver {}\n", names.ip)).expect("a file");
    let service = format!("--proxy-server-host=srv:{SERVICE}");
    let flags = ["--log-format=json", "!--proxy-server-host", &service];
    let args = world.agent_args("agent-1", 1, &flags);
    with_resolver(&conf, "agent-1", &args, dir)
}

/// Starts `adit` in a mount namespace with this `/etc/resolv.conf`.
fn with_resolver(conf: &Path, name: &str, args: &[String], dir: &Path) -> Process {
    let mount = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
    let mut words = ["unshare", "--mount", "sh", "-c", mount]
        .map(str::to_owned)
        .to_vec();
    words.push(conf.display().to_string());
    words.push(env!("CARGO_BIN_EXE_adit").to_owned());
    words.extend_from_slice(&args[1..]);
    Process::start_program(name, Path::new("unshare"), &words, dir)
}

/// Upstream (configuration): An agent finds its servers by SRV records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_takes_host_and_port_of_its_server_from_srv_records() {
    let (target, _target) = targets::echo().await;
    let world = World::start(&[]).await;
    let record = Record::of(world.server().agents.port());
    let Some(names) = name_server(&[record]).await else {
        return;
    };
    let _agent = agent(&world, &names);
    world.links(1).await;
    world.assert_serves(&format!("127.0.0.1:{target}")).await;
}

/// RFC 2782: the lower priority number comes first, and the next one if that server does not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_priority_is_tried_if_the_first_server_does_not_answer() {
    let world = World::start(&[]).await;
    let (_held, closed) = targets::closed_port();
    let first = Record::of(closed.port());
    let second = Record {
        priority: 1,
        ..Record::of(world.server().agents.port())
    };
    let Some(names) = name_server(&[second, first]).await else {
        return;
    };
    let _agent = agent(&world, &names);
    world.links(1).await;
}

/// Each attempt asks for the records again, so an agent follows a server that moves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_moves_to_another_port_is_found_by_its_new_record() {
    let (target, _target) = targets::echo().await;
    let mut world = World::start(&[]).await;
    let record = Record::of(world.server().agents.port());
    let Some(names) = name_server(&[record]).await else {
        return;
    };
    let _agent = agent(&world, &names);
    world.links(1).await;
    world.stop_server(Duration::ZERO).await;
    world.start_server(0).await;
    names.say(&[Record::of(world.server().agents.port())]);
    world.links(1).await;
    world.assert_serves(&format!("127.0.0.1:{target}")).await;
}

/// A spoofed DNS answer can send agents to any host, but they do not accept that host as their server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_the_certificate_does_not_name_is_refused() {
    let world = World::start(&[]).await;
    let good = Record::of(world.server().agents.port());
    let bad = Record {
        host: OTHER,
        ..good
    };
    let Some(names) = name_server(&[bad]).await else {
        return;
    };
    let agent = agent(&world, &names);
    until("it is refused, by name", || {
        let log = agent.log();
        log.lines()
            .filter(|line| line.contains("cannot connect to a server"))
            .any(|line| line.contains("certificate"))
    })
    .await;
    assert_eq!(world.server().links(), 0);
    // The agent connects once the server's certificate contains this name.
    world
        .files
        .issue("server", Usage::Server, &[OTHER.to_owned()])
        .expect("a certificate");
    world.links(1).await;
}

/// The weights of two servers behind one name make the choice random. The agent retries until it holds both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_servers_behind_one_name_are_found() {
    let flags = ["--server-count=2", "--log-format=json"];
    let world = World::start(&flags).await;
    let args = world.other_args("0", ".second");
    let second = Process::start("server-2", &args, world.dir.path());
    let records = [world.server().agents, second.address("agents")];
    let records = records.map(|address| Record::of(address.port()));
    let Some(names) = name_server(&records).await else {
        return;
    };
    let agent = agent(&world, &names);
    metric(agent.address("health"), HELD, 2.0).await;
    world.links(1).await;
}
