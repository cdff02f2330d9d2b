//! What stands in a certificate, for those who ask before anything depends on it.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{
    ca, crl,
    principal::Principal,
    tls::{TlsError, TlsFiles},
};

/// More than any bundle has; the rest of a longer file is not looked at.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// One certificate of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inspected {
    /// Whom it names.
    pub subject: String,
    /// Its alternative names.
    pub names: Vec<String>,
    /// Valid from then.
    pub not_before: SystemTime,
    /// Until then.
    pub not_after: SystemTime,
}

/// The certificates of a PEM file, in order; those that cannot be read are left out, since whoever loads the file names them.
///
/// # Errors
/// The file cannot be read.
pub fn certificates(path: &Path) -> std::io::Result<Vec<Inspected>> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(FILE_BYTES_MAX)
        .read_to_end(&mut bytes)?;
    let all = ca::certificates(&bytes).filter_map(|der| inspect(&der));
    Ok(all.collect())
}

/// What makes the revocation lists of a file refuse too much or too little of what the CAs of a bundle have issued, one phrase
/// each.
///
/// # Errors
/// One of the files cannot be used.
pub fn revocation(ca: &Path, crl: &Path) -> Result<Vec<String>, TlsError> {
    let files = TlsFiles::read(&[ca, crl])?;
    let (ca, bundle) = files.pair(ca)?;
    let roots = ca::parse_bundle(ca, bundle)?;
    let (crl, lists) = files.pair(crl)?;
    crl::parse(crl, lists, &roots).map(|parsed| parsed.flaws)
}

fn inspect(der: &[u8]) -> Option<Inspected> {
    let (_rest, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    let validity = certificate.validity();
    let holder = Principal::from_der(der)?;
    Some(Inspected {
        subject: holder.subject,
        names: holder.names,
        not_before: time(validity.not_before.timestamp()),
        not_after: time(validity.not_after.timestamp()),
    })
}

/// Seconds since 1970; before that it is 1970.
fn time(seconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::selfsigned::{ThrowawayCa, Usage};

    #[test]
    #[expect(clippy::disallowed_methods, reason = "certificates have dates")]
    fn a_certificate_says_whom_it_names_and_for_how_long() {
        let ca = ThrowawayCa::new("inspected").unwrap();
        let names = ["server.example".to_owned(), "192.0.2.1".to_owned()];
        let pair = ca.issue(Usage::Server, "server", &names).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chain.pem");
        std::fs::write(&path, format!("{}{}", pair.cert_pem, ca.cert_pem())).unwrap();
        let [server, issuer] = &certificates(&path).unwrap()[..] else {
            panic!("two certificates");
        };
        assert!(server.subject.contains("server") && issuer.subject.contains("inspected"));
        assert!(
            server
                .names
                .iter()
                .any(|name| name.contains("server.example"))
        );
        let now = SystemTime::now();
        assert!(server.not_before < now && now < server.not_after);
        assert!(certificates(&dir.path().join("missing")).is_err());
    }
}
