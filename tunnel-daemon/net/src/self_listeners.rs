//! Addresses that this process listens on, so that it never dials itself for a peer.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::OnceLock;

/// Filled once all listeners are bound.
#[derive(Debug, Default)]
pub struct OwnListeners(OnceLock<Vec<SocketAddr>>);

impl OwnListeners {
    /// Sets the addresses of all listeners, wildcard addresses included.
    pub fn set(&self, addresses: Vec<SocketAddr>) {
        // Called only at the start of a program.
        let _again = self.0.set(addresses);
    }

    /// Whether a connect to `address` reaches one of our listeners. True for any address until the listeners are known.
    #[must_use]
    pub fn has(&self, address: SocketAddr) -> bool {
        let Some(own) = self.0.get() else {
            return true;
        };
        let ip = address.ip().to_canonical();
        own.iter()
            .filter(|own| own.port() == address.port())
            .any(|own| {
                let bound = own.ip().to_canonical();
                bound == ip || (bound.is_unspecified() && is_local(ip))
            })
    }
}

/// Whether the address is local: the kernel lets us bind to it. Where the kernel allows any address, any counts.
fn is_local(ip: IpAddr) -> bool {
    ip.is_loopback()
        || ip.is_unspecified()
        // Any other error says nothing about the address.
        || UdpSocket::bind((ip, 0)).map_or_else(|error| error.kind() != ErrorKind::AddrNotAvailable, |_| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_known_by_every_address_that_leads_to_them() {
        let own = OwnListeners::default();
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert!(own.has(at("192.0.2.1:1")), "not known yet");
        own.set(vec![
            at("[::]:8091"),
            at("127.0.0.1:8092"),
            at("0.0.0.0:8090"),
        ]);
        for reaches in [
            "127.0.0.1:8091",
            "127.9.9.9:8091",
            "[::1]:8091",
            "[::ffff:127.0.0.1]:8090",
            "0.0.0.0:8090",
            "127.0.0.1:8092",
        ] {
            assert!(own.has(at(reaches)), "{reaches}");
        }
        for other in ["127.0.0.1:8093", "127.0.0.2:8092", "192.0.2.1:8091"] {
            assert!(!own.has(at(other)), "{other}");
        }
    }
}
