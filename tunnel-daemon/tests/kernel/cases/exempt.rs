//! Own sockets are never redirected.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;

use adit_net::direct;
use adit_net::self_sockets::{OwnSockets, SocketExemptions};
use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, RedirectRule};
use rustix::net::sockopt::socket_cookie;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpSocket;

use crate::support::cgroup::Cgroup;
use crate::support::client::over;
use crate::support::privilege::{ready, ready_v6};
use crate::support::role::{Role, tell};
use crate::support::target::target;
use crate::support::world::runtime;

#[test]
fn an_exempt_socket_connects_directly_and_other_sockets_do_not() {
    if ready("exempt sockets") {
        exempt_goes_direct(target("127.8.0.1"));
    }
}

#[test]
fn an_exempt_socket_connects_directly_over_ipv6() {
    if ready_v6("exempt sockets of IPv6") {
        exempt_goes_direct(target("::1"));
    }
}

fn exempt_goes_direct(target: SocketAddr) {
    let cgroup = Cgroup::new();
    let arguments = format!("{} {target}", cgroup.path().display());
    let mut role = Role::start("exempt", Some(cgroup.path()), &arguments);
    assert_eq!(role.hear(), "exempt: direct");
    // Counts of redirected calls, and of calls by exempt sockets.
    assert_eq!(role.hear(), "early: 1, 1");
    assert_eq!(role.hear(), "own: 1, 2");
    assert_eq!(role.hear(), "bound: direct");
    assert_eq!(role.hear(), "other: redirected");
    assert_eq!(role.hear(), "bound, of a rule that denies: denied");
    drop(role);
}

/// Connects as server and agent do.
fn connected(own: &OwnSockets, target: SocketAddr) -> TcpStream {
    runtime().block_on(async {
        let socket = if target.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        };
        let stream = direct::connect(own, socket.unwrap(), target).await;
        stream.unwrap().into_std().unwrap()
    })
}

fn tell_way(socket: &str, is_direct: bool, otherwise: &str) {
    let way = if is_direct { "direct" } else { otherwise };
    tell(&format!("{socket}: {way}"));
}

/// Plays a process that redirects calls of its own cgroup.
pub(crate) fn play(arguments: &str) {
    let (cgroup, target) = arguments.split_once(' ').unwrap();
    let target: SocketAddr = target.parse().unwrap();
    let redirect = Arc::new(Redirect::attach(OBJECT, Path::new(cgroup)).unwrap());
    let (domain, here): (Domain, IpAddr) = if target.is_ipv4() {
        (Domain::IPV4, Ipv4Addr::LOCALHOST.into())
    } else {
        (Domain::IPV6, Ipv6Addr::LOCALHOST.into())
    };
    let listener = TcpListener::bind((here, 0)).unwrap();
    let at = Some(listener.local_addr().unwrap());
    let of_family = |v6: bool| at.filter(|at| at.is_ipv6() == v6);
    redirect
        .set_listener(0, &listener, of_family(false), of_family(true))
        .unwrap();
    let rule = RedirectRule {
        network: target.ip().into(),
        port: None,
        action: Action::Redirect(0),
    };
    redirect.set_rules(&[rule]).unwrap();
    let own = Socket::new(domain, Type::STREAM, None).unwrap();
    redirect.exempt(socket_cookie(&own).unwrap()).unwrap();
    let seen = over(own, target).unwrap();
    tell_way("exempt", seen.is_direct(), "redirected");
    let counts = || {
        let all = redirect.calls().unwrap();
        let of = |outcome: &str| all.iter().find(|(name, _)| *name == outcome).unwrap().1;
        format!("{}, {}", of("redirected"), of("exempt"))
    };
    let own_sockets = OwnSockets::on();
    drop(connected(&own_sockets, target));
    // No redirect is registered with `own_sockets` yet, so this socket was not exempt.
    tell(&format!("early: {}", counts()));
    drop(listener.accept().unwrap());
    own_sockets.spared_by(&(Arc::clone(&redirect) as Arc<dyn SocketExemptions>));
    drop(connected(&own_sockets, target));
    tell(&format!("own: {}", counts()));
    // The redirect leaves a socket bound to a device alone: bound to another device, it could not reach a listener on
    // loopback.
    let bound = Socket::new(domain, Type::STREAM, None).unwrap();
    bound.bind_device(Some(b"lo")).unwrap();
    let seen = over(bound, target).unwrap();
    tell_way("bound", seen.is_direct(), "redirected");
    let other = Socket::new(domain, Type::STREAM, None).unwrap();
    other.connect(&target.into()).unwrap();
    let (socket, peer) = listener.accept().unwrap();
    let origin = redirect.origin(&socket, peer).unwrap();
    tell_way("other", origin != Some(target), "redirected");
    let denying = RedirectRule {
        action: Action::RedirectOrDeny(0),
        ..rule
    };
    redirect.set_rules(&[denying]).unwrap();
    let bound = Socket::new(domain, Type::STREAM, None).unwrap();
    bound.bind_device(Some(b"lo")).unwrap();
    let denied =
        over(bound, target).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied);
    tell_way("bound, of a rule that denies", !denied, "denied");
}
