//! The result of `getpeername` for a redirected connection.

use crate::endpoint::Endpoint;
use crate::tables::Origin;

/// The original destination, if `shown` is the listener. `None` leaves the result unchanged: the peer is not the
/// listener of the redirect.
#[inline(always)]
#[must_use]
pub fn shown_peer(shown: &Endpoint, origin: &Origin) -> Option<Endpoint> {
    (*shown == origin.via).then_some(origin.destination)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_listener_is_replaced_by_the_destination() {
        let via = Endpoint::v4([127, 0, 0, 1], 1);
        let destination = Endpoint::v4([10, 0, 0, 1], 443);
        let origin = Origin {
            destination,
            via,
            listener: 0,
            flags: 0,
        };
        assert_eq!(shown_peer(&via, &origin), Some(destination));
        assert_eq!(shown_peer(&Endpoint { port: 2, ..via }, &origin), None);
    }
}
