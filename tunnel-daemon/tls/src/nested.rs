//! TLS towards servers of the public kind, over any stream: another proxy behind a tunnel.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::cipher::{provider, versions};
use crate::stream::ByteStream;
use crate::tls::{TlsFiles, refused};
use crate::tls_error::TlsError;
use crate::{ca, verifier};
use adit_config::tls_policy::TlsPolicy;

/// A connection of any depth: a socket, TLS over it, or TLS in a tunnel over that.
pub trait Nested: AsyncRead + AsyncWrite + Send + Unpin {
    /// The TCP socket at the bottom, if there is one.
    fn tcp(&self) -> Option<&TcpStream>;
}

impl Nested for ByteStream {
    fn tcp(&self) -> Option<&TcpStream> {
        Self::tcp(self)
    }
}

impl Nested for Box<dyn Nested> {
    fn tcp(&self) -> Option<&TcpStream> {
        (**self).tcp()
    }
}

impl<S: Nested> Nested for TlsStream<S> {
    fn tcp(&self) -> Option<&TcpStream> {
        self.get_ref().0.tcp()
    }
}

/// Where systems and operators of clusters keep the certificates that they trust.
const BUNDLES: [&str; 4] = [
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    SYSTEM_BUNDLE,
    "/etc/ssl/cert.pem",
];
const SYSTEM_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";

/// A configuration that trusts what this system trusts.
#[derive(Clone)]
pub struct SystemTrust(Arc<ClientConfig>);

impl SystemTrust {
    /// Reads `bundle`, or all bundles of this system that are there. Certificates that cannot be used are left out. Blocks.
    ///
    /// # Errors
    /// A bundle cannot be read, or no certificate can be used.
    pub fn load(policy: &TlsPolicy, bundle: Option<&Path>) -> Result<Self, TlsError> {
        let paths: Vec<&Path> = match bundle {
            Some(path) => vec![path],
            None => BUNDLES
                .iter()
                .map(Path::new)
                .filter(|path| path.exists())
                .collect(),
        };
        let files = TlsFiles::read(&paths)?;
        let mut roots = RootCertStore::empty();
        for path in &paths {
            let (_path, bytes) = files.pair(path)?;
            roots.add_parsable_certificates(ca::certificates(bytes));
        }
        if roots.is_empty() {
            let path = paths.first().copied();
            let path = path.unwrap_or_else(|| Path::new(SYSTEM_BUNDLE));
            return Err(TlsError::NoCertificate {
                path: path.to_owned(),
            });
        }
        let provider = provider(policy);
        let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions(policy))
            .map_err(refused)?
            .dangerous()
            .with_custom_certificate_verifier(verifier::of_servers(roots, Vec::new(), &provider)?)
            .with_no_client_auth();
        Ok(Self(Arc::new(config)))
    }

    /// The client's side of a handshake over `io`; `name` is verified.
    ///
    /// # Errors
    /// The handshake fails.
    pub async fn connect<S: Nested>(
        &self,
        name: ServerName<'static>,
        io: S,
    ) -> io::Result<TlsStream<S>> {
        TlsConnector::from(Arc::clone(&self.0))
            .connect(name, io)
            .await
    }
}
