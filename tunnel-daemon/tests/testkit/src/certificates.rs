//! Certificates as files, and revocation lists, of a CA that lives for one day.

use std::error::Error;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io};

pub use adit_tls::selfsigned::{ThrowawayCa, Usage};
use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};

/// Why files or a list could not be made.
type Failure = Box<dyn Error + Send + Sync>;

/// A revocation list of this CA that names these certificates; all PEM.
///
/// # Errors
/// One of them is no certificate.
#[expect(clippy::disallowed_methods, reason = "revocation lists have dates")]
pub fn revoke(ca: &ThrowawayCa, certificates: &[&str]) -> Result<String, Failure> {
    let now = SystemTime::now();
    let entry = |pem: &&str| {
        let der = CertificateDer::from_pem_slice(pem.as_bytes())?;
        let (_rest, certificate) = x509_parser::parse_x509_certificate(&der)?;
        Ok(RevokedCertParams {
            serial_number: SerialNumber::from_slice(certificate.raw_serial()),
            revocation_time: now.into(),
            reason_code: None,
            invalidity_date: None,
        })
    };
    let revoked_certs = certificates
        .iter()
        .map(entry)
        .collect::<Result<_, Failure>>()?;
    let list = CertificateRevocationListParams {
        this_update: (now - Duration::from_secs(5 * 60)).into(),
        next_update: (now + Duration::from_secs(24 * 60 * 60)).into(),
        crl_number: SerialNumber::from(1_u64),
        issuing_distribution_point: None,
        revoked_certs,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    Ok(list.signed_by(ca.issuer())?.pem()?)
}

/// A CA file and pairs for a server, an agent and a client. Dropping this removes the files.
pub struct ThrowawayFiles {
    dir: tempfile::TempDir,
    ca: ThrowawayCa,
}

impl ThrowawayFiles {
    /// Writes `ca.crt`, `{server,agent,client}.{crt,key}` to a temporary directory only this user can enter. The
    /// server's certificate carries `server_names` (host names or addresses), the others none.
    ///
    /// # Errors
    /// A name is not valid in a certificate, or the temporary directory is not writable.
    pub fn create(server_names: &[String]) -> Result<Self, Failure> {
        let dir = tempfile::Builder::new()
            .prefix("adit-certificates-")
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir()?;
        let files = Self {
            dir,
            ca: ThrowawayCa::new("adit throw-away CA")?,
        };
        write(&files.ca_file(), &files.ca.cert_pem())?;
        files.issue("server", Usage::Server, server_names)?;
        files.issue("agent", Usage::Client, &[])?;
        files.issue("client", Usage::Client, &[])?;
        Ok(files)
    }

    /// Makes one more pair in the directory, or replaces the one of that name: the common name is `name`.
    ///
    /// # Errors
    /// As [`ThrowawayFiles::create`].
    pub fn issue(&self, name: &str, usage: Usage, names: &[String]) -> Result<(), Failure> {
        let pair = self.ca.issue(usage, name, names)?;
        write(&self.cert(name), &pair.cert_pem)?;
        write(&self.key(name), &pair.key_pem)
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The CA behind the files.
    #[must_use]
    pub fn ca(&self) -> &ThrowawayCa {
        &self.ca
    }

    /// The CA bundle.
    #[must_use]
    pub fn ca_file(&self) -> PathBuf {
        self.dir().join("ca.crt")
    }

    /// The certificate file of `name`: `server`, `agent`, `client` or a name issued later.
    #[must_use]
    pub fn cert(&self, name: &str) -> PathBuf {
        self.dir().join(format!("{name}.crt"))
    }

    /// The key file of `name`.
    #[must_use]
    pub fn key(&self, name: &str) -> PathBuf {
        self.dir().join(format!("{name}.key"))
    }
}

/// Mode 0600 for all files: keys need it, certificates work with it.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    io::Write::write_all(&mut options.open(path)?, text.as_bytes())?;
    Ok(())
}
