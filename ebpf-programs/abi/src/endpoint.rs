//! An address and a port, as stored in maps.

/// `AF_INET`.
pub const AF_INET: u16 = 2;
/// `AF_INET6`.
pub const AF_INET6: u16 = 10;
/// Bytes of an [`Endpoint`].
pub const ENDPOINT_BYTES: usize = 20;

/// An address and a port.
///
/// IPv4 is always stored as IPv4: in the first four bytes, followed by zeros. This includes IPv4-mapped addresses of
/// IPv6 sockets, so one rule serves both families.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// The address in network order.
    pub ip: [u8; 16],
    /// The port in host order.
    pub port: u16,
    /// [`AF_INET`], [`AF_INET6`], or 0: no endpoint.
    pub family: u16,
}

const _: () = assert!(size_of::<Endpoint>() == ENDPOINT_BYTES && align_of::<Endpoint>() == 2);

impl Endpoint {
    /// No endpoint.
    pub const NONE: Self = Self {
        ip: [0; 16],
        port: 0,
        family: 0,
    };

    /// From an IPv4 address as a word in network order, as in the kernel's contexts.
    #[inline(always)]
    #[must_use]
    pub const fn from_word(word: u32, port: u16) -> Self {
        let [a, b, c, d] = word.to_ne_bytes();
        Self::v4([a, b, c, d], port)
    }

    /// From an IPv6 address as words in network order; IPv4-mapped addresses become IPv4.
    #[inline(always)]
    #[must_use]
    pub const fn from_words(words: [u32; 4], port: u16) -> Self {
        if is_mapped(words) {
            return Self::from_word(words[3], port);
        }
        let [a, b, c, d] = words[0].to_ne_bytes();
        let [e, f, g, h] = words[1].to_ne_bytes();
        let [i, j, k, l] = words[2].to_ne_bytes();
        let [m, n, o, p] = words[3].to_ne_bytes();
        Self {
            ip: [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p],
            port,
            family: AF_INET6,
        }
    }

    /// An IPv4 endpoint.
    #[inline(always)]
    #[must_use]
    pub const fn v4(ip: [u8; 4], port: u16) -> Self {
        let [a, b, c, d] = ip;
        Self {
            ip: [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            port,
            family: AF_INET,
        }
    }

    /// An IPv6 endpoint, not IPv4-mapped.
    #[inline(always)]
    #[must_use]
    pub const fn v6(ip: [u8; 16], port: u16) -> Self {
        Self {
            ip,
            port,
            family: AF_INET6,
        }
    }

    /// The address word for a context of an IPv4 socket. Meaningless for IPv6.
    #[inline(always)]
    #[must_use]
    pub const fn word(&self) -> u32 {
        u32::from_ne_bytes([self.ip[0], self.ip[1], self.ip[2], self.ip[3]])
    }

    /// The address words for a context of an IPv6 socket; IPv4 becomes IPv4-mapped.
    #[inline(always)]
    #[must_use]
    pub const fn words(&self) -> [u32; 4] {
        if self.family == AF_INET {
            return [0, 0, MAPPED, self.word()];
        }
        let ip = &self.ip;
        [
            u32::from_ne_bytes([ip[0], ip[1], ip[2], ip[3]]),
            u32::from_ne_bytes([ip[4], ip[5], ip[6], ip[7]]),
            u32::from_ne_bytes([ip[8], ip[9], ip[10], ip[11]]),
            u32::from_ne_bytes([ip[12], ip[13], ip[14], ip[15]]),
        ]
    }

    /// Whether this is [`Self::NONE`].
    #[inline(always)]
    #[must_use]
    pub const fn is_none(&self) -> bool {
        self.family == 0
    }

    /// The bytes stored in maps.
    #[must_use]
    pub fn to_bytes(self) -> [u8; ENDPOINT_BYTES] {
        let mut bytes = [0; ENDPOINT_BYTES];
        bytes[..16].copy_from_slice(&self.ip);
        bytes[16..18].copy_from_slice(&self.port.to_ne_bytes());
        bytes[18..].copy_from_slice(&self.family.to_ne_bytes());
        bytes
    }

    /// Reads the bytes stored in maps.
    #[must_use]
    pub fn from_bytes(bytes: [u8; ENDPOINT_BYTES]) -> Self {
        let mut ip = [0; 16];
        ip.copy_from_slice(&bytes[..16]);
        Self {
            ip,
            port: u16::from_ne_bytes([bytes[16], bytes[17]]),
            family: u16::from_ne_bytes([bytes[18], bytes[19]]),
        }
    }
}

/// The third word of `::ffff:0:0/96` in network order.
const MAPPED: u32 = 0x0000_ffff_u32.to_be();

#[inline(always)]
const fn is_mapped(words: [u32; 4]) -> bool {
    words[0] == 0 && words[1] == 0 && words[2] == MAPPED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_mapped_address_is_read_as_ipv4_and_written_mapped() {
        let words = [0, 0, MAPPED, u32::from_ne_bytes([10, 1, 2, 3])];
        let endpoint = Endpoint::from_words(words, 443);
        assert_eq!(endpoint, Endpoint::v4([10, 1, 2, 3], 443));
        assert_eq!(endpoint.words(), words);
        assert_eq!(endpoint.word().to_ne_bytes(), [10, 1, 2, 3]);
    }

    #[test]
    fn ipv6_words_are_the_address_in_network_order() {
        let ip: [u8; 16] = core::array::from_fn(|at| u8::try_from(at + 1).unwrap());
        let endpoint = Endpoint::v6(ip, 1);
        assert_eq!(Endpoint::from_words(endpoint.words(), 1), endpoint);
        // `::1.2.3.4` is not mapped.
        let compatible = [0, 0, 0, u32::from_ne_bytes([1, 2, 3, 4])];
        assert_eq!(Endpoint::from_words(compatible, 1).family, AF_INET6);
    }

    #[test]
    fn endpoint_bytes_round_trip() {
        let endpoint = Endpoint::v6([7; 16], 65_535);
        assert_eq!(Endpoint::from_bytes(endpoint.to_bytes()), endpoint);
    }
}
