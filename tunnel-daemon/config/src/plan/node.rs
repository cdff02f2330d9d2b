//! Node to control plane: an agent's listeners and redirect, and the destinations that a server dials for agents.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use adit_core::target::{Host, Target};
use ipnet::IpNet;

use super::netns::NetnsPlan;
use super::rule_file::RuleFile;
use crate::address::BindAddress;
use crate::error::{ConfigError, bail};
use crate::limits;

/// A listener of an agent: each of its connections goes to one destination, which the server dials.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetListener {
    /// The listening address.
    pub bind: BindAddress,
    /// `host:port`, in the spelling sent to servers.
    pub destination: String,
}

impl TargetListener {
    /// Reads `LOCAL_PORT:DEST_HOST:DEST_PORT`; `bind` is the address for the local port.
    ///
    /// # Errors
    /// The error in the text, and the expected form.
    pub fn parse(text: &str, bind: &str) -> Result<Self, ConfigError> {
        let bad = |why: &str| {
            ConfigError::new(format!(
                "--target {text:?}: {why}; write LOCAL_PORT:DEST_HOST:DEST_PORT, such as 6443:kubernetes.example:6443 or \
                 6443:[fd00::1]:6443"
            ))
        };
        let (port, destination) = text
            .split_once(':')
            .ok_or_else(|| bad("it has no destination"))?;
        let port: u16 = port
            .parse()
            .map_err(|_not_a_port| bad("the local port is no number from 0 to 65535"))?;
        let destination = destination_of(destination).map_err(|why| bad(&why))?;
        let bind = BindAddress::new(bind, port).map_err(ConfigError::about("--bind-address"))?;
        Ok(Self { bind, destination })
    }
}

/// A destination in canonical spelling, or why it is invalid.
fn destination_of(text: &str) -> Result<String, String> {
    let target =
        Target::parse(text).map_err(|flaw| format!("the destination cannot be read: {flaw}"))?;
    if target.port == 0 {
        return Err("the destination has no port".to_owned());
    }
    let named = |name: &str| BindAddress::new(name, 0).is_ok_and(|_| !name.is_empty());
    if matches!(&target.host, Host::Name(name) if !named(name)) {
        return Err("the destination has no host".to_owned());
    }
    Ok(target.to_string())
}

/// An address of a Service whose connections go to one destination, which the server dials.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CapturedService {
    /// The address that processes of the node connect to; never an IPv4-mapped IPv6 address.
    pub address: SocketAddr,
    /// `host:port`, in the spelling sent to servers.
    pub destination: String,
}

impl CapturedService {
    /// Reads `SERVICE_IP:PORT=DEST_HOST:DEST_PORT`.
    ///
    /// # Errors
    /// The error in the text, and the expected form.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let bad = |why: &str| {
            ConfigError::new(format!(
                "--redirect-apiserver {text:?}: {why}; write SERVICE_IP:PORT=DEST_HOST:DEST_PORT, such as \
                 10.96.0.1:443=kubernetes.example:6443 or [fd00::1]:443=[fd01::2]:6443"
            ))
        };
        let (service, destination) = text
            .split_once('=')
            .ok_or_else(|| bad("it has no destination"))?;
        let address: SocketAddr = service
            .parse()
            .map_err(|_no_address| bad("what comes before = is no IP address with a port"))?;
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        if address.port() == 0 || address.ip().is_unspecified() {
            return Err(bad(
                "SERVICE_IP:PORT must not be an unspecified address or port 0",
            ));
        }
        let destination = destination_of(destination).map_err(|why| bad(&why))?;
        Ok(Self {
            address,
            destination,
        })
    }
}

/// The redirect of an agent: connections of this node's processes that it captures.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeRedirectPlan {
    /// Captured Services; each address once.
    pub services: Vec<CapturedService>,
    /// Captured processes: a directory of the cgroup2 file system.
    pub cgroup: PathBuf,
    /// A file with more Services, reloaded when it changes.
    pub file: Option<PathBuf>,
    /// Other network namespaces in which to capture.
    pub netns: Option<NetnsPlan>,
    /// Addresses of this node for callers whose namespace has no listener; at most one of each family.
    pub node_addresses: Vec<IpAddr>,
}

impl NodeRedirectPlan {
    /// This plan with the Services of a file added.
    ///
    /// # Errors
    /// Too many Services, or an address that is given twice.
    pub fn with(&self, file: RuleFile) -> Result<Self, ConfigError> {
        let mut all = self.clone();
        all.services.extend(file.services);
        let (count, max) = (all.services.len(), limits::NODE_LISTENERS_MAX);
        if count > max {
            bail!("{count} values of --redirect-apiserver are too many: at most {max}");
        }
        all.check()?;
        Ok(all)
    }

    /// # Errors
    /// An address is given twice, or callers cannot reach it.
    fn check(&self) -> Result<(), ConfigError> {
        for (number, ip) in self.node_addresses.iter().enumerate() {
            if ip.is_unspecified() || ip.is_loopback() {
                bail!(
                    "--redirect-node-address {ip}: no other network namespace can reach it; give an address of this node"
                );
            }
            let same = |other: &IpAddr| other.is_ipv4() == ip.is_ipv4();
            if self.node_addresses.iter().skip(number + 1).any(same) {
                bail!("--redirect-node-address names two addresses of one family: drop one");
            }
        }
        for (number, service) in self.services.iter().enumerate() {
            let same = |other: &CapturedService| other.address == service.address;
            if self.services.iter().skip(number + 1).any(same) {
                bail!(
                    "--redirect-apiserver names {} twice: drop one",
                    service.address
                );
            }
        }
        Ok(())
    }
}

/// Checks an agent's listeners against the rest of its plan.
///
/// # Errors
/// Too many listeners, or no lanes to carry their tunnels.
pub(super) fn check_targets(
    (targets, from): (&[TargetListener], &[IpNet]),
    redirect: Option<&NodeRedirectPlan>,
    lanes_max: u32,
    has_proof: bool,
) -> Result<(), ConfigError> {
    // A file that names no Service yet may name some later.
    let services = redirect.map_or(0, |redirect| redirect.services.len().max(1));
    let max = limits::NODE_LISTENERS_MAX;
    for (flag, count) in [
        ("--target", targets.len()),
        ("--redirect-apiserver", services),
    ] {
        if count == 0 {
            continue;
        }
        if count > max {
            bail!("{count} values of {flag} are too many: at most {max}");
        }
        if lanes_max == 0 {
            bail!("{flag} needs lanes, and --lanes=0 allows none: drop one");
        }
        if !has_proof {
            bail!(
                "{flag} needs lanes, which servers grant only to agents that prove who they are: give --agent-cert and --agent-key, or \
                 --token-path"
            );
        }
    }
    let (count, max) = (from.len(), limits::TARGET_SOURCES_MAX);
    if count > max {
        bail!("{count} values of --target-from are too many: at most {max}; join networks");
    }
    redirect.map_or(Ok(()), NodeRedirectPlan::check)
}

/// Destinations that a server dials for agents.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug, Default)]
#[command(next_help_heading = "Node to control plane")]
pub struct DestinationsPlan {
    /// Destination this server dials for agents: CIDR:PORT, ADDRESS:PORT (IPv6 in brackets) or NAME:PORT; needs agents that
    /// prove who they are, and lanes; or none; repeatable [default: none]
    #[arg(long = "allowed-destination", value_name = "DEST")]
    pub allowed: Vec<String>,
    /// Begin each connection to such a destination with a PROXY protocol header, version 2, that names its source and agent
    #[arg(long = "destination-proxy-header")]
    pub proxy_header: bool,
}

impl DestinationsPlan {
    /// The plan with an empty list for the word `none`.
    pub(crate) fn spelled_out(mut self) -> Self {
        if self.allowed == ["none"] {
            self.allowed.clear();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::tests::says;

    #[test]
    fn targets_are_read_and_shown_in_one_spelling() {
        for (text, bind, listens, destination) in [
            ("1:Kube.a:443", "127.0.0.1", "127.0.0.1:1", "kube.a:443"),
            ("0:[FD00::1]:6443", "[::1]", "[::1]:0", "[fd00::1]:6443"),
            ("1:10.0.0.1:2", "::1", "[::1]:1", "10.0.0.1:2"),
        ] {
            let listener = TargetListener::parse(text, bind).unwrap();
            assert_eq!(listener.bind.to_string(), listens);
            assert_eq!(listener.destination, destination);
        }
    }

    #[test]
    fn bad_targets_name_the_text_and_the_form() {
        for text in [
            "",
            "6443",
            "6443:",
            "6443:host",
            "6443:host:0",
            "6443:host:",
            "x:host:1",
            "65536:host:1",
            "6443::1",
            "6443:a b:1",
            "6443:fd00::1:1",
        ] {
            let error = TargetListener::parse(text, "127.0.0.1").unwrap_err();
            says(&error, &format!("{text:?}"));
            says(&error, "LOCAL_PORT:DEST_HOST:DEST_PORT");
        }
        let error = TargetListener::parse("1:a:1", "a b").unwrap_err();
        says(&error, "--bind-address");
    }

    #[test]
    fn services_are_read_and_shown_in_one_spelling() {
        let service = CapturedService::parse("[::ffff:10.96.0.1]:443=Kube.example:6443").unwrap();
        assert_eq!(service.address, "10.96.0.1:443".parse().unwrap());
        assert_eq!(service.destination, "kube.example:6443");
        for text in [
            "",
            "10.96.0.1:443",
            "10.96.0.1=a:1",
            "kubernetes:443=a:1",
            "10.96.0.1:0=a:1",
            "0.0.0.0:443=a:1",
            "10.96.0.1:443=a",
            "10.96.0.1:443=a:0",
            "10.96.0.1:443=:1",
        ] {
            let error = CapturedService::parse(text).unwrap_err();
            says(&error, &format!("{text:?}"));
            says(&error, "SERVICE_IP:PORT=DEST_HOST:DEST_PORT");
        }
    }

    #[test]
    fn services_need_lanes_and_must_be_unique() {
        let service = |text| CapturedService::parse(text).unwrap();
        let plan = |services| NodeRedirectPlan {
            services,
            cgroup: "/sys/fs/cgroup".into(),
            file: None,
            netns: None,
            node_addresses: Vec::new(),
        };
        let one = plan(vec![service("10.96.0.1:443=a:1")]);
        assert!(check_targets((&[], &[]), Some(&one), 4, true).is_ok());
        let both = ["10.96.0.1:443=a:1", "[::ffff:10.96.0.1]:443=b:2"];
        let twice = plan(both.map(service).to_vec());
        for (plan, lanes, certificate, said) in [
            (&twice, 4, true, "10.96.0.1:443 twice"),
            (&one, 0, true, "--redirect-apiserver needs lanes"),
            (&one, 4, false, "--agent-cert"),
        ] {
            let error = check_targets((&[], &[]), Some(plan), lanes, certificate).unwrap_err();
            says(&error, said);
        }
        for (addresses, said) in [
            (&["127.0.0.1"][..], "no other network namespace"),
            (&["::"], "no other network namespace"),
            (&["192.0.2.1", "192.0.2.2"], "two addresses"),
        ] {
            let mut plan = one.clone();
            plan.node_addresses = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
            let error = check_targets((&[], &[]), Some(&plan), 4, true).unwrap_err();
            says(&error, said);
        }
        let file = RuleFile {
            services: vec![service("10.96.0.1:443=b:2")],
            ..RuleFile::default()
        };
        let error = one.with(file).unwrap_err();
        says(&error, "twice");
    }
}
