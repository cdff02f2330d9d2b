//! The real program drops its start-up privileges in each thread, and works without them afterwards.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::thread::CapabilitySet;

use super::namespaces::{child_of, namespaces};
use crate::support::blocking;
use crate::support::bpffs::{Bpffs, open_to_all};
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::confined::{NOBODY, give};
use crate::support::daemon::{Daemon, User, field};
use crate::support::namespace::Namespace;
use crate::support::privilege::{ready, say, skip};
use crate::support::stranger::{STRANGER, Stranger};
use crate::support::target::target;
use crate::support::world::{World, calls, is_ready};

/// Capabilities that a process of root may keep, by number: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_NET_BIND_SERVICE,
/// CAP_IPC_LOCK and CAP_SYS_RESOURCE.
const KEPT: u64 = 1 << 1 | 1 << 2 | 1 << 10 | 1 << 14 | 1 << 24;
const PLAIN: &str = "--lane-security=plaintext";
const HELPER_RUNS: &str = "adit_redirect_netns_helper{state=\"running\"}";

/// Checks that each thread, including relay threads, has no capability that `user` may not keep, and cannot regain one.
fn assert_nothing_left(daemon: &Daemon, user: User, expected: &[&str]) {
    let threads = daemon.threads();
    let names: Vec<&str> = threads.iter().map(|(name, _)| name.as_str()).collect();
    for name in expected {
        assert!(names.contains(name), "no thread {name}: {names:?}");
    }
    let may = match user {
        User::Root | User::Confined(_) => KEPT,
        User::Ambient | User::AmbientWith(_) => 0,
    };
    let confined = matches!(user, User::Confined(_));
    for (name, status) in &threads {
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            let held = u64::from_str_radix(field(status, set), 16).unwrap();
            assert_eq!(held & !may, 0, "{name}: {set} {held:#x}");
        }
        let bounded = u64::from_str_radix(field(status, "CapBnd"), 16).unwrap();
        assert!(user.is_ambient() || bounded & !may == 0, "{name}");
        assert_eq!(field(status, "NoNewPrivs"), "1", "{name}");
        // 2 stands for a seccomp filter.
        assert!(!confined || field(status, "Seccomp") == "2", "{name}");
    }
    let log = daemon.log();
    assert!(log.contains("capabilities given up"), "{log}");
}

const THREADS: [&str; 4] = ["adit-log", "adit-admin", "relay-0", "tokio-rt-worker"];

fn server(world: &World, user: User, name: &str, flags: &[String]) -> Daemon {
    let socket = format!("--admin-socket={}/{name}.sock", world.dir().display());
    let args = world.server_args(&[&[PLAIN.to_owned(), socket], flags].concat());
    Daemon::start(user, name, &args, world.dir())
}

fn agent(world: &World, user: User, server: &Daemon, flags: &[String]) -> Daemon {
    linked_agent(world, user, server, &[&[PLAIN.to_owned()], flags].concat())
}

/// Starts an agent with a health port, and waits for its link and an idle lane.
pub(super) fn linked_agent(world: &World, user: User, server: &Daemon, flags: &[String]) -> Daemon {
    let mut args = world.probed_agent_args(server.address("agents"));
    args.extend_from_slice(flags);
    let agent = Daemon::start(user, "agent", &args, world.dir());
    // Lanes open shortly after the link.
    server.until("the agent is linked and has lanes", |server| {
        is_ready(server.address("health")) && server.metric("adit_lanes{state=\"idle\"}") >= 1.0
    });
    agent
}

fn prepared(user: User) -> World {
    let world = World::new();
    if user.is_ambient() {
        give(world.dir(), NOBODY);
        give(world.certificates(), NOBODY);
    }
    world
}

/// Calls until a call goes through the tunnel: lanes open shortly after the link.
fn captured(client: &mut Client, at: SocketAddr) {
    blocking::until("a captured call", Duration::from_secs(60), || {
        let seen = client.call(at).ok()?;
        (!seen.is_direct()).then_some(())
    });
}

/// The series of accounted connections of clients with destinations of this class.
pub(super) fn account(class: impl std::fmt::Display) -> String {
    format!(
        "adit_ebpf_connections_total{{agent=\"kernel\",destination_class=\"{class}\",role=\"client\",tenant=\"default\"}}"
    )
}

pub(super) fn redirecting_server(user: User) {
    let target = target("127.20.0.1");
    let clients = Cgroup::new();
    let stranger = Stranger::on(clients.path());
    let world = prepared(user);
    let flags = [
        format!("--redirect={target}"),
        clients.flag(),
        "--account=on".to_owned(),
    ];
    let server = server(&world, user, "server", &flags);
    assert_nothing_left(&server, user, &THREADS);
    // The rights to attach suffice to list other programs. Reading their names may take more.
    let (log, other) = (server.log(), format!("connect4 {}", stranger.id()));
    assert!(log.contains(&other), "{log}");
    let agent = agent(&world, user, &server, &[]);
    assert_nothing_left(&agent, user, &THREADS);
    // Maps are read and written from now on without any capability.
    let mut client = Client::start(Some(clients.path()));
    for _ in 0..5 {
        captured(&mut client, target);
    }
    server.until("the kernel accounts for them", |server| {
        server.metric(&account(target)) >= 5.0
    });
    assert_eq!(server.metric("adit_redirect_state{state=\"active\"}"), 1.0);
    server.until("the kernel's counts", |server| {
        server.metric(&calls("redirected")) >= 5.0
    });
    // Threads that started meanwhile hold no capabilities either.
    assert_nothing_left(&server, user, &THREADS);
    assert_nothing_left(&agent, user, &THREADS);
    let status = status(&world, "server");
    let (held, name_or_why) = match user.is_ambient() {
        true => ("[]", "names unknown: they take CAP_SYS_ADMIN"),
        false => ("CAP_NET_BIND_SERVICE", STRANGER),
    };
    assert!(!status.contains("CAP_BPF\""), "{status}");
    let accounts = "\"account\":{\"state\":\"on\",\"reason\":\"eBPF program ";
    // The status reports the host's abilities as probed at the start.
    let probed = "programs of these kinds load";
    for part in [held, accounts, &other, name_or_why, probed] {
        assert!(status.contains(part), "{part}: {status}");
    }
    drop(agent);
    assert_eq!(server.end().code(), Some(0));
    assert!(client.call(target).unwrap().is_direct());
}

/// The raw answer of an admin socket.
fn status(world: &World, name: &str) -> String {
    use std::io::{Read as _, Write as _};
    let path = world.dir().join(format!("{name}.sock"));
    let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
    let request = b"GET /v1/status HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    stream.write_all(request).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    text
}

pub(super) fn redirecting_agent(user: User) {
    let api = target("127.21.0.1");
    let service: SocketAddr = "198.51.100.1:443".parse().unwrap();
    let nodes = Cgroup::new();
    let world = prepared(user);
    let allowed = [format!("--allowed-destination={api}")];
    let server = server(&world, user, "server", &allowed);
    let flags = [
        nodes.flag(),
        format!("--redirect-apiserver={service}={api}"),
        "--account=on".to_owned(),
    ];
    let agent = agent(&world, user, &server, &flags);
    assert_nothing_left(&agent, user, &THREADS);
    let mut client = Client::start(Some(nodes.path()));
    for _ in 0..5 {
        captured(&mut client, service);
    }
    agent.until("the kernel accounts for them", |agent| {
        agent.metric(&account(api)) >= 5.0
    });
    assert_nothing_left(&agent, user, &THREADS);
    assert_eq!(agent.end().code(), Some(0));
    // The call fails: the redirect is gone and no program denies or redirects.
    assert!(client.call(service).is_err());
}

/// Limit (rights): Capabilities of a running process that started as root or with those for eBPF | none in any thread;
/// of root five for files, ports and limits
#[test]
fn a_redirecting_server_of_root_keeps_no_right_over_the_kernel_in_any_thread() {
    if ready("privileges of a server") {
        redirecting_server(User::Root);
    }
}

/// Limit (rights): Capabilities of a running process that started as root or with those for eBPF
#[test]
fn a_redirecting_server_with_ambient_capabilities_keeps_none_in_any_thread() {
    if ready("a server with ambient capabilities") {
        redirecting_server(User::Ambient);
    }
}

/// Limit (rights): Capabilities of a running process that started as root or with those for eBPF
#[test]
fn a_redirecting_agent_of_root_keeps_no_right_over_the_kernel_in_any_thread() {
    if ready("privileges of an agent") {
        redirecting_agent(User::Root);
    }
}

/// Limit (rights): Capabilities of a running process that started as root or with those for eBPF
#[test]
fn a_redirecting_agent_with_ambient_capabilities_keeps_none_in_any_thread() {
    if ready("an agent with ambient capabilities") {
        redirecting_agent(User::Ambient);
    }
}

/// Setting marks and pinning take capabilities. Both happen before the process drops them.
#[test]
fn closed_on_failure_holds_after_its_capabilities_are_dropped() {
    let test = "closing without rights";
    if ready(test) {
        closed_on_failure(test, User::Root);
    }
}

/// An unprivileged user with ambient capabilities can set marks and pin, too, where it may create folders.
///
/// Limit (rights): Ambient capabilities for `closed` and for other namespaces | as for loading, and a bpffs folder; for
/// other namespaces CAP_SYS_ADMIN and CAP_SYS_PTRACE, too
#[test]
fn closed_on_failure_holds_with_ambient_capabilities() {
    let test = "closing with ambient capabilities";
    if ready(test) {
        closed_on_failure(test, User::Ambient);
    }
}

/// A bpffs for the pins of `user`. Otherwise `None`, and the reason was printed.
fn pins(test: &str, user: User) -> Option<Bpffs> {
    match (Bpffs::somewhere(), open_to_all()) {
        (Err(why), _) => skip(test, &why),
        // Tests must not change the host's own bpffs.
        (Ok(_), Err(why)) if user.is_ambient() => say(test, &why),
        (Ok(mounted), _) => return Some(mounted),
    }
    None
}

pub(super) fn closed_on_failure(test: &str, user: User) {
    let Some(_mounted) = pins(test, user) else {
        return;
    };
    let target = target("127.22.0.1");
    let (clients, world) = (Cgroup::new(), prepared(user));
    let flags = |mode: &str| {
        [
            format!("--redirect={target}"),
            format!("--redirect-on-failure={mode}"),
            clients.flag(),
        ]
    };
    let closed = server(&world, user, "closed", &flags("closed"));
    let linked = agent(&world, user, &closed, &[]);
    let mut client = Client::start(Some(clients.path()));
    for _ in 0..3 {
        captured(&mut client, target);
    }
    assert_nothing_left(&closed, user, &THREADS);
    drop(linked);
    assert_eq!(closed.end().code(), Some(0));
    client.fails(target, "not permitted");
    let open = server(&world, user, "open", &flags("open"));
    assert_eq!(open.end().code(), Some(0));
    assert!(client.call(target).unwrap().is_direct());
}

/// Capabilities to open listeners in namespaces of another user's processes, in addition to those for loading programs.
const TO_ENTER: CapabilitySet = CapabilitySet::SYS_ADMIN.union(CapabilitySet::SYS_PTRACE);

/// Limit (rights): Ambient capabilities for `closed` and for other namespaces
#[test]
fn with_ambient_capabilities_other_namespaces_are_captured() {
    let test = "other namespaces with ambient capabilities";
    if let Some([namespace]) = namespaces(test) {
        let (target, clients) = (target("127.27.0.1"), Cgroup::new());
        let user = User::AmbientWith(TO_ENTER);
        let world = prepared(user);
        let flags = in_namespace(target, &clients, &namespace);
        let server = server(&world, user, "server", &flags);
        captures_in_namespace(&world, &server, TO_ENTER, &namespace, &clients, target);
        assert_eq!(server.end().code(), Some(0));
        // Without the server the call reaches that namespace, where nothing listens.
        let mut client = Client::start_in(&namespace, clients.path());
        client.fails(target, "refused");
    }
}

/// The helper marks its sockets, and the programs are pinned. After the server's end the pinned programs deny.
///
/// Limit (rights): Ambient capabilities for `closed` and for other namespaces
#[test]
fn with_ambient_capabilities_other_namespaces_are_closed_on_failure() {
    let test = "closing other namespaces with ambient capabilities";
    let Some([namespace]) = namespaces(test) else {
        return;
    };
    let user = User::AmbientWith(TO_ENTER);
    let Some(_mounted) = pins(test, user) else {
        return;
    };
    let (target, clients, world) = (target("127.28.0.1"), Cgroup::new(), prepared(user));
    let flags = |mode: &str| {
        let flags = in_namespace(target, &clients, &namespace);
        let mode = format!("--redirect-on-failure={mode}");
        [flags.as_slice(), &[mode]].concat()
    };
    let closed = server(&world, user, "closed", &flags("closed"));
    let kept = TO_ENTER | CapabilitySet::NET_ADMIN;
    captures_in_namespace(&world, &closed, kept, &namespace, &clients, target);
    assert_eq!(closed.end().code(), Some(0));
    let mut client = Client::start_in(&namespace, clients.path());
    client.fails(target, "not permitted");
    // The pins belong to the same user, which may remove them.
    let open = server(&world, user, "open", &flags("open"));
    assert_eq!(open.end().code(), Some(0));
    client.fails(target, "refused");
}

fn in_namespace(target: SocketAddr, clients: &Cgroup, namespace: &Namespace) -> [String; 3] {
    [
        format!("--redirect={target}"),
        clients.flag(),
        format!("--redirect-netns={}", namespace.path().display()),
    ]
}

/// Checks that a client in the namespace is captured, the server has no capabilities, and its helper of the same user has
/// `kept`.
fn captures_in_namespace(
    world: &World,
    server: &Daemon,
    kept: CapabilitySet,
    namespace: &Namespace,
    clients: &Cgroup,
    target: SocketAddr,
) {
    assert_nothing_left(server, User::Ambient, &THREADS);
    assert_eq!(server.metric(HELPER_RUNS), 1.0, "{}", server.log());
    let helper = format!("/proc/{}/status", child_of(server.id()));
    let status = std::fs::read_to_string(helper).unwrap();
    for (set, expected) in [
        ("CapPrm", kept.bits()),
        ("CapEff", kept.bits()),
        ("CapInh", 0),
        ("CapAmb", 0),
    ] {
        let held = u64::from_str_radix(field(&status, set), 16).unwrap();
        assert_eq!(held, expected, "{set} {held:#x}");
    }
    assert_eq!(field(&status, "NoNewPrivs"), "1");
    let users: Vec<&str> = field(&status, "Uid").split_whitespace().collect();
    assert_eq!(users, [NOBODY.to_string().as_str(); 4]);
    let agent = agent(world, User::Ambient, server, &[]);
    let mut client = Client::start_in(namespace, clients.path());
    for _ in 0..3 {
        captured(&mut client, target);
    }
    assert_nothing_left(server, User::Ambient, &THREADS);
    drop(agent);
}

/// The flags enable no eBPF, and privileges are dropped as with eBPF.
///
/// Limit (rights): Capabilities of a running process that started as root or with those for eBPF
#[test]
fn without_ebpf_a_process_of_root_drops_the_same_capabilities() {
    if !rustix::process::geteuid().is_root() {
        return skip("a process of root", "this user is not root");
    }
    let world = prepared(User::Root);
    let server = server(&world, User::Root, "server", &[]);
    assert_nothing_left(&server, User::Root, &THREADS);
    let agent = agent(&world, User::Root, &server, &[]);
    assert_nothing_left(&agent, User::Root, &THREADS);
}
