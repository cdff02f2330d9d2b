//! Throw-away certificates: a CA that lives for one day and the certificates that it signs. For `adit demo` and for tests;
//! nothing that outlives the process should trust them.

use std::{
    fs, io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};

/// How long the certificates are valid.
const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Validity starts in the past, so that a peer whose clock is a little behind accepts them.
pub(crate) const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);

/// Why certificates could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SelfSignedError {
    /// A name is no valid subject alternative name, or the key generator failed.
    #[error("cannot make a certificate for {names}: {cause}; give host names or IP addresses")]
    Certificate {
        /// The names asked for.
        names: String,
        /// The generator's error.
        cause: rcgen::Error,
    },
    /// The files could not be written.
    #[error("cannot write certificates to {}: {cause}; check that the directory exists and is writable", .path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
}

/// What a certificate may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Server authentication.
    Server,
    /// Client authentication: agents and clients.
    Client,
}

/// A CA whose key exists only in this process.
pub struct ThrowawayCa {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate with its key, both PEM.
pub struct Issued {
    /// One block `CERTIFICATE`.
    pub cert_pem: String,
    /// One block `PRIVATE KEY`.
    pub key_pem: String,
}

impl ThrowawayCa {
    /// A new CA named `common_name`.
    ///
    /// # Errors
    /// The key generator failed.
    pub fn new(common_name: &str) -> Result<Self, SelfSignedError> {
        let failed = |cause| SelfSignedError::Certificate {
            names: common_name.to_owned(),
            cause,
        };
        let key = KeyPair::generate().map_err(failed)?;
        let limits = BasicConstraints::Unconstrained;
        let issuer = authority(common_name, limits, key, throwaway_dates()).map_err(failed)?;
        Ok(Self { issuer })
    }

    /// The CA's certificate as a PEM bundle of one.
    #[must_use]
    pub fn cert_pem(&self) -> String {
        self.issuer.pem()
    }

    /// A new pair signed by this CA. `names` are host names and IP addresses for the SAN extension; may be empty.
    ///
    /// # Errors
    /// A name is not valid in a certificate.
    pub fn issue(
        &self,
        usage: Usage,
        common_name: &str,
        names: &[String],
    ) -> Result<Issued, SelfSignedError> {
        let failed = |cause| SelfSignedError::Certificate {
            names: names.join(", "),
            cause,
        };
        let dates = throwaway_dates();
        end_entity(usage, common_name, names, dates, &self.issuer).map_err(failed)
    }

    /// A revocation list of this CA that names these certificates; all PEM.
    ///
    /// # Errors
    /// One of them is no certificate.
    #[expect(clippy::disallowed_methods, reason = "revocation lists have dates")]
    pub fn revoke(&self, certificates: &[&str]) -> Result<String, SelfSignedError> {
        let failed = |cause| SelfSignedError::Certificate {
            names: "a revocation list".to_owned(),
            cause,
        };
        let now = SystemTime::now();
        let entry = |pem: &&str| {
            let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok();
            let serial = der.as_ref().and_then(|der| {
                let (_rest, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
                Some(SerialNumber::from_slice(certificate.raw_serial()))
            });
            let serial_number =
                serial.ok_or_else(|| failed(rcgen::Error::CouldNotParseCertificate))?;
            Ok(RevokedCertParams {
                serial_number,
                revocation_time: now.into(),
                reason_code: None,
                invalidity_date: None,
            })
        };
        let revoked_certs = certificates
            .iter()
            .map(entry)
            .collect::<Result<Vec<_>, SelfSignedError>>()?;
        let list = CertificateRevocationListParams {
            this_update: (now - CLOCK_SKEW).into(),
            next_update: (now + LIFETIME).into(),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let signed = list.signed_by(&self.issuer).map_err(failed)?;
        signed.pem().map_err(failed)
    }
}

/// Start and end of a validity.
pub(crate) type Dates = (SystemTime, SystemTime);

#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn throwaway_dates() -> Dates {
    let now = SystemTime::now();
    (now - CLOCK_SKEW, now + LIFETIME)
}

/// Parameters of a certificate with this subject and these alternative names: host names and IP addresses.
fn parameters(
    common_name: &str,
    names: &[String],
    (not_before, not_after): Dates,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params.not_before = not_before.into();
    params.not_after = not_after.into();
    Ok(params)
}

/// The certificate of an authority, signed by itself.
///
/// # Errors
/// The generator failed.
pub(crate) fn authority(
    common_name: &str,
    limits: BasicConstraints,
    key: KeyPair,
    dates: Dates,
) -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    let mut params = parameters(common_name, &[], dates)?;
    params.is_ca = IsCa::Ca(limits);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    CertifiedIssuer::self_signed(params, key)
}

/// A new pair signed by `issuer`.
///
/// # Errors
/// A name is neither a host name nor an IP address, or the generator failed.
pub(crate) fn end_entity(
    usage: Usage,
    common_name: &str,
    names: &[String],
    dates: Dates,
    issuer: &Issuer<'_, KeyPair>,
) -> Result<Issued, rcgen::Error> {
    let mut params = parameters(common_name, names, dates)?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![match usage {
        Usage::Server => ExtendedKeyUsagePurpose::ServerAuth,
        Usage::Client => ExtendedKeyUsagePurpose::ClientAuth,
    }];
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    Ok(Issued {
        cert_pem: params.signed_by(&key, issuer)?.pem(),
        key_pem: key.serialize_pem(),
    })
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
    pub fn create(server_names: &[String]) -> Result<Self, SelfSignedError> {
        let dir = tempfile::Builder::new()
            .prefix("adit-certificates-")
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|cause| SelfSignedError::Write {
                path: std::env::temp_dir(),
                cause,
            })?;
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
    pub fn issue(&self, name: &str, usage: Usage, names: &[String]) -> Result<(), SelfSignedError> {
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
fn write(path: &Path, text: &str) -> Result<(), SelfSignedError> {
    let failed = |cause| SelfSignedError::Write {
        path: path.to_owned(),
        cause,
    };
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path).map_err(failed)?;
    io::Write::write_all(&mut file, text.as_bytes()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_of_throwaway_keys_has_mode_0700() {
        let files = ThrowawayFiles::create(&["localhost".to_owned()]).unwrap();
        let mode = fs::metadata(files.dir()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
}
