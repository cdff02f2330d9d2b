//! Connections of this process that bypass its own redirect.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::task::Poll;

use tokio::net::{TcpSocket, TcpStream};

use crate::self_sockets::OwnSockets;

/// A socket of the family of `address`.
///
/// # Errors
/// The host lacks the family, or has no descriptor left.
pub fn socket_for(address: SocketAddr) -> io::Result<TcpSocket> {
    if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }
}

/// Connects, past a redirect of this process if there is one. Has no deadline of its own; a dropped call leaves no socket.
///
/// # Errors
/// The error of the operating system, or the redirect cannot exempt the socket.
pub async fn connect(
    own: &OwnSockets,
    socket: TcpSocket,
    address: SocketAddr,
) -> io::Result<TcpStream> {
    let cookie = own.cookie(&socket)?;
    let mut connecting = pin!(socket.connect(address));
    let mut has_called = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_called, true) {
            return connecting.as_mut().poll(cx);
        }
        // The first poll is what calls connect(2).
        let polled = own.connecting(cookie, || connecting.as_mut().poll(cx));
        polled.unwrap_or_else(|not_noted| Poll::Ready(Err(not_noted)))
    })
    .await
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn connect_returns_a_connection_or_its_error() {
        for own in [OwnSockets::off(), OwnSockets::on()] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = listener.local_addr().unwrap();
            let (socket, accepted) = tokio::join!(
                connect(&own, TcpSocket::new_v4().unwrap(), at),
                listener.accept()
            );
            assert_eq!(accepted.unwrap().1, socket.unwrap().local_addr().unwrap());
            // Bound without a listener, so no other process gets the port.
            let closed = TcpSocket::new_v4().unwrap();
            closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let at = closed.local_addr().unwrap();
            let refused = connect(&own, TcpSocket::new_v4().unwrap(), at).await;
            let kind = refused.map_err(|error| error.kind()).map(drop);
            assert_eq!(kind, Err(io::ErrorKind::ConnectionRefused));
        }
    }
}
