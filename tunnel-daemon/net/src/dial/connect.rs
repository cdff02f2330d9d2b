//! Making one TCP connection, with the socket options every target gets.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use adit_core::destination::DestinationList;
use tokio::net::{TcpSocket, TcpStream};

use crate::accounts::{Accounts, Labels};
use crate::direct;
use crate::self_sockets::OwnSockets;
use crate::socket::tune_stream;
use adit_telemetry::labels::AccountRole;

/// One attempt to connect to one address.
pub trait Connect: Send + Sync {
    /// The connection.
    type Stream: Send;

    /// Connects, or fails with the error of the operating system; `name` is what was resolved to `addr`. Has no deadline of
    /// its own; dropping the future gives up and leaves nothing open.
    fn connect(
        &self,
        addr: SocketAddr,
        name: Option<&str>,
    ) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// Real sockets: no delay, keepalive every 15 s, accounted for in the kernel if that is on.
#[derive(Clone)]
pub struct TcpConnect {
    /// Accounting in the kernel.
    pub accounts: Accounts,
    /// Sockets that a redirect of this process leaves alone.
    pub own_sockets: OwnSockets,
    /// Id of the agent that dials these targets.
    pub agent: Arc<str>,
    /// The list whose entries are the destination classes.
    pub allowed: Arc<DestinationList>,
}

impl TcpConnect {
    /// Names the socket to the kernel. After connect(2) the kernel would not account for the socket.
    fn account(&self, socket: &TcpSocket, addr: SocketAddr, name: Option<&str>) -> Option<u64> {
        if !self.accounts.is_on() {
            return None;
        }
        let class = self.allowed.class(addr, name).unwrap_or_default();
        let labels = Labels {
            role: AccountRole::Target,
            agent: &self.agent,
            destination_class: class,
        };
        self.accounts.connecting(socket, &labels)
    }
}

impl Connect for TcpConnect {
    type Stream = TcpStream;

    async fn connect(&self, addr: SocketAddr, name: Option<&str>) -> io::Result<TcpStream> {
        let socket = direct::socket_for(addr)?;
        tune_stream(&socket)?;
        let accounted = self.account(&socket, addr, name);
        let stream = direct::connect(&self.own_sockets, socket, addr)
            .await
            .inspect_err(|_refused| self.accounts.failed(accounted))?;
        // Without a listener on an ephemeral port of this machine, the kernel may choose that very port as the source, and
        // connects the socket to itself.
        let source = stream.local_addr()?;
        if (source.ip(), source.port()) == (addr.ip(), addr.port()) {
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused));
        }
        Ok(stream)
    }
}
