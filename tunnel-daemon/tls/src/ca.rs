//! CA bundles, by upstream's rules. Only PEM blocks `CERTIFICATE` without headers count. A block that is cut off or no
//! base64 is skipped. A block that decodes but is no certificate is an error naming the file, since an unnoticed missing CA
//! is worse than a refused start. A bundle without a certificate is an error.

use std::path::Path;

use rustls::RootCertStore;
use rustls_pki_types::{CertificateDer, pem::PemObject};

use crate::{pem, tls_error::TlsError};

/// The trust anchors of a bundle. `path` is for the error text only; `bytes` is its content.
pub(super) fn parse_bundle(path: &Path, bytes: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for (index, der) in certificates(bytes).enumerate() {
        check_certificate(&der)
            .and_then(|()| store.add(der).map_err(|error| error.to_string()))
            .map_err(|reason| TlsError::BadCertificate {
                path: path.to_owned(),
                position: index + 1,
                reason,
            })?;
    }
    if store.is_empty() {
        return Err(TlsError::NoCertificate {
            path: path.to_owned(),
        });
    }
    Ok(store)
}

/// The decoded `CERTIFICATE` blocks of a file, in order, unchecked.
pub(super) fn certificates(bytes: &[u8]) -> impl Iterator<Item = CertificateDer<'static>> {
    pem::blocks(bytes)
        .into_iter()
        .filter(|block| block.label == "CERTIFICATE" && !block.has_headers)
        .filter_map(|block| CertificateDer::from_pem_slice(block.text).ok())
}

/// Whether `der` is exactly one X.509 certificate.
pub(super) fn check_certificate(der: &CertificateDer<'_>) -> Result<(), String> {
    match x509_parser::parse_x509_certificate(der) {
        Ok(([], _certificate)) => Ok(()),
        Ok((rest, _certificate)) => Err(format!("{} bytes follow the certificate", rest.len())),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selfsigned::ThrowawayCa;

    const NOT_A_CERTIFICATE: &str =
        "-----BEGIN CERTIFICATE-----\naGVsbG8gd29ybGQ=\n-----END CERTIFICATE-----\n";

    fn ca() -> String {
        ThrowawayCa::new("bundle test")
            .expect("a CA can be made")
            .cert_pem()
    }

    fn anchors(text: &str) -> Result<usize, TlsError> {
        parse_bundle(Path::new("/x/ca.pem"), text.as_bytes()).map(|store| store.len())
    }

    /// Upstream (configuration): CA bundles: every certificate counts, foreign blocks are ignored, malformed
    /// certificates are errors.
    #[test]
    fn every_certificate_of_a_bundle_is_an_anchor() {
        assert_eq!(
            anchors(&format!("# first\n{}# second\n{}", ca(), ca())).unwrap(),
            2
        );
    }

    /// Upstream (configuration): CA bundles: every certificate counts, foreign blocks are ignored, malformed
    /// certificates are errors.
    #[test]
    fn foreign_block_is_ignored() {
        let foreign = "-----BEGIN PUBLIC KEY-----\naGVsbG8=\n-----END PUBLIC KEY-----\n";
        assert_eq!(anchors(&format!("{foreign}{}", ca())).unwrap(), 1);
    }

    #[test]
    fn certificate_block_with_pem_headers_is_ignored() {
        let with_headers = NOT_A_CERTIFICATE.replace("\naGVs", "\nNote: x\n\naGVs");
        assert_eq!(anchors(&format!("{with_headers}{}", ca())).unwrap(), 1);
    }

    /// Upstream (configuration): CA bundles: every certificate counts, foreign blocks are ignored, malformed
    /// certificates are errors.
    #[test]
    fn malformed_certificate_is_refused_naming_file_and_block() {
        let error = anchors(&format!("{}{NOT_A_CERTIFICATE}", ca())).unwrap_err();
        assert!(
            matches!(&error, TlsError::BadCertificate { position: 2, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("/x/ca.pem"), "{error}");
    }

    /// Upstream (configuration): CA bundles: every certificate counts, foreign blocks are ignored, malformed
    /// certificates are errors.
    #[test]
    fn truncated_and_non_base64_blocks_are_skipped() {
        let truncated = "-----BEGIN CERTIFICATE-----\naGVs\n";
        let garbage = "-----BEGIN CERTIFICATE-----\n!!!! not base64\n-----END CERTIFICATE-----\n";
        assert_eq!(
            anchors(&format!("{garbage}{truncated}{}{truncated}", ca())).unwrap(),
            1
        );
    }

    /// Upstream (configuration): CA bundles: every certificate counts, foreign blocks are ignored, malformed
    /// certificates are errors.
    #[test]
    fn bundle_without_certificate_is_an_error_naming_the_file() {
        for text in ["", "hello\n", "-----BEGIN CERTIFICATE-----\naGVs\n"] {
            let error = anchors(text).unwrap_err();
            assert!(matches!(error, TlsError::NoCertificate { .. }), "{error}");
            assert!(error.to_string().contains("/x/ca.pem"), "{error}");
        }
    }
}
