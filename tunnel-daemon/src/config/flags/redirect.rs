//! Flags of the transparent frontend: what is captured, and where captured connections may come in otherwise.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;

use crate::config::address::BindAddress;
use crate::config::plan::{OnFailure, RedirectPlan, RedirectTarget, TransparentPlan};

/// Connections of programs that know nothing of a proxy.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Transparent")]
pub(super) struct TransparentFlags {
    /// Send connections of a cgroup's processes to these destinations through the tunnel: CIDR or address, with :PORT or
    /// without, IPv6 with a port as [CIDR]:PORT; needs eBPF; repeatable
    #[arg(long = "redirect", value_name = "TARGET", value_parser = target, requires = "redirect_cgroup")]
    redirect: Vec<RedirectTarget>,
    /// Leave these destinations alone; the longest prefix decides; repeatable
    #[arg(long, value_name = "TARGET", value_parser = target, requires = "redirect")]
    redirect_exclude: Vec<RedirectTarget>,
    /// The cgroup whose processes are redirected: a folder of the cgroup2 file system
    #[arg(long, value_name = "PATH", requires = "redirect")]
    redirect_cgroup: Option<PathBuf>,
    /// What becomes of these connections when no server takes them: open lets them go where they go; closed denies them, also
    /// after this process has ended, and needs bpffs
    #[arg(
        long,
        value_name = "MODE",
        default_value = "open",
        requires = "redirect"
    )]
    redirect_on_failure: OnFailure,
    /// Listen here for connections that REDIRECT or TPROXY rules of a packet filter send, HOST:PORT
    #[arg(long, value_name = "ADDR", value_parser = BindAddress::parse)]
    transparent_bind_address: Option<BindAddress>,
}

impl TransparentFlags {
    pub(super) fn plan(self) -> TransparentPlan {
        TransparentPlan {
            redirect: self.redirect_cgroup.map(|cgroup| RedirectPlan {
                targets: self.redirect,
                excluded: self.redirect_exclude,
                on_failure: self.redirect_on_failure,
                cgroup,
            }),
            bind: self.transparent_bind_address,
        }
    }
}

/// `10.0.0.0/8`, `10.1.2.3:443`, `10.0.0.0/8:9090`, `fd00::/64`, `[fd00::/64]:443`.
fn target(text: &str) -> Result<RedirectTarget, String> {
    let bad = |what: &str| {
        format!(
            "{what} in {text:?}: write CIDR or ADDRESS, with :PORT or without, such as 10.0.0.0/8:9090 or [fd00::/64]:443"
        )
    };
    let (network, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (network, tail) = rest.split_once(']').ok_or_else(|| bad("no ]"))?;
            match tail {
                "" => (network, None),
                tail => (
                    network,
                    Some(tail.strip_prefix(':').ok_or_else(|| bad("no : behind ]"))?),
                ),
            }
        }
        // More than one colon: an IPv6 address without a port.
        None if text.matches(':').count() > 1 => (text, None),
        None => match text.split_once(':') {
            Some((network, port)) => (network, Some(port)),
            None => (text, None),
        },
    };
    let port = match port {
        None => None,
        Some(port) => match port.parse() {
            Ok(0) | Err(_) => return Err(bad(&format!("{port:?} is no port from 1 to 65535"))),
            Ok(port) => Some(port),
        },
    };
    let parsed: Result<IpNet, _> = match network.parse::<IpAddr>() {
        Ok(address) => Ok(IpNet::from(address)),
        Err(_not_an_address) => network.parse(),
    };
    let parsed = parsed.map_err(|_neither| bad(&format!("{network:?} is no network")))?;
    let whole = parsed.trunc();
    if whole != parsed {
        return Err(bad(&format!(
            "bits are set behind the prefix of {network}, which is {whole}"
        )));
    }
    Ok(RedirectTarget {
        network: whole,
        port,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_come_with_a_port_or_without() {
        for (text, network, port) in [
            ("10.0.0.0/8", "10.0.0.0/8", None),
            ("10.0.0.0/8:9090", "10.0.0.0/8", Some(9090)),
            ("10.1.2.3", "10.1.2.3/32", None),
            ("10.1.2.3:443", "10.1.2.3/32", Some(443)),
            ("fd00::/64", "fd00::/64", None),
            ("fd00::1", "fd00::1/128", None),
            ("[fd00::/64]:443", "fd00::/64", Some(443)),
            ("[fd00::1]", "fd00::1/128", None),
            ("0.0.0.0/0", "0.0.0.0/0", None),
        ] {
            let expected = RedirectTarget {
                network: network.parse().unwrap(),
                port,
            };
            assert_eq!(target(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_network_is_named_with_the_form_wanted() {
        for text in [
            "",
            "example.com",
            "10.0.0.0/33",
            "10.0.0.1/8",
            "10.0.0.0/8:",
            "10.0.0.0/8:0",
            "[fd00::1",
            "[fd00::1]443",
            "10.0.0.0/8:70000",
        ] {
            let error = target(text).unwrap_err();
            assert!(error.contains("10.0.0.0/8:9090"), "{text}: {error}");
        }
    }
}
