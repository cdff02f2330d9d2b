//! Why a server cannot be reached, and which of several reasons is the one to tell.

use std::io;
use std::net::SocketAddr;

use rustix::io::Errno;

use adit_net::resolve::ResolveError;
use adit_tls::handshake::HandshakeError;
use adit_tls::tls::TlsError;

/// Why a server cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectorError {
    /// The name has no address.
    #[error("lookup {name}: {source}")]
    Resolve {
        /// The name looked up.
        name: String,
        /// Why.
        source: ResolveError,
    },
    /// The host cannot be a TLS server name, or a file is broken.
    #[error(transparent)]
    Name(#[from] TlsError),
    /// An address accepted no connection.
    #[error("dial {address}: {source}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// No address came of the name.
    #[error("{0} has no address")]
    NoAddress(String),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] HandshakeError),
    /// The forward proxy said no.
    #[error("proxy {proxy} refused to connect to {target}: {answer}")]
    Proxy {
        /// The proxy's address as configured.
        proxy: String,
        /// The server wanted.
        target: String,
        /// First line of its answer, or what went wrong.
        answer: String,
    },
}

impl ConnectorError {
    /// Of the failures of two addresses of one name, the one that says more about the server; of equals the later one.
    pub(super) fn or_more_telling(self, later: Self) -> Self {
        if later.rank() <= self.rank() {
            later
        } else {
            self
        }
    }

    /// Lower is told first: a refused certificate before a peer that is no TLS server, that before a closed port, and that
    /// before what only says that this host has no route.
    fn rank(&self) -> u8 {
        match self {
            Self::Tls(HandshakeError::Failed(cause)) if is_refusal(cause) => 0,
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

/// Whether one end said no to what the other one showed or asked for.
fn is_refusal(cause: &io::Error) -> bool {
    let tls = cause
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(
        tls,
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_))
    )
}

/// Failures that say something about this host's addresses and routes, not about the server.
fn is_local(cause: &io::Error) -> bool {
    let local = [Errno::NETUNREACH, Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT];
    Errno::from_io_error(cause).is_some_and(|errno| local.contains(&errno))
}
