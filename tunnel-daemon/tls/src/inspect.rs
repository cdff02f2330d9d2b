//! Contents of certificates, for checks before they are used.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use x509_parser::x509::X509Version;

use crate::{
    ca, crl,
    principal::{Principal, distinguished_name},
    tls::{FILE_BYTES_MAX, TlsError, TlsFiles},
};

/// One certificate of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inspected {
    /// The subject.
    pub subject: String,
    /// The issuer.
    pub issuer: String,
    /// Subject alternative names.
    pub names: Vec<String>,
    /// Start of its validity.
    pub not_before: SystemTime,
    /// End of its validity.
    pub not_after: SystemTime,
    /// It has `basicConstraints` with `CA:TRUE`.
    pub is_ca: bool,
    /// Only version 3 has extensions.
    pub is_version_3: bool,
    /// Its extended key usage, if there is one, has `serverAuth` or any usage.
    pub may_serve: bool,
    /// As [`Self::may_serve`], with `clientAuth`.
    pub may_dial: bool,
    /// SHA-256 of the certificate (DER).
    pub sha256: [u8; 32],
}

/// Role of a certificate's holder in a handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The dialled side.
    Server,
    /// The dialling side.
    Client,
}

/// Why peers refuse a certificate within its dates.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Flaw {
    /// `basicConstraints` with `CA:TRUE`.
    #[error(
        "says that it is a CA (basicConstraints CA:TRUE): Adit refuses it, peers in Go accept it"
    )]
    Ca,
    /// X.509 of version 1 or 2, without extensions.
    #[error("is not X.509 version 3: Adit refuses it, peers in Go accept it from clients")]
    OldVersion,
    /// A server without `subjectAltName`.
    #[error("has no alternative name: every peer refuses it")]
    NoName,
    /// A server whose `extendedKeyUsage` has neither `serverAuth` nor `anyExtendedKeyUsage`.
    #[error("is not for servers (extendedKeyUsage without serverAuth): every peer refuses it")]
    NotForServers,
    /// A client whose `extendedKeyUsage` has neither `clientAuth` nor `anyExtendedKeyUsage`.
    #[error("is not for clients (extendedKeyUsage without clientAuth): every peer refuses it")]
    NotForClients,
}

impl Flaw {
    /// What to do.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Ca => "issue a certificate with CA:FALSE, signed by this one or another CA",
            Self::OldVersion => "issue one of version 3 (openssl x509 -req with -extfile)",
            Self::NoName => {
                "issue it with the names and addresses that peers dial (subjectAltName)"
            }
            Self::NotForServers => "issue it with extendedKeyUsage = serverAuth",
            Self::NotForClients => "issue it with extendedKeyUsage = clientAuth",
        }
    }

    /// Whether peers in Go refuse the certificate, too: upstream's programs and kube-apiserver.
    #[must_use]
    pub fn refused_by_go(self) -> bool {
        match self {
            Self::Ca | Self::OldVersion => false,
            Self::NoName | Self::NotForServers | Self::NotForClients => true,
        }
    }
}

impl Inspected {
    /// Why peers refuse the certificate from a `role`, the worst first; empty if they accept it.
    #[must_use]
    pub fn flaws(&self, role: Role) -> Vec<Flaw> {
        let is_server = role == Role::Server;
        let flaws = [
            (is_server && self.names.is_empty(), Flaw::NoName),
            (is_server && !self.may_serve, Flaw::NotForServers),
            (!is_server && !self.may_dial, Flaw::NotForClients),
            (!self.is_version_3, Flaw::OldVersion),
            (self.is_ca, Flaw::Ca),
        ];
        let found = flaws.into_iter().filter(|(is_there, _)| *is_there);
        found.map(|(_, flaw)| flaw).collect()
    }
}

/// Whole days until `end`; `None` once it is past.
#[must_use]
pub fn days_left(end: SystemTime, now: SystemTime) -> Option<u64> {
    const DAY_SECONDS: u64 = 24 * 60 * 60;
    let left = end.duration_since(now).ok()?;
    Some(left.as_secs() / DAY_SECONDS)
}

/// Expiry of the certificates in a file that is in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expiry {
    /// The file.
    pub path: PathBuf,
    /// The certificates are authorities.
    pub is_ca: bool,
    /// When the first certificate of a chain expires, or the last of several authorities: the others may be left over from
    /// a change.
    pub not_after: SystemTime,
    /// Lifetime of the certificate that expires then.
    pub lifetime: Duration,
}

impl Expiry {
    /// Expiry of the certificates in a file (PEM); `None` when there are none.
    #[must_use]
    pub fn of(path: &Path, bytes: &[u8]) -> Option<Self> {
        let all: Vec<Inspected> = ca::certificates(bytes)
            .filter_map(|der| inspect(&der))
            .collect();
        let is_ca = all.first()?.is_ca;
        let end = |one: &&Inspected| one.not_after;
        let that = if is_ca {
            all.iter().max_by_key(end)
        } else {
            all.iter().min_by_key(end)
        };
        let Inspected {
            not_before,
            not_after,
            ..
        } = that?;
        Some(Self {
            path: path.to_owned(),
            is_ca,
            not_after: *not_after,
            lifetime: not_after.duration_since(*not_before).unwrap_or_default(),
        })
    }
}

/// The certificates of a PEM file, in order. Unreadable ones are left out: loading the file reports them.
///
/// # Errors
/// The file cannot be read.
pub fn certificates(path: &Path) -> std::io::Result<Vec<Inspected>> {
    let mut bytes = Vec::new();
    // The rest of a longer file is ignored.
    adit_host::files::open(path)?
        .take(FILE_BYTES_MAX)
        .read_to_end(&mut bytes)?;
    let all = ca::certificates(&bytes).filter_map(|der| inspect(&der));
    Ok(all.collect())
}

/// Why the revocation lists of a file refuse too much or too little of the certificates that the CAs of a bundle have
/// issued, one phrase each.
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

/// Reads a certificate; `None` when it is none.
pub(super) fn inspect(der: &[u8]) -> Option<Inspected> {
    let (_rest, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    let validity = certificate.validity();
    let holder = Principal::from_der(der)?;
    // No extended key usage allows each usage.
    let usage = certificate.extended_key_usage().ok().flatten();
    let (may_serve, may_dial) = usage.map_or((true, true), |usage| {
        let usage = usage.value;
        (
            usage.any || usage.server_auth,
            usage.any || usage.client_auth,
        )
    });
    Some(Inspected {
        subject: holder.subject,
        issuer: distinguished_name(certificate.issuer()),
        names: holder.names,
        not_before: time(validity.not_before.timestamp()),
        not_after: time(validity.not_after.timestamp()),
        is_ca: certificate.is_ca(),
        is_version_3: certificate.version() == X509Version::V3,
        may_serve,
        may_dial,
        sha256: holder.certificate_sha256,
    })
}

/// Seconds since 1970; earlier times count as 1970.
fn time(seconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selfsigned::{ThrowawayCa, Usage};
    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, KeyPair};

    #[test]
    #[expect(clippy::disallowed_methods, reason = "certificates have dates")]
    fn names_and_validity_of_a_certificate_are_read() {
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

    #[test]
    fn days_left_are_whole_and_none_once_expired() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let day = 24 * 60 * 60;
        for (now, left) in [
            (0, Some(10)),
            (9 * day, Some(1)),
            (9 * day + 1, Some(0)),
            (10 * day, Some(0)),
            (10 * day + 1, None),
        ] {
            assert_eq!(days_left(at(10 * day), at(now)), left);
        }
    }

    /// An X.509 version 1 certificate, valid for a hundred years.
    const OLD: &str = "-----BEGIN CERTIFICATE-----
MIIBGDCBvwIUMo0mYdfhQT8NqbSniYs5UjC9FjswCgYIKoZIzj0EAwIwDjEMMAoG
A1UEAwwDb2xkMCAXDTI2MTEyNjIxMTMzNFoYDzIxMjYxMTAyMjExMzM0WjAOMQww
CgYDVQQDDANvbGQwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAT8LUU9N4gcMNbF
BYimdXgrkywW8JgPy4pjjS+dtjcdjL+CN6mVwYlWpzUTkooWcAG8zVXUdfebvLZV
VFztje+rMAoGCCqGSM49BAMCA0gAMEUCIQDog59Yl+QvCVLlFb1V+vejf3mqSN6u
+DnfVWbtqECKYwIgfT/Oixkc+UVSEsukeN9Qgp85jCvE/m1RqSwd+5O9iL8=
-----END CERTIFICATE-----
";

    fn flaws(pem: &str) -> [Vec<Flaw>; 2] {
        let der = ca::certificates(pem.as_bytes()).next().unwrap();
        let inspected = inspect(&der).unwrap();
        [Role::Server, Role::Client].map(|role| inspected.flaws(role))
    }

    #[test]
    fn certificate_flaws_that_peers_refuse_are_detected() {
        let ca = ThrowawayCa::new("a CA").unwrap();
        let issued = |usage, names: &[String]| ca.issue(usage, "x", names).unwrap().cert_pem;
        let names = ["server.example".to_owned()];
        let (server, client) = (issued(Usage::Server, &names), issued(Usage::Client, &names));
        for (what, pem, of_server, of_client) in [
            ("server", &server, vec![], vec![Flaw::NotForClients]),
            ("client", &client, vec![Flaw::NotForServers], vec![]),
            (
                "without a name",
                &issued(Usage::Server, &[]),
                vec![Flaw::NoName],
                vec![Flaw::NotForClients],
            ),
            (
                "CA",
                &ca.cert_pem(),
                vec![Flaw::NoName, Flaw::Ca],
                vec![Flaw::Ca],
            ),
            (
                "version 1",
                &OLD.to_owned(),
                vec![Flaw::NoName, Flaw::OldVersion],
                vec![Flaw::OldVersion],
            ),
        ] {
            assert_eq!(flaws(pem), [of_server, of_client], "{what}");
        }
    }

    #[test]
    fn any_or_no_extended_key_usage_fits_both_roles() {
        for usages in [vec![], vec![ExtendedKeyUsagePurpose::Any]] {
            let mut params = CertificateParams::new(["a".to_owned()]).unwrap();
            params.extended_key_usages = usages;
            let key = KeyPair::generate().unwrap();
            let certificate = params.self_signed(&key).unwrap();
            assert_eq!(flaws(&certificate.pem()), [vec![], vec![]]);
        }
    }
}
