//! TLS handshakes, both sides, each under a deadline and with the configuration that is current when it starts.

use std::{io, sync::Arc, time::Duration};

use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::{
    buffered::ReadBuffered,
    cause::TlsCause,
    records::TrafficSecrets,
    reload::{ReloadableClientTls, ReloadableServerTls},
    sessions::SessionsOfHandshake,
    stream::{ByteStream, PeerAddr, Socket},
    tls::{Alpn, AlpnRule},
};

/// Plain text rustls may hold while the socket is full: as much as HTTP/2 writes at once. Its default of 64 KiB would split
/// large writes.
const SEND_BUFFER_BYTES: usize = 256 << 10;

/// How long, and for how many bytes, a server waits for a refused client to read the alert.
const ALERT_READ_WITHIN: Duration = Duration::from_secs(1);
const UNREAD_BYTES_MAX: u64 = 64 << 10;

/// Why there is no TLS connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("TLS handshake failed: {cause}")]
pub struct HandshakeError {
    /// The cause, for a message that already mentions a TLS handshake.
    pub cause: TlsCause,
}

impl From<TlsCause> for HandshakeError {
    fn from(cause: TlsCause) -> Self {
        Self { cause }
    }
}

impl HandshakeError {
    /// Of an error of the TLS library, or of the socket below it.
    #[must_use]
    pub fn of(error: &io::Error) -> Self {
        TlsCause::of_handshake(error).into()
    }
}

impl From<HandshakeError> for io::Error {
    fn from(error: HandshakeError) -> Self {
        let kind = match &error.cause {
            TlsCause::TimedOut { .. } => io::ErrorKind::TimedOut,
            TlsCause::Closed => io::ErrorKind::UnexpectedEof,
            TlsCause::Reset => io::ErrorKind::ConnectionReset,
            _ => io::ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}

/// A server's handshake that failed. Dropped, it closes the socket at once.
#[derive(Debug)]
pub struct FailedHandshake {
    /// Why.
    pub error: HandshakeError,
    /// `None`: no alert was sent.
    socket: Option<ReadBuffered<Socket>>,
}

impl FailedHandshake {
    fn without_alert(cause: TlsCause) -> Self {
        let error = cause.into();
        Self {
            error,
            socket: None,
        }
    }

    /// Closes the socket behind the alert. A kernel that closes a socket with unread input, or gets input afterwards, sends RST,
    /// which may overtake the alert. So input is read for at most a second, and dropped. A cancelled call closes at once.
    pub async fn close(self) {
        let Some(mut socket) = self.socket else {
            return;
        };
        let closing = async {
            socket.shutdown().await?;
            let mut unread = socket.take(UNREAD_BYTES_MAX);
            tokio::io::copy(&mut unread, &mut tokio::io::sink()).await
        };
        // A peer that sends or waits for longer gets no better answer.
        let _ended = tokio::time::timeout(ALERT_READ_WITHIN, closing).await;
    }
}

impl From<FailedHandshake> for HandshakeError {
    fn from(failed: FailedHandshake) -> Self {
        failed.error
    }
}

/// The server's side. A cancelled call closes the socket.
///
/// # Errors
/// See [`HandshakeError`]; with a client CA this includes a missing or foreign client certificate.
pub async fn accept_tls(
    socket: Socket,
    peer: PeerAddr,
    tls: &ReloadableServerTls,
    deadline: Duration,
) -> Result<ByteStream, FailedHandshake> {
    let mut config = Arc::clone(&tls.current().config);
    let secrets = tls.spec().alpn.gives_records().then(Arc::default);
    if let Some(secrets) = &secrets {
        Arc::make_mut(&mut config).key_log = Arc::<TrafficSecrets>::clone(secrets);
    }
    let sessions = tls.spec().client_ca.is_some().then(|| {
        let all = Arc::clone(&config.session_storage);
        Arc::new(SessionsOfHandshake::new(
            all,
            Arc::clone(&config.time_provider),
        ))
    });
    if let Some(sessions) = &sessions {
        Arc::make_mut(&mut config).session_storage = Arc::<SessionsOfHandshake>::clone(sessions);
    }
    let acceptor = TlsAcceptor::from(config);
    let socket = ReadBuffered::new(socket, secrets.is_some());
    let accept = acceptor.accept_with(socket, |session| {
        session.set_buffer_limit(Some(SEND_BUFFER_BYTES));
    });
    let stream = match tokio::time::timeout(deadline, accept.into_fallible()).await {
        Ok(Ok(stream)) => stream,
        Ok(Err((error, socket))) => {
            return Err(FailedHandshake {
                error: HandshakeError::of(&error),
                socket: Some(socket),
            });
        }
        Err(_elapsed) => {
            let after = deadline;
            return Err(FailedHandshake::without_alert(TlsCause::TimedOut { after }));
        }
    };
    if let Some(sessions) = sessions {
        sessions.keep(stream.get_ref().1.peer_certificates().unwrap_or_default());
    }
    checked(
        ByteStream::tls(TlsStream::Server(stream), peer, secrets),
        &tls.spec().alpn,
    )
    .map_err(FailedHandshake::without_alert)
}

/// The client's side: verifies the server's certificate against `name` (see `tls::server_name`). `alpn` replaces the
/// configured protocols for this connection. A cancelled call closes the socket.
///
/// With TLS 1.3 the server judges our certificate after this returns: a refusal shows at the first read.
///
/// # Errors
/// See [`HandshakeError`].
pub async fn connect_tls(
    socket: Socket,
    peer: PeerAddr,
    tls: &ReloadableClientTls,
    name: ServerName<'static>,
    alpn: Option<&Alpn>,
    deadline: Duration,
) -> Result<ByteStream, HandshakeError> {
    let alpn = alpn.unwrap_or_else(|| &tls.spec().alpn);
    let mut config = Arc::clone(&tls.current().config);
    let secrets = alpn.gives_records().then(Arc::default);
    if let Some(secrets) = &secrets {
        Arc::make_mut(&mut config).key_log = Arc::<TrafficSecrets>::clone(secrets);
    }
    let connector = TlsConnector::from(config);
    let connect = connector.with_alpn(alpn.protocols.clone()).connect_with(
        name,
        ReadBuffered::new(socket, secrets.is_some()),
        |session| session.set_buffer_limit(Some(SEND_BUFFER_BYTES)),
    );
    let stream = match tokio::time::timeout(deadline, connect).await {
        Ok(connected) => connected.map_err(|error| HandshakeError::of(&error))?,
        Err(_elapsed) => return Err(TlsCause::TimedOut { after: deadline }.into()),
    };
    let stream = ByteStream::tls(TlsStream::Client(stream), peer, secrets);
    Ok(checked(stream, alpn)?)
}

fn checked(mut stream: ByteStream, alpn: &Alpn) -> Result<ByteStream, TlsCause> {
    let agreed = stream.alpn();
    if agreed.is_none() && alpn.rule == AlpnRule::Required {
        return Err(TlsCause::NoProtocol);
    }
    let records = agreed.is_some_and(|agreed| alpn.records.as_deref() == Some(agreed));
    if let ByteStream::Tls(tls) = &mut stream
        && !records
    {
        tls.keep_session();
    }
    Ok(stream)
}

#[cfg(test)]
mod tests;
