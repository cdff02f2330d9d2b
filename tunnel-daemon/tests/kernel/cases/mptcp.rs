//! Multipath TCP: the hooks see the TCP subflow, which is redirected and denied as any other connection.

use std::net::SocketAddr;

use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, RedirectRule};
use socket2::{Domain, Protocol, Socket, Type};

use super::redirect::scene;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::privilege::{ready, say};
use crate::support::target::target;
use crate::support::world::calls;

/// As [`ready`], and whether this host has Multipath TCP. A host without it is no failure.
fn ready_mptcp(test: &str) -> bool {
    if let Err(error) = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::MPTCP)) {
        say(test, format!("no Multipath TCP here: {error}"));
        return false;
    }
    ready(test)
}

#[test]
fn an_mptcp_connection_is_redirected_and_shows_the_listener_as_its_peer() {
    if !ready_mptcp("the redirect of Multipath TCP") {
        return;
    }
    let scene = scene(target("127.0.0.1"), None, &["--redirect=198.51.100.0/24"]);
    let mut client = Client::start(Some(scene.clients.path()));
    let asked: SocketAddr = "198.51.100.7:9090".parse().unwrap();
    let seen = client.call_mptcp(asked).unwrap();
    assert!(!seen.is_direct(), "{seen:?}");
    // The program's socket is not the subflow's socket, so no destination is recorded for its cookie.
    assert!(scene.server.listeners.contains(&seen.peer), "{seen:?}");
    scene.server.metric_is(&calls("redirected"), 1.0);
}

#[test]
fn an_mptcp_connection_is_denied_like_any_other() {
    if !ready_mptcp("a denial of Multipath TCP") {
        return;
    }
    let (target, cgroup) = (target("127.30.0.1"), Cgroup::new());
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    let rule = RedirectRule {
        network: target.ip().into(),
        port: None,
        action: Action::RedirectOrDeny(0),
    };
    redirect.set_rules(&[rule]).unwrap();
    let mut client = Client::start(Some(cgroup.path()));
    let refused = client.call_mptcp(target).unwrap_err();
    assert!(refused.contains("Operation not permitted"), "{refused}");
    drop(redirect);
    assert!(client.call_mptcp(target).unwrap().is_direct());
}
