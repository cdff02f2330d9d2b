//! Exempt processes are removed from the table when they end, because the kernel reuses process ids.

use adit_redirect::processes::visible;
use adit_redirect::redirect::unpin;
use aya::maps::{HashMap, Map, MapData, loaded_maps};

use super::namespaces::namespaces;
use super::redirect::scene;
use crate::support::bpffs::Bpffs;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::privilege::{ready, skip};
use crate::support::target::target;
use crate::support::world::{World, calls};

/// The map of exempt processes. The kernel truncates its name.
const MAP: &str = "REDIRECT_PROCES";
/// Bytes that are no TLS ClientHello. The agent port closes the connection, and the call itself makes the process exempt.
const NO_HELLO_BYTES: usize = 64;

/// Whether the programs of any redirect exempt this process.
pub(super) fn is_exempt(process: u32) -> bool {
    let maps = loaded_maps()
        .filter_map(Result::ok)
        .filter(|map| map.name_as_str() == Some(MAP));
    maps.filter_map(|map| {
        // A map that disappeared meanwhile is skipped.
        let map = Map::from_map_data(MapData::from_id(map.id()).ok()?).ok()?;
        HashMap::<MapData, u32, u8>::try_from(map).ok()
    })
    .any(|map| map.get(&process, 0).is_ok())
}

fn is_ready(test: &str) -> bool {
    if !ready(test) {
        return false;
    }
    if let Err(why) = visible() {
        skip(test, why);
        return false;
    }
    true
}

/// Limit (redirect): An exempt process
#[test]
fn an_exempt_process_is_forgotten_when_it_ends_and_not_before() {
    if is_ready("exempt processes that end") {
        forgotten("open", "127.18.0.1");
    }
}

/// Limit (redirect): An exempt process
#[test]
fn closed_on_failure_forgets_exempt_processes_at_their_end_and_at_a_restart() {
    let test = "exempt processes that end, closing on failure";
    if !is_ready(test) {
        return;
    }
    match Bpffs::somewhere() {
        Ok(_mounted) => forgotten("closed", "127.19.0.1"),
        Err(why) => skip(test, &why),
    }
}

/// Limit (redirect): Calls to the agent port with `--redirect-agents=captured` | captured like any other
#[test]
fn calls_to_the_agent_port_exempt_no_process_with_redirect_agents_captured() {
    if !ready("calls to the agent port that exempt nobody") {
        return;
    }
    let target = target("127.29.0.1");
    let (clients, world) = (Cgroup::new(), World::new());
    let flags = [
        format!("--redirect={target}"),
        // The agent port stays excluded.
        "--redirect=127.0.0.1".to_owned(),
        "--redirect-agents=captured".to_owned(),
        clients.flag(),
    ];
    let server = world.server(None, &flags);
    let _agent = world.agent(&server, None);
    let mut client = Client::start(Some(clients.path()));
    for _call in 0..2 {
        assert!(!client.call(target).unwrap().is_direct());
        client.carry(server.agents, NO_HELLO_BYTES).unwrap_err();
    }
    server.metric_is(&calls("redirected"), 2.0);
    server.metric_is(&calls("excluded"), 2.0);
    assert_eq!(server.metric(&calls("exempt")), 0.0);
    drop(client);
}

/// Another service may use the agent port's number there. Here nothing listens, and a failing call is enough for the test.
#[test]
fn a_process_that_calls_loopback_of_another_namespace_stays_captured() {
    let Some([pod]) = namespaces("calls to the agent port's number in another namespace") else {
        return;
    };
    let netns = format!("--redirect-netns={}", pod.path().display());
    let flags = ["--redirect=198.51.100.0/24", &netns];
    let scene = scene(target("127.0.0.1"), None, &flags);
    let mut client = Client::start_in(&pod, scene.clients.path());
    let asked = "198.51.100.7:9090".parse().unwrap();
    for _call in 0..2 {
        assert_eq!(client.call(asked).unwrap().peer, asked);
        assert!(scene.server.agents.ip().is_loopback());
        client.carry(scene.server.agents, 1).unwrap_err();
    }
    scene.server.metric_is(&calls("redirected"), 2.0);
    assert_eq!(scene.server.metric(&calls("exempt")), 0.0);
}

fn forgotten(on_failure: &str, address: &str) {
    let target = target(address);
    let (clients, world) = (Cgroup::new(), World::new());
    let flags = [
        format!("--redirect={target}"),
        format!("--redirect-on-failure={on_failure}"),
        clients.flag(),
    ];
    let mut server = world.server(None, &flags);
    let agent = world.agent(&server, None);
    let [ends, mut stays] = [(); 2].map(|()| {
        let mut client = Client::start(Some(clients.path()));
        assert!(!client.call(target).unwrap().is_direct());
        client.carry(server.agents, NO_HELLO_BYTES).unwrap_err();
        assert!(is_exempt(client.id()));
        assert!(client.call(target).unwrap().is_direct());
        client
    });
    let ended = ends.id();
    drop(ends);
    server.until("it is forgotten", || (!is_exempt(ended)).then_some(()));
    assert!(is_exempt(stays.id()));
    assert!(stays.call(target).unwrap().is_direct());
    server.role.kill();
    drop(agent);
    if on_failure == "closed" {
        // Without a server the pinned programs keep their maps.
        assert!(is_exempt(stays.id()));
        let next = world.server(None, &flags);
        let _agent = world.agent(&next, None);
        next.until("its predecessor's maps are gone", || {
            (!is_exempt(stays.id())).then_some(())
        });
        // The first call sometimes goes direct for an unknown reason, so the test checks only the second call.
        let [first, second] = [(); 2].map(|()| stays.call(target).unwrap());
        assert!(!second.is_direct(), "{first:?}, then {second:?}");
        drop(next);
        unpin(clients.path()).unwrap();
    }
}
