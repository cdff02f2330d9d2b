//! The redirect in network namespaces other than the server's, with a listener of the server in each.
//!
//! As in `redirect`, only the agent reaches 198.51.100.0/24. The namespaces have no routes.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use adit_config::NetnsHelperOptions;
use adit_redirect::namespaces::{Asked, Helper};
use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, RedirectRule};
use ipnet::IpNet;

use super::redirect::{Scene, resets, scene};
use crate::support::bpffs::Bpffs;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::listening::listening_at;
use crate::support::namespace::{Namespace, helped_by_ourselves};
use crate::support::privilege::{ready, ready_v6, skip};
use crate::support::target::target;
use crate::support::world::{World, calls, nodes_of, sample};

pub(super) const CAPTURED: &str = "adit_redirect_namespaces{state=\"captured\"}";
const RULE: &str = "--redirect=198.51.100.0/24";

fn asked() -> SocketAddr {
    "198.51.100.7:9090".parse().unwrap()
}

/// Creates `N` namespaces, or skips the test with the reason.
pub(super) fn namespaces<const N: usize>(test: &str) -> Option<[Namespace; N]> {
    if !ready(test) {
        return None;
    }
    let made: Result<Vec<Namespace>, String> = (0..N).map(|_| Namespace::new()).collect();
    match made {
        Ok(made) => made.try_into().ok(),
        Err(why) => {
            skip(test, &why);
            None
        }
    }
}

pub(super) fn flag(namespace: &Namespace) -> String {
    format!("--redirect-netns={}", namespace.path().display())
}

/// Calls until a call is captured, and returns the errors before that.
pub(super) fn until_captured(client: &mut Client, scene: &Scene, asked: SocketAddr) -> Vec<String> {
    let mut errors = Vec::new();
    scene
        .server
        .until("the namespace is captured", || match client.call(asked) {
            Ok(seen) => {
                assert_eq!(seen.peer, asked);
                Some(())
            }
            Err(error) => {
                errors.push(error);
                None
            }
        });
    errors
}

/// Limit (redirect): A process in a captured network namespace | served by the listener there, also where namespaces
/// share addresses
#[test]
fn a_process_in_another_namespace_reaches_what_only_the_agent_reaches() {
    let Some([one, other]) = namespaces("redirect in other namespaces") else {
        return;
    };
    let v6 = TcpListener::bind("[::1]:0").ok().map(|_| target("::1"));
    let flags = [
        RULE,
        "--redirect=[2001:db8::/32]:443",
        &flag(&one),
        &flag(&other),
    ];
    let scene = scene(target("127.0.0.1"), v6, &flags);
    // Namespaces that exist at the start are captured when the server is up.
    assert_eq!(scene.server.metric(CAPTURED), 2.0);
    for namespace in [&one, &other] {
        let mut client = Client::start_in(namespace, scene.clients.path());
        client.is_captured(asked());
        let seen = client.call_mapped(asked()).unwrap();
        assert_eq!(seen.peer, "[::ffff:198.51.100.7]:9090".parse().unwrap());
        if v6.is_some() {
            let asked = "[2001:db8::7]:443".parse().unwrap();
            assert_eq!(client.call(asked).unwrap().peer, asked);
        }
    }
    let readyz = scene.server.readyz();
    let line = "[+]redirect-netns: 2 other namespaces captured";
    assert!(readyz.contains(line), "{readyz}");
}

/// Limit (redirect): A process in a captured network namespace
#[test]
fn two_namespaces_with_the_same_addresses_have_their_own_listeners() {
    let Some([one, other]) = namespaces("overlapping namespaces") else {
        return;
    };
    helped_by_ourselves();
    let options = NetnsHelperOptions {
        mark: 0,
        cgroup: None,
        paths: vec![one.path(), other.path(), one.path()],
    };
    let mut helper = Helper::start(&options).unwrap();
    let look = helper.look(std::iter::empty()).unwrap();
    assert_eq!(look.opened.len(), 2);
    let cgroup = Cgroup::new();
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    redirect
        .set_rules(&[RedirectRule {
            network: "198.51.100.0/24".parse().unwrap(),
            port: None,
            action: Action::Redirect(0),
        }])
        .unwrap();
    let ids = [0, 1].map(|at: usize| look.opened[at].id);
    let listeners: Vec<TcpListener> = look
        .opened
        .into_iter()
        .map(|mut opened| {
            let socket = socket2::Socket::from(opened.sockets.remove(0));
            socket.listen(16).unwrap();
            let listener = TcpListener::from(socket);
            let at = listener.local_addr().unwrap();
            redirect.set_listener(0, &listener, Some(at), None).unwrap();
            listener
        })
        .collect();
    // Both connect at the same time from the same address and port, to different destinations.
    let callers: Vec<_> = [(&one, 1), (&other, 2)]
        .into_iter()
        .map(|(namespace, last)| {
            let asked = SocketAddr::from(([198, 51, 100, last], 80));
            let mut client = Client::start_in(namespace, cgroup.path());
            std::thread::spawn(move || drop((client.call_from(40_404, asked), client)))
        })
        .collect();
    let accepted: Vec<_> = listeners
        .iter()
        .map(|listener| listener.accept().unwrap())
        .collect();
    assert_eq!(accepted[0].1, accepted[1].1);
    for ((socket, peer), last) in accepted.into_iter().zip([1, 2]) {
        let asked = SocketAddr::from(([198, 51, 100, last], 80));
        assert_eq!(redirect.origin(&socket, peer).unwrap(), Some(asked));
    }
    for caller in callers {
        caller.join().unwrap();
    }
    // The helper opens no second listener in a held namespace, and does not report one that is gone.
    drop(other);
    let held = ids.map(|id| Asked {
        id,
        wants_v6: false,
    });
    let limit = Instant::now() + Duration::from_secs(10);
    loop {
        let look = helper.look(held.into_iter()).unwrap();
        assert!(look.opened.is_empty() && look.failed.is_empty());
        if look.still == ids[..1] {
            break;
        }
        assert!(Instant::now() < limit, "{look:?}");
    }
}

/// Limit (redirect): Network namespaces that come and go | captured and forgotten with their processes; left alone
/// without `--redirect-netns`
#[test]
fn namespaces_are_found_by_the_processes_of_the_cgroup_and_forgotten_with_them() {
    let Some([namespace]) = namespaces("finding namespaces") else {
        return;
    };
    let scene = scene(target("127.0.0.1"), None, &[RULE, "--redirect-netns=auto"]);
    assert_eq!(scene.server.metric(CAPTURED), 0.0);
    for _ in 0..2 {
        let mut client = Client::start_in(&namespace, scene.clients.path());
        // Without a listener calls are left alone, and no route exists.
        for error in until_captured(&mut client, &scene, asked()) {
            assert!(error.contains("unreachable"), "{error}");
        }
        scene.server.metric_is(CAPTURED, 1.0);
        drop(client);
        scene.server.metric_is(CAPTURED, 0.0);
    }
    // The server's own namespace has a listener anyway, which also serves its other processes.
    let mut neighbour = Client::start(Some(scene.clients.path()));
    assert!(!neighbour.call(asked()).unwrap().is_direct());
    assert_eq!(scene.server.metric(CAPTURED), 0.0);
}

/// Limit (redirect): Network namespaces that come and go
#[test]
fn a_named_namespace_is_captured_while_it_exists() {
    let Some([namespace]) = namespaces("namespaces that come and go") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let link = dir.path().join("later");
    let flag = format!("--redirect-netns={}", link.display());
    let scene = scene(target("127.0.0.1"), None, &[RULE, &flag]);
    assert_eq!(scene.server.metric(CAPTURED), 0.0);
    let mut client = Client::start_in(&namespace, scene.clients.path());
    std::os::unix::fs::symlink(namespace.path(), &link).unwrap();
    until_captured(&mut client, &scene, asked());
    // Only a listener of the server could keep the namespace alive: the path is dangling now.
    drop((client, namespace));
    scene.server.metric_is(CAPTURED, 0.0);
}

/// Limit (redirect): Network namespaces that come and go
#[test]
fn without_the_flag_other_namespaces_are_left_alone() {
    let Some([namespace]) = namespaces("no flag for other namespaces") else {
        return;
    };
    let scene = scene(target("127.0.0.1"), None, &[RULE]);
    let mut client = Client::start_in(&namespace, scene.clients.path());
    client.fails(asked(), "unreachable");
    scene.server.metric_is(&calls("no_listener"), 1.0);
    let off = scene
        .server
        .metric("adit_redirect_netns_helper{state=\"off\"}");
    assert_eq!(off, 1.0);
}

/// Limit (redirect): A call in a namespace that has no listener yet, with `closed` | denied
#[test]
fn closed_on_failure_denies_in_a_namespace_until_it_has_a_listener() {
    let test = "closing in other namespaces";
    if ready(test) {
        closed_until_captured(test, RULE, asked(), None);
    }
}

/// `rule` covers `asked`. `v6` is the target behind `asked` if that is IPv6.
pub(super) fn closed_until_captured(
    test: &str,
    rule: &str,
    asked: SocketAddr,
    v6: Option<SocketAddr>,
) {
    let (_mounted, namespace) = match (Bpffs::somewhere(), Namespace::bare()) {
        (Ok(mounted), Ok(namespace)) => (mounted, namespace),
        (Err(why), _) | (_, Err(why)) => return skip(test, &why),
    };
    let flags = [rule, "--redirect-on-failure=closed", &flag(&namespace)];
    let mut scene = scene(target("127.0.0.1"), v6, &flags);
    // Loopback is down there, so opening the listener fails.
    let failed = "adit_redirect_namespaces{state=\"failed\"}";
    assert_eq!(scene.server.metric(failed), 1.0);
    let readyz = scene.server.readyz();
    assert!(readyz.contains("ip link set lo up"), "{readyz}");
    let mut client = Client::start_in(&namespace, scene.clients.path());
    client.fails(asked, "not permitted");
    namespace.run("ip link set lo up");
    for error in until_captured(&mut client, &scene, asked) {
        assert!(error.contains("not permitted"), "{error}");
    }
    // Calls also fail after the server was killed.
    scene.server.role.kill();
    client.fails(asked, "not permitted");
    // Pins would outlive the test.
    drop(client);
    adit_redirect::redirect::unpin(scene.clients.path()).unwrap();
}

/// Limit (redirect): A missing helper for other namespaces, or its privilege | logged with the remedy; the rest works
#[test]
fn a_killed_helper_is_reported_and_captured_namespaces_stay_captured() {
    let Some([one, other]) = namespaces("a helper that is killed") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let link = dir.path().join("later");
    let later = format!("--redirect-netns={}", link.display());
    let scene = scene(target("127.0.0.1"), None, &[RULE, &flag(&one), &later]);
    let mut client = Client::start_in(&one, scene.clients.path());
    assert!(!client.call(asked()).unwrap().is_direct());
    let running = scene
        .server
        .metric("adit_redirect_netns_helper{state=\"running\"}");
    assert_eq!(running, 1.0);
    let helper = child_of(scene.server.role.id());
    let helper = rustix::process::Pid::from_raw(helper).unwrap();
    rustix::process::kill_process(helper, rustix::process::Signal::KILL).unwrap();
    scene
        .server
        .metric_is("adit_redirect_netns_helper{state=\"ended\"}", 1.0);
    assert!(!client.call(asked()).unwrap().is_direct());
    let readyz = scene.server.readyz();
    let line = "[-]redirect-netns: 1 other namespaces captured; the helper";
    assert!(readyz.contains(line), "{readyz}");
    // Without the helper no new listener is opened.
    std::os::unix::fs::symlink(other.path(), &link).unwrap();
    let mut late = Client::start_in(&other, scene.clients.path());
    assert!(late.call(asked()).is_err());
    assert_eq!(scene.server.metric(CAPTURED), 1.0);
}

/// The child process of `parent`.
pub(super) fn child_of(parent: u32) -> i32 {
    let stats = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // Fields after the process name, which may contain any character: state, then parent.
            let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
            Some((parent, entry.file_name().to_str()?.parse().ok()?))
        });
    let children: Vec<i32> = stats
        .filter(|(its, _): &(u32, i32)| *its == parent)
        .map(|(_, child)| child)
        .collect();
    assert_eq!(children.len(), 1, "{children:?}");
    children[0]
}

#[test]
fn the_helper_exits_when_its_server_is_killed() {
    let Some([namespace]) = namespaces("a server that is killed beside its helper") else {
        return;
    };
    let mut scene = scene(target("127.0.0.1"), None, &[RULE, &flag(&namespace)]);
    let helper: PathBuf = format!("/proc/{}/stat", child_of(scene.server.role.id())).into();
    scene.server.role.kill();
    let limit = Instant::now() + Duration::from_secs(10);
    // The adopting process may reap the helper late.
    let ended = || {
        std::fs::read_to_string(&helper)
            .ok()
            .and_then(|stat| {
                stat.rsplit_once(") ")
                    .map(|(_, rest)| rest.starts_with('Z'))
            })
            .unwrap_or(true)
    };
    while !ended() {
        assert!(Instant::now() < limit, "the helper goes on");
        std::thread::yield_now();
    }
}

/// Limit (redirect): A missing helper for other namespaces, or its privilege
#[test]
fn without_the_privilege_the_flag_and_the_remedy_are_named_and_the_rest_works() {
    let Some([namespace]) = namespaces("no CAP_SYS_ADMIN") else {
        return;
    };
    let setpriv = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]);
        command.args(words);
        command
    };
    match setpriv(&["true"]).output() {
        Ok(output) if output.status.success() => (),
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return skip("no CAP_SYS_ADMIN", &why);
        }
        Err(error) => return skip("no CAP_SYS_ADMIN", error),
    }
    let (clients, world) = (Cgroup::new(), World::new());
    let target = target("127.13.0.1");
    let program = std::env::current_exe().unwrap();
    let flags = [
        format!("--redirect={target}"),
        clients.flag(),
        flag(&namespace),
    ];
    let program = program.display().to_string();
    let server = world.server_by(setpriv(&[&program]), None, &flags);
    let _agent = world.agent(&server, None);
    let readyz = server.readyz();
    let line =
        "[-]redirect-netns: 0 other namespaces captured; --redirect-netns needs CAP_SYS_ADMIN";
    assert!(readyz.contains(line), "{readyz}");
    let missing = server.metric("adit_redirect_netns_helper{state=\"missing\"}");
    assert_eq!(missing, 1.0);
    let mut client = Client::start(Some(clients.path()));
    assert!(!client.call(target).unwrap().is_direct());
}

#[test]
fn an_agents_redirect_reaches_into_other_namespaces() {
    let Some([namespace]) = namespaces("an agent and other namespaces") else {
        return;
    };
    let api = target("127.0.0.1");
    let world = World::new();
    let server = world.server(None, &[format!("--allowed-destination={api}")]);
    let nodes = Cgroup::new();
    let service: SocketAddr = "198.51.100.1:443".parse().unwrap();
    let cgroup = nodes.flag();
    let redirect = format!("--redirect-apiserver={service}={api}");
    let flags = [cgroup.as_str(), &redirect, &flag(&namespace)];
    let _agent = world.agent_with(&server, None, &flags);
    let mut pod = Client::start_in(&namespace, nodes.path());
    pod.is_captured(service);
}

/// Limit (redirect): A call in a namespace that has no listener yet, with a node address | served at the agent's node
/// address
#[test]
fn a_pod_without_a_listener_is_sent_to_the_nodes_address() {
    let ends = ["10.77.0.1/24", "10.77.0.2/24"];
    sent_to_the_node("the node's address", ends, "198.51.100.1:443");
}

/// Limit (redirect): A call in a namespace that has no listener yet, with a node address
#[test]
fn a_pod_without_a_listener_is_sent_to_the_nodes_ipv6_address() {
    let test = "the node's IPv6 address";
    if ready_v6(test) {
        let ends = ["fd77::1/64", "fd77::2/64"];
        sent_to_the_node(test, ends, "[2001:db8::1]:443");
    }
}

/// Calls a Service from a pod whose namespace has no listener. `ends` are the node's and the pod's address.
fn sent_to_the_node(test: &str, ends: [&str; 2], service: &str) {
    let Some([node, pod]) = namespaces(test) else {
        return;
    };
    node.connect(&pod, ends[0], ends[1]);
    let [node_ip, pod_ip] = ends.map(|end| end.parse::<IpNet>().unwrap().addr());
    let service: SocketAddr = service.parse().unwrap();
    // Server and agent run in the namespace of their thread.
    node.inside(|| {
        let api = target("127.0.0.1");
        let (world, server, nodes) = nodes_of(api);
        let redirect = format!("--redirect-apiserver={service}={api}");
        let address = format!("--redirect-node-address={node_ip}");
        let cgroup = nodes.flag();
        let flags = [cgroup.as_str(), &redirect, &address];
        let this = Command::new(std::env::current_exe().unwrap());
        let (agent, health) = world.probed_agent_by(this, &server, None, &flags);
        let mut client = Client::start_in(&pod, nodes.path());
        for _ in 0..3 {
            let seen = client.call(service).unwrap();
            assert_eq!(seen.peer, service);
            assert_eq!(seen.local.ip(), pod_ip);
            assert!(!seen.is_direct(), "{seen:?}");
        }
        // Calls of the node's own processes use loopback.
        let mut neighbour = Client::start(Some(nodes.path()));
        let seen = neighbour.call(service).unwrap();
        assert!(seen.local.ip().is_loopback(), "{seen:?}");
        // The other family has no node address, so the call is left alone.
        let other = if service.is_ipv4() {
            "[2001:db8::1]:443"
        } else {
            "198.51.100.1:443"
        };
        assert!(client.call(other.parse().unwrap()).is_err());
        // Hosts of the network reach the listener, but a connection that was not redirected has no Service, even if only one
        // exists.
        let refused = [
            "adit_redirect_refused_total{reason=\"unknown_origin\"}",
            "adit_node_refusals_total{reason=\"no_destination\"}",
        ];
        let refusals = || refused.map(|series| sample(health, series).unwrap());
        assert_eq!(refusals(), [0.0; 2]);
        let listener = listening_at(agent.id(), node_ip);
        pod.inside(|| resets(listener));
        server.until("the refusal is counted", || {
            (refusals() == [1.0; 2]).then_some(())
        });
    });
}
