//! Options of `adit node-interface`.

use std::net::IpAddr;

/// What to do with the interface of an address.
#[derive(clap::Subcommand, Clone, PartialEq, Eq, Debug)]
pub enum NodeInterfaceOptions {
    /// Make the interface, unless it is there; needs CAP_NET_ADMIN
    Add(NodeInterfaceAddress),
    /// Remove the interface, if it is there; an interface that adit did not make stays
    Remove(NodeInterfaceAddress),
}

/// The address of both commands.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct NodeInterfaceAddress {
    /// The address, IPv4 or IPv6, without a prefix length
    #[arg(value_name = "ADDRESS", value_parser = address)]
    pub address: IpAddr,
}

/// An address that a node may get for its own use.
fn address(text: &str) -> Result<IpAddr, String> {
    const WRITE: &str = "write an IP address outside of all networks that the node reaches, such as 192.0.2.10 or fd00::10";
    let address: IpAddr = text.parse().map_err(|_no_address| WRITE.to_owned())?;
    let address = address.to_canonical();
    let is = match address {
        _ if address.is_unspecified() => "the unspecified address",
        _ if address.is_loopback() => "a loopback address, which pods have themselves",
        _ if address.is_multicast() => "a multicast address",
        IpAddr::V4(v4) if v4.is_broadcast() => "the broadcast address",
        IpAddr::V4(v4) if v4.is_link_local() => LINK_LOCAL,
        IpAddr::V6(v6) if v6.is_unicast_link_local() => LINK_LOCAL,
        IpAddr::V4(_) | IpAddr::V6(_) => return Ok(address),
    };
    Err(format!("it is {is}: {WRITE}"))
}

const LINK_LOCAL: &str = "a link-local address, which no endpoint of a Service may have";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_one_spelling() {
        for (text, read) in [
            ("192.0.2.10", "192.0.2.10"),
            ("::ffff:192.0.2.10", "192.0.2.10"),
            ("FD00:0::10", "fd00::10"),
        ] {
            assert_eq!(address(text).unwrap().to_string(), read);
        }
    }

    #[test]
    fn addresses_that_no_node_may_get_are_refused_with_the_reason() {
        for (text, why) in [
            ("", "write an IP address"),
            ("node-1", "write an IP address"),
            ("192.0.2.10/32", "write an IP address"),
            ("[fd00::1]", "write an IP address"),
            ("fe80::1%eth0", "write an IP address"),
            ("0.0.0.0", "unspecified"),
            ("::", "unspecified"),
            ("127.0.0.1", "loopback"),
            ("::1", "loopback"),
            ("::ffff:127.0.0.1", "loopback"),
            ("224.0.0.1", "multicast"),
            ("ff02::1", "multicast"),
            ("255.255.255.255", "broadcast"),
            ("169.254.20.10", "link-local"),
            ("fe80::1", "link-local"),
        ] {
            let error = address(text).unwrap_err();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }
}
