//! TLS handshakes, both sides, each under a deadline and with the configuration that is current when it starts.

use std::{io, sync::Arc, time::Duration};

use rustls_pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::{
    buffered::ReadBuffered,
    records::TrafficSecrets,
    reload::{ReloadableClientTls, ReloadableServerTls},
    sessions::SessionsOfHandshake,
    stream::{ByteStream, PeerAddr, Socket},
    tls::{Alpn, AlpnRule},
    tls_words,
};

/// Plain text rustls may hold while the socket is full: as much as HTTP/2 writes at once. Its default of 64 KiB would split
/// large writes.
const SEND_BUFFER_BYTES: usize = 256 << 10;

/// Why there is no TLS connection.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The peer was too slow, or does not speak TLS.
    #[error(
        "the TLS handshake was not finished within {} s; check that the peer speaks TLS on this port",
        .after.as_secs_f32()
    )]
    TimedOut {
        /// The deadline.
        after: Duration,
    },
    /// The handshake succeeded without an application protocol, but one is needed.
    #[error("the peer agreed to no application protocol (ALPN); gRPC needs h2")]
    NoProtocol,
    /// The peer refused, or was refused; the text says which certificate or parameter.
    #[error("TLS handshake failed: {}", tls_words::of_handshake(.0))]
    Failed(#[source] io::Error),
}

impl HandshakeError {
    /// The cause, for a message that already mentions a TLS handshake.
    #[must_use]
    pub fn cause(&self) -> String {
        match self {
            Self::Failed(cause) => tls_words::of_handshake(cause),
            other => other.to_string(),
        }
    }
}

impl From<HandshakeError> for io::Error {
    fn from(error: HandshakeError) -> Self {
        let kind = match &error {
            HandshakeError::TimedOut { .. } => io::ErrorKind::TimedOut,
            HandshakeError::NoProtocol => io::ErrorKind::InvalidData,
            HandshakeError::Failed(cause) => cause.kind(),
        };
        Self::new(kind, error)
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
) -> Result<ByteStream, HandshakeError> {
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
    let accept = acceptor.accept_with(buffered(socket, secrets.is_some()), |session| {
        session.set_buffer_limit(Some(SEND_BUFFER_BYTES));
    });
    let stream = finish(accept, deadline).await?;
    if let Some(sessions) = sessions {
        sessions.keep(stream.get_ref().1.peer_certificates().unwrap_or_default());
    }
    checked(
        ByteStream::tls(TlsStream::Server(stream), peer, secrets),
        &tls.spec().alpn,
    )
}

fn buffered(socket: Socket, by_record: bool) -> ReadBuffered<Socket> {
    if by_record {
        ReadBuffered::record_by_record(socket)
    } else {
        ReadBuffered::new(socket)
    }
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
    let mut config = tls.current();
    let secrets = alpn.gives_records().then(Arc::default);
    if let Some(secrets) = &secrets {
        Arc::make_mut(&mut config).key_log = Arc::<TrafficSecrets>::clone(secrets);
    }
    let connector = TlsConnector::from(config);
    let connect = connector.with_alpn(alpn.protocols.clone()).connect_with(
        name,
        buffered(socket, secrets.is_some()),
        |session| session.set_buffer_limit(Some(SEND_BUFFER_BYTES)),
    );
    let stream = finish(connect, deadline).await?;
    checked(
        ByteStream::tls(TlsStream::Client(stream), peer, secrets),
        alpn,
    )
}

async fn finish<T>(
    handshake: impl Future<Output = io::Result<T>>,
    deadline: Duration,
) -> Result<T, HandshakeError> {
    match tokio::time::timeout(deadline, handshake).await {
        Ok(result) => result.map_err(HandshakeError::Failed),
        Err(_elapsed) => Err(HandshakeError::TimedOut { after: deadline }),
    }
}

fn checked(mut stream: ByteStream, alpn: &Alpn) -> Result<ByteStream, HandshakeError> {
    let agreed = stream.alpn();
    if agreed.is_none() && alpn.rule == AlpnRule::Required {
        return Err(HandshakeError::NoProtocol);
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
