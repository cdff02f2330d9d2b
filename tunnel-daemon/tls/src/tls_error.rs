//! Faults of the files that TLS is configured from. Each text names the file and the remedy.

use std::{io, path::PathBuf};

/// Why a TLS configuration could not be made from its files.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file is missing, forbidden, or no regular file.
    #[error("cannot read {}: {cause}; check that the path is right and that this user may read it", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// The file is larger than any certificate bundle, so it was given by mistake.
    #[error("{} is larger than {limit_bytes} bytes; give a PEM file with certificates or a key", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The largest size that is read.
        limit_bytes: u64,
    },
    /// No block `CERTIFICATE` that decodes.
    #[error("{} holds no PEM block CERTIFICATE that can be decoded; give a PEM file with at least one certificate", .path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// A block decodes, but what it holds is no X.509 certificate.
    #[error("{}: certificate {position} of the file is not valid: {reason}; replace or remove that block", .path.display())]
    BadCertificate {
        /// The file.
        path: PathBuf,
        /// Which `CERTIFICATE` block, counted from 1.
        position: usize,
        /// The parser's error.
        reason: String,
    },
    /// No block `X509 CRL` that decodes.
    #[error("{} holds no PEM block X509 CRL that can be decoded; give a PEM file with at least one revocation list (openssl ca -gencrl)", .path.display())]
    NoCrl {
        /// The file.
        path: PathBuf,
    },
    /// A block decodes, but what it holds is no revocation list.
    #[error("{}: revocation list {position} of the file is not valid: {reason}; replace or remove that block", .path.display())]
    BadCrl {
        /// The file.
        path: PathBuf,
        /// Which `X509 CRL` block, counted from 1.
        position: usize,
        /// The parser's error.
        reason: String,
    },
    /// No private key block in the file.
    #[error("{} holds no private key; give a PEM file with a block PRIVATE KEY, RSA PRIVATE KEY or EC PRIVATE KEY", .path.display())]
    NoKey {
        /// The file.
        path: PathBuf,
    },
    /// The key needs a pass phrase, which cannot be entered here.
    #[error("the private key in {} is encrypted; store it without a pass phrase (openssl pkey -in OLD -out NEW)", .path.display())]
    EncryptedKey {
        /// The file.
        path: PathBuf,
    },
    /// The key block cannot be used.
    #[error("the private key in {} cannot be used: {reason}; give an RSA (2048 bits or more), ECDSA or Ed25519 key", .path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        reason: String,
    },
    /// Certificate and key are both valid but belong to different pairs.
    #[error("the private key in {} does not belong to the first certificate in {}; give both files of one pair", .key.display(), .cert.display())]
    Mismatch {
        /// The certificate file.
        cert: PathBuf,
        /// The key file.
        key: PathBuf,
    },
    /// The TLS library refused the combination.
    #[error("this TLS configuration cannot be used: {reason}")]
    Refused {
        /// The library's error.
        reason: String,
    },
    /// The name of the server to connect to is neither a host name nor an address.
    #[error(
        "{host:?} is neither a host name nor an IP address; give the server's name as it stands in its certificate"
    )]
    BadServerName {
        /// What was given.
        host: String,
    },
}
