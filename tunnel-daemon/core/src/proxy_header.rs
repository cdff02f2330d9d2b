//! The PROXY protocol's binary header (version 2): tells a target the client's address.
//!
//! HAProxy's specification, section 2.2: signature, version and command, family, length, addresses, then fields of type,
//! length and value. Types 0xE0 to 0xEF are for applications.

use std::net::{IpAddr, SocketAddr};

use bytes::{BufMut as _, Bytes, BytesMut};

use crate::text::beginning;

const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, command PROXY: the connection is relayed.
const PROXY: u8 = 0x21;
const UNSPECIFIED: u8 = 0x00;
const TCP4: u8 = 0x11;
const TCP6: u8 = 0x21;
/// Field: the id of the agent that opened the tunnel.
pub const AGENT_ID: u8 = 0xE0;
/// Longest value of a field; longer values are cut.
const VALUE_BYTES_MAX: usize = 1024;

/// Encodes the header. `addresses`: source and destination of the client's connection, if known. In mixed families the IPv4
/// address is written as IPv4-mapped.
#[must_use]
pub fn header_v2(addresses: Option<(SocketAddr, SocketAddr)>, agent: &str) -> Bytes {
    let mut body = BytesMut::new();
    let family = match addresses {
        None => UNSPECIFIED,
        Some((source, destination)) => put_addresses(&mut body, source, destination),
    };
    let value = beginning(agent, VALUE_BYTES_MAX);
    body.put_u8(AGENT_ID);
    body.put_u16(u16::try_from(value.len()).unwrap_or(0));
    body.put_slice(value.as_bytes());
    let mut header = BytesMut::with_capacity(16 + body.len());
    header.put_slice(&SIGNATURE);
    header.put_u8(PROXY);
    header.put_u8(family);
    header.put_u16(u16::try_from(body.len()).unwrap_or(0));
    header.put_slice(&body);
    header.freeze()
}

fn put_addresses(body: &mut BytesMut, source: SocketAddr, destination: SocketAddr) -> u8 {
    let family = match (source.ip().to_canonical(), destination.ip().to_canonical()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            body.put_slice(&from.octets());
            body.put_slice(&to.octets());
            TCP4
        }
        (from, to) => {
            body.put_slice(&mapped(from));
            body.put_slice(&mapped(to));
            TCP6
        }
    };
    body.put_u16(source.port());
    body.put_u16(destination.port());
    family
}

fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_those_of_the_specification() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let v4 = header_v2(Some((at("10.1.2.3:4660"), at("127.0.0.1:6443"))), "n1");
        let mut expected = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x11".to_vec();
        expected.extend([10, 1, 2, 3, 127, 0, 0, 1, 0x12, 0x34, 0x19, 0x2B]);
        expected.extend([AGENT_ID, 0, 2, b'n', b'1']);
        assert_eq!(v4, expected);
        let v6 = header_v2(Some((at("[fd00::1]:1"), at("[::ffff:10.0.0.1]:2"))), "");
        assert_eq!((v6[13], v6.len()), (TCP6, 16 + 36 + 3));
        assert_eq!(
            v6[32..48],
            "::ffff:10.0.0.1"
                .parse::<std::net::Ipv6Addr>()
                .unwrap()
                .octets()
        );
        let unknown = header_v2(None, "n1");
        assert_eq!(
            unknown[12..],
            [PROXY, UNSPECIFIED, 0, 5, AGENT_ID, 0, 2, b'n', b'1']
        );
    }

    #[test]
    fn long_ids_are_cut_between_characters() {
        let header = header_v2(None, &"ä".repeat(40_000));
        let length = u16::from_be_bytes([header[17], header[18]]);
        assert_eq!((length, header.len()), (1024, 16 + 3 + 1024));
    }
}
