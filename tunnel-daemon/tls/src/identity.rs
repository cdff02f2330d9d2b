//! A certificate chain with its private key, checked to belong together before use.

use std::{path::Path, sync::Arc};

use rustls::{
    crypto::CryptoProvider,
    sign::{CertifiedKey, SingleCertAndKey},
};
use rustls_pki_types::{PrivateKeyDer, pem::PemObject};

use crate::{
    ca,
    inspect::{self, Role},
    pem,
    tls_error::TlsError,
};

/// Parses and pairs a certificate file and a key file. Paths are for error texts; the bytes are their content.
///
/// # Errors
/// One of the files is unusable, or the key belongs to another certificate.
pub(super) fn parse_identity(
    (cert_path, cert): (&Path, &[u8]),
    (key_path, key): (&Path, &[u8]),
    provider: &CryptoProvider,
) -> Result<Arc<SingleCertAndKey>, TlsError> {
    let chain: Vec<_> = ca::certificates(cert).collect();
    if chain.is_empty() {
        return Err(TlsError::NoCertificate {
            path: cert_path.to_owned(),
        });
    }
    for (index, der) in chain.iter().enumerate() {
        ca::check_certificate(der).map_err(|reason| TlsError::BadCertificate {
            path: cert_path.to_owned(),
            position: index + 1,
            reason,
        })?;
    }
    let key = parse_key(key_path, key)?;
    let bad_key = |error: rustls::Error| TlsError::BadKey {
        path: key_path.to_owned(),
        reason: error.to_string(),
    };
    let key = provider
        .key_provider
        .load_private_key(key)
        .map_err(bad_key)?;
    let pair = CertifiedKey::new(chain, key);
    match pair.keys_match() {
        // `Unknown` means the key cannot name its public half; the first handshake checks the pair.
        Ok(()) | Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => {}
        Err(rustls::Error::InconsistentKeys(_)) => {
            return Err(TlsError::Mismatch {
                cert: cert_path.to_owned(),
                key: key_path.to_owned(),
            });
        }
        Err(error) => {
            let (path, reason) = (cert_path.to_owned(), error.to_string());
            return Err(TlsError::BadCertificate {
                path,
                position: 1,
                reason,
            });
        }
    }
    Ok(Arc::new(SingleCertAndKey::from(pair)))
}

/// Logs why peers refuse the first certificate of a file, though it is usable. A start goes on: peers in Go accept some of
/// these certificates.
pub(super) fn warn_of_flaws((path, cert): (&Path, &[u8]), role: Role) {
    let own = ca::certificates(cert).next();
    let own = own.and_then(|der| inspect::inspect(&der));
    for flaw in own.iter().flat_map(|own| own.flaws(role)) {
        tracing::warn!(file = %path.display(), "the certificate {flaw}; {}", flaw.remedy());
    }
}

/// The first private key of a PEM file. Other blocks (`EC PARAMETERS`, certificates) are passed over, as in Go.
fn parse_key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    let is_key = |block: &pem::PemBlock<'_>| {
        block.label == "PRIVATE KEY" || block.label.ends_with(" PRIVATE KEY")
    };
    let Some(block) = pem::blocks(bytes).into_iter().find(is_key) else {
        return Err(TlsError::NoKey {
            path: path.to_owned(),
        });
    };
    if block.label == "ENCRYPTED PRIVATE KEY" || block.has_headers {
        return Err(TlsError::EncryptedKey {
            path: path.to_owned(),
        });
    }
    PrivateKeyDer::from_pem_slice(block.text).map_err(|error| TlsError::BadKey {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cipher::provider,
        selfsigned::{Issued, ThrowawayCa, Usage},
    };

    fn issue() -> Issued {
        ThrowawayCa::new("test")
            .unwrap()
            .issue(Usage::Server, "server", &["localhost".to_owned()])
            .unwrap()
    }

    fn parse(cert: &str, key: &str) -> Result<(), TlsError> {
        let (cert, key) = (
            (Path::new("/x/tls.crt"), cert.as_bytes()),
            (Path::new("/x/tls.key"), key.as_bytes()),
        );
        parse_identity(
            cert,
            key,
            &provider(&adit_config::tls_policy::TlsPolicy::default()),
        )
        .map(|_pair| ())
    }

    #[test]
    fn matching_pair_is_accepted_among_other_pem_blocks() {
        let pair = issue();
        parse(&pair.cert_pem, &pair.key_pem).unwrap();
        let parameters =
            "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
        parse(
            &format!("{}{}", pair.key_pem, pair.cert_pem),
            &format!("{parameters}{}", pair.key_pem),
        )
        .unwrap();
    }

    #[test]
    fn key_of_another_certificate_is_refused_naming_both_files() {
        let error = parse(&issue().cert_pem, &issue().key_pem).unwrap_err();
        assert!(matches!(error, TlsError::Mismatch { .. }), "{error}");
        assert!(
            error.to_string().contains("/x/tls.key") && error.to_string().contains("/x/tls.crt")
        );
    }

    #[test]
    fn swapped_files_are_detected() {
        let pair = issue();
        let error = parse(&pair.key_pem, &pair.cert_pem).unwrap_err();
        assert!(matches!(error, TlsError::NoCertificate { .. }), "{error}");
        let error = parse(&pair.cert_pem, &pair.cert_pem).unwrap_err();
        assert!(matches!(error, TlsError::NoKey { .. }), "{error}");
    }

    #[test]
    fn encrypted_key_names_the_remedy() {
        let pair = issue();
        let legacy = pair
            .key_pem
            .replacen("KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\n\n", 1);
        let modern = pair.key_pem.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
        for key in [legacy, modern] {
            let error = parse(&pair.cert_pem, &key).unwrap_err();
            assert!(matches!(error, TlsError::EncryptedKey { .. }), "{error}");
            assert!(error.to_string().contains("openssl pkey"));
        }
    }

    #[test]
    fn unusable_key_is_refused_naming_the_file() {
        for body in ["aGVsbG8=", "!!!!"] {
            let key = format!("-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n");
            let error = parse(&issue().cert_pem, &key).unwrap_err();
            assert!(matches!(error, TlsError::BadKey { .. }), "{error}");
            assert!(error.to_string().contains("/x/tls.key"), "{error}");
        }
    }
}
