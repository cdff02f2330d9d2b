//! Byte streams of all kinds behind one type with static dispatch: TCP, unix, or TLS over either. `tokio::io::split`
//! works on all of them; the plain variants can be taken out where `into_split` or a raw descriptor is wanted.

use std::{
    fmt,
    io::{self, Read as _},
    net::{IpAddr, Shutdown, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use rustls::ProtocolVersion;
use rustls_pki_types::CertificateDer;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::TlsStream;

use crate::{
    buffered::ReadBuffered,
    cause,
    principal::Principal,
    records::{RecordStream, TakeOverError, TrafficSecrets},
};

/// Bytes of the peer that are read after a failed write, in search of its alert: more than a server sends before it judges
/// a client's certificate.
const ALERT_WITHIN_BYTES: usize = 64 << 10;

/// Where a peer is, for logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerAddr {
    /// Address and port.
    Tcp(SocketAddr),
    /// As a balancer in between says.
    Forwarded {
        /// Address and port of the peer.
        client: SocketAddr,
        /// Those of the balancer.
        by: SocketAddr,
    },
    /// The other end of a unix socket has no address worth naming.
    Unix,
}

impl fmt::Display for PeerAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address)
            | Self::Forwarded {
                client: address, ..
            } => address.fmt(f),
            Self::Unix => f.write_str("unix"),
        }
    }
}

/// A plain socket.
#[derive(Debug)]
pub enum Socket {
    /// TCP.
    Tcp(TcpStream),
    /// Unix, stream type.
    Unix(UnixStream),
}

/// A connection as frontends, links and lanes see it.
#[derive(Debug)]
pub enum ByteStream {
    /// Clear text, with the address the peer had when accepted: a reset socket no longer knows.
    Plain(Socket, PeerAddr),
    /// TLS over either. Boxed: the session is a kilobyte, and the other variants are moved around.
    Tls(Box<TlsConnection>),
}

/// A finished TLS handshake and the peer's identity.
#[derive(Debug)]
pub struct TlsConnection {
    io: TlsStream<ReadBuffered<Socket>>,
    peer: PeerAddr,
    principal: Option<Arc<Principal>>,
    /// Secrets of a connection whose records may be taken over.
    secrets: Option<Arc<TrafficSecrets>>,
}

impl Socket {
    /// Waits for the peer's first byte without consuming it; false if there will be none. On a unix socket, which is not
    /// peeked at, EOF counts as a byte.
    pub async fn speaks(&self) -> bool {
        match self {
            Self::Tcp(socket) => socket.peek(&mut [0]).await.is_ok_and(|bytes| bytes > 0),
            Self::Unix(socket) => socket.readable().await.is_ok(),
        }
    }

    /// The TCP socket; `None` on a unix socket.
    pub(super) fn into_tcp(self) -> Option<TcpStream> {
        match self {
            Self::Tcp(socket) => Some(socket),
            Self::Unix(_) => None,
        }
    }
}

impl PeerAddr {
    /// Its address, as the balancer says if there is one; never IPv4-mapped.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(address)
            | Self::Forwarded {
                client: address, ..
            } => Some(address.ip().to_canonical()),
            Self::Unix => None,
        }
    }

    /// The address whose connection it is, whatever a balancer says: what is counted by it, nobody can forge.
    #[must_use]
    pub fn counted_ip(&self) -> Option<IpAddr> {
        self.balancer().or_else(|| self.ip())
    }

    /// The balancer's address, if there is one.
    #[must_use]
    pub fn balancer(&self) -> Option<IpAddr> {
        match self {
            Self::Forwarded { by, .. } => Some(by.ip().to_canonical()),
            Self::Tcp(_) | Self::Unix => None,
        }
    }

    /// Whether the peer is on this host: by its address, or by a unix socket.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().to_canonical().is_loopback(),
            // A claim.
            Self::Forwarded { .. } => false,
            Self::Unix => true,
        }
    }
}

impl ByteStream {
    /// A finished handshake.
    pub(super) fn tls(
        io: TlsStream<ReadBuffered<Socket>>,
        peer: PeerAddr,
        secrets: Option<Arc<TrafficSecrets>>,
    ) -> Self {
        let certificate = io
            .get_ref()
            .1
            .peer_certificates()
            .and_then(|chain| chain.first());
        let principal = certificate
            .and_then(|der| Principal::from_der(der))
            .map(Arc::new);
        Self::Tls(Box::new(TlsConnection {
            io,
            peer,
            principal,
            secrets,
        }))
    }

    /// Asks for a larger send buffer on a unix socket than the kernel's usual 208 KiB, as large as the kernel allows (at
    /// most twice `net.core.wmem_max`). The kernel books twice `bytes`, for its own structures. Where
    /// `net.core.wmem_default` gives as much or more, the buffer stays. TCP sizes its buffers itself.
    pub fn widen(&self, bytes: usize) {
        let Socket::Unix(socket) = self.socket() else {
            return;
        };
        let socket = SockRef::from(socket);
        let wanted = bytes.saturating_mul(2);
        if socket.send_buffer_size().is_ok_and(|has| has >= wanted) {
            return;
        }
        if let Err(error) = socket.set_send_buffer_size(bytes) {
            tracing::debug!(%error, "a client's socket keeps its send buffer");
        }
    }

    /// Where the peer is.
    #[must_use]
    pub fn peer(&self) -> PeerAddr {
        match self {
            Self::Plain(_, peer) => *peer,
            Self::Tls(tls) => tls.peer,
        }
    }

    /// The peer's identity by its verified certificate. On a server: `None` without TLS or without a client CA.
    #[must_use]
    pub fn principal(&self) -> Option<&Arc<Principal>> {
        self.as_tls()?.principal.as_ref()
    }

    /// The certificates that the peer has shown, its own first; empty without TLS.
    #[must_use]
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        let session = self.as_tls().map(|tls| tls.io.get_ref().1);
        session
            .and_then(|session| session.peer_certificates())
            .unwrap_or_default()
    }

    /// The application protocol agreed upon.
    #[must_use]
    pub fn alpn(&self) -> Option<&[u8]> {
        self.as_tls()?.io.get_ref().1.alpn_protocol()
    }

    /// The TLS version, for logs.
    #[must_use]
    pub fn tls_version(&self) -> Option<ProtocolVersion> {
        self.as_tls()?.io.get_ref().1.protocol_version()
    }

    /// The TLS part, when there is one.
    #[must_use]
    pub fn as_tls(&self) -> Option<&TlsConnection> {
        match self {
            Self::Plain(..) => None,
            Self::Tls(tls) => Some(tls),
        }
    }

    /// The TCP socket at the bottom, for socket options; `None` on unix sockets.
    #[must_use]
    pub fn tcp(&self) -> Option<&TcpStream> {
        self.socket().tcp()
    }

    /// The socket at the bottom.
    fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket, _) => socket,
            Self::Tls(tls) => tls.io.get_ref().0.inner(),
        }
    }
}

impl TlsConnection {
    /// No caller will take over the records: the connection may read beyond them.
    pub(super) fn keep_session(&mut self) {
        self.secrets = None;
        self.io.get_mut().0.read_freely();
    }

    /// A server that renews its keys and asks the client to do the same.
    #[cfg(test)]
    pub(super) fn with_new_keys(mut self) -> Self {
        if let TlsStream::Server(io) = &mut self.io {
            io.get_mut().1.refresh_traffic_keys().unwrap();
        }
        self
    }

    /// The session of the TLS library, without its connection.
    #[cfg(test)]
    pub(super) fn into_session(self) -> rustls::Connection {
        self.split().1
    }

    fn split(self) -> (ReadBuffered<Socket>, rustls::Connection) {
        match self.io {
            TlsStream::Client(io) => {
                let (io, session) = io.into_inner();
                (io, session.into())
            }
            TlsStream::Server(io) => {
                let (io, session) = io.into_inner();
                (io, session.into())
            }
        }
    }

    /// Whether its handshake has gone on with an earlier session.
    #[cfg(test)]
    pub(super) fn is_resumed(&self) -> bool {
        self.io.get_ref().1.handshake_kind() == Some(rustls::HandshakeKind::Resumed)
    }

    /// Whether the cipher is AES-GCM of TLS 1.3, by its name: kernel TLS gets keys for no other cipher.
    #[must_use]
    pub fn is_aes_gcm(&self) -> bool {
        use rustls::CipherSuite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384};
        let suite = self.io.get_ref().1.negotiated_cipher_suite();
        suite.is_some_and(|suite| {
            matches!(
                suite.suite(),
                TLS13_AES_128_GCM_SHA256 | TLS13_AES_256_GCM_SHA384
            )
        })
    }

    /// Takes the bytes that rustls has decrypted and no caller has read. Reads nothing from the socket: the next record may
    /// or may not be complete there.
    pub fn take_decrypted(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        // Ends with `WouldBlock`, or with the error that ended the session, which the next read finds again.
        let _end = match &mut self.io {
            TlsStream::Client(io) => io.get_mut().1.reader().read_to_end(&mut bytes),
            TlsStream::Server(io) => io.get_mut().1.reader().read_to_end(&mut bytes),
        };
        bytes
    }

    /// Takes the connection over from rustls. All decrypted bytes must have been read.
    ///
    /// # Errors
    /// See [`TakeOverError`]; the connection is closed then.
    pub fn into_records(self) -> Result<RecordStream, TakeOverError> {
        let secrets = self.secrets.clone();
        let secrets = secrets.ok_or(TakeOverError::Session("its secrets were not kept"))?;
        let (io, session) = self.split();
        if !io.at_record_end() {
            return Err(TakeOverError::Session("it holds part of a record"));
        }
        let (socket, left) = io.into_parts();
        RecordStream::take_over(socket, session, &left, &secrets)
    }

    /// On a server: the host name the client asked for (SNI), if any. `None` on a client.
    #[must_use]
    pub fn sni(&self) -> Option<&str> {
        match &self.io {
            TlsStream::Client(_) => None,
            TlsStream::Server(tls) => tls.get_ref().1.server_name(),
        }
    }

    /// Fills `out` with keying material of this session (RFC 5705), the same at both ends and on no other connection.
    ///
    /// # Errors
    /// `out` is empty or absurdly long.
    pub fn export_keying_material(
        &self,
        label: &[u8],
        context: &[u8],
        out: &mut [u8],
    ) -> Result<(), rustls::Error> {
        match &self.io {
            TlsStream::Client(tls) => tls
                .get_ref()
                .1
                .export_keying_material(out, label, Some(context))
                .map(|_out| ()),
            TlsStream::Server(tls) => tls
                .get_ref()
                .1
                .export_keying_material(out, label, Some(context))
                .map(|_out| ()),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(socket) => socket.as_fd(),
            Self::Unix(socket) => socket.as_fd(),
        }
    }
}

/// A connection that may turn out to be a plain socket.
pub trait Connection: AsyncRead + AsyncWrite + Unpin {
    /// Whether its bytes are those of a socket, so that [`Self::into_descriptor`] has one.
    fn is_plain(&self) -> bool;

    /// Who the peer is by its verified certificate, if it has shown one.
    fn principal(&self) -> Option<&Principal> {
        None
    }

    /// The TCP socket at the bottom, if there is one.
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }

    /// The socket at the bottom, of whatever kind, to ask about its peer.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Tells the peer that nothing more is read. Returns whether EOF is certain to follow the bytes that the peer has sent
    /// before, which only a unix socket can promise.
    fn refuse_input(&self) -> bool {
        false
    }

    /// The socket itself, removed from the runtime. `None` when a layer is between the socket and the bytes, or the runtime
    /// does not release the socket; the connection is closed then.
    fn into_descriptor(self) -> Option<OwnedFd>;
}

impl Connection for ByteStream {
    fn is_plain(&self) -> bool {
        self.as_tls().is_none()
    }

    fn principal(&self) -> Option<&Principal> {
        Self::principal(self).map(AsRef::as_ref)
    }

    fn tcp(&self) -> Option<&TcpStream> {
        Self::tcp(self)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket().descriptor()
    }

    fn refuse_input(&self) -> bool {
        self.socket().refuse_input()
    }

    fn into_descriptor(self) -> Option<OwnedFd> {
        match self {
            Self::Plain(socket, _) => socket.into_descriptor(),
            Self::Tls(_) => None,
        }
    }
}

impl Connection for TcpStream {
    fn is_plain(&self) -> bool {
        true
    }

    fn tcp(&self) -> Option<&TcpStream> {
        Some(self)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }

    fn into_descriptor(self) -> Option<OwnedFd> {
        self.into_std().ok().map(OwnedFd::from)
    }
}

impl Connection for Socket {
    fn is_plain(&self) -> bool {
        true
    }

    fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Tcp(socket) => Some(socket),
            Self::Unix(_) => None,
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }

    fn refuse_input(&self) -> bool {
        match self {
            Self::Tcp(_) => false,
            Self::Unix(socket) => SockRef::from(socket).shutdown(Shutdown::Read).is_ok(),
        }
    }

    fn into_descriptor(self) -> Option<OwnedFd> {
        match self {
            Self::Tcp(socket) => socket.into_std().ok().map(OwnedFd::from),
            Self::Unix(socket) => socket.into_std().ok().map(OwnedFd::from),
        }
    }
}

/// In memory: tests of the packages above tunnel through it.
impl Connection for tokio::io::DuplexStream {
    fn is_plain(&self) -> bool {
        false
    }

    fn into_descriptor(self) -> Option<OwnedFd> {
        None
    }
}

/// A buffer is between the socket and the bytes.
impl<S: Connection> Connection for tokio::io::BufWriter<S> {
    fn is_plain(&self) -> bool {
        false
    }

    fn into_descriptor(self) -> Option<OwnedFd> {
        None
    }
}

/// Delegates each method of `AsyncRead` and `AsyncWrite` to the variant's stream.
macro_rules! delegate_io {
    ($type:ty, { $($pattern:pat => $io:expr),+ $(,)? }) => {
        impl AsyncRead for $type {
            fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
                match self.get_mut() { $($pattern => Pin::new($io).poll_read(cx, out)),+ }
            }
        }

        impl AsyncWrite for $type {
            fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
                match self.get_mut() { $($pattern => Pin::new($io).poll_write(cx, bytes)),+ }
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                slices: &[io::IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                match self.get_mut() { $($pattern => Pin::new($io).poll_write_vectored(cx, slices)),+ }
            }

            fn is_write_vectored(&self) -> bool {
                match self { $($pattern => $io.is_write_vectored()),+ }
            }

            fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                match self.get_mut() { $($pattern => Pin::new($io).poll_flush(cx)),+ }
            }

            fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                match self.get_mut() { $($pattern => Pin::new($io).poll_shutdown(cx)),+ }
            }
        }
    };
}

delegate_io!(Socket, { Self::Tcp(io) => io, Self::Unix(io) => io });
delegate_io!(ByteStream, { Self::Plain(io, _) => io, Self::Tls(tls) => tls });

/// TLS 1.3 lets a client write before the server has judged its certificate. The write then fails while the server's alert,
/// which says why, waits in the socket. RST never overtakes the alert, so that nothing is waited for.
impl TlsConnection {
    /// The outcome of a write: of a cut connection, the peer's alert if there is one. Reading loses nothing that a caller
    /// could use: a connection that cannot be written to is over.
    fn explained<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected};
        match polled {
            Poll::Ready(Err(error)) => Poll::Ready(Err(match error.kind() {
                BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected => {
                    self.unread_alert(cx).unwrap_or(error)
                }
                _ => cause::of_stream(error),
            })),
            other => other,
        }
    }

    fn unread_alert(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        let mut space = [0; 4096];
        for _read in 0..ALERT_WITHIN_BYTES / space.len() {
            let mut out = ReadBuf::new(&mut space);
            match Pin::new(&mut self.io).poll_read(cx, &mut out) {
                Poll::Ready(Ok(())) if !out.filled().is_empty() => (),
                Poll::Ready(Err(error)) if cause::inner(&error).is_some() => {
                    return Some(cause::of_stream(error));
                }
                Poll::Ready(_) | Poll::Pending => return None,
            }
        }
        None
    }
}

impl AsyncRead for TlsConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io)
            .poll_read(cx, out)
            .map_err(cause::of_stream)
    }
}

impl AsyncWrite for TlsConnection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.io).poll_write(cx, bytes);
        this.explained(cx, polled)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.io).poll_write_vectored(cx, slices);
        this.explained(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.io).poll_flush(cx);
        this.explained(cx, polled)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.io).poll_shutdown(cx);
        this.explained(cx, polled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_unix_socket_buffer_is_enlarged_and_never_shrunk() {
        let (near, _far) = UnixStream::pair().unwrap();
        let small = SockRef::from(&near).set_send_buffer_size(32 * 1024);
        small.unwrap();
        let stream = ByteStream::Plain(Socket::Unix(near), PeerAddr::Unix);
        let booked = || {
            let socket = SockRef::from(stream.socket());
            socket.send_buffer_size().unwrap()
        };
        for (bytes, expected) in [(64, 128), (16, 128), (96, 192)] {
            stream.widen(bytes * 1024);
            assert_eq!(booked(), expected * 1024, "{bytes} KiB");
        }
    }
}
