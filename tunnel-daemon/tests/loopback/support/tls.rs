//! TLS connections to a server's ports, with or without a certificate, and TLS for targets.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::world::World;

/// As an agent: [`dial_as`] with ALPN `h2`.
pub(crate) async fn dial(
    address: SocketAddr,
    ca: &Path,
    identity: Option<(&Path, &Path)>,
) -> io::Result<TlsStream<TcpStream>> {
    dial_as(b"h2", address, ca, identity).await
}

/// As [`dial_as`], to a server with this world's certificates. `name` is that of the certificate to present.
pub(crate) async fn dial_to(
    world: &World,
    alpn: &[u8],
    address: SocketAddr,
    name: Option<&str>,
) -> io::Result<TlsStream<TcpStream>> {
    let pair = name.map(|name| (world.files.cert(name), world.files.key(name)));
    let identity = pair.as_ref().map(|(cert, key)| (&**cert, &**key));
    dial_as(alpn, address, &world.files.ca_file(), identity).await
}

/// A handshake that offers the ALPN protocol `alpn`, trusts `ca` and presents `identity` (certificate, key), if any.
pub(crate) async fn dial_as(
    alpn: &[u8],
    address: SocketAddr,
    ca: &Path,
    identity: Option<(&Path, &Path)>,
) -> io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    over(stream, alpn, ca, identity).await
}

/// The same over an existing connection.
pub(crate) async fn over(
    stream: TcpStream,
    alpn: &[u8],
    ca: &Path,
    identity: Option<(&Path, &Path)>,
) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(ca).expect("a CA file"))
        .expect("a CA");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("default versions")
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_file(cert).expect("a certificate file")],
                PrivateKeyDer::from_pem_file(key).expect("a key file"),
            )
            .expect("a pair"),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    stream.set_nodelay(true)?;
    let name = ServerName::from(stream.peer_addr()?.ip());
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

/// A server's configuration with the world's certificate of this name.
pub(crate) fn server_config(world: &World, name: &str) -> ServerConfig {
    server_config_of(&world.files.cert(name), &world.files.key(name))
}

/// A server's configuration with a certificate and its key.
pub(crate) fn server_config_of(cert: &Path, key: &Path) -> ServerConfig {
    let cert = CertificateDer::from_pem_file(cert);
    let key = PrivateKeyDer::from_pem_file(key);
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("default versions")
        .with_no_client_auth()
        .with_single_cert(vec![cert.expect("a certificate")], key.expect("a key"))
        .expect("a pair")
}

/// Accepts TLS connections of any client; see [`server_config`].
pub(crate) fn acceptor(world: &World, name: &str) -> TlsAcceptor {
    TlsAcceptor::from(Arc::new(server_config(world, name)))
}

/// The certificate that the server presented.
pub(crate) fn shown(stream: &TlsStream<TcpStream>) -> CertificateDer<'static> {
    let (_, session) = stream.get_ref();
    session
        .peer_certificates()
        .and_then(|chain| chain.first())
        .expect("a server shows a certificate")
        .clone()
        .into_owned()
}
