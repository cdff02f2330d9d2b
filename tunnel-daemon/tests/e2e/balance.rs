//! A load balancer in front of the agent ports of servers.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

/// Listens on all addresses at port `at` (0: any), and distributes connections round-robin over the ports that accept them.
/// Runs until the test ends.
pub(crate) fn balance(at: u16, ports: Vec<u16>) -> u16 {
    let listener = TcpListener::bind(("0.0.0.0", at)).expect("a port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for (turn, client) in listener.incoming().enumerate() {
            let Ok(client) = client else { continue };
            let mut in_turn = (0..ports.len()).map(|step| ports[(turn + step) % ports.len()]);
            let server = in_turn.find_map(|port| TcpStream::connect(("127.0.0.1", port)).ok());
            if let Some(server) = server {
                join(&client, &server);
                join(&server, &client);
            }
        }
    });
    port
}

fn join(from: &TcpStream, to: &TcpStream) {
    let (mut from, mut to) = (
        from.try_clone().expect("a descriptor"),
        to.try_clone().expect("a descriptor"),
    );
    thread::spawn(move || {
        io::copy(&mut from, &mut to).ok();
        to.shutdown(Shutdown::Write).ok();
    });
}
