//! A PROXY protocol header tells a destination of the control plane the source and the Service address of a captured
//! connection.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use ipnet::IpNet;

use super::namespaces::namespaces;
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::namespace::Namespace;
use crate::support::privilege::ready_v6;
use crate::support::world::World;

const LIMIT: Duration = Duration::from_secs(60);
/// Signature, version and command.
const BEGINNING: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x21";
const TCP4: u8 = 0x11;
const TCP6: u8 = 0x21;
/// The only TLV field: type, length, and the id of the tests' agent.
const AGENT: &[u8] = b"\xE0\0\x06kernel";

/// Source and destination of a connection.
type Ends = (SocketAddr, SocketAddr);

/// Reads the header, and returns source and destination. No byte after the header is read.
fn ends(stream: &mut TcpStream) -> Ends {
    let mut head = [0; 16];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[..13], *BEGINNING);
    let length = u16::from_be_bytes([head[14], head[15]]);
    let mut rest = vec![0; usize::from(length)];
    stream.read_exact(&mut rest).unwrap();
    // Two addresses of the family, then two ports.
    let ip_bytes = match head[13] {
        TCP4 => 4,
        TCP6 => 16,
        other => panic!("family {other:#x}"),
    };
    let (addresses, rest) = rest.split_at(2 * ip_bytes);
    let (ports, fields) = rest.split_at(4);
    assert_eq!(fields, AGENT);
    let end =
        |ip: &[u8], port: &[u8]| SocketAddr::new(ip_of(ip), u16::from_be_bytes([port[0], port[1]]));
    let (source, destination) = addresses.split_at(ip_bytes);
    (end(source, &ports[..2]), end(destination, &ports[2..]))
}

/// An address of 4 or 16 bytes.
fn ip_of(bytes: &[u8]) -> IpAddr {
    match <[u8; 4]>::try_from(bytes) {
        Ok(v4) => v4.into(),
        Err(_longer) => <[u8; 16]>::try_from(bytes).unwrap().into(),
    }
}

/// A target that expects a header, and a channel with the headers. Otherwise as [`crate::support::target::target`].
fn target() -> (SocketAddr, mpsc::Receiver<Ends>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let ends = ends(&mut stream);
            if tell.send(ends).is_err() {
                return; // The test is over.
            }
            writeln!(stream, "{}", stream.peer_addr().unwrap()).unwrap();
            let mut word = [0; 64];
            while let Ok(read @ 1..) = stream.read(&mut word) {
                stream.write_all(&word[..read]).unwrap();
            }
        }
    });
    (address, told)
}

/// Limit (redirect): `--destination-proxy-header` | tells the destination the source, the Service address and the agent
#[test]
fn the_proxy_header_of_a_captured_connection_has_its_source_and_agent() {
    if let Some([node, pod]) = namespaces("a header for captured connections") {
        told(
            &node,
            &pod,
            ["10.80.0.1/24", "10.80.0.2/24"],
            "198.51.100.1:443",
        );
    }
}

/// Limit (redirect): `--destination-proxy-header`
#[test]
fn the_proxy_header_of_a_captured_ipv6_connection_has_its_source_and_agent() {
    let test = "a header for captured connections of IPv6";
    if !ready_v6(test) {
        return;
    }
    if let Some([node, pod]) = namespaces(test) {
        told(
            &node,
            &pod,
            ["fd80::1/64", "fd80::2/64"],
            "[2001:db8::1]:443",
        );
    }
}

/// The header contains the pod's address, not the address of the agent that accepted or the server that dials. `ends` are
/// the node's and the pod's address.
fn told(node: &Namespace, pod: &Namespace, ends: [&str; 2], service: &str) {
    node.connect(pod, ends[0], ends[1]);
    let [node_ip, pod_ip] = ends.map(|end| end.parse::<IpNet>().unwrap().addr());
    let service: SocketAddr = service.parse().unwrap();
    // Server and agent run in the namespace of their thread.
    node.inside(|| {
        let (api, headers) = target();
        let (nodes, world) = (Cgroup::new(), World::new());
        let server = world.server(
            None,
            &[
                format!("--allowed-destination={api}"),
                "--destination-proxy-header".to_owned(),
            ],
        );
        let cgroup = nodes.flag();
        let redirect = format!("--redirect-apiserver={service}={api}");
        let address = format!("--redirect-node-address={node_ip}");
        let flags = [cgroup.as_str(), &redirect, &address];
        let _agent = world.agent_with(&server, None, &flags);
        let mut client = Client::start_in(pod, nodes.path());
        // Each connection has its own header, and a header never disturbs the next one.
        for _call in 0..3 {
            let seen = client.call(service).unwrap();
            assert_eq!((seen.peer, seen.local.ip()), (service, pod_ip));
            // The destination is the Service address, not the listener's.
            assert_eq!(headers.recv_timeout(LIMIT), Ok((seen.local, service)));
            assert!(seen.caller.ip().is_loopback(), "{seen:?}");
        }
        // Processes of the node use loopback, and differ by their ports.
        let mut neighbour = Client::start(Some(nodes.path()));
        let seen = neighbour.call(service).unwrap();
        assert!(seen.local.ip().is_loopback(), "{seen:?}");
        assert_eq!(headers.recv_timeout(LIMIT), Ok((seen.local, service)));
    });
}
