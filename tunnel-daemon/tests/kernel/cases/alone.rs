//! The programs without a server: what they leave alone.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;

use adit::ebpf::object::{OBJECT, load};
use adit::ebpf::redirect::{Action, Redirect, RedirectRule, neighbours};
use aya::programs::CgroupSockAddr;

use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::privilege::{ready, skip};
use crate::support::target::target;

fn rule(to: SocketAddr, action: Action) -> RedirectRule {
    RedirectRule {
        network: to.ip().into(),
        port: Some(to.port()),
        action,
    }
}

fn calls(redirect: &Redirect, outcome: &str) -> u64 {
    let calls = redirect.calls().unwrap();
    calls.iter().find(|(name, _)| *name == outcome).unwrap().1
}

#[test]
fn a_rule_whose_listener_is_missing_or_gone_leaves_the_call_alone() {
    if !ready("missing listeners") {
        return;
    }
    let (cgroup, target) = (Cgroup::new(), target("127.5.0.1"));
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    redirect
        .set_rules(&[rule(target, Action::Redirect(7))])
        .unwrap();
    let mut client = Client::start(Some(cgroup.path()));
    assert!(client.call(target).unwrap().is_direct());
    assert_eq!(calls(&redirect, "no_listener"), 1);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    redirect.set_listener(7, &listener, Some(at), None).unwrap();
    drop(listener);
    assert!(client.call(target).unwrap().is_direct());
    assert_eq!(calls(&redirect, "listener_gone"), 1);
    // It fails only where the rule says so.
    redirect
        .set_rules(&[rule(target, Action::RedirectOrDeny(7))])
        .unwrap();
    let error = client.call(target).unwrap_err();
    assert!(error.contains("not permitted"), "{error}");
    assert_eq!(calls(&redirect, "denied"), 1);
    drop(client);
}

#[test]
fn a_caller_in_another_network_namespace_is_left_alone() {
    if !ready("other namespaces") {
        return;
    }
    if !Command::new("unshare")
        .args(["--net", "true"])
        .status()
        .is_ok_and(|status| status.success())
    {
        return skip("other namespaces", "`unshare --net` does not work here");
    }
    let (cgroup, target) = (Cgroup::new(), target("127.6.0.1"));
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    redirect.set_listener(0, &listener, Some(at), None).unwrap();
    redirect
        .set_rules(&[rule(target, Action::Redirect(0))])
        .unwrap();
    let mut apart = Client::start_apart(cgroup.path());
    // Loopback is down there.
    let error = apart.call(target).unwrap_err();
    assert!(error.contains("unreachable"), "{error}");
    assert_eq!(calls(&redirect, "no_listener"), 1);
    assert_eq!(calls(&redirect, "redirected"), 0);
    drop(apart);
}

#[test]
fn the_listener_learns_the_destination_once_and_nobody_elses() {
    if !ready("original destinations") {
        return;
    }
    let (cgroup, asked) = (Cgroup::new(), "198.51.100.9:4711".parse().unwrap());
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    redirect.set_listener(0, &listener, Some(at), None).unwrap();
    redirect
        .set_rules(&[rule(asked, Action::Redirect(0))])
        .unwrap();
    let mut client = Client::start(Some(cgroup.path()));
    let answer = std::thread::spawn(move || (client.call(asked), client));
    let (socket, peer) = listener.accept().unwrap();
    let stranger = SocketAddr::new(peer.ip(), peer.port() ^ 1);
    assert_eq!(redirect.origin(&socket, stranger).unwrap(), None);
    assert_eq!(redirect.origin(&socket, peer).unwrap(), Some(asked));
    assert_eq!(redirect.origin(&socket, peer).unwrap(), None);
    drop(socket);
    let (refused, client) = answer.join().unwrap();
    assert!(refused.is_err());
    drop(client);
}

#[test]
fn a_note_goes_with_the_client_that_gave_up() {
    if !ready("notes of clients that are gone") {
        return;
    }
    let (cgroup, asked) = (Cgroup::new(), "198.51.100.9:4712".parse().unwrap());
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    redirect.set_listener(0, &listener, Some(at), None).unwrap();
    redirect
        .set_rules(&[rule(asked, Action::Redirect(0))])
        .unwrap();
    let mut client = Client::start(Some(cgroup.path()));
    let calling = std::thread::spawn(move || {
        // Nobody answers: it ends by the reset below.
        let refused = client.call(asked);
        (refused, client)
    });
    let (socket, peer) = listener.accept().unwrap();
    assert_eq!(redirect.arrivals_waiting(), 1);
    socket2::SockRef::from(&socket)
        .set_linger(Some(std::time::Duration::ZERO))
        .unwrap();
    let elsewhere = listener.try_clone().unwrap();
    drop(socket);
    let (refused, client) = calling.join().unwrap();
    assert!(refused.is_err());
    assert_eq!(redirect.arrivals_waiting(), 0);
    assert_eq!(redirect.origin(&elsewhere, peer).unwrap(), None);
    drop(client);
}

#[test]
fn another_programs_rewrite_is_matched_and_never_undone() {
    if !ready("other programs") {
        return;
    }
    // The inner cgroup's programs come first: they stand for a load balancer that turns a service into a backend.
    let outer = Cgroup::new();
    let inner = outer.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let (service, backend) = ("198.51.100.20:80".parse().unwrap(), target("127.7.0.1"));
    let first = Redirect::attach(OBJECT, &inner).unwrap();
    let ours = Redirect::attach(OBJECT, outer.path()).unwrap();
    let some = TcpListener::bind("127.0.0.1:0").unwrap();
    first.set_listener(0, &some, Some(backend), None).unwrap();
    first
        .set_rules(&[rule(service, Action::Redirect(0))])
        .unwrap();
    // A rule of ours for the service matches nothing: what arrives is the backend.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    ours.set_listener(0, &listener, Some(at), None).unwrap();
    ours.set_rules(&[rule(service, Action::Redirect(0))])
        .unwrap();
    let mut client = Client::start(Some(&inner));
    assert!(client.call(service).unwrap().is_direct());
    assert_eq!(calls(&ours, "no_rule"), 1);
    // One for the backend does, and the backend is the destination.
    ours.set_rules(&[rule(backend, Action::Redirect(0))])
        .unwrap();
    let calling = std::thread::spawn(move || (client.call(service), client));
    let (socket, peer) = listener.accept().unwrap();
    assert_eq!(ours.origin(&socket, peer).unwrap(), Some(backend));
    // The first program's note is about a connection that led elsewhere: it keeps none.
    assert_eq!(first.origin(&socket, peer).unwrap(), None);
    drop(socket);
    drop(calling.join().unwrap());
    drop((first, ours));
    std::fs::remove_dir(&inner).unwrap();
}

/// One of ours, by a name that another project might have given it.
#[test]
fn programs_of_others_at_the_same_hook_are_known_by_name() {
    if !ready("neighbours") {
        return;
    }
    let (ours, theirs) = ("adit_connect4", "lbxx_connect4");
    let mut object = OBJECT.to_vec();
    let places: Vec<usize> = (0..object.len() - ours.len())
        .filter(|at| object[*at..].starts_with(ours.as_bytes()))
        .collect();
    assert!(!places.is_empty(), "the object names its programs");
    for at in places {
        object[at..at + theirs.len()].copy_from_slice(theirs.as_bytes());
    }
    let is_known = || neighbours().iter().any(|name| name == theirs);
    assert!(!is_known());
    let mut loaded = load(&object).unwrap();
    let program = loaded.program_mut(theirs).unwrap();
    let program: &mut CgroupSockAddr = program.try_into().unwrap();
    program.load().unwrap();
    assert!(is_known());
    // Those of ours are nobody's neighbours.
    assert!(neighbours().iter().all(|name| !name.starts_with("adit_")));
    drop(loaded);
}
