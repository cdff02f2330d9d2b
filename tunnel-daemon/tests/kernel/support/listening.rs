//! Ports on which a process listens, from the kernel's tables.

use std::fs;
use std::net::{IpAddr, SocketAddr};

/// Code of the LISTEN state.
const LISTEN: &str = "0A";

/// The only socket that listens at this address in the network namespace of a process.
pub(crate) fn listening_at(process: u32, ip: IpAddr) -> SocketAddr {
    let table = if ip.is_ipv4() { "tcp" } else { "tcp6" };
    let table = fs::read_to_string(format!("/proc/{process}/net/{table}")).expect("it runs");
    let wanted = hex(ip);
    let ports: Vec<u16> = table
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (at, port) = fields.get(1)?.split_once(':')?;
            let is_it = at == wanted && fields.get(3) == Some(&LISTEN);
            is_it.then(|| u16::from_str_radix(port, 16).expect("hexadecimal"))
        })
        .collect();
    assert_eq!(ports.len(), 1, "{ip}: {table}");
    SocketAddr::new(ip, ports[0])
}

/// Format of these tables: words of four bytes, each in the machine's byte order.
fn hex(ip: IpAddr) -> String {
    let bytes = match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let words = bytes.chunks_exact(4).map(|word| {
        let word = word.try_into().expect("four bytes");
        format!("{:08X}", u32::from_ne_bytes(word))
    });
    words.collect()
}
