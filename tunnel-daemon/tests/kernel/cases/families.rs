//! Hosts that separate IPv4 and IPv6: `net.ipv6.bindv6only`.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};

use adit_net::listen::listen;

use crate::support::namespace::Namespace;
use crate::support::privilege::{say, skip};

/// The setting is per network namespace.
const ONLY_V6: &str = "/proc/sys/net/ipv6/bindv6only";

/// Whether the listener accepts a connection over IPv4, and one over IPv6.
fn takes(listener: &TcpListener) -> [io::Result<()>; 2] {
    let port = listener.local_addr().unwrap().port();
    let both: [SocketAddr; 2] = [
        (Ipv4Addr::LOCALHOST, port).into(),
        (Ipv6Addr::LOCALHOST, port).into(),
    ];
    both.map(|address| TcpStream::connect(address).map(drop))
}

/// This covers the ports for probes, metrics, administration, agents and clients. A kubelet may probe over IPv4 whatever the
/// sysctl is.
#[test]
fn listeners_on_all_addresses_accept_ipv4_despite_bindv6only() {
    const TEST: &str = "listeners and bindv6only";
    let namespace = match Namespace::new() {
        Ok(namespace) => namespace,
        Err(why) => return skip(TEST, &why),
    };
    namespace.inside(|| {
        if let Err(error) = fs::write(ONLY_V6, "1") {
            return say(TEST, format!("{ONLY_V6}: {error}"));
        }
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let [v4, v6] = takes(&listen(any, |_socket| ()).unwrap());
        assert!(v4.is_ok() && v6.is_ok(), "{v4:?} {v6:?}");
        // A socket without `IPV6_V6ONLY` set follows the sysctl.
        let [v4, v6] = takes(&TcpListener::bind(any).unwrap());
        assert!(v4.is_err() && v6.is_ok(), "{v4:?} {v6:?}");
    });
}
