//! Sockets that are registered with the kernel for accounting, and traffic on them.

use std::net::{Ipv4Addr, SocketAddr};

use adit_net::accounts::{Accounts, Labels};
use adit_telemetry::labels::AccountRole;
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// An agent's connection to a target.
pub(crate) const TARGET: Labels<'_> = Labels {
    role: AccountRole::Target,
    agent: "a",
    destination_class: "c",
};
/// A client's connection to a server.
pub(crate) const CLIENT: Labels<'_> = Labels {
    role: AccountRole::Client,
    agent: "a",
    destination_class: "",
};
/// The labels of [`TARGET`] as exported.
pub(crate) const LABELS: &str = r#"agent="a",destination_class="c""#;

/// Connects a socket that is registered with the kernel.
pub(crate) async fn connect(accounts: &Accounts, address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    accounts.connecting(&socket, &TARGET).unwrap();
    socket.connect(address).await.unwrap()
}

/// A listener whose connections the kernel can account for.
pub(crate) fn listener(accounts: &Accounts) -> TcpListener {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket.bind(&address.into()).unwrap();
    accounts.listening(&socket);
    socket.listen(16).unwrap();
    socket.set_nonblocking(true).unwrap();
    TcpListener::from_std(socket.into()).unwrap()
}

/// Sends `bytes` and shuts down writing, while it reads to EOF. Returns the number of received bytes.
pub(crate) async fn exchange(socket: &mut TcpStream, bytes: usize) -> usize {
    let (mut read, mut write) = socket.split();
    let sending = async {
        write.write_all(&vec![7; bytes]).await.unwrap();
        write.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let (_sent, read) = tokio::join!(sending, read.read_to_end(&mut received));
    read.unwrap()
}
