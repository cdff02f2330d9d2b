//! Throw-away certificates: a CA that lives for one day and the certificates that it signs. For `adit demo` and for tests;
//! nothing that outlives the process should trust them.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

/// How long the certificates are valid.
const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Validity starts in the past, so that a peer whose clock is a little behind accepts them.
pub(crate) const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);

/// A name is no valid subject alternative name, or the key generator failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot make a certificate for {names}: {cause}; give host names or IP addresses")]
pub struct SelfSignedError {
    /// The names asked for.
    names: String,
    /// The generator's error.
    cause: rcgen::Error,
}

/// What a certificate may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Server authentication.
    Server,
    /// Client authentication: agents and clients.
    Client,
    /// Both: servers among peers.
    Peer,
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
        let failed = |cause| SelfSignedError {
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
        let failed = |cause| SelfSignedError {
            names: names.join(", "),
            cause,
        };
        let dates = throwaway_dates();
        end_entity(usage, common_name, names, dates, &self.issuer).map_err(failed)
    }

    /// What signs.
    #[must_use]
    pub fn issuer(&self) -> &Issuer<'static, KeyPair> {
        &self.issuer
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
    let (server, client) = (
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    );
    params.extended_key_usages = match usage {
        Usage::Server => vec![server],
        Usage::Client => vec![client],
        Usage::Peer => vec![server, client],
    };
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    Ok(Issued {
        cert_pem: params.signed_by(&key, issuer)?.pem(),
        key_pem: key.serialize_pem(),
    })
}
