//! What stands between agents and servers: a load balancer in front of agent ports, and a proxy in front of the agents' network.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
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

/// Listens on all addresses at port `at`, and connects by CONNECT for those who show a password. Returns the number of its
/// tunnels. Runs until the test ends.
pub(crate) fn forward_proxy(at: u16) -> Arc<AtomicUsize> {
    let listener = TcpListener::bind(("0.0.0.0", at)).expect("a port");
    let tunnels: Arc<AtomicUsize> = Arc::default();
    let counted = Arc::clone(&tunnels);
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let counted = Arc::clone(&counted);
            thread::spawn(move || {
                if tunnel(client).is_ok() {
                    counted.fetch_add(1, Relaxed);
                }
            });
        }
    });
    tunnels
}

/// Answers a CONNECT request, after which the client has to wait for the answer.
fn tunnel(mut client: TcpStream) -> io::Result<()> {
    let head: io::Result<Vec<String>> = BufReader::new(&client)
        .lines()
        .take_while(|line| line.as_ref().is_ok_and(|line| !line.is_empty()))
        .collect();
    let head = head?;
    let target = head.first().and_then(|line| line.strip_prefix("CONNECT "));
    let target = target.and_then(|rest| rest.split(' ').next());
    let is_known = head
        .iter()
        .any(|line| line.starts_with("Proxy-Authorization: Basic "));
    let (Some(target), true) = (target, is_known) else {
        let refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"a\"\r\n\r\n";
        client.write_all(refusal)?;
        return Err(io::ErrorKind::PermissionDenied.into());
    };
    let server = TcpStream::connect(target)?;
    client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
    join(&client, &server);
    join(&server, &client);
    Ok(())
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
