//! eBPF programs without a server: the calls that they leave alone.

use std::io::{ErrorKind, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;

use adit_redirect::object::{OBJECT, load};
use adit_redirect::other_programs::{OtherProgram, Place};
use adit_redirect::pins;
use adit_redirect::redirect::{Action, Redirect, RedirectRule, unpin};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::support::bpffs::Bpffs;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::privilege::{ready, skip};
use crate::support::stranger::{STRANGER, Stranger};
use crate::support::target::target;

fn rule(to: SocketAddr, action: Action) -> RedirectRule {
    RedirectRule {
        network: to.ip().into(),
        port: Some(to.port()),
        action,
    }
}

/// Makes this the only rule.
fn only(redirect: &Redirect, to: SocketAddr, action: Action) {
    redirect.set_rules(&[rule(to, action)]).unwrap();
}

/// A listener for calls that the redirect takes.
fn listening(redirect: &Redirect, number: u32) -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let set = redirect.set_listener(number, &listener, Some(at), None);
    set.unwrap();
    listener
}

fn calls(redirect: &Redirect, outcome: &str) -> u64 {
    let calls = redirect.calls().unwrap();
    calls.iter().find(|(name, _)| *name == outcome).unwrap().1
}

/// Limit (redirect): A call without a listener, or from an uncaptured network namespace | left alone
#[test]
fn a_rule_whose_listener_is_missing_or_gone_leaves_the_call_alone() {
    if !ready("missing listeners") {
        return;
    }
    let (cgroup, target) = (Cgroup::new(), target("127.5.0.1"));
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    only(&redirect, target, Action::Redirect(7));
    let mut client = Client::start(Some(cgroup.path()));
    assert!(client.call(target).unwrap().is_direct());
    assert_eq!(calls(&redirect, "no_listener"), 1);
    let listener = listening(&redirect, 7);
    drop(listener);
    assert!(client.call(target).unwrap().is_direct());
    assert_eq!(calls(&redirect, "listener_gone"), 1);
    // With `RedirectOrDeny` the same call fails.
    only(&redirect, target, Action::RedirectOrDeny(7));
    client.fails(target, "not permitted");
    assert_eq!(calls(&redirect, "denied"), 1);
    drop(client);
}

/// Limit (redirect): A call without a listener, or from an uncaptured network namespace
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
    let _listener = listening(&redirect, 0);
    only(&redirect, target, Action::Redirect(0));
    let mut apart = Client::start_apart(cgroup.path());
    // Loopback is down in that namespace.
    apart.fails(target, "unreachable");
    assert_eq!(calls(&redirect, "no_listener"), 1);
    assert_eq!(calls(&redirect, "redirected"), 0);
    drop(apart);
}

/// Limit (redirect): Connections to the listener that are not redirected | closed and counted
#[test]
fn the_listener_gets_the_original_destination_of_its_peer_once() {
    if !ready("original destinations") {
        return;
    }
    let (cgroup, asked) = (Cgroup::new(), "198.51.100.9:4711".parse().unwrap());
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    let listener = listening(&redirect, 0);
    only(&redirect, asked, Action::Redirect(0));
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

/// Limit (redirect): Connections to the listener that are not redirected
#[test]
fn an_unread_destination_entry_is_removed_with_its_connection() {
    if !ready("notes of clients that are gone") {
        return;
    }
    let (cgroup, asked) = (Cgroup::new(), "198.51.100.9:4712".parse().unwrap());
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    let listener = listening(&redirect, 0);
    only(&redirect, asked, Action::Redirect(0));
    let mut client = Client::start(Some(cgroup.path()));
    let calling = std::thread::spawn(move || {
        // The test accepts without answering; the reset below ends the call.
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

/// Limit (redirect): eBPF programs of others that rewrite addresses | their result is matched and never undone. Log and
/// status name them
#[test]
fn another_programs_rewrite_is_matched_and_never_undone() {
    if !ready("other programs") {
        return;
    }
    // Programs of the inner cgroup run first. They act as a load balancer that replaces a Service address by a backend.
    let outer = Cgroup::new();
    let inner = outer.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let (service, backend) = ("198.51.100.20:80".parse().unwrap(), target("127.7.0.1"));
    let first = Redirect::attach(OBJECT, &inner).unwrap();
    let ours = Redirect::attach(OBJECT, outer.path()).unwrap();
    let some = TcpListener::bind("127.0.0.1:0").unwrap();
    first.set_listener(0, &some, Some(backend), None).unwrap();
    only(&first, service, Action::Redirect(0));
    // A rule of `ours` for the Service matches nothing, because `ours` sees the backend address.
    let listener = listening(&ours, 0);
    only(&ours, service, Action::Redirect(0));
    let mut client = Client::start(Some(&inner));
    assert!(client.call(service).unwrap().is_direct());
    assert_eq!(calls(&ours, "no_rule"), 1);
    // A rule for the backend matches, and the recorded destination is the backend.
    only(&ours, backend, Action::Redirect(0));
    let calling = std::thread::spawn(move || (client.call(service), client));
    let (socket, peer) = listener.accept().unwrap();
    assert_eq!(ours.origin(&socket, peer).unwrap(), Some(backend));
    // The first program's record belongs to a connection that another program redirected, so it is dropped.
    assert_eq!(first.origin(&socket, peer).unwrap(), None);
    drop(socket);
    drop(calling.join().unwrap());
    drop((first, ours));
    std::fs::remove_dir(&inner).unwrap();
}

/// Attaches three redirects: one to the outer cgroup, then two to the inner cgroup. The outer program was attached first, so
/// only its cgroup makes it run last.
fn three_on(outer: &Cgroup, inner: &Cgroup) -> [Redirect; 3] {
    let above = Redirect::attach(OBJECT, outer.path()).unwrap();
    let [first, second] = [(); 2].map(|()| Redirect::attach(OBJECT, inner.path()).unwrap());
    [first, second, above]
}

/// Redirects calls from one address to another one, which has a listener.
fn lead(redirect: &Redirect, from: SocketAddr, to: SocketAddr) {
    let here = TcpListener::bind("127.0.0.1:0").unwrap();
    redirect.set_listener(0, &here, Some(to), None).unwrap();
    only(redirect, from, Action::Redirect(0));
}

/// Limit (redirect): Several eBPF programs at one hook | all run: those of a cgroup in attach order, then those of its
/// parents. A call that one denies fails
#[test]
fn programs_run_in_attach_order_and_then_those_of_the_parent_cgroup() {
    if !ready("programs in order") {
        return;
    }
    let service = "198.51.100.30:80".parse().unwrap();
    let [one, two, three] = ["127.20.0.1", "127.20.0.2", "127.20.0.3"].map(target);
    for is_in_turn in [true, false] {
        let outer = Cgroup::new();
        let inner = outer.below();
        let [first, second, above] = three_on(&outer, &inner);
        let (from_service, from_one) = if is_in_turn {
            (&first, &second)
        } else {
            (&second, &first)
        };
        lead(from_service, service, one);
        lead(from_one, one, two);
        lead(&above, two, three);
        let mut client = Client::start(Some(inner.path()));
        let seen = client.call(service).unwrap();
        assert!(seen.is_direct(), "{seen:?}");
        assert_eq!(calls(from_service, "redirected"), 1);
        if is_in_turn {
            // Each program rewrote the result of the one before. The client sees the address that the last program saw.
            assert_eq!([from_one, &above].map(|it| calls(it, "redirected")), [1; 2]);
            assert_eq!(seen.peer, two);
        } else {
            // All three ran. The first saw the Service address, and the outer one an address without a rule.
            assert_eq!([from_one, &above].map(|it| calls(it, "no_rule")), [1; 2]);
            assert_eq!(seen.peer, service);
        }
        drop(client);
    }
}

/// Limit (redirect): Several eBPF programs at one hook
#[test]
fn sibling_and_parent_programs_leave_each_others_connections_alone() {
    if !ready("programs beside each other") {
        return;
    }
    let outer = Cgroup::new();
    let inner = outer.below();
    let redirects = three_on(&outer, &inner);
    let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let asked: [SocketAddr; 3] = ["198.51.100.31:80", "198.51.100.32:80", "198.51.100.33:80"]
        .map(|address| address.parse().unwrap());
    for ((redirect, listener), asked) in redirects.iter().zip(&listeners).zip(asked) {
        let at = listener.local_addr().unwrap();
        redirect.set_listener(0, listener, Some(at), None).unwrap();
        only(redirect, asked, Action::Redirect(0));
    }
    let mut client = Client::start(Some(inner.path()));
    for ((whose, listener), asked) in listeners.iter().enumerate().zip(asked) {
        let calling = std::thread::spawn(move || (client.call(asked), client));
        listener.set_nonblocking(true).unwrap();
        // The loop ends if the call was redirected elsewhere and failed.
        let (mut socket, peer) = loop {
            match listener.accept() {
                Ok(accepted) => break accepted,
                Err(_none_yet) if !calling.is_finished() => std::thread::yield_now(),
                Err(error) => panic!("{error}: {:?}", calling.join().map(|(seen, _)| seen)),
            }
        };
        socket.set_nonblocking(false).unwrap();
        // All programs saw the connection, and only the one that redirected it recorded its destination.
        for (number, redirect) in redirects.iter().enumerate() {
            let origin = redirect.origin(&socket, peer).unwrap();
            assert_eq!(origin, (number == whose).then_some(asked), "{number}");
        }
        writeln!(socket, "{peer}").unwrap();
        let mut back = socket.try_clone().unwrap();
        std::io::copy(&mut socket, &mut back).unwrap();
        let (seen, again) = calling.join().unwrap();
        client = again;
        assert_eq!(seen.unwrap().peer, asked);
    }
    for redirect in &redirects {
        assert_eq!(
            [calls(redirect, "redirected"), calls(redirect, "no_rule")],
            [1, 2]
        );
    }
    drop(client);
}

/// Limit (redirect): Several eBPF programs at one hook
#[test]
fn a_call_that_one_program_denies_fails_though_the_others_run() {
    if !ready("a program that denies") {
        return;
    }
    let service: SocketAddr = "198.51.100.34:80".parse().unwrap();
    for denies in 0..3 {
        let outer = Cgroup::new();
        let inner = outer.below();
        let redirects = three_on(&outer, &inner);
        redirects[denies]
            .set_rules(&[rule(service, Action::RedirectOrDeny(0))])
            .unwrap();
        let mut client = Client::start(Some(inner.path()));
        client.fails(service, "not permitted");
        for (number, redirect) in redirects.iter().enumerate() {
            let outcome = if number == denies {
                "denied"
            } else {
                "no_rule"
            };
            assert_eq!(calls(redirect, outcome), 1, "{number} of {denies}");
        }
        drop(client);
    }
}

/// A server that cannot pin its programs redirects nothing, and leaves no denying program behind.
#[test]
fn programs_that_cannot_be_pinned_deny_nothing_once_their_redirect_is_gone() {
    let Some(_mounted) = Bpffs::ready("programs that cannot be pinned") else {
        return;
    };
    let (cgroup, target) = (Cgroup::new(), target("127.36.0.1"));
    let folder = pins::folder(cgroup.path()).unwrap();
    // A pinned map takes the folder's path, so the redirect cannot clear it.
    let in_the_way = load(OBJECT).unwrap();
    let map = in_the_way.map("REDIRECT_CALLS").unwrap();
    map.pin(&folder).unwrap();
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    only(&redirect, target, Action::RedirectOrDeny(0));
    let mut client = Client::start(Some(cgroup.path()));
    client.fails(target, "not permitted");
    let pinned = redirect.pin(cgroup.path());
    std::fs::remove_file(&folder).unwrap();
    assert!(pinned.is_err() && !pins::beside(&folder).exists());
    drop(redirect);
    client.direct_within_a_second(target);
    drop(client);
}

/// The kernel detaches programs with a delay after unpinning, and a call in between could be denied. So `unpin` must detach
/// them.
#[test]
fn unpinned_programs_deny_nothing_from_that_moment() {
    let Some(_mounted) = Bpffs::ready("programs whose pins are let go") else {
        return;
    };
    let (cgroup, target) = (Cgroup::new(), target("127.39.0.1"));
    let mut client = Client::start(Some(cgroup.path()));
    for round in 0..20 {
        let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
        only(&redirect, target, Action::RedirectOrDeny(0));
        redirect.pin(cgroup.path()).unwrap();
        drop(redirect);
        client.fails(target, "not permitted");
        unpin(cgroup.path()).unwrap();
        let seen = client.call(target);
        assert!(
            seen.as_ref().is_ok_and(|seen| seen.is_direct()),
            "{round}: {seen:?}"
        );
    }
    drop(client);
}

/// Limit (redirect): eBPF programs of others that rewrite addresses
#[test]
fn other_programs_at_the_same_hook_are_listed_with_name_and_order() {
    if !ready("other programs") {
        return;
    }
    let outer = Cgroup::new();
    let captured = outer.below();
    let inner = captured.below();
    let above = Stranger::on(outer.path());
    let before = Stranger::on(captured.path());
    let ours = Redirect::attach(OBJECT, captured.path()).unwrap();
    let behind = Stranger::on(captured.path());
    let below = Stranger::on(inner.path());
    let found = ours.other_programs(captured.path()).unwrap();
    assert_eq!(found.unknown(), None);
    // The host may have other programs, and the list leaves out programs of Adit.
    let named = |program: &&OtherProgram| program.name.as_deref() == Some(STRANGER);
    let strangers = found.programs.iter().filter(named);
    let seen: Vec<_> = strangers.map(|it| (it.id, it.place)).collect();
    let expected = [
        (before.id(), Place::Before),
        (behind.id(), Place::Behind),
        (above.id(), Place::Behind),
        (below.id(), Place::Below),
    ];
    assert_eq!(seen, expected);
    let names = found.programs.iter().filter_map(|it| it.name.as_deref());
    let of_ours: Vec<_> = names.filter(|name| name.starts_with("adit_")).collect();
    assert_eq!(of_ours, [""; 0]);
}

/// The kernel detaches a pinned program with a delay after its pin is removed.
#[test]
fn programs_pinned_by_a_predecessor_are_not_listed() {
    let Some(_mounted) = Bpffs::ready("other programs after a restart") else {
        return;
    };
    let cgroup = Cgroup::new();
    let predecessor = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    predecessor.pin(cgroup.path()).unwrap();
    drop(predecessor);
    let ours = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    ours.pin(cgroup.path()).unwrap();
    let found = ours.other_programs(cgroup.path());
    unpin(cgroup.path()).unwrap();
    let mut seen = found.unwrap().programs;
    seen.retain(|it| {
        let name = it.name.as_deref();
        name.is_some_and(|name| name.starts_with("adit_"))
    });
    assert!(seen.is_empty(), "{seen:?}");
}

/// The redirect's own capabilities suffice to list other programs, but not to read their names.
///
/// Limit (redirect): eBPF programs of others that rewrite addresses
#[test]
fn without_cap_sys_admin_other_programs_are_listed_without_names() {
    if !ready("other programs without names") {
        return;
    }
    let cgroup = Cgroup::new();
    let before = Stranger::on(cgroup.path());
    let ours = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    // Capabilities belong to threads: each thread drops all others and ends.
    let seen_with = |rights| {
        let sets = CapabilitySets {
            effective: rights,
            permitted: rights,
            inheritable: CapabilitySet::empty(),
        };
        let look = || {
            set_capabilities(None, sets).unwrap();
            ours.other_programs(cgroup.path())
        };
        std::thread::scope(|threads| threads.spawn(look).join().unwrap())
    };
    let least = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
    for rights in [least, CapabilitySet::NET_ADMIN] {
        let found = seen_with(rights).unwrap();
        let is_it = |program: &&OtherProgram| program.id == before.id();
        let seen = found.programs.iter().find(is_it).unwrap();
        assert_eq!((&seen.name, seen.place), (&None, Place::Before));
        let unknown = found.unknown().unwrap();
        assert!(unknown.contains("CAP_SYS_ADMIN"), "{unknown}");
    }
    // Without capabilities the query fails instead of returning an empty list.
    let error = seen_with(CapabilitySet::empty()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
}
