//! A listening socket that serves this host and named networks only: other sources get no answer to their SYN.
//!
//! A socket filter (classic BPF) needs no privilege, unlike a rule of a packet filter, and goes with the socket. It sees packets
//! before the handshake, so a stranger learns not even that something listens. A check after accept(2) would answer first.

use std::io;
use std::os::fd::AsFd;

use ipnet::IpNet;
use socket2::{SockFilter, SockRef};

// Instructions of linux/bpf_common.h, and offsets of linux/filter.h.
const LOAD_WORD: u16 = 0x20;
const LOAD_BYTE: u16 = 0x30;
const AND: u16 = 0x54;
const SHIFT_RIGHT: u16 = 0x74;
const JUMP: u16 = 0x05;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
/// Number of the interface on which the packet arrived.
const INTERFACE: u32 = 0xffff_f000 + 8;
/// The IP header.
const IP: u32 = 0xfff0_0000;
/// Offsets of the source in the headers of IPv4 and IPv6.
const SOURCE_V4: u32 = IP + 12;
const SOURCE_V6: u32 = IP + 8;
/// Loopback has this number in every network namespace. What a host sends to its own addresses arrives there.
const LOOPBACK: u32 = 1;
const TAKE: SockFilter = SockFilter::new(RETURN, 0, 0, u32::MAX);
const DROP: SockFilter = SockFilter::new(RETURN, 0, 0, 0);

/// Lets a bound socket serve connections of this host and of these networks only. Accepted sockets keep the filter.
///
/// # Errors
/// The kernel knows no socket filters, or its `net.core.optmem_max` is too small.
pub fn attach(socket: &impl AsFd, networks: &[IpNet]) -> io::Result<()> {
    SockRef::from(socket).attach_filter(&program(networks))
}

fn program(networks: &[IpNet]) -> Vec<SockFilter> {
    let blocks = |v4: bool| {
        let networks = networks
            .iter()
            .filter(move |net| net.addr().is_ipv4() == v4);
        networks.flat_map(block).chain([DROP])
    };
    let v4: Vec<SockFilter> = blocks(true).collect();
    let past_v4 = u32::try_from(v4.len()).unwrap_or(u32::MAX);
    let mut program = vec![
        SockFilter::new(LOAD_WORD, 0, 0, INTERFACE),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, LOOPBACK),
        TAKE,
        // The version of the packet, and not the family of the socket: one of IPv6 may serve both.
        SockFilter::new(LOAD_BYTE, 0, 0, IP),
        SockFilter::new(SHIFT_RIGHT, 0, 0, 4),
        SockFilter::new(JUMP_IF_EQUAL, 1, 0, 4),
        SockFilter::new(JUMP, 0, 0, past_v4),
    ];
    program.extend(v4);
    program.extend(blocks(false));
    program
}

/// Takes a packet from this network, and leads others to the next block.
fn block(network: &IpNet) -> Vec<SockFilter> {
    let words = words(network);
    let mut block = Vec::new();
    for (position, (offset, mask, value)) in words.iter().enumerate() {
        // Behind each word are three instructions for each further one, and the last that takes the packet.
        let rest = 3 * (words.len() - 1 - position) + 1;
        let next_block = u8::try_from(rest).unwrap_or(u8::MAX);
        block.extend([
            SockFilter::new(LOAD_WORD, 0, 0, *offset),
            SockFilter::new(AND, 0, 0, *mask),
            SockFilter::new(JUMP_IF_EQUAL, 0, next_block, *value),
        ]);
    }
    block.push(TAKE);
    block
}

/// Offset, mask and value of each word of the source address that a network is known by.
fn words(network: &IpNet) -> Vec<(u32, u32, u32)> {
    let (first, mask, value) = match network.trunc() {
        IpNet::V4(net) => (
            SOURCE_V4,
            u128::from(net.netmask().to_bits()) << 96,
            u128::from(net.addr().to_bits()) << 96,
        ),
        IpNet::V6(net) => (SOURCE_V6, net.netmask().to_bits(), net.addr().to_bits()),
    };
    (0..4)
        .map(|word| {
            let shift = 96 - 32 * word;
            let part = |bits: u128| u32::try_from((bits >> shift) & 0xffff_ffff).unwrap_or(0);
            (first + 4 * word, part(mask), part(value))
        })
        .take_while(|(_, mask, _)| *mask != 0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_network_is_known_by_the_words_of_its_prefix() {
        let words_of = |text: &str| words(&text.parse().unwrap());
        assert_eq!(words_of("0.0.0.0/0"), []);
        assert_eq!(
            words_of("10.244.7.9/20"),
            [(SOURCE_V4, 0xffff_f000, 0x0af4_0000)]
        );
        assert_eq!(
            words_of("fd00:1:2::/40"),
            [
                (SOURCE_V6, u32::MAX, 0xfd00_0001),
                (SOURCE_V6 + 4, 0xff00_0000, 0)
            ]
        );
        assert_eq!(words_of("::1/128").len(), 4);
    }

    /// The kernel checks every jump of the program. Whom it drops is tried in `kernel`, in network namespaces.
    #[test]
    fn the_kernel_takes_the_longest_filter_and_this_host_is_served() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let network: IpNet = "fd00::1/128".parse().unwrap();
        let networks = [network; adit_config::limits::TARGET_SOURCES_MAX];
        attach(&listener, &networks).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_accepted, peer) = listener.accept().unwrap();
        assert_eq!(peer, client.local_addr().unwrap());
    }
}
