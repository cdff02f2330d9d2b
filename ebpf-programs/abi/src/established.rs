//! The record of an established redirected connection.

use crate::endpoint::Endpoint;
use crate::tables::{Arrival, ArrivalKey, Origin};

/// A client's connection at the moment it is established.
#[derive(Clone, Copy, Debug)]
pub struct Established {
    /// The client's network namespace.
    pub netns_cookie: u64,
    /// The client's address.
    pub local: Endpoint,
    /// The address that the client is connected to.
    pub remote: Endpoint,
    /// Now, on the monotonic clock.
    pub now_ns: u64,
    /// The client's socket.
    pub cookie: u64,
}

/// The entry that the listener will look up. `None` if the connection does not lead to the listener, because a later
/// eBPF program redirected it elsewhere.
#[inline(always)]
#[must_use]
pub fn established(connection: &Established, origin: &Origin) -> Option<(ArrivalKey, Arrival)> {
    if origin.via != connection.remote {
        return None;
    }
    let key = ArrivalKey {
        netns_cookie: origin.asked_under(connection.netns_cookie),
        client: connection.local,
        reserved: 0,
    };
    let arrival = Arrival {
        destination: origin.destination,
        listener: origin.listener,
        established_ns: connection.now_ns,
        cookie: connection.cookie,
    };
    Some((key, arrival))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::{NODE_COOKIE, ORIGIN_TO_NODE};

    const VIA: Endpoint = Endpoint::v4([127, 0, 0, 1], 40_000);
    const ORIGIN: Origin = Origin {
        destination: Endpoint::v4([10, 0, 0, 1], 443),
        via: VIA,
        listener: 3,
        flags: 0,
    };

    fn connection(remote: Endpoint) -> Established {
        Established {
            netns_cookie: 5,
            local: Endpoint::v4([127, 0, 0, 1], 50_000),
            remote,
            now_ns: 6,
            cookie: 7,
        }
    }

    #[test]
    fn the_destination_is_keyed_by_namespace_and_client_address() {
        let (key, arrival) = established(&connection(VIA), &ORIGIN).unwrap();
        assert_eq!((key.netns_cookie, key.client.port), (5, 50_000));
        assert_eq!(arrival.destination, ORIGIN.destination);
        assert_eq!(
            (arrival.listener, arrival.established_ns, arrival.cookie),
            (3, 6, 7)
        );
    }

    #[test]
    fn destinations_for_the_node_listener_are_keyed_without_a_namespace() {
        let origin = Origin {
            flags: ORIGIN_TO_NODE,
            ..ORIGIN
        };
        let (key, _) = established(&connection(VIA), &origin).unwrap();
        assert_eq!(key.netns_cookie, NODE_COOKIE);
    }

    #[test]
    fn a_connection_redirected_by_another_program_stores_nothing() {
        let elsewhere = Endpoint { port: 1, ..VIA };
        assert_eq!(established(&connection(elsewhere), &ORIGIN), None);
    }
}
