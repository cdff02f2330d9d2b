//! Headers of the PROXY protocol: what a server writes to targets (version 2), and what a balancer writes to it.
//!
//! HAProxy's specification. Section 2.1, version 1: a line of text. Section 2.2, version 2: signature, version and command, family,
//! length, addresses, then fields of type, length and value. Types 0xE0 to 0xEF are for applications.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

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

/// Bytes that tell the versions apart; every header is longer.
pub const START_BYTES: usize = SIGNATURE.len();
/// Longest line of version 1, with its end.
const LINE_BYTES_MAX: usize = 107;
/// Longest body of version 2: addresses, and fields such as a certificate's names.
const BODY_BYTES_MAX: usize = 2048;
/// Version 2, command LOCAL: the balancer's own connection, as for a health check.
const LOCAL: u8 = 0x20;

/// Why a connection is not one of a balancer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeaderError {
    /// It begins with something else.
    #[error(
        "there is no PROXY header: let the balancer send one, or take its address out of --proxy-protocol-from"
    )]
    Missing,
    /// It does not end in time, or its length is beyond reason.
    #[error("its PROXY header is too long")]
    TooLong,
    /// Another version or command.
    #[error("its PROXY header has an unknown version or command")]
    Version,
    /// Datagrams, or a family that does not exist.
    #[error("its PROXY header is not of a TCP connection")]
    Family,
    /// The addresses are missing or no addresses.
    #[error("its PROXY header has malformed addresses")]
    Addresses,
}

/// What is known after some bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Header {
    /// At least so many more bytes belong to it.
    Needs(usize),
    /// It is whole: the client's address. `None`: the connection's own address counts (LOCAL, UNKNOWN, UNSPEC, UNIX).
    Whole(Option<SocketAddr>),
}

/// Reads a header of either version, from its first byte on. The caller reads exactly the bytes that it needs, since others follow.
///
/// # Errors
/// See [`HeaderError`].
pub fn parse(read: &[u8]) -> Result<Header, HeaderError> {
    let Some((start, rest)) = read.split_at_checked(START_BYTES) else {
        return Ok(Header::Needs(START_BYTES - read.len()));
    };
    if start == SIGNATURE {
        return parse_v2(rest);
    }
    if !start.starts_with(b"PROXY ") {
        return Err(HeaderError::Missing);
    }
    let Some(line) = read.strip_suffix(b"\r\n") else {
        let needed = if read.ends_with(b"\r") { 1 } else { 2 };
        return match read.len() + needed {
            ..=LINE_BYTES_MAX => Ok(Header::Needs(needed)),
            _ => Err(HeaderError::TooLong),
        };
    };
    let line = std::str::from_utf8(line).map_err(|_text| HeaderError::Addresses)?;
    parse_line(line).map(Header::Whole)
}

fn parse_line(line: &str) -> Result<Option<SocketAddr>, HeaderError> {
    let words: Vec<&str> = line.split(' ').collect();
    let [_proxy, family, rest @ ..] = &words[..] else {
        return Err(HeaderError::Family);
    };
    let ip = |text: &str| -> Option<IpAddr> {
        match *family {
            "TCP4" => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
            _ => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        }
    };
    let port = |text: &str| -> Option<u16> {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let is_short = text == "0" || !text.starts_with('0');
        text.parse().ok().filter(|_| is_number && is_short)
    };
    match (*family, rest) {
        // Whatever follows is to be ignored.
        ("UNKNOWN", _) => Ok(None),
        ("TCP4" | "TCP6", [from, to, from_port, to_port]) => {
            let to = ip(to).zip(port(to_port));
            let from = ip(from).zip(port(from_port)).filter(|_| to.is_some());
            from.map(|from| Some(SocketAddr::from(from)))
                .ok_or(HeaderError::Addresses)
        }
        ("TCP4" | "TCP6", _) => Err(HeaderError::Addresses),
        _ => Err(HeaderError::Family),
    }
}

fn parse_v2(rest: &[u8]) -> Result<Header, HeaderError> {
    let Some(([command, family, length @ ..], body)) = rest.split_first_chunk::<4>() else {
        return Ok(Header::Needs(4 - rest.len()));
    };
    let length = usize::from(u16::from_be_bytes(*length));
    let is_local = match *command {
        LOCAL => true,
        PROXY => false,
        _ => return Err(HeaderError::Version),
    };
    if length > BODY_BYTES_MAX {
        return Err(HeaderError::TooLong);
    }
    if body.len() < length {
        return Ok(Header::Needs(length - body.len()));
    }
    // The addresses, both, then both ports.
    let from = match *family {
        _ if is_local => None,
        UNSPECIFIED | 0x31 => None,
        TCP4 => {
            let (ip, rest) = body
                .split_first_chunk::<4>()
                .ok_or(HeaderError::Addresses)?;
            Some((
                IpAddr::from(*ip),
                rest.get(4..8).ok_or(HeaderError::Addresses)?,
            ))
        }
        TCP6 => {
            let (ip, rest) = body
                .split_first_chunk::<16>()
                .ok_or(HeaderError::Addresses)?;
            Some((
                IpAddr::from(*ip),
                rest.get(16..20).ok_or(HeaderError::Addresses)?,
            ))
        }
        _ => return Err(HeaderError::Family),
    };
    Ok(Header::Whole(from.map(|(ip, ports)| {
        let port = ports
            .first_chunk()
            .map_or(0, |port| u16::from_be_bytes(*port));
        SocketAddr::new(ip.to_canonical(), port)
    })))
}

/// For the fuzz target and the test that replays its corpus.
///
/// # Panics
/// When a header asks for no byte or for too many, or is whole before a byte that it asked for has come.
#[doc(hidden)]
pub fn fuzz_entry(data: &[u8]) {
    let mut end = 0;
    while let Some(read) = data.get(..end) {
        match parse(read) {
            Ok(Header::Needs(more)) => {
                for cut in end..(end + more).min(data.len()) {
                    let early = data.get(..cut).map(parse);
                    assert!(!matches!(early, Some(Ok(Header::Whole(_)))));
                }
                assert!(more > 0 && end + more <= START_BYTES + 4 + BODY_BYTES_MAX);
                end += more;
            }
            Ok(Header::Whole(_)) | Err(_) => break,
        }
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
            "::ffff:10.0.0.1".parse::<Ipv6Addr>().unwrap().octets()
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

    /// What comes of bytes that arrive one by one, and how many of them belong to the header.
    fn read(bytes: &[u8]) -> (Result<Option<SocketAddr>, HeaderError>, usize) {
        let mut end = 0;
        loop {
            match parse(&bytes[..end.min(bytes.len())]) {
                Ok(Header::Needs(more)) if end + more <= bytes.len() => end += more,
                Ok(Header::Needs(_)) => panic!("{end} of {} bytes", bytes.len()),
                Ok(Header::Whole(client)) => return (Ok(client), end),
                Err(error) => return (Err(error), end),
            }
        }
    }

    #[test]
    fn both_versions_give_the_clients_address_and_not_a_byte_more_is_read() {
        let at = |text: &str| Some(text.parse::<SocketAddr>().unwrap());
        let to = at("10.0.0.9:8091").unwrap();
        let mut v2 = header_v2(Some((at("10.1.2.3:4660").unwrap(), to)), "n1").to_vec();
        let length = v2.len();
        v2.extend(b"hello");
        assert_eq!(read(&v2), (Ok(at("10.1.2.3:4660")), length));
        let v6 = header_v2(
            Some((at("[fd00::1]:1").unwrap(), at("[fd00::2]:2").unwrap())),
            "",
        );
        assert_eq!(read(&v6).0, Ok(at("[fd00::1]:1")));
        for (line, client) in [
            (
                "PROXY TCP4 192.0.2.1 10.0.0.9 56324 8091",
                at("192.0.2.1:56324"),
            ),
            ("PROXY TCP6 fd00::1 fd00::2 1 65535", at("[fd00::1]:1")),
            ("PROXY UNKNOWN", None),
            ("PROXY UNKNOWN ffff:f::1 x 1 2", None),
        ] {
            let bytes = [line.as_bytes(), b"\r\n\x16\x03\x01"].concat();
            assert_eq!(read(&bytes), (Ok(client), line.len() + 2), "{line}");
        }
    }

    #[test]
    fn the_balancers_own_connections_and_unix_clients_have_the_connections_address() {
        let whole = |command, family, body: &[u8]| {
            let mut bytes = SIGNATURE.to_vec();
            bytes.extend([command, family]);
            bytes.extend(u16::try_from(body.len()).unwrap().to_be_bytes());
            bytes.extend(body);
            read(&bytes).0
        };
        assert_eq!(whole(LOCAL, UNSPECIFIED, b""), Ok(None));
        assert_eq!(whole(LOCAL, TCP4, &[1; 12]), Ok(None));
        assert_eq!(whole(PROXY, UNSPECIFIED, &[0; 7]), Ok(None));
        assert_eq!(whole(PROXY, 0x31, &[b'/'; 216]), Ok(None));
        for (command, family, body, error) in [
            (PROXY, TCP4, &[0; 7][..], HeaderError::Addresses),
            (PROXY, TCP6, &[0; 35], HeaderError::Addresses),
            (PROXY, 0x12, &[0; 12], HeaderError::Family),
            (PROXY, 0x41, &[0; 12], HeaderError::Family),
            (0x22, TCP4, &[0; 12], HeaderError::Version),
            (0x11, TCP4, &[0; 12], HeaderError::Version),
            (PROXY, TCP4, &[0; 2049], HeaderError::TooLong),
        ] {
            assert_eq!(
                whole(command, family, body),
                Err(error),
                "{command} {family}"
            );
        }
    }

    #[test]
    fn what_is_no_header_is_told_apart_from_a_wrong_one() {
        let long = format!("PROXY UNKNOWN {}", "x".repeat(200));
        for (bytes, error) in [
            (
                &b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\0"[..],
                HeaderError::Missing,
            ),
            (b"GET / HTTP/1.1\r\n", HeaderError::Missing),
            (b"proxy tcp4 1.2.3.4 5.6.7.8 1 2\r\n", HeaderError::Missing),
            (b"PROXY TCP4 1.2.3.4 5.6.7.8 1\r\n", HeaderError::Addresses),
            (
                b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2 3\r\n",
                HeaderError::Addresses,
            ),
            (
                b"PROXY TCP4  1.2.3.4 5.6.7.8 1 2\r\n",
                HeaderError::Addresses,
            ),
            (
                b"PROXY TCP4 fd00::1 5.6.7.8 1 2\r\n",
                HeaderError::Addresses,
            ),
            (
                b"PROXY TCP4 1.2.3.4 5.6.7.8 01 2\r\n",
                HeaderError::Addresses,
            ),
            (
                b"PROXY TCP4 1.2.3.4 5.6.7.8 +1 2\r\n",
                HeaderError::Addresses,
            ),
            (
                b"PROXY TCP4 1.2.3.4 5.6.7.8 1 65536\r\n",
                HeaderError::Addresses,
            ),
            (b"PROXY UDP4 1.2.3.4 5.6.7.8 1 2\r\n", HeaderError::Family),
            (long.as_bytes(), HeaderError::TooLong),
        ] {
            assert_eq!(read(bytes).0, Err(error), "{}", bytes.escape_ascii());
        }
    }
}
