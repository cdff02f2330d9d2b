//! Capture applies to TCP sockets that were created in the captured cgroup, even after their process moved to another
//! cgroup.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::support::cgroup::{Cgroup, enter};
use crate::support::client::{Client, Seen, over};
use crate::support::privilege::{ready, ready_v6};
use crate::support::role::{Role, tell};
use crate::support::target::target;
use crate::support::world::{World, calls};

const ROLE: &str = "captured-sockets";
/// Longest wait for an echoed datagram.
const LIMIT: Duration = Duration::from_secs(10);

/// Limit (redirect): UDP sockets of captured processes | left alone and counted
#[test]
fn a_connected_udp_socket_of_a_captured_process_is_left_alone_and_counted() {
    if ready("UDP of a captured process") {
        udp_is_left_alone("127.37.0.1");
    }
}

/// Limit (redirect): UDP sockets of captured processes
#[test]
fn a_connected_udp_socket_of_ipv6_is_left_alone_and_counted() {
    if ready_v6("UDP of a captured process over IPv6") {
        udp_is_left_alone("::1");
    }
}

/// Limit (redirect): A socket whose process moves to another cgroup | belongs to the cgroup it was created in
#[test]
fn a_socket_keeps_the_cgroup_of_its_creation_when_its_process_moves() {
    if ready("a captured process that moves") {
        stays_of_its_cgroup(target("127.38.0.1"));
    }
}

/// Limit (redirect): A socket whose process moves to another cgroup
#[test]
fn an_ipv6_socket_keeps_the_cgroup_of_its_creation_when_its_process_moves() {
    if ready_v6("a captured process that moves, over IPv6") {
        stays_of_its_cgroup(target("::1"));
    }
}

/// Flags of a server that captures calls to an address, on any port.
fn flags(target: SocketAddr, captured: &Cgroup) -> [String; 2] {
    [format!("--redirect={}", target.ip()), captured.flag()]
}

fn udp_is_left_alone(at: &str) {
    let (by_udp, by_tcp) = (udp_target(at), target(at));
    let (captured, world) = (Cgroup::new(), World::new());
    let server = world.server(None, &flags(by_tcp, &captured));
    let _agent = world.agent(&server, None);
    let mut role = Role::start(ROLE, Some(captured.path()), &format!("udp {by_udp}"));
    assert_eq!(role.hear(), "direct");
    server.metric_is(&calls("not_tcp"), 1.0);
    assert_eq!(server.metric(&calls("redirected")), 0.0);
    // The rule applies to TCP connections to the same address.
    let mut client = Client::start(Some(captured.path()));
    assert!(!client.call(by_tcp).unwrap().is_direct());
    server.metric_is(&calls("redirected"), 1.0);
    assert_eq!(server.metric(&calls("not_tcp")), 1.0);
}

/// As [`target`], over UDP: answers each datagram with its sender's address.
fn udp_target(at: &str) -> SocketAddr {
    let socket = UdpSocket::bind((at, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((_bytes, from)) = socket.recv_from(&mut [0; 64]) {
            let _gone = socket.send_to(from.to_string().as_bytes(), from);
        }
    });
    address
}

fn stays_of_its_cgroup(target: SocketAddr) {
    let (captured, elsewhere, world) = (Cgroup::new(), Cgroup::new(), World::new());
    let server = world.server(None, &flags(target, &captured));
    let _agent = world.agent(&server, None);
    let (inside, outside) = (captured.path().display(), elsewhere.path().display());
    let arguments = format!("moves {target} {inside} {outside}");
    let mut role = Role::start(ROLE, None, &arguments);
    assert_eq!(role.hear(), "made before it came: direct");
    assert_eq!(role.hear(), "made inside, used after it left: redirected");
    assert_eq!(role.hear(), "made after it left: direct");
    server.metric_is(&calls("redirected"), 1.0);
}

/// Plays a process that connects sockets as `arguments` say.
pub(crate) fn play(arguments: &str) {
    let words: Vec<&str> = arguments.split(' ').collect();
    match words[..] {
        ["udp", target] => tell(way(&seen_by_udp(target.parse().unwrap()))),
        ["moves", target, captured, elsewhere] => move_through(
            target.parse().unwrap(),
            Path::new(captured),
            Path::new(elsewhere),
        ),
        _ => panic!("{arguments}"),
    }
}

fn way(seen: &Seen) -> &'static str {
    if seen.is_direct() {
        "direct"
    } else {
        "redirected"
    }
}

fn seen_by_udp(target: SocketAddr) -> Seen {
    let socket = UdpSocket::bind((target.ip(), 0)).unwrap();
    socket.connect(target).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.send(b"who am I").unwrap();
    let mut answer = [0; 64];
    let bytes = socket.recv(&mut answer).unwrap();
    let caller = std::str::from_utf8(&answer[..bytes]).unwrap();
    let seen = Seen {
        local: socket.local_addr().unwrap(),
        peer: socket.peer_addr().unwrap(),
        caller: caller.parse().unwrap(),
    };
    assert_eq!(seen.peer, target);
    seen
}

/// The process enters the captured cgroup and leaves it.
fn move_through(target: SocketAddr, captured: &Path, elsewhere: &Path) {
    let socket = || Socket::new(Domain::for_address(target), Type::STREAM, None).unwrap();
    let call = |made: &str, socket: Socket| {
        let seen = over(socket, target).unwrap();
        assert_eq!(seen.peer, target);
        tell(&format!("{made}: {}", way(&seen)));
    };
    let before = socket();
    enter(captured);
    call("made before it came", before);
    let inside = socket();
    enter(elsewhere);
    call("made inside, used after it left", inside);
    call("made after it left", socket());
}
