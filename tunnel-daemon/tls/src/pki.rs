//! Certificate authorities and certificates of an installation, as files: what `adit pki` makes and shows.
//!
//! There are three authorities. A single one would let each agent open tunnels into the networks of other agents, because its
//! certificate would be valid as a client's or as a peer's. Each signs end-entity certificates only (path length 0). A server has
//! a certificate of each: for agents, for clients, and for other servers, its peers.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{BasicConstraints, Issuer, KeyPair};

use adit_kube::sha256::Sha256;

use crate::inspect;
use crate::selfsigned::{self, CLOCK_SKEW, Dates, Issued, Usage, end_entity};

/// Seconds of a day.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Mode of keys: their owner alone reads them.
const KEY_MODE: u32 = 0o600;
/// Mode of certificates, which are public.
const CERTIFICATE_MODE: u32 = 0o644;
/// Longest common name of X.509 (RFC 5280, `ub-common-name`).
const COMMON_NAME_MAX: usize = 64;

/// Why nothing was made.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file of that name exists.
    #[error("{} exists and is not replaced: remove it, or give another --dir", .path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A file or folder cannot be written.
    #[error("cannot write {}: {cause}", .path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// A file of an authority cannot be read.
    #[error("cannot read {}: {cause}: make the authorities with adit pki init, or give their folder with --dir", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// A file of an authority is invalid, or does not match the authority's other file.
    #[error("{}: {why}: replace it by the one that adit pki init made", .path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The authority has expired and signs nothing.
    #[error("the authority {} has expired: make new ones with adit pki init in another --dir", .path.display())]
    Expired {
        /// The certificate of the authority.
        path: PathBuf,
    },
    /// A name that is not valid in a certificate, or in the name of a file.
    #[error("{name:?} {why}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong, and what to give.
        why: &'static str,
    },
    /// The generator of keys or certificates failed.
    #[error("cannot make a certificate for {name}: {cause}")]
    Generate {
        /// Name that the certificate was for.
        name: String,
        /// The generator's error.
        cause: rcgen::Error,
    },
}

/// Whose certificates an authority signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authority {
    /// Of agents, and of servers towards agents.
    Agents,
    /// Of clients such as kube-apiserver, and of servers towards clients.
    Clients,
    /// Of servers towards each other. Folders of earlier releases lack it.
    Peers,
}

impl Authority {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Agents, Self::Clients, Self::Peers];

    /// Whether `folder` has files of this authority.
    #[must_use]
    pub fn is_in(self, folder: &Path) -> bool {
        let mut files = paths(folder, self.stem()).into_iter();
        files.any(|path| fs::symlink_metadata(path).is_ok())
    }

    /// The name of its files without their endings.
    #[must_use]
    pub fn stem(self) -> &'static str {
        match self {
            Self::Agents => "agents-ca",
            Self::Clients => "clients-ca",
            Self::Peers => "peers-ca",
        }
    }

    fn common_name(self) -> &'static str {
        match self {
            Self::Agents => "Adit agents CA",
            Self::Clients => "Adit clients CA",
            Self::Peers => "Adit peers CA",
        }
    }
}

/// A certificate to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The name of its files without their endings.
    pub stem: String,
    /// Who signs it.
    pub authority: Authority,
    /// Usage of the certificate.
    pub usage: Usage,
    /// The common name of its subject.
    pub common_name: String,
    /// Host names and IP addresses of its subject.
    pub names: Vec<String>,
}

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Path of the file.
    pub path: PathBuf,
    /// Whether it is a key, which only its owner may read.
    pub is_key: bool,
    /// When the certificate expires.
    pub not_after: Option<SystemTime>,
}

/// Makes all authorities in `folder`, which is created with mode 0700 if it is missing. In a folder of an earlier release, which
/// has all but that of peers, makes that one.
///
/// # Errors
/// A file exists or cannot be written.
pub fn init(folder: &Path, days: u32) -> Result<Vec<Written>, PkiError> {
    let mut files = Vec::new();
    let is_earlier = Authority::ALL
        .iter()
        .all(|one| one.is_in(folder) == (*one != Authority::Peers));
    let missing = if is_earlier {
        &[Authority::Peers][..]
    } else {
        &Authority::ALL
    };
    for &authority in missing {
        let failed = |cause| PkiError::Generate {
            name: authority.common_name().to_owned(),
            cause,
        };
        let dates = validity(days, None);
        let key = KeyPair::generate().map_err(failed)?;
        let (name, key_pem) = (named_by_key(authority, &key), key.serialize_pem());
        let issuer = selfsigned::authority(&name, BasicConstraints::Constrained(0), key, dates);
        let pair = Issued {
            cert_pem: issuer.map_err(failed)?.pem(),
            key_pem,
        };
        files.extend(pair_files(folder, authority.stem(), pair, dates.1));
    }
    let made = DirBuilder::new().mode(0o700).recursive(true).create(folder);
    made.map_err(|cause| PkiError::Write {
        path: folder.to_owned(),
        cause,
    })?;
    write_new(files)
}

/// The common name of an authority, with the beginning of its key's SHA-256. Peers choose a CA by its name, so two authorities
/// of one name would each fail on certificates of the other with an error about a signature.
fn named_by_key(authority: Authority, key: &KeyPair) -> String {
    let hash = Sha256::digest(rcgen::PublicKeyData::subject_public_key_info(key));
    let [a, b, c, d, ..] = hash;
    let short = u32::from_be_bytes([a, b, c, d]);
    format!("{} {short:08x}", authority.common_name())
}

/// Makes certificates with the authorities in `folder`, all or none. None is valid longer than its authority.
///
/// # Errors
/// A name is not possible, an authority is missing or has expired, a file exists or cannot be written.
pub fn issue(folder: &Path, days: u32, wanted: &[Wanted]) -> Result<Vec<Written>, PkiError> {
    let mut files = Vec::new();
    for one in wanted {
        check_common_name(&one.common_name)?;
        check_stem(&one.stem)?;
        one.names.iter().try_for_each(|name| check_name(name))?;
        let signer = Signer::open(folder, one.authority)?;
        let dates = validity(days, Some(signer.not_after));
        let (name, names) = (&one.common_name, &one.names);
        let pair = end_entity(one.usage, name, names, dates, &signer.issuer);
        let pair = pair.map_err(|cause| PkiError::Generate {
            name: name.clone(),
            cause,
        })?;
        files.extend(pair_files(folder, &one.stem, pair, dates.1));
    }
    write_new(files)
}

/// An authority, read from its files.
struct Signer {
    issuer: Issuer<'static, KeyPair>,
    not_after: SystemTime,
}

impl Signer {
    #[expect(clippy::disallowed_methods, reason = "certificates have dates")]
    fn open(folder: &Path, authority: Authority) -> Result<Self, PkiError> {
        let [cert_path, key_path] = paths(folder, authority.stem());
        let read = |path: &Path| {
            fs::read_to_string(path).map_err(|cause| PkiError::Read {
                path: path.to_owned(),
                cause,
            })
        };
        let (cert, key) = (read(&cert_path)?, read(&key_path)?);
        let wrong = |path: &Path, why: &str| PkiError::Authority {
            path: path.to_owned(),
            why: why.to_owned(),
        };
        let key = KeyPair::from_pem(&key).map_err(|_cause| wrong(&key_path, "no private key"))?;
        let no_certificate = || wrong(&cert_path, "no certificate");
        let der = crate::ca::certificates(cert.as_bytes())
            .next()
            .ok_or_else(no_certificate)?;
        let (_rest, parsed) =
            x509_parser::parse_x509_certificate(&der).map_err(|_cause| no_certificate())?;
        let inspected = inspect::inspect(&der).ok_or_else(no_certificate)?;
        if !inspected.is_ca {
            return Err(wrong(&cert_path, "not the certificate of an authority"));
        }
        if parsed.public_key().raw != rcgen::PublicKeyData::subject_public_key_info(&key) {
            return Err(wrong(&key_path, "not the key of the certificate beside it"));
        }
        if inspected.not_after <= SystemTime::now() {
            return Err(PkiError::Expired { path: cert_path });
        }
        let issuer = Issuer::from_ca_cert_der(&der, key)
            .map_err(|cause| wrong(&cert_path, &cause.to_string()))?;
        Ok(Self {
            issuer,
            not_after: inspected.not_after,
        })
    }
}

/// Whether two CA bundles, as PEM, have a key in common: under whatever names, a certificate of one is then valid at the other.
/// Blocks that are no certificates are skipped: the load of their file refuses them.
#[must_use]
pub fn share_a_key(one: &[u8], other: &[u8]) -> bool {
    let keys = |bundle: &[u8]| -> Vec<Vec<u8>> {
        let certificates = crate::ca::certificates(bundle);
        let keys = certificates.filter_map(|der| {
            let (_rest, parsed) = x509_parser::parse_x509_certificate(&der).ok()?;
            Some(parsed.public_key().raw.to_vec())
        });
        keys.collect()
    };
    let own = keys(one);
    keys(other).iter().any(|key| own.contains(key))
}

/// Start and end of a validity, at most up to `end`.
#[expect(clippy::disallowed_methods, reason = "certificates have dates")]
fn validity(days: u32, end: Option<SystemTime>) -> Dates {
    let now = SystemTime::now();
    let not_after = now + DAY * days;
    let not_after = end.map_or(not_after, |end| not_after.min(end));
    (now - CLOCK_SKEW, not_after)
}

fn check_common_name(name: &str) -> Result<(), PkiError> {
    let why = if name.is_empty() || name.chars().count() > COMMON_NAME_MAX {
        "is not a common name: give 1 to 64 characters"
    } else if name.chars().any(char::is_control) {
        "has a control character: leave it out"
    } else {
        return Ok(());
    };
    Err(PkiError::Name {
        name: name.to_owned(),
        why,
    })
}

fn check_stem(stem: &str) -> Result<(), PkiError> {
    let is_allowed =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '@');
    if stem.chars().all(is_allowed) {
        return Ok(());
    }
    Err(PkiError::Name {
        name: stem.to_owned(),
        why: "cannot be part of a file name: use only letters, digits and . - _ : @",
    })
}

/// Checks a name or address that peers dial. `CertificateParams` takes any ASCII text for a DNS name.
fn check_name(name: &str) -> Result<(), PkiError> {
    let host = name.strip_prefix("*.").unwrap_or(name);
    if rustls_pki_types::ServerName::try_from(host).is_ok() {
        return Ok(());
    }
    Err(PkiError::Name {
        name: name.to_owned(),
        why: "is not a host name or IP address: give the name that agents, clients or peers dial, without a port",
    })
}

fn paths(folder: &Path, stem: &str) -> [PathBuf; 2] {
    ["crt", "key"].map(|ending| folder.join(format!("{stem}.{ending}")))
}

fn pair_files(
    folder: &Path,
    stem: &str,
    pair: Issued,
    not_after: SystemTime,
) -> [(Written, String); 2] {
    let [cert, key] = paths(folder, stem);
    let written = |path, is_key, not_after| Written {
        path,
        is_key,
        not_after,
    };
    [
        (written(key, true, None), pair.key_pem),
        (written(cert, false, Some(not_after)), pair.cert_pem),
    ]
}

/// Writes files that must not be there yet: all, or none.
fn write_new(files: Vec<(Written, String)>) -> Result<Vec<Written>, PkiError> {
    // Checked before the first file is written, so that usually no file has to be removed.
    for (file, _) in &files {
        if fs::symlink_metadata(&file.path).is_ok() {
            return Err(PkiError::Exists {
                path: file.path.clone(),
            });
        }
    }
    let mut written: Vec<Written> = Vec::new();
    for (file, text) in files {
        if let Err(cause) = write(&file, &text) {
            for made in written {
                // The error below matters more than a file that stays.
                let _ignored = fs::remove_file(&made.path);
            }
            return Err(match cause.kind() {
                io::ErrorKind::AlreadyExists => PkiError::Exists { path: file.path },
                _ => PkiError::Write {
                    path: file.path,
                    cause,
                },
            });
        }
        written.push(file);
    }
    Ok(written)
}

fn write(file: &Written, text: &str) -> io::Result<()> {
    let mode = if file.is_key {
        KEY_MODE
    } else {
        CERTIFICATE_MODE
    };
    let mut options = OpenOptions::new();
    let mut open = options
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&file.path)?;
    let outcome = open
        .write_all(text.as_bytes())
        .and_then(|()| File::sync_all(&open));
    if outcome.is_err() {
        let _ignored = fs::remove_file(&file.path);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rustls_pki_types::pem::PemObject as _;
    use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

    use super::*;
    use crate::inspect::{Flaw, Inspected, Role, certificates};

    fn wanted(stem: &str, authority: Authority, usage: Usage, names: &[&str]) -> Wanted {
        Wanted {
            stem: stem.to_owned(),
            authority,
            usage,
            common_name: stem.to_owned(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    fn agent(stem: &str) -> Wanted {
        wanted(stem, Authority::Agents, Usage::Client, &[])
    }

    fn only(path: &Path) -> Inspected {
        let mut all = certificates(path).unwrap();
        assert_eq!(all.len(), 1);
        all.remove(0)
    }

    /// The limits of rule 52: separate authorities, path length 0, keys readable by their owner only.
    #[test]
    fn authorities_sign_end_entities_only_and_keys_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("pki");
        let written = init(&folder, 10).unwrap();
        assert_eq!(written.len(), 6);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        for file in &written {
            assert_eq!(mode(&file.path), if file.is_key { 0o600 } else { 0o644 });
        }
        for authority in Authority::ALL {
            let [path, _key] = paths(&folder, authority.stem());
            let pem = fs::read(&path).unwrap();
            let der = CertificateDer::from_pem_slice(&pem).unwrap();
            let (_rest, ca) = x509_parser::parse_x509_certificate(&der).unwrap();
            let constraints = ca.basic_constraints().unwrap().unwrap().value;
            assert_eq!(
                (constraints.ca, constraints.path_len_constraint),
                (true, Some(0))
            );
            let usage = ca.key_usage().unwrap().unwrap().value;
            assert!(usage.key_cert_sign() && usage.crl_sign() && !usage.digital_signature());
        }
        let keys = Authority::ALL.map(|one| fs::read(&paths(&folder, one.stem())[1]).unwrap());
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }

    /// Also among other CAs, and under another name.
    #[test]
    fn bundles_share_a_key_whatever_the_name_of_its_certificate() {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), 10).unwrap();
        let read =
            |one: Authority| paths(dir.path(), one.stem()).map(|path| fs::read(path).unwrap());
        let [agents, _key] = read(Authority::Agents);
        let [clients, _key] = read(Authority::Clients);
        let [peers, key] = read(Authority::Peers);
        let key = KeyPair::from_pem(std::str::from_utf8(&key).unwrap()).unwrap();
        let limits = BasicConstraints::Constrained(0);
        let renamed = selfsigned::authority("another name", limits, key, validity(10, None));
        let renamed = [&agents[..], renamed.unwrap().pem().as_bytes()].concat();
        for (one, other, shared) in [
            (&peers, &agents, false),
            (&peers, &clients, false),
            (&peers, &peers, true),
            (&peers, &renamed, true),
            (&renamed, &agents, true),
            (&renamed, &clients, false),
            (&peers, &Vec::new(), false),
        ] {
            assert_eq!(share_a_key(one, other), shared);
            assert_eq!(share_a_key(other, one), shared);
        }
    }

    /// The folder of a release without peers: what is there stays as it is.
    #[test]
    fn the_authority_of_peers_is_added_to_the_two_others() {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), 10).unwrap();
        let own = paths(dir.path(), Authority::Peers.stem());
        for path in &own {
            fs::remove_file(path).unwrap();
        }
        let others = [Authority::Agents, Authority::Clients];
        let others = others.map(|one| paths(dir.path(), one.stem()));
        let contents = || {
            others
                .concat()
                .iter()
                .map(|path| fs::read(path).unwrap())
                .collect::<Vec<_>>()
        };
        let before = contents();
        assert!(!Authority::Peers.is_in(dir.path()));
        let written = init(dir.path(), 10).unwrap();
        let written: Vec<&Path> = written.iter().map(|file| file.path.as_path()).collect();
        assert_eq!(written, [own[1].as_path(), own[0].as_path()]);
        assert!(Authority::Peers.is_in(dir.path()));
        assert_eq!(contents(), before);
        assert!(matches!(init(dir.path(), 10), Err(PkiError::Exists { .. })));
        // Half an authority is none to add, and none to replace.
        fs::remove_file(&own[0]).unwrap();
        assert!(matches!(init(dir.path(), 10), Err(PkiError::Exists { .. })));
        fs::remove_file(&own[1]).unwrap();
        fs::remove_file(&others[0][0]).unwrap();
        fs::remove_file(&others[0][1]).unwrap();
        assert!(matches!(init(dir.path(), 10), Err(PkiError::Exists { .. })));
        assert!(!Authority::Peers.is_in(dir.path()));
    }

    /// Else an agent of the first authority would fail on a server of the second with an error about a signature.
    #[test]
    fn authorities_of_two_installations_have_different_names() {
        let names = || {
            let dir = tempfile::tempdir().unwrap();
            init(dir.path(), 10).unwrap();
            Authority::ALL.map(|one| only(&paths(dir.path(), one.stem())[0]).subject)
        };
        let (first, second) = (names(), names());
        for (one, other) in first.iter().zip(&second) {
            assert_ne!(one, other);
        }
        assert!(first[0].starts_with("CN=Adit agents CA "), "{}", first[0]);
    }

    #[test]
    fn leaves_are_for_one_side_and_verified_by_their_own_authority_alone() {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), 10).unwrap();
        let names = ["server.example", "192.0.2.1", "::1"];
        let all = [
            wanted("server-cluster", Authority::Agents, Usage::Server, &names),
            wanted("server", Authority::Clients, Usage::Server, &names),
            agent("agent-a"),
            wanted("client-b", Authority::Clients, Usage::Client, &[]),
            wanted("server-peer", Authority::Peers, Usage::Peer, &names),
        ];
        issue(dir.path(), 5, &all).unwrap();
        for one in &all {
            let [path, _key] = paths(dir.path(), &one.stem);
            let leaf = only(&path);
            let of_servers = (Role::Server, webpki::KeyUsage::server_auth());
            let of_clients = (Role::Client, webpki::KeyUsage::client_auth());
            let (usages, lacking) = match one.usage {
                Usage::Server => (vec![of_servers], Some((Role::Client, Flaw::NotForClients))),
                Usage::Client => (vec![of_clients], Some((Role::Server, Flaw::NotForServers))),
                Usage::Peer => (vec![of_servers, of_clients], None),
            };
            for (role, _usage) in &usages {
                assert_eq!(leaf.flaws(*role), []);
            }
            if let Some((other, flaw)) = lacking {
                assert!(leaf.flaws(other).contains(&flaw), "{}", one.stem);
            }
            let is_trusted_by = |authority: Authority| {
                let ca = fs::read(&paths(dir.path(), authority.stem())[0]).unwrap();
                let ca = CertificateDer::from_pem_slice(&ca).unwrap();
                let der = CertificateDer::from_pem_slice(&fs::read(&path).unwrap()).unwrap();
                let anchor = webpki::anchor_from_trusted_cert(&ca).unwrap();
                let end = webpki::EndEntityCert::try_from(&der).unwrap();
                for name in &one.names {
                    let name = ServerName::try_from(name.as_str()).unwrap();
                    end.verify_is_valid_for_subject_name(&name).unwrap();
                }
                let is_valid = |usage| {
                    let algorithms = webpki::ALL_VERIFICATION_ALGS;
                    let (anchors, now) = (std::slice::from_ref(&anchor), UnixTime::now());
                    end.verify_for_usage(algorithms, anchors, &[], now, usage, None, None)
                        .is_ok()
                };
                let valid: Vec<bool> = usages.iter().map(|(_, usage)| is_valid(*usage)).collect();
                assert!(valid.iter().all(|is| *is == valid[0]), "{}", one.stem);
                valid[0]
            };
            let trusted = Authority::ALL.map(is_trusted_by);
            let expected = Authority::ALL.map(|authority| authority == one.authority);
            assert_eq!(trusted, expected, "{}", one.stem);
        }
    }

    #[test]
    fn no_file_is_replaced_and_partial_output_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), 10).unwrap();
        let before = fs::read(dir.path().join("agents-ca.key")).unwrap();
        let error = init(dir.path(), 10).unwrap_err();
        assert!(
            error.to_string().ends_with("or give another --dir"),
            "{error}"
        );
        assert_eq!(fs::read(dir.path().join("agents-ca.key")).unwrap(), before);
        // A dangling symbolic link counts as an existing file.
        std::os::unix::fs::symlink("/nowhere", dir.path().join("b.crt")).unwrap();
        let error = issue(dir.path(), 5, &[agent("a"), agent("b")]).unwrap_err();
        assert!(matches!(error, PkiError::Exists { path } if path.ends_with("b.crt")));
        assert!(!dir.path().join("a.key").exists() && !dir.path().join("a.crt").exists());
    }

    #[test]
    fn no_certificate_outlives_its_authority() {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), 2).unwrap();
        let written = issue(dir.path(), 365, &[agent("a")]).unwrap();
        let ends: Vec<SystemTime> = written.iter().filter_map(|file| file.not_after).collect();
        assert_eq!(ends, [only(&dir.path().join("agents-ca.crt")).not_after]);
        assert_eq!(only(&dir.path().join("a.crt")).not_after, ends[0]);
    }

    #[test]
    fn faults_of_authorities_name_the_file_and_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let fault = |dir: &Path| issue(dir, 5, &[agent("a")]).unwrap_err().to_string();
        assert!(fault(dir.path()).contains("agents-ca.crt: No such file"));
        init(dir.path(), 10).unwrap();
        let [cert, key] = paths(dir.path(), "agents-ca");
        let [_, other] = paths(dir.path(), "clients-ca");
        fs::copy(other, &key).unwrap();
        assert!(fault(dir.path()).contains("agents-ca.key: not the key of the certificate"));
        fs::write(&key, "x").unwrap();
        assert!(fault(dir.path()).contains("agents-ca.key: no private key"));
        fs::write(&cert, "x").unwrap();
        let expired = tempfile::tempdir().unwrap();
        init(expired.path(), 0).unwrap();
        assert!(fault(expired.path()).contains("has expired: make new ones"));
    }

    #[test]
    fn invalid_names_are_refused_before_any_file_is_written() {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), 10).unwrap();
        let long = "a".repeat(65);
        let server = |name: &str| wanted("server", Authority::Agents, Usage::Server, &[name]);
        for (wanted, told) in [
            (agent("../a"), "cannot be part of a file name"),
            (agent("a b"), "cannot be part of a file name"),
            (agent(""), "is not a common name"),
            (agent(&long), "is not a common name"),
            (agent("a\n"), "has a control character"),
            (
                server("server.example:8132"),
                "is not a host name or IP address",
            ),
            (
                server("https://server.example"),
                "is not a host name or IP address",
            ),
            (server(""), "is not a host name or IP address"),
        ] {
            let error = issue(dir.path(), 5, std::slice::from_ref(&wanted)).unwrap_err();
            assert!(error.to_string().contains(told), "{wanted:?}: {error}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 6);
        issue(dir.path(), 5, &[server("*.server.example")]).unwrap();
    }
}
