//! Why a connection to a server failed, and which of several failures to report.

use std::io;
use std::net::SocketAddr;

use rustix::io::Errno;

use adit_net::resolve::ResolveError;
use adit_tls::handshake::HandshakeError;
use adit_tls::tls::TlsError;

/// Why a connection to a server failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectorError {
    /// The lookup failed.
    #[error("lookup {name}: {source}")]
    Resolve {
        /// The name looked up.
        name: String,
        /// Cause of the failure.
        source: ResolveError,
    },
    /// The host is not a valid TLS server name, or a TLS file is broken.
    #[error(transparent)]
    Name(#[from] TlsError),
    /// An address accepted no connection.
    #[error("dial {address}: {source}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// Cause of the failure.
        source: io::Error,
    },
    /// The lookup returned no address.
    #[error("{0} has no address")]
    NoAddress(String),
    /// The TLS handshake failed.
    #[error(transparent)]
    Tls(#[from] HandshakeError),
    /// The forward proxy cannot be used, or refused.
    #[error("cannot connect to {target} through the proxy {proxy}: {answer}")]
    Proxy {
        /// The proxy's address as configured.
        proxy: String,
        /// The intended server.
        target: String,
        /// What went wrong, with the first line of the proxy's answer if it refused.
        answer: String,
    },
}

impl ConnectorError {
    /// Of two failures for addresses of one name, the one that says more about the server; of equal ones `later`.
    pub(super) fn or_more_telling(self, later: Self) -> Self {
        if later.rank() <= self.rank() {
            later
        } else {
            self
        }
    }

    /// Lower is reported first: a refused certificate, then a peer that is no TLS server, then a closed port, then a missing
    /// route on this host.
    fn rank(&self) -> u8 {
        match self {
            Self::Tls(error) if error.cause.is_refusal() => 0,
            Self::Resolve { .. }
            | Self::Name(_)
            | Self::NoAddress(_)
            | Self::Tls(_)
            | Self::Proxy { .. } => 1,
            Self::Tcp { source, .. } if is_local(source) => 3,
            Self::Tcp { .. } => 2,
        }
    }
}

/// Failures caused by this host's addresses and routes, not by the server.
fn is_local(cause: &io::Error) -> bool {
    let local = [Errno::NETUNREACH, Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT];
    Errno::from_io_error(cause).is_some_and(|errno| local.contains(&errno))
}
