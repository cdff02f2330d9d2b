//! Configuration of a TLS side: files, policy and protocols in, a checked rustls configuration out. `reload` reads changed
//! files again, `handshake` makes handshakes.

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, ServerConfig, client::danger::ServerCertVerifier, crypto::CryptoProvider,
    server::danger::ClientCertVerifier,
};
use rustls_pki_types::ServerName;
use zeroize::Zeroizing;

pub use crate::tls_error::TlsError;
use crate::{
    ca,
    cipher::{aes_in_hardware, provider, versions},
    crl, identity,
    inspect::{Expiry, Role},
    verifier,
};
use adit_config::tls_policy::TlsPolicy;
use adit_kube::sha256::Sha256;

/// ALPN name of HTTP/2, which gRPC needs.
pub const ALPN_H2: &[u8] = b"h2";
/// ALPN name of HTTP/1.1, for HTTP-CONNECT over TLS.
pub const ALPN_HTTP11: &[u8] = b"http/1.1";

/// Largest certificate, key or CA file that is read: a bundle of all public CAs is a tenth of it.
pub(crate) const FILE_BYTES_MAX: u64 = 4 << 20;

/// Whether a connection may go on when no application protocol was agreed upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlpnRule {
    /// Refuse it, as gRPC-Go does. Any protocol that was offered will do: a router in front may select a custom one.
    Required,
    /// Serve it, as Go's HTTP server does.
    Optional,
}

/// The application protocols of a side, most wanted first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alpn {
    /// ALPN names, for example [`ALPN_H2`].
    pub protocols: Vec<Vec<u8>>,
    /// What happens without an agreed protocol.
    pub rule: AlpnRule,
    /// The protocol whose connections leave rustls after their greeting.
    pub records: Option<Vec<u8>>,
}

impl Alpn {
    /// A gRPC listener: `h2`, and a peer without ALPN is refused. `extra` protocols are preferred.
    #[must_use]
    pub fn grpc<S: AsRef<str>>(extra: &[S]) -> Self {
        let extra = extra.iter().map(|name| name.as_ref().as_bytes().to_vec());
        Self {
            protocols: extra.chain([ALPN_H2.to_vec()]).collect(),
            rule: AlpnRule::Required,
            records: None,
        }
    }

    /// Offers `name` first. Its connections leave rustls after their greeting: see [`crate::records`].
    #[must_use]
    pub fn with_records(mut self, name: &str) -> Self {
        self.protocols.insert(0, name.into());
        self.records = Some(name.into());
        self
    }

    /// `name` as in [`Self::with_records`], followed by the custom protocols of `self`: a front may route by them. A server
    /// that knows only HTTP/2 refuses the handshake.
    #[must_use]
    pub fn records_beside(&self, name: &str) -> Self {
        let custom = self.protocols.iter().filter(|known| *known != ALPN_H2);
        Self {
            protocols: [name.into()].into_iter().chain(custom.cloned()).collect(),
            rule: AlpnRule::Required,
            records: Some(name.into()),
        }
    }

    /// Whether connections may leave rustls.
    pub(super) fn gives_records(&self) -> bool {
        self.records.is_some()
    }

    /// A listener whose protocol has no ALPN name: what a peer offers is ignored.
    #[must_use]
    pub fn none() -> Self {
        Self {
            protocols: Vec::new(),
            rule: AlpnRule::Optional,
            records: None,
        }
    }

    /// An HTTP-CONNECT listener: `http/1.1`, or a peer without ALPN.
    #[must_use]
    pub fn http11() -> Self {
        Self {
            protocols: vec![ALPN_HTTP11.to_vec()],
            rule: AlpnRule::Optional,
            records: None,
        }
    }
}

/// Specification of a configuration. Implemented by [`ServerTls`] and [`ClientTls`].
pub trait TlsSpec: Send + Sync + 'static {
    /// The rustls configuration.
    type Config: Send + Sync + 'static;

    /// Every file that [`TlsSpec::build`] uses.
    fn paths(&self) -> Vec<&Path>;

    /// The file with the private key.
    fn key(&self) -> Option<&Path>;

    /// Checks everything and builds. Touches no file: `files` holds their content.
    ///
    /// # Errors
    /// The first fault, naming the file.
    fn build(&self, files: &TlsFiles) -> Result<Self::Config, TlsError>;

    /// Lets a new configuration keep what the old one has learned, as far as its files allow.
    fn inherit(&self, _new: &mut Self::Config, _old: &Self::Config) {}
}

/// The TLS side of a listener.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// Certificate chain, PEM, own certificate first.
    pub cert: PathBuf,
    /// Private key of the certificate, PEM.
    pub key: PathBuf,
    /// Client certificates are requested and verified against this bundle; without it none is requested.
    pub client_ca: Option<PathBuf>,
    /// Revocation lists. Certificates on them are refused, and certificates whose issuer has no list among them.
    pub client_crl: Option<PathBuf>,
    /// A client may come without a certificate; a certificate that does not verify still ends the handshake.
    pub client_may_be_anonymous: bool,
    /// Versions and suites.
    pub policy: TlsPolicy,
    /// Application protocols.
    pub alpn: Alpn,
}

/// The TLS side of a dialler: an agent to its server, a proxy to a remote server.
#[derive(Clone, Debug)]
pub struct ClientTls {
    /// The server's certificate is verified against this bundle.
    pub ca: PathBuf,
    /// Revocation lists of that bundle's CAs.
    pub crl: Option<PathBuf>,
    /// Own certificate chain and its key, sent when the server asks.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Versions and suites; upstream's agent always has the default.
    pub policy: TlsPolicy,
    /// Application protocols.
    pub alpn: Alpn,
}

/// The configuration of a listener.
pub struct ServerSide {
    /// For handshakes.
    pub(super) config: Arc<ServerConfig>,
    /// Verifier of client certificates, if they are requested.
    pub(super) clients: Option<Arc<dyn ClientCertVerifier>>,
    /// Fingerprint of the files that decide which clients are let in.
    pub(super) trust: [u8; 32],
}

impl TlsSpec for ServerTls {
    type Config = ServerSide;

    fn key(&self) -> Option<&Path> {
        Some(&self.key)
    }

    fn paths(&self) -> Vec<&Path> {
        [&self.cert, &self.key]
            .into_iter()
            .chain(&self.client_ca)
            .chain(&self.client_crl)
            .map(PathBuf::as_path)
            .collect()
    }

    fn build(&self, files: &TlsFiles) -> Result<ServerSide, TlsError> {
        let provider = provider(&self.policy);
        let identity =
            identity::parse_identity(files.pair(&self.cert)?, files.pair(&self.key)?, &provider)?;
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions(&self.policy))
            .map_err(refused)?;
        identity::warn_of_flaws(files.pair(&self.cert)?, Role::Server);
        let clients = self.client_verifier(files, &provider)?;
        let builder = match &clients {
            Some(verifier) => builder.with_client_cert_verifier(Arc::clone(verifier)),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(identity);
        config.alpn_protocols.clone_from(&self.alpn.protocols);
        config.ignore_client_order = aes_in_hardware();
        config.enable_secret_extraction = self.alpn.gives_records();
        Ok(ServerSide {
            config: Arc::new(config),
            clients,
            trust: files.fingerprint_of(|path| {
                let mut trusted = self.client_ca.iter().chain(&self.client_crl);
                trusted.any(|one| one == path)
            }),
        })
    }

    /// Sessions outlive a renewal of the own certificate. After a change of CAs or revocation lists no session is resumed:
    /// each client is verified by the new files.
    fn inherit(&self, new: &mut ServerSide, old: &ServerSide) {
        if new.trust == old.trust {
            let sessions = Arc::clone(&old.config.session_storage);
            Arc::make_mut(&mut new.config).session_storage = sessions;
        }
    }
}

impl ServerTls {
    /// `None`: no certificate is requested.
    fn client_verifier(
        &self,
        files: &TlsFiles,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Option<Arc<dyn ClientCertVerifier>>, TlsError> {
        let Some(ca) = &self.client_ca else {
            return Ok(None);
        };
        let (path, bytes) = files.pair(ca)?;
        let roots = ca::parse_bundle(path, bytes)?;
        let lists = revocation_lists(self.client_crl.as_deref(), files, &roots)?;
        verifier::of_clients(roots, lists, self.client_may_be_anonymous, provider).map(Some)
    }
}

/// The lists of a file, if there is one; flaws of the file are logged.
fn revocation_lists(
    crl: Option<&Path>,
    files: &TlsFiles,
    roots: &rustls::RootCertStore,
) -> Result<Vec<rustls_pki_types::CertificateRevocationListDer<'static>>, TlsError> {
    let Some(crl) = crl else {
        return Ok(Vec::new());
    };
    let (path, bytes) = files.pair(crl)?;
    let crl::RevocationLists { lists, flaws } = crl::parse(path, bytes, roots)?;
    for flaw in flaws {
        tracing::warn!(file = %path.display(), "revocation lists: {flaw}");
    }
    Ok(lists)
}

/// The configuration of a dialler.
pub struct ClientSide {
    /// For handshakes.
    pub(super) config: Arc<ClientConfig>,
    /// Verifier of server certificates.
    pub(super) servers: Arc<dyn ServerCertVerifier>,
}

impl TlsSpec for ClientTls {
    type Config = ClientSide;

    fn key(&self) -> Option<&Path> {
        self.identity.as_ref().map(|(_cert, key)| key.as_path())
    }

    fn paths(&self) -> Vec<&Path> {
        let pair = self.identity.iter().flat_map(|(cert, key)| [cert, key]);
        [&self.ca]
            .into_iter()
            .chain(&self.crl)
            .chain(pair)
            .map(PathBuf::as_path)
            .collect()
    }

    fn build(&self, files: &TlsFiles) -> Result<ClientSide, TlsError> {
        let provider = provider(&self.policy);
        let (ca_path, ca_bytes) = files.pair(&self.ca)?;
        let roots = ca::parse_bundle(ca_path, ca_bytes)?;
        let lists = revocation_lists(self.crl.as_deref(), files, &roots)?;
        let servers = verifier::of_servers(roots, lists, &provider)?;
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions(&self.policy))
            .map_err(refused)?
            // As rustls verifies, with one more usage accepted.
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&servers));
        let mut config = match &self.identity {
            Some((cert, key)) => {
                let (cert, key) = (files.pair(cert)?, files.pair(key)?);
                identity::warn_of_flaws(cert, Role::Client);
                builder.with_client_cert_resolver(identity::parse_identity(cert, key, &provider)?)
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols.clone_from(&self.alpn.protocols);
        // For lanes, which use this configuration with other protocols and leave rustls.
        config.enable_secret_extraction = true;
        Ok(ClientSide {
            config: Arc::new(config),
            servers,
        })
    }
}

pub(super) fn refused(error: impl std::fmt::Display) -> TlsError {
    TlsError::Refused {
        reason: error.to_string(),
    }
}

/// The content of the files of one [`TlsSpec`], all read before any is checked. Dropping clears it, since keys are among
/// them.
pub struct TlsFiles(BTreeMap<PathBuf, Zeroizing<Vec<u8>>>);

impl TlsFiles {
    /// Reads each file once. Blocks; a few kilobytes as a rule.
    ///
    /// # Errors
    /// A file cannot be read or is absurdly large.
    pub fn read(paths: &[&Path]) -> Result<Self, TlsError> {
        let read = |path: &&Path| Ok((path.to_path_buf(), read_file(path)?));
        paths.iter().map(read).collect::<Result<_, _>>().map(Self)
    }

    /// Distinguishes contents without keeping keys in memory.
    pub(super) fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint_of(|_path| true)
    }

    /// As [`Self::fingerprint`], of the files that count.
    fn fingerprint_of(&self, counts: impl Fn(&PathBuf) -> bool) -> [u8; 32] {
        let mut hash = Sha256::default();
        for (path, bytes) in self.0.iter().filter(|(path, _bytes)| counts(path)) {
            hash.update(path.as_os_str().as_encoded_bytes());
            hash.update([0]);
            hash.update(Sha256::digest(bytes));
        }
        hash.finish()
    }

    /// When the certificates in the files expire.
    pub(super) fn expiries(&self) -> Vec<Expiry> {
        let files = self.0.iter();
        files
            .filter_map(|(path, bytes)| Expiry::of(path, bytes))
            .collect()
    }

    /// A file's path, for error texts, and its content.
    pub(super) fn pair(&self, path: &Path) -> Result<(&Path, &[u8]), TlsError> {
        let not_read = || TlsError::Unreadable {
            path: path.to_owned(),
            cause: std::io::ErrorKind::NotFound.into(),
        };
        self.0
            .get_key_value(path)
            .map(|(path, bytes)| (path.as_path(), bytes.as_slice()))
            .ok_or_else(not_read)
    }
}

fn read_file(path: &Path) -> Result<Zeroizing<Vec<u8>>, TlsError> {
    let unreadable = |cause| TlsError::Unreadable {
        path: path.to_owned(),
        cause,
    };
    let file = adit_host::files::open(path).map_err(unreadable)?;
    let length = file.metadata().map_or(0, |about| about.len());
    let capacity = usize::try_from(length.min(FILE_BYTES_MAX)).unwrap_or_default();
    // Read at once, with room for one more byte to detect EOF: a buffer that grows leaves copies of a key behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(capacity + 1));
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if u64::try_from(bytes.len()).is_ok_and(|len| len <= FILE_BYTES_MAX) {
        Ok(bytes)
    } else {
        Err(TlsError::TooLarge {
            path: path.to_owned(),
            limit_bytes: FILE_BYTES_MAX,
        })
    }
}

/// The name a server's certificate must carry: a host name (sent as SNI) or an address (IP SAN, no SNI). Accepts the host
/// of a dial address: brackets, a zone and a trailing dot are dropped, as Go does.
///
/// # Errors
/// The text is neither.
pub fn server_name(host: &str) -> Result<ServerName<'static>, TlsError> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    let bare = bare
        .split_once('%')
        .map_or(bare, |(address, _zone)| address);
    let bare = bare.strip_suffix('.').unwrap_or(bare);
    ServerName::try_from(bare.to_owned()).map_err(|_invalid| TlsError::BadServerName {
        host: host.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_names_are_hosts_or_addresses() {
        for (given, address) in [
            ("example.org", false),
            ("example.org.", false),
            ("10.0.0.1", true),
            ("[::1]", true),
            ("fe80::1%eth0", true),
        ] {
            let name = server_name(given).unwrap();
            assert_eq!(matches!(name, ServerName::IpAddress(_)), address, "{given}");
        }
        let error = server_name("no host").unwrap_err();
        assert!(error.to_string().contains("no host"));
    }

    #[test]
    fn read_files_are_cleared_when_they_are_dropped() {
        fn clears(_secret: &impl zeroize::ZeroizeOnDrop) {}
        let files = TlsFiles::read(&[Path::new("/proc/self/stat")]).unwrap();
        files.0.values().for_each(clears);
    }

    #[test]
    fn missing_file_is_named() {
        let error = TlsFiles::read(&[Path::new("/nonexistent/tls.crt")])
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("/nonexistent/tls.crt"),
            "{error}"
        );
    }

    #[test]
    fn huge_file_is_refused_before_it_fills_memory() {
        let huge = tempfile::NamedTempFile::new().unwrap();
        huge.as_file().set_len(1 << 40).unwrap();
        let error = TlsFiles::read(&[huge.path()]).err().unwrap();
        assert!(matches!(error, TlsError::TooLarge { .. }), "{error}");
    }

    #[test]
    fn lane_protocols_are_preferred_over_h2() {
        assert_eq!(
            Alpn::grpc(&["x-lane"]).protocols,
            [b"x-lane".to_vec(), b"h2".to_vec()]
        );
    }
}
