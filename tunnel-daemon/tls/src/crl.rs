//! Certificate revocation lists (RFC 5280 section 5) of a PEM file.

use std::path::Path;

use rustls::RootCertStore;
use rustls_pki_types::{CertificateRevocationListDer, UnixTime, pem::PemObject};
use x509_parser::prelude::{CertificateRevocationList, FromDer as _};
use x509_parser::x509::X509Name;

use crate::{pem, tls_error::TlsError};

/// The lists of a file.
pub(super) struct RevocationLists {
    pub(super) lists: Vec<CertificateRevocationListDer<'static>>,
    /// Why the lists refuse too much or too little, one phrase each.
    pub(super) flaws: Vec<String>,
}

/// Reads lists for certificates that `roots` issue. `path` is for texts only; `bytes` is its content. The signature of a
/// list is checked with each certificate.
pub(super) fn parse(
    path: &Path,
    bytes: &[u8],
    roots: &RootCertStore,
) -> Result<RevocationLists, TlsError> {
    let lists: Vec<CertificateRevocationListDer<'static>> = pem::blocks(bytes)
        .into_iter()
        .filter(|block| block.label == "X509 CRL" && !block.has_headers)
        .filter_map(|block| CertificateRevocationListDer::from_pem_slice(block.text).ok())
        .collect();
    if lists.is_empty() {
        return Err(TlsError::NoCrl {
            path: path.to_owned(),
        });
    }
    let mut read = Vec::new();
    for (index, der) in lists.iter().enumerate() {
        let bad = |reason: String| TlsError::BadCrl {
            path: path.to_owned(),
            position: index + 1,
            reason,
        };
        match CertificateRevocationList::from_der(der) {
            Ok(([], list)) => read.push(list),
            Ok((rest, _list)) => return Err(bad(format!("{} bytes follow it", rest.len()))),
            Err(error) => return Err(bad(error.to_string())),
        }
    }
    let missing = without_list(roots, &read).into_iter().map(|subject| {
        format!("there is no list of {subject}, so every certificate that it has issued is refused")
    });
    let outdated = read.iter().filter(|list| is_outdated(list)).map(|list| {
        let issuer = list.issuer();
        format!("a newer list of {issuer} was due, so certificates revoked since are let in")
    });
    let flaws = missing.chain(outdated).collect();
    drop(read);
    Ok(RevocationLists { lists, flaws })
}

/// Subjects of trust anchors that have issued none of the lists.
fn without_list(roots: &RootCertStore, lists: &[CertificateRevocationList<'_>]) -> Vec<String> {
    let subjects = roots.subjects().into_iter();
    let without = subjects.filter(|subject| {
        let mut issuers = lists.iter().map(CertificateRevocationList::issuer);
        !issuers.any(|issuer| issuer.as_raw() == subject.as_ref())
    });
    without
        .map(|subject| match X509Name::from_der(subject.as_ref()) {
            Ok((_rest, name)) => name.to_string(),
            Err(_unreadable) => "one without a readable name".to_owned(),
        })
        .collect()
}

/// Whether the time is past for which the issuer has promised a newer list.
fn is_outdated(list: &CertificateRevocationList<'_>) -> bool {
    let due = list.next_update().map(|due| due.timestamp());
    let now = UnixTime::now().as_secs();
    due.is_some_and(|due| u64::try_from(due).unwrap_or(0) < now)
}

#[cfg(test)]
mod tests {
    use adit_testkit::certificates::{ThrowawayCa, revoke};

    use super::*;
    use crate::ca;

    fn parsed(text: &str, roots: &RootCertStore) -> Result<usize, TlsError> {
        parse(Path::new("/x/crl.pem"), text.as_bytes(), roots).map(|parsed| parsed.lists.len())
    }

    fn roots(ca: &ThrowawayCa) -> RootCertStore {
        ca::parse_bundle(Path::new("/x/ca.pem"), ca.cert_pem().as_bytes()).unwrap()
    }

    #[test]
    fn every_list_of_a_file_counts_and_other_blocks_do_not() {
        let ca = ThrowawayCa::new("a").unwrap();
        let (list, other) = (revoke(&ca, &[]).unwrap(), ca.cert_pem());
        assert_eq!(
            parsed(&format!("{list}{other}{list}"), &roots(&ca)).unwrap(),
            2
        );
    }

    #[test]
    fn invalid_crl_errors_name_file_and_list() {
        let ca = ThrowawayCa::new("a").unwrap();
        let wrong = "-----BEGIN X509 CRL-----\naGVsbG8gd29ybGQ=\n-----END X509 CRL-----\n";
        let first = revoke(&ca, &[]).unwrap();
        for (text, says) in [
            (String::new(), "/x/crl.pem holds no PEM block X509 CRL"),
            (
                format!("{first}{wrong}"),
                "/x/crl.pem: revocation list 2 of the file is not valid",
            ),
        ] {
            let error = parsed(&text, &roots(&ca)).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn an_issuer_without_a_crl_is_named() {
        let [a, b] = ["a", "b"].map(|name| ThrowawayCa::new(name).unwrap());
        let both = format!("{}{}", a.cert_pem(), b.cert_pem());
        let roots = ca::parse_bundle(Path::new("/x/ca.pem"), both.as_bytes()).unwrap();
        let der = CertificateRevocationListDer::from_pem_slice(revoke(&a, &[]).unwrap().as_bytes());
        let der = der.unwrap();
        let (_rest, list) = CertificateRevocationList::from_der(&der).unwrap();
        assert!(!is_outdated(&list));
        assert_eq!(without_list(&roots, &[list]), ["CN=b"]);
    }
}
