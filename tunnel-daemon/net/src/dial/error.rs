//! Why a dial failed, in the words of Go's dialler.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use adit_core::destination::Denied;
use adit_core::target::TargetError;
use adit_core::text::Excerpt;
use rustix::io::Errno;

use crate::resolve::ResolveError;
use adit_telemetry::labels::{DialReason, DialStage};

/// A network a client may ask for. Anything else (`udp`, `unix`) is refused: tunnels are TCP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Network {
    /// Both families.
    Tcp,
    /// IPv4 only.
    Tcp4,
    /// IPv6 only.
    Tcp6,
}

impl Network {
    /// Does this network reach addresses of `ip`'s family?
    #[must_use]
    pub fn takes(self, ip: IpAddr) -> bool {
        match self {
            Self::Tcp => true,
            Self::Tcp4 => ip.is_ipv4(),
            Self::Tcp6 => ip.is_ipv6(),
        }
    }
}

impl FromStr for Network {
    type Err = DialError;

    fn from_str(text: &str) -> Result<Self, DialError> {
        match text {
            "tcp" => Ok(Self::Tcp),
            "tcp4" => Ok(Self::Tcp4),
            "tcp6" => Ok(Self::Tcp6),
            other => Err(DialError::UnknownNetwork(Excerpt(other).to_string())),
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Tcp4 => "tcp4",
            Self::Tcp6 => "tcp6",
        })
    }
}

/// Why there is no connection to a target. `Display` is the text for `DIAL_RSP`.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The protocol is none of `tcp`, `tcp4`, `tcp6`.
    #[error("dial {0}: unknown network {0}")]
    UnknownNetwork(String),
    /// The address is not `host:port`.
    #[error("dial {network}: {flaw}")]
    Address {
        /// The requested network.
        network: Network,
        /// What is wrong with the address.
        flaw: TargetError,
    },
    /// The name has no usable answer.
    #[error("dial {network}: lookup {host}: {cause}")]
    Lookup {
        /// The requested network.
        network: Network,
        /// Excerpt of the name.
        host: String,
        /// The resolver's error.
        #[source]
        cause: ResolveError,
    },
    /// The host has no address of the family that `tcp4` or `tcp6` asks for.
    #[error("dial {network}: address {host}: no suitable address found")]
    NoSuitable {
        /// The requested network.
        network: Network,
        /// The host.
        host: String,
    },
    /// The deadline passed while connecting.
    #[error("dial {network} {addr}: i/o timeout")]
    Timeout {
        /// The requested network.
        network: Network,
        /// The first address that had not failed by then.
        addr: SocketAddr,
    },
    /// The allow-list refuses every address.
    #[error("dial {network} {addr}: {denied}")]
    Denied {
        /// The requested network.
        network: Network,
        /// The first address that was refused.
        addr: SocketAddr,
        /// The list's reason.
        denied: Denied,
    },
    /// The allow-list refuses this name with any address; the name was not looked up.
    #[error("dial {network}: {denied}")]
    NameDenied {
        /// The requested network.
        network: Network,
        /// The list's reason.
        denied: Denied,
    },
    /// The operating system refused, or the target did.
    #[error("dial {network} {addr}: {}", GoText(.cause))]
    Connect {
        /// The requested network.
        network: Network,
        /// The address of the failure that is shown.
        addr: SocketAddr,
        /// The failure.
        #[source]
        cause: io::Error,
    },
}

impl DialError {
    /// For the metric label: did time run out, as Go's `net.Error.Timeout` would say?
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.reason().0 == DialReason::Timeout
    }

    /// Why the dial failed, and how far it had come, for the log and our own metric.
    #[must_use]
    pub fn reason(&self) -> (DialReason, DialStage) {
        match self {
            Self::UnknownNetwork(_) | Self::Address { .. } => {
                (DialReason::Other, DialStage::Request)
            }
            Self::Lookup { cause, .. } => {
                let reason = match cause {
                    ResolveError::NotFound => DialReason::NoSuchHost,
                    ResolveError::TimedOut => DialReason::Timeout,
                    ResolveError::Misbehaving | ResolveError::Failed(_) => DialReason::Other,
                };
                (reason, DialStage::Lookup)
            }
            Self::NoSuitable { .. } => (DialReason::NoSuchHost, DialStage::Lookup),
            Self::Timeout { .. } => (DialReason::Timeout, DialStage::Connect),
            Self::Denied { .. } | Self::NameDenied { .. } => {
                (DialReason::Denied, DialStage::Policy)
            }
            Self::Connect { cause, .. } => reason_of_connect(cause),
        }
    }

    /// Did this agent's own policy refuse, and not the network or the target?
    #[must_use]
    pub fn is_denied(&self) -> bool {
        self.reason().0 == DialReason::Denied
    }
}

/// Why the attempt at one address failed.
#[derive(Debug)]
pub enum AttemptError {
    /// The allow-list refuses the address.
    Denied(Denied),
    /// The connect failed.
    Failed(io::Error),
}

/// The most telling failure. An answer of a target comes first, then a failure of this host (no route, no such family). A
/// refusal by the allow-list comes last: it matters only when nothing else was tried.
pub(super) fn most_telling(
    network: Network,
    first: SocketAddr,
    failures: Vec<(SocketAddr, AttemptError)>,
) -> DialError {
    let rank = |failure: &AttemptError| match failure {
        AttemptError::Denied(_) => 2,
        AttemptError::Failed(cause) => u8::from(is_local(cause)),
    };
    match failures
        .into_iter()
        .min_by_key(|(_, failure)| rank(failure))
    {
        Some((addr, AttemptError::Denied(denied))) => DialError::Denied {
            network,
            addr,
            denied,
        },
        Some((addr, AttemptError::Failed(cause))) => DialError::Connect {
            network,
            addr,
            cause,
        },
        // Unreachable while a race without success reports its failures. An error is still better than a panic.
        None => DialError::Timeout {
            network,
            addr: first,
        },
    }
}

/// Failures of this host's addresses and routes, not of the target.
fn is_local(cause: &io::Error) -> bool {
    let local = [Errno::NETUNREACH, Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT];
    Errno::from_io_error(cause).is_some_and(|errno| local.contains(&errno))
}

fn reason_of_connect(cause: &io::Error) -> (DialReason, DialStage) {
    match cause.kind() {
        io::ErrorKind::ConnectionRefused => return (DialReason::Refused, DialStage::Connect),
        io::ErrorKind::TimedOut => return (DialReason::Timeout, DialStage::Connect),
        _ => (),
    }
    match Errno::from_io_error(cause) {
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
            (DialReason::Overload, DialStage::Request)
        }
        Some(Errno::HOSTUNREACH | Errno::HOSTDOWN | Errno::NETDOWN) => {
            (DialReason::Unreachable, DialStage::Connect)
        }
        _ if is_local(cause) => (DialReason::Unreachable, DialStage::Connect),
        _ => (DialReason::Other, DialStage::Connect),
    }
}

/// An error of the operating system as Go prints it: the failed call and the C library's text.
struct GoText<'a>(&'a io::Error);

impl fmt::Display for GoText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.0.kind() {
            io::ErrorKind::ConnectionRefused => Some(Errno::CONNREFUSED),
            io::ErrorKind::TimedOut => Some(Errno::TIMEDOUT),
            _ => None,
        };
        let text = match Errno::from_io_error(self.0).or(kind) {
            Some(Errno::CONNREFUSED) => "connect: connection refused",
            Some(Errno::TIMEDOUT) => "connect: connection timed out",
            Some(Errno::HOSTUNREACH) => "connect: no route to host",
            Some(Errno::NETUNREACH) => "connect: network is unreachable",
            Some(Errno::HOSTDOWN) => "connect: host is down",
            Some(Errno::NETDOWN) => "connect: network is down",
            Some(Errno::CONNRESET) => "connect: connection reset by peer",
            Some(Errno::CONNABORTED) => "connect: software caused connection abort",
            Some(Errno::ADDRNOTAVAIL) => "connect: cannot assign requested address",
            Some(Errno::ACCESS) => "connect: permission denied",
            Some(Errno::PERM) => "connect: operation not permitted",
            Some(Errno::INVAL) => "connect: invalid argument",
            Some(Errno::MFILE) => "socket: too many open files",
            Some(Errno::NFILE) => "socket: too many open files in system",
            Some(Errno::NOBUFS) => "socket: no buffer space available",
            Some(Errno::NOMEM) => "socket: cannot allocate memory",
            Some(Errno::AFNOSUPPORT) => "socket: address family not supported by protocol",
            Some(_) | None => return write!(f, "connect: {}", self.0),
        };
        f.write_str(text)
    }
}

#[cfg(test)]
mod tests {
    use adit_core::destination::Why;

    use super::*;

    /// The server derives the reason from the agent's text, so that both ends log and count the same reason.
    #[test]
    fn the_dial_reason_is_recovered_from_the_agents_text() {
        let network = Network::Tcp;
        let addr: SocketAddr = ([192, 0, 2, 1], 443).into();
        let errnos = [
            Errno::CONNREFUSED,
            Errno::TIMEDOUT,
            Errno::HOSTUNREACH,
            Errno::NETUNREACH,
            Errno::HOSTDOWN,
            Errno::NETDOWN,
            Errno::CONNRESET,
            Errno::ADDRNOTAVAIL,
            Errno::AFNOSUPPORT,
            Errno::ACCESS,
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOBUFS,
            Errno::NOMEM,
        ];
        let mut errors: Vec<DialError> = errnos
            .into_iter()
            .map(|errno| DialError::Connect {
                network,
                addr,
                cause: errno.into(),
            })
            .collect();
        let lookups = [
            ResolveError::NotFound,
            ResolveError::TimedOut,
            ResolveError::Misbehaving,
            ResolveError::Failed("no name server".to_owned()),
        ];
        errors.extend(lookups.into_iter().map(|cause| DialError::Lookup {
            network,
            host: "name.test".to_owned(),
            cause,
        }));
        for why in [Why::NotListed, Why::Guarded, Why::OwnListener] {
            let denied = Denied::name("name.test", 443, why);
            errors.push(DialError::NameDenied { network, denied });
        }
        errors.extend([
            DialError::UnknownNetwork("udp".to_owned()),
            DialError::Timeout { network, addr },
            DialError::NoSuitable {
                network,
                host: "name.test".to_owned(),
            },
        ]);
        for error in errors {
            let text = error.to_string();
            assert_eq!(DialReason::of_answer(&text), error.reason(), "{text}");
        }
    }
}
