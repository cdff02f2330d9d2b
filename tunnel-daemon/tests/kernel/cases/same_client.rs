//! Two connections with the same client address and port, which share a key in the map of recorded destinations.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, RedirectRule};
use socket2::{Domain, SockRef, Socket, Type};

use crate::support::cgroup::Cgroup;
use crate::support::client::{Client, Seen};
use crate::support::privilege::ready;

type Call = JoinHandle<Result<Seen, String>>;

/// A client that waits for a greeting, and ends with its call.
fn calling(cgroup: &Cgroup, port: u16, asked: SocketAddr) -> Call {
    let mut client = Client::start(Some(cgroup.path()));
    std::thread::spawn(move || client.call_from(port, asked))
}

/// Accepts the connection of that call.
fn accepted(listener: &TcpListener, call: &Call) -> (TcpStream, SocketAddr) {
    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let has_failed = call.is_finished();
        match listener.accept() {
            Ok(accepted) => return accepted,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        assert!(!has_failed && Instant::now() < deadline, "it never came");
        std::thread::yield_now();
    }
}

/// The first connection is accepted. It ends while the second one waits under the same key.
///
/// Limit (redirect): Connections to the listener that are not redirected
#[test]
fn the_end_of_a_connection_removes_no_destination_entry_of_another() {
    if !ready("two connections of one client address") {
        return;
    }
    let cgroup = Cgroup::new();
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    // Two listeners: at a single listener both connections would have the same four addresses and ports.
    let asked = [1, 2].map(|last| SocketAddr::from(([198, 51, 100, last], 4713)));
    let listeners = [0, 1].map(|number| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = Some(listener.local_addr().unwrap());
        redirect.set_listener(number, &listener, at, None).unwrap();
        listener
    });
    let rule = |number: u32, to: SocketAddr| RedirectRule {
        network: to.ip().into(),
        port: Some(to.port()),
        action: Action::Redirect(number),
    };
    redirect
        .set_rules(&[rule(0, asked[0]), rule(1, asked[1])])
        .unwrap();
    // The socket reserves the port; the clients share it.
    let held = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    held.set_reuse_address(true).unwrap();
    held.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into())
        .unwrap();
    let port = held.local_addr().unwrap().as_socket().unwrap().port();

    let first = calling(&cgroup, port, asked[0]);
    let (socket, client) = accepted(&listeners[0], &first);
    assert_eq!(client.port(), port);
    assert_eq!(redirect.origin(&socket, client).unwrap(), Some(asked[0]));
    let second = calling(&cgroup, port, asked[1]);
    let (waiting, same) = accepted(&listeners[1], &second);
    assert_eq!(same, client);
    assert_eq!(redirect.arrivals_waiting(), 1);

    // A reset closes the client's socket, too.
    SockRef::from(&socket)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(socket);
    // The kernel runs the eBPF programs before the client's call returns.
    let over = first.join().unwrap();
    assert!(over.is_err(), "{over:?}");
    assert_eq!(redirect.arrivals_waiting(), 1);
    assert_eq!(redirect.origin(&waiting, client).unwrap(), Some(asked[1]));
    drop(waiting);
    let unserved = second.join().unwrap();
    assert!(unserved.is_err(), "{unserved:?}");
    drop(held);
}
