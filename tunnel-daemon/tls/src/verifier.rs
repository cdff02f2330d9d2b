//! Verification of peers' certificates: that of rustls, which also accepts `anyExtendedKeyUsage` for the usage that is
//! needed.
//!
//! RFC 5280 section 4.2.1.12 leaves it to the application whether that value is enough. Go accepts it, so peers of upstream
//! have such certificates. All other checks are those of rustls: chain, dates, names, revocation, no CA as a peer.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::{
    CertificateDer, CertificateRevocationListDer, ServerName, SignatureVerificationAlgorithm,
    UnixTime,
};
use webpki::{
    CertRevocationList, EndEntityCert, ExtendedKeyUsageValidator, KeyPurposeId, KeyPurposeIdIter,
    KeyUsage, OwnedCertRevocationList, RequiredEkuNotFoundContext, RevocationOptionsBuilder,
};

use crate::principal::Principal;
use crate::tls::{TlsError, refused};

/// `anyExtendedKeyUsage`, 2.5.29.37.0, as it stands in a certificate: tag, length, content.
const ANY_DER: [u8; 6] = [6, 4, 0x55, 0x1d, 0x25, 0];
const ANY: KeyPurposeId<'static> = KeyPurposeId::new(&[0x55, 0x1d, 0x25, 0]);
/// `id-kp-serverAuth`, 1.3.6.1.5.5.7.3.1.
const SERVER_AUTH: KeyPurposeId<'static> = KeyPurposeId::new(&[0x2b, 6, 1, 5, 5, 7, 3, 1]);
/// `id-kp-clientAuth`, 1.3.6.1.5.5.7.3.2.
const CLIENT_AUTH: KeyPurposeId<'static> = KeyPurposeId::new(&[0x2b, 6, 1, 5, 5, 7, 3, 2]);

/// Verifier of servers, by the CAs of `roots`. `lists`: as for [`of_clients`].
///
/// # Errors
/// The library refused, as for `roots` without a CA.
pub(super) fn of_servers(
    roots: RootCertStore,
    lists: Vec<CertificateRevocationListDer<'static>>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ServerCertVerifier>, TlsError> {
    let roots = Arc::new(roots);
    let parsed = parsed(&lists)?;
    let strict =
        WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
            .with_crls(lists)
            .build()
            .map_err(refused)?;
    let any = AnyUsage {
        needed: (SERVER_AUTH, KeyUsage::server_auth()),
        algorithms: provider.signature_verification_algorithms.all,
        roots,
        lists: parsed,
    };
    Ok(Arc::new(WithAnyUsage { strict, any }))
}

/// Verifier of clients, by the CAs of `roots`. With revocation `lists`, every certificate of a chain needs a list of its
/// issuer that does not name it.
///
/// # Errors
/// A list cannot be read, or `roots` has no CA.
pub(super) fn of_clients(
    roots: RootCertStore,
    lists: Vec<CertificateRevocationListDer<'static>>,
    may_be_anonymous: bool,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let roots = Arc::new(roots);
    let parsed = parsed(&lists)?;
    let mut strict =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
            .with_crls(lists);
    if may_be_anonymous {
        strict = strict.allow_unauthenticated();
    }
    let any = AnyUsage {
        needed: (CLIENT_AUTH, KeyUsage::client_auth()),
        algorithms: provider.signature_verification_algorithms.all,
        roots,
        lists: parsed,
    };
    let strict = strict.build().map_err(refused)?;
    Ok(Arc::new(WithAnyUsage { strict, any }))
}

fn parsed(
    lists: &[CertificateRevocationListDer<'_>],
) -> Result<Vec<CertRevocationList<'static>>, TlsError> {
    let lists = lists.iter();
    lists
        .map(|list| OwnedCertRevocationList::from_der(list).map(CertRevocationList::from))
        .collect::<Result<_, _>>()
        .map_err(refused)
}

/// The second verification, of chains that rustls has refused for their usage.
struct AnyUsage {
    needed: (KeyPurposeId<'static>, KeyUsage),
    algorithms: &'static [&'static dyn SignatureVerificationAlgorithm],
    roots: Arc<RootCertStore>,
    lists: Vec<CertRevocationList<'static>>,
}

impl AnyUsage {
    /// Verifies a chain that was refused with `error`, if a certificate of it may have `anyExtendedKeyUsage`.
    ///
    /// # Errors
    /// `error`, or another fault of the chain.
    fn verify(
        &self,
        error: Error,
        own: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        if !std::iter::once(own).chain(intermediates).any(names_any) {
            return Err(error);
        }
        let lists: Vec<&CertRevocationList<'_>> = self.lists.iter().collect();
        // Without a list nothing is checked. The builder's defaults are those of rustls: the whole chain is checked, and a
        // certificate without a list is refused.
        let revocation = RevocationOptionsBuilder::new(&lists).ok();
        let revocation = revocation.map(RevocationOptionsBuilder::build);
        let Ok(certificate) = EndEntityCert::try_from(own) else {
            return Err(error);
        };
        certificate
            .verify_for_usage(
                self.algorithms,
                &self.roots.roots,
                intermediates,
                now,
                self,
                revocation,
                None,
            )
            .map(|_path| ())
            .map_err(|besides| more_telling(error, besides))
    }
}

/// Whether a certificate may hold `anyExtendedKeyUsage`. Other bytes may look like it: that costs only a verification.
fn names_any(certificate: &CertificateDer<'_>) -> bool {
    certificate
        .windows(ANY_DER.len())
        .any(|window| window == ANY_DER)
}

/// Of a refusal for the usage and another fault, the other fault.
fn more_telling(refusal: Error, besides: webpki::Error) -> Error {
    use CertificateError as Certificate;
    let Error::InvalidCertificate(
        Certificate::InvalidPurpose | Certificate::InvalidPurposeContext { .. },
    ) = refusal
    else {
        return refusal;
    };
    match besides {
        webpki::Error::RequiredEkuNotFoundContext(_) => refusal,
        webpki::Error::UnknownIssuer => Certificate::UnknownIssuer.into(),
        webpki::Error::CertRevoked => Certificate::Revoked.into(),
        webpki::Error::UnknownRevocationStatus => Certificate::UnknownRevocationStatus.into(),
        other => Certificate::Other(OtherError(Arc::new(other))).into(),
    }
}

/// A refusal for the name, with the names of the certificate as they are written: the library puts its own notation. A refusal for
/// the CA names them, too, if the certificate is for another name: the connection may have led to another installation, whose CA
/// nobody should trust here.
fn with_names(error: Error, own: &CertificateDer<'_>, name: &ServerName<'_>) -> Error {
    use CertificateError as Certificate;
    match error {
        Error::InvalidCertificate(
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. },
        ) => Certificate::NotValidForNameContext {
            expected: name.to_owned(),
            presented: hosts(own),
        }
        .into(),
        Error::InvalidCertificate(Certificate::UnknownIssuer | Certificate::BadSignature)
            if is_for_others(own, name) =>
        {
            let stranger = Stranger {
                expected: name.to_str().into_owned(),
                presented: hosts(own),
            };
            Certificate::Other(OtherError(Arc::new(stranger))).into()
        }
        other => other,
    }
}

/// Whether the certificate can be read, and is not for this name.
fn is_for_others(own: &CertificateDer<'_>, name: &ServerName<'_>) -> bool {
    ParsedCertificate::try_from(own).is_ok_and(|own| verify_server_name(&own, name).is_err())
}

/// Host names and addresses of a certificate.
fn hosts(own: &CertificateDer<'_>) -> Vec<String> {
    let names = Principal::from_der(own).map_or_else(Vec::new, |holder| holder.names);
    let host = |name: &String| {
        let host = name.strip_prefix("dns:");
        host.or_else(|| name.strip_prefix("ip:")).map(str::to_owned)
    };
    names.iter().filter_map(host).collect()
}

/// A certificate of a CA that is not trusted, for another name than the dialled one.
#[derive(Debug, thiserror::Error)]
#[error("no CA that is trusted here has signed a certificate for {expected}")]
pub(super) struct Stranger {
    /// The dialled name.
    pub(super) expected: String,
    /// Names and addresses in the certificate.
    pub(super) presented: Vec<String>,
}

impl ExtendedKeyUsageValidator for AnyUsage {
    /// No extended key usage allows each usage, as with rustls.
    fn validate(&self, usages: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        let (needed, required) = self.needed;
        let mut present = Vec::new();
        for usage in usages {
            let usage = usage?;
            if usage == needed || usage == ANY {
                return Ok(());
            }
            present.push(usage.to_decoded_oid());
        }
        if present.is_empty() {
            return Ok(());
        }
        let missing = RequiredEkuNotFoundContext { required, present };
        Err(webpki::Error::RequiredEkuNotFoundContext(missing))
    }
}

/// A verifier of rustls, and what it refuses verified a second time.
struct WithAnyUsage<V: ?Sized> {
    strict: Arc<V>,
    any: AnyUsage,
}

impl<V: ?Sized> fmt::Debug for WithAnyUsage<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WithAnyUsage").finish_non_exhaustive()
    }
}

/// What both traits have: signatures of handshakes, which no usage concerns, as rustls verifies them.
macro_rules! verify_signatures_strictly {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.strict
                .verify_tls12_signature(message, certificate, signed)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.strict
                .verify_tls13_signature(message, certificate, signed)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.strict.supported_verify_schemes()
        }
    };
}

impl ServerCertVerifier for WithAnyUsage<WebPkiServerVerifier> {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let strict = self
            .strict
            .verify_server_cert(own, intermediates, name, ocsp, now);
        let Err(error) = strict else {
            return strict;
        };
        let by_any_usage = || {
            self.any.verify(error, own, intermediates, now)?;
            verify_server_name(&ParsedCertificate::try_from(own)?, name)
        };
        by_any_usage().map_err(|error| with_names(error, own, name))?;
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures_strictly!();
}

impl ClientCertVerifier for WithAnyUsage<dyn ClientCertVerifier> {
    fn offer_client_auth(&self) -> bool {
        self.strict.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.strict.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.strict.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let strict = self.strict.verify_client_cert(own, intermediates, now);
        let Err(error) = strict else {
            return strict;
        };
        self.any.verify(error, own, intermediates, now)?;
        Ok(ClientCertVerified::assertion())
    }

    verify_signatures_strictly!();
}

#[cfg(test)]
mod tests;
