//! Keys and values of the redirect's maps.

use crate::endpoint::{ENDPOINT_BYTES, Endpoint};

/// Bytes of a [`RuleKey`].
pub const RULE_KEY_BYTES: usize = 20;
/// Bytes of a [`Rule`].
pub const RULE_BYTES: usize = 16;
/// Bytes of a [`ListenerKey`].
pub const LISTENER_KEY_BYTES: usize = 16;
/// Bytes of a [`Listener`].
pub const LISTENER_BYTES: usize = 44;
/// Bytes of an [`Origin`].
pub const ORIGIN_BYTES: usize = 48;
/// Bytes of an [`ArrivalKey`].
pub const ARRIVAL_KEY_BYTES: usize = 32;
/// Bytes of an [`Arrival`].
pub const ARRIVAL_BYTES: usize = 40;

/// Bits of a [`RuleKey`] before the address: generation, family and port, which must match completely.
pub const SCOPE_BITS: u32 = 32;

/// Calls to these destinations are unchanged.
pub const ACTION_LEAVE: u32 = 0;
/// Calls to these destinations are redirected to a listener.
pub const ACTION_REDIRECT: u32 = 1;

/// Calls to these destinations are unchanged, and the calling process becomes part of the tunnel: none of its later calls
/// is redirected.
pub const ACTION_JOIN: u32 = 2;

/// Flag of a rule: a call that cannot be redirected is denied. Without the flag the call is unchanged.
pub const FLAG_DENY: u32 = 1;

/// Flag of a rule with [`ACTION_JOIN`]: the caller joins only in network namespaces for which the map has the rule's listener.
/// Each namespace has its own loopback, where another program may listen on the same port.
pub const FLAG_HOME: u32 = 2;

/// Flag of an [`Origin`]: the call was redirected to the node's address, in another network namespace.
pub const ORIGIN_TO_NODE: u32 = 1;

/// Used instead of a network namespace's cookie for the listener at the node's address, which every namespace can reach,
/// and for its connections. No namespace has this cookie.
pub const NODE_COOKIE: u64 = 0;

/// Key of the longest-prefix table: generation, family, port and address of a call's destination. Port 0 is for rules
/// without a port. The table may hold rules of two generations; a call uses one of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleKey {
    generation: u8,
    family: u8,
    port: [u8; 2],
    ip: [u8; 16],
}

const _: () = assert!(size_of::<RuleKey>() == RULE_KEY_BYTES && align_of::<RuleKey>() == 1);

impl RuleKey {
    /// The key of rules of this generation with this port.
    #[inline(always)]
    #[must_use]
    pub const fn of(destination: &Endpoint, generation: u8) -> Self {
        Self {
            generation,
            // Both families fit one byte.
            family: destination.family.to_be_bytes()[1],
            port: destination.port.to_be_bytes(),
            ip: destination.ip,
        }
    }

    /// The key of rules without a port.
    #[inline(always)]
    #[must_use]
    pub const fn any_port(self) -> Self {
        Self {
            port: [0, 0],
            ..self
        }
    }

    /// The bytes stored in the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; RULE_KEY_BYTES] {
        let mut bytes = [0; RULE_KEY_BYTES];
        bytes[0] = self.generation;
        bytes[1] = self.family;
        bytes[2..4].copy_from_slice(&self.port);
        bytes[4..].copy_from_slice(&self.ip);
        bytes
    }
}

/// The action for calls to some destinations.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Length of the address prefix, without [`SCOPE_BITS`]. The longer of two matches wins; if equal, the rule with a port.
    pub prefix_bits: u32,
    /// [`ACTION_LEAVE`], [`ACTION_REDIRECT`] or [`ACTION_JOIN`]; other values act as [`ACTION_LEAVE`].
    pub action: u32,
    /// The listener's number, to look up in the caller's network namespace.
    pub listener: u32,
    /// [`FLAG_DENY`], [`FLAG_HOME`].
    pub flags: u32,
}

const _: () = assert!(size_of::<Rule>() == RULE_BYTES && align_of::<Rule>() == 4);

impl Rule {
    /// The bytes stored in the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; RULE_BYTES] {
        words([self.prefix_bits, self.action, self.listener, self.flags])
    }
}

/// A listener in one network namespace.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerKey {
    /// `SO_NETNS_COOKIE`, or [`NODE_COOKIE`].
    pub netns_cookie: u64,
    /// The number in rules.
    pub listener: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () =
    assert!(size_of::<ListenerKey>() == LISTENER_KEY_BYTES && align_of::<ListenerKey>() == 8);

impl ListenerKey {
    /// The bytes stored in the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; LISTENER_KEY_BYTES] {
        let mut bytes = [0; LISTENER_KEY_BYTES];
        bytes[..8].copy_from_slice(&self.netns_cookie.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.listener.to_ne_bytes());
        bytes[12..].copy_from_slice(&self.reserved.to_ne_bytes());
        bytes
    }
}

/// The addresses of a listener; each may be [`Endpoint::NONE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// For IPv4 destinations.
    pub v4: Endpoint,
    /// For IPv6 destinations.
    pub v6: Endpoint,
    /// `SO_MARK` of the listener's sockets, so that no other program can take the address; 0 matches any mark.
    pub mark: u32,
}

const _: () = assert!(size_of::<Listener>() == LISTENER_BYTES && align_of::<Listener>() == 4);

impl Listener {
    /// The bytes stored in the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; LISTENER_BYTES] {
        let mut bytes = [0; LISTENER_BYTES];
        bytes[..ENDPOINT_BYTES].copy_from_slice(&self.v4.to_bytes());
        bytes[ENDPOINT_BYTES..2 * ENDPOINT_BYTES].copy_from_slice(&self.v6.to_bytes());
        bytes[2 * ENDPOINT_BYTES..].copy_from_slice(&self.mark.to_ne_bytes());
        bytes
    }
}

/// The original destination of a redirected socket; kept until the socket's connection ends.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The destination from the caller, or as rewritten by an earlier eBPF program.
    pub destination: Endpoint,
    /// The listener's address.
    pub via: Endpoint,
    /// The number in rules.
    pub listener: u32,
    /// [`ORIGIN_TO_NODE`].
    pub flags: u32,
}

impl Origin {
    /// The cookie that the listener uses in its lookup: `netns_cookie`, the client's, or [`NODE_COOKIE`].
    #[inline(always)]
    #[must_use]
    pub const fn asked_under(&self, netns_cookie: u64) -> u64 {
        if self.flags & ORIGIN_TO_NODE == 0 {
            netns_cookie
        } else {
            NODE_COOKIE
        }
    }
}

const _: () = assert!(size_of::<Origin>() == ORIGIN_BYTES && align_of::<Origin>() == 4);

/// A redirected connection, as seen by its listener.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivalKey {
    /// `SO_NETNS_COOKIE` of client and listener; [`NODE_COOKIE`] at the node's address.
    pub netns_cookie: u64,
    /// The peer address that `accept` returns.
    pub client: Endpoint,
    /// Zero.
    pub reserved: u32,
}

const _: () =
    assert!(size_of::<ArrivalKey>() == ARRIVAL_KEY_BYTES && align_of::<ArrivalKey>() == 8);

impl ArrivalKey {
    /// The bytes stored in the map.
    #[must_use]
    pub fn to_bytes(self) -> [u8; ARRIVAL_KEY_BYTES] {
        let mut bytes = [0; ARRIVAL_KEY_BYTES];
        bytes[..8].copy_from_slice(&self.netns_cookie.to_ne_bytes());
        bytes[8..28].copy_from_slice(&self.client.to_bytes());
        bytes[28..].copy_from_slice(&self.reserved.to_ne_bytes());
        bytes
    }
}

/// The entry that the listener looks up for an accepted connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The client's original destination.
    pub destination: Endpoint,
    /// The number in rules.
    pub listener: u32,
    /// When the connection was established, on the monotonic clock.
    pub established_ns: u64,
    /// The client's socket.
    pub cookie: u64,
}

const _: () = assert!(size_of::<Arrival>() == ARRIVAL_BYTES && align_of::<Arrival>() == 8);

impl Arrival {
    /// Whether the entry is at most [`crate::ARRIVAL_AGE_MAX_NS`] old and may be used.
    #[must_use]
    pub const fn is_fresh(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.established_ns) <= crate::ARRIVAL_AGE_MAX_NS
    }

    /// Reads the bytes stored in the map.
    #[must_use]
    pub fn from_bytes(bytes: [u8; ARRIVAL_BYTES]) -> Self {
        let mut destination = [0; ENDPOINT_BYTES];
        destination.copy_from_slice(&bytes[..ENDPOINT_BYTES]);
        let mut listener = [0; 4];
        listener.copy_from_slice(&bytes[20..24]);
        let mut established_ns = [0; 8];
        established_ns.copy_from_slice(&bytes[24..32]);
        let mut cookie = [0; 8];
        cookie.copy_from_slice(&bytes[32..]);
        Self {
            destination: Endpoint::from_bytes(destination),
            listener: u32::from_ne_bytes(listener),
            established_ns: u64::from_ne_bytes(established_ns),
            cookie: u64::from_ne_bytes(cookie),
        }
    }
}

fn words<const N: usize, const BYTES: usize>(words: [u32; N]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_key_compares_generation_family_and_port_first_in_network_order() {
        let bytes = RuleKey::of(&Endpoint::v4([10, 0, 0, 1], 0x1234), 3).to_bytes();
        assert_eq!(bytes[..8], [3, 2, 0x12, 0x34, 10, 0, 0, 1]);
        let any = RuleKey::of(&Endpoint::v4([10, 0, 0, 1], 0x1234), 3).any_port();
        assert_eq!(any.to_bytes()[..4], [3, 2, 0, 0]);
    }

    #[test]
    fn arrival_fields_are_read_at_their_c_offsets() {
        // Offsets of the C layout.
        let mut bytes = [0; ARRIVAL_BYTES];
        bytes[..20].copy_from_slice(&Endpoint::v4([1, 2, 3, 4], 80).to_bytes());
        bytes[core::mem::offset_of!(Arrival, listener)] = 7;
        bytes[core::mem::offset_of!(Arrival, established_ns)] = 8;
        bytes[core::mem::offset_of!(Arrival, cookie)] = 9;
        let arrival = Arrival::from_bytes(bytes);
        assert_eq!(arrival.destination, Endpoint::v4([1, 2, 3, 4], 80));
        let numbers = (arrival.listener, arrival.established_ns, arrival.cookie);
        #[cfg(target_endian = "little")]
        assert_eq!(numbers, (7, 8, 9));
    }

    #[test]
    fn an_arrival_is_fresh_for_ten_seconds() {
        let arrival = Arrival::from_bytes([0; ARRIVAL_BYTES]);
        assert!(arrival.is_fresh(10_000_000_000));
        assert!(!arrival.is_fresh(10_000_000_001));
    }

    #[test]
    fn keys_and_values_are_written_in_the_order_of_their_fields() {
        let key = ListenerKey {
            netns_cookie: u64::MAX,
            listener: 0,
            reserved: 0,
        };
        assert_eq!(
            key.to_bytes()[..9],
            [255, 255, 255, 255, 255, 255, 255, 255, 0]
        );
        let client = Endpoint::v4([9, 9, 9, 9], 9);
        let arrival = ArrivalKey {
            netns_cookie: 0,
            client,
            reserved: 0,
        };
        assert_eq!(arrival.to_bytes()[8..28], client.to_bytes());
        let listener = Listener {
            v4: client,
            v6: Endpoint::NONE,
            mark: 5,
        };
        assert_eq!(listener.to_bytes()[..20], client.to_bytes());
        assert_eq!(listener.to_bytes()[40..], 5_u32.to_ne_bytes());
        let rule = Rule {
            prefix_bits: 1,
            action: 2,
            listener: 3,
            flags: 4,
        };
        let mut expected = [0; RULE_BYTES];
        for (at, number) in [1_u32, 2, 3, 4].into_iter().enumerate() {
            expected[at * 4..at * 4 + 4].copy_from_slice(&number.to_ne_bytes());
        }
        assert_eq!(rule.to_bytes(), expected);
    }
}
