//! Why a TLS connection failed, in words for operators: for logs of listeners, links and lanes, and for `adit check`.
//!
//! The troubleshooting page has each text; a test goes over the values.

use std::{fmt, io, time::Duration};

use adit_core::proxy_header::HeaderError;
use adit_core::text::Excerpt;
use rustls::{AlertDescription, CertificateError, Error, OtherError};

use crate::verifier::Stranger;

/// Names of a certificate in a message.
const NAMES_SHOWN_MAX: usize = 8;

/// Why a TLS connection failed. `Display` says what failed, and what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TlsCause {
    /// A server that requires a client certificate got none.
    #[error("the peer shows no certificate: give it a certificate and its key")]
    NoCertificate,
    /// No chain to a CA of the bundle.
    #[error(
        "the peer's certificate is signed by no CA that is trusted here: add its CA to the CA file, or issue it with that CA"
    )]
    UnknownIssuer,
    /// The bundle has a CA of the issuer's name, with another key.
    #[error(
        "the peer's certificate does not match the CA of that name here: is there another CA with the same name?"
    )]
    BadSignature,
    /// Past its end.
    #[error("the peer's certificate has expired: renew it")]
    Expired,
    /// Before its start.
    #[error("the peer's certificate is not valid yet: check both clocks")]
    NotYetValid,
    /// On a revocation list.
    #[error("the peer's certificate is revoked: issue another one")]
    Revoked,
    /// No revocation list of its issuer.
    #[error("the peer's certificate cannot be checked: no revocation list here is from its CA")]
    NoRevocationList,
    /// The revocation list is past its next update.
    #[error("the peer's certificate cannot be checked: the revocation list has expired")]
    RevocationListExpired,
    /// Not for the name that was dialled.
    #[error(
        "the peer's certificate is not for {expected}, but for {}: dial such a name, or issue it for {expected}",
        Names(.offered)
    )]
    WrongName {
        /// The dialled name.
        expected: String,
        /// Names and addresses in the certificate.
        offered: Vec<String>,
    },
    /// Neither for the name that was dialled, nor by a CA of the bundle.
    #[error(
        "the peer's certificate is not for {expected}, but for {}, and is signed by no CA that is trusted here: \
         does the address, or a router on the path, lead to another server?",
        Names(.offered)
    )]
    Stranger {
        /// The dialled name.
        expected: String,
        /// Names and addresses in the certificate.
        offered: Vec<String>,
    },
    /// The extended key usage lacks this role.
    #[error(
        "the peer's certificate is not for this use: servers need extendedKeyUsage serverAuth, clients clientAuth"
    )]
    WrongUsage,
    /// `basicConstraints` with `CA:TRUE`.
    #[error("the peer's certificate is that of a CA: give the peer one of its own")]
    OfCa,
    /// The signature's algorithm.
    #[error(
        "the peer's certificate has a signature algorithm that is not supported: use ECDSA, Ed25519, or RSA of 2048 bits"
    )]
    Algorithm,
    /// Another flaw of the peer's certificate.
    #[error("the peer's certificate cannot be used: adit pki show prints what it contains")]
    Unusable,
    /// Alert `certificate_required`: a server's answer to a client without a certificate.
    #[error("the server requires a client certificate: give one and its key")]
    CertificateRequired,
    /// Alert `unknown_ca`.
    #[error("the peer refuses our certificate: it trusts no CA that has signed it")]
    NotTrusted,
    /// Alert `decrypt_error`.
    #[error(
        "the peer refuses our certificate: its signature does not match the CA of that name; is there another CA with the same name?"
    )]
    NotOfThatCa,
    /// Alert `certificate_expired`.
    #[error("the peer refuses our certificate: it has expired, or a clock is wrong")]
    OursExpired,
    /// Alert `certificate_revoked`.
    #[error("the peer refuses our certificate: it is revoked")]
    OursRevoked,
    /// Alert `unsupported_certificate`.
    #[error("the peer refuses our certificate: check its extendedKeyUsage")]
    OursUnsupported,
    /// Alerts `bad_certificate` and `certificate_unknown`.
    #[error("the peer refuses our certificate: the peer's log has the cause")]
    OursRefused,
    /// Alert `access_denied`.
    #[error("the peer refuses this connection: access denied")]
    AccessDenied,
    /// Alert `protocol_version`.
    #[error("the peer takes no TLS version of ours: check the TLS versions of both ends")]
    NoVersion,
    /// Alerts `handshake_failure` and `insufficient_security`.
    #[error(
        "the peer takes no cipher suite or parameter of ours: check --cipher-suites of both ends"
    )]
    NoParameters,
    /// Alert `no_application_protocol`.
    #[error(
        "the peer takes no application protocol (ALPN) of ours: does this address lead to its agent port?"
    )]
    OursNoProtocol,
    /// Alert `unrecognized_name`.
    #[error("the peer does not know the name that was dialled (SNI): check the address")]
    UnknownName,
    /// Another alert.
    #[error("the peer ended the TLS session with alert {}: its log has the cause", Alert(*.0))]
    OtherAlert(u8),
    /// The first bytes are no TLS record.
    #[error("the peer does not speak TLS: check the address and port")]
    NotTls,
    /// A balancer's connection has no PROXY header, or a wrong one.
    #[error("a balancer of --proxy-protocol-from: {0}")]
    NoProxyHeader(#[from] HeaderError),
    /// Nothing in common, as this end found.
    #[error(
        "no TLS version, cipher suite or parameter in common with the peer: check --cipher-suites and TLS versions"
    )]
    Incompatible,
    /// The peer offers other application protocols.
    #[error(
        "no application protocol (ALPN) in common with the peer: is it the right port for this peer?"
    )]
    NoCommonProtocol,
    /// The peer agreed to no application protocol.
    #[error("the peer agreed to no application protocol (ALPN); gRPC needs h2")]
    NoProtocol,
    /// The peer broke the TLS protocol, or bytes were changed on the way.
    #[error("the peer broke the TLS protocol, or something on the path changed bytes")]
    Broken,
    /// The deadline.
    #[error(
        "the TLS handshake was not finished within {} s; check that the peer speaks TLS on this port",
        .after.as_secs_f32()
    )]
    TimedOut {
        /// The deadline.
        after: Duration,
    },
    /// FIN during the handshake.
    #[error("the peer closed the connection during the handshake: its log has the cause")]
    Closed,
    /// RST.
    #[error("the peer reset the connection: its log, or a balancer between, has the cause")]
    Reset,
    /// FIN without close_notify: an attacker on the path may have cut the connection off.
    #[error("the peer closed the connection without a TLS close_notify")]
    NoCloseNotify,
    /// The system's error about the socket.
    #[error("the socket failed: {0}")]
    Socket(String),
}

impl TlsCause {
    /// Of an error of a handshake, or of the socket below it.
    #[must_use]
    pub fn of_handshake(error: &io::Error) -> Self {
        match inner(error) {
            Some(error) => Self::of(error),
            None => match error.kind() {
                io::ErrorKind::UnexpectedEof => Self::Closed,
                io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::Reset,
                _ => Self::Socket(error.to_string()),
            },
        }
    }

    /// Of an error of the TLS library.
    #[must_use]
    pub fn of(error: &Error) -> Self {
        match error {
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::InvalidCertificate(error) => Self::of_certificate(error),
            Error::AlertReceived(alert) => Self::of_alert(*alert),
            Error::InvalidMessage(_) => Self::NotTls,
            Error::PeerIncompatible(_) => Self::Incompatible,
            Error::NoApplicationProtocol => Self::NoCommonProtocol,
            Error::InvalidCertRevocationList(_) => Self::NoRevocationList,
            _ => Self::Broken,
        }
    }

    /// Whether one end refused the other's certificate or parameters: of several failures this one says most.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(
            self,
            Self::NotTls
                | Self::Incompatible
                | Self::NoCommonProtocol
                | Self::NoProtocol
                | Self::Broken
                | Self::TimedOut { .. }
                | Self::Closed
                | Self::Reset
                | Self::NoCloseNotify
                | Self::Socket(_)
        )
    }

    fn of_certificate(error: &CertificateError) -> Self {
        use CertificateError as E;
        match error {
            E::UnknownIssuer => Self::UnknownIssuer,
            E::Expired | E::ExpiredContext { .. } => Self::Expired,
            E::NotValidYet | E::NotValidYetContext { .. } => Self::NotYetValid,
            E::Revoked => Self::Revoked,
            E::UnknownRevocationStatus => Self::NoRevocationList,
            E::ExpiredRevocationList | E::ExpiredRevocationListContext { .. } => {
                Self::RevocationListExpired
            }
            // The verifier puts names instead of the library's notation.
            E::NotValidForNameContext {
                expected,
                presented,
            } => Self::WrongName {
                expected: expected.to_str().into_owned(),
                offered: presented.clone(),
            },
            E::InvalidPurpose | E::InvalidPurposeContext { .. } => Self::WrongUsage,
            E::BadSignature => Self::BadSignature,
            E::UnsupportedSignatureAlgorithmContext { .. }
            | E::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => Self::Algorithm,
            E::Other(other) => Self::of_other(other),
            _ => Self::Unusable,
        }
    }

    /// Of what the library has no variant for.
    fn of_other(error: &OtherError) -> Self {
        if let Some(stranger) = error.0.downcast_ref::<Stranger>() {
            return Self::Stranger {
                expected: stranger.expected.clone(),
                offered: stranger.presented.clone(),
            };
        }
        match error.0.downcast_ref() {
            Some(webpki::Error::CaUsedAsEndEntity) => Self::OfCa,
            Some(webpki::Error::InvalidSignatureForPublicKey) => Self::BadSignature,
            _ => Self::Unusable,
        }
    }

    /// Of the alert that the peer sent before it closed the connection.
    fn of_alert(alert: AlertDescription) -> Self {
        use AlertDescription as A;
        match alert {
            A::CertificateRequired | A::NoCertificate => Self::CertificateRequired,
            A::UnknownCA => Self::NotTrusted,
            A::DecryptError => Self::NotOfThatCa,
            A::CertificateExpired => Self::OursExpired,
            A::CertificateRevoked => Self::OursRevoked,
            A::UnsupportedCertificate => Self::OursUnsupported,
            A::BadCertificate | A::CertificateUnknown => Self::OursRefused,
            A::AccessDenied => Self::AccessDenied,
            A::ProtocolVersion => Self::NoVersion,
            A::HandshakeFailure | A::InsufficientSecurity => Self::NoParameters,
            A::NoApplicationProtocol => Self::OursNoProtocol,
            A::UnrecognisedName => Self::UnknownName,
            other => Self::OtherAlert(other.into()),
        }
    }
}

/// The error of an established connection, of the same kind, with a text for operators. Errors of the socket stay.
pub(super) fn of_stream(error: io::Error) -> io::Error {
    let cause = match inner(&error) {
        Some(Error::InvalidMessage(_)) => TlsCause::Broken,
        Some(error) => TlsCause::of(error),
        None if error.kind() == io::ErrorKind::UnexpectedEof => TlsCause::NoCloseNotify,
        None => return error,
    };
    io::Error::new(error.kind(), cause)
}

/// The error of the TLS library in `error`, if it is one: the peer's alert, or what this end found.
pub(super) fn inner(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

struct Names<'a>(&'a [String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no name at all");
        }
        for (at, name) in self.0.iter().take(NAMES_SHOWN_MAX).enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{}", Excerpt(name))?;
        }
        match self.0.len().saturating_sub(NAMES_SHOWN_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// The number of an alert, with its name in RFC 8446, section 6, if it has one.
struct Alert(u8);

impl fmt::Display for Alert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use AlertDescription as A;
        write!(f, "{}", self.0)?;
        let name = match A::from(self.0) {
            A::CloseNotify => "close_notify",
            A::UnexpectedMessage => "unexpected_message",
            A::BadRecordMac => "bad_record_mac",
            A::RecordOverflow => "record_overflow",
            A::IllegalParameter => "illegal_parameter",
            A::DecodeError => "decode_error",
            A::InternalError => "internal_error",
            A::InappropriateFallback => "inappropriate_fallback",
            A::UserCanceled => "user_canceled",
            A::MissingExtension => "missing_extension",
            A::UnsupportedExtension => "unsupported_extension",
            _ => return Ok(()),
        };
        write!(f, " ({name})")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn io_error(error: Error) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }

    #[test]
    fn errors_of_the_library_have_a_cause_in_words() {
        let alert = |alert| Error::AlertReceived(alert);
        let of_ca = OtherError(Arc::new(webpki::Error::CaUsedAsEndEntity));
        for (error, cause) in [
            (
                CertificateError::UnknownIssuer.into(),
                TlsCause::UnknownIssuer,
            ),
            (
                CertificateError::BadSignature.into(),
                TlsCause::BadSignature,
            ),
            (CertificateError::Other(of_ca).into(), TlsCause::OfCa),
            (alert(AlertDescription::UnknownCA), TlsCause::NotTrusted),
            (alert(AlertDescription::DecryptError), TlsCause::NotOfThatCa),
            (
                alert(AlertDescription::CertificateRequired),
                TlsCause::CertificateRequired,
            ),
            (
                alert(AlertDescription::InternalError),
                TlsCause::OtherAlert(80),
            ),
            (Error::NoCertificatesPresented, TlsCause::NoCertificate),
        ] {
            let error = io_error(error);
            assert_eq!(TlsCause::of_handshake(&error), cause);
            let mapped = of_stream(error);
            assert_eq!(
                (mapped.to_string(), mapped.kind()),
                (cause.to_string(), io::ErrorKind::InvalidData)
            );
        }
        let cut = io::Error::new(io::ErrorKind::UnexpectedEof, "see https://docs.rs/rustls");
        assert_eq!(TlsCause::of_handshake(&cut), TlsCause::Closed);
        assert_eq!(
            of_stream(cut).to_string(),
            TlsCause::NoCloseNotify.to_string()
        );
        let reset = io::Error::from_raw_os_error(104);
        assert_eq!(TlsCause::of_handshake(&reset), TlsCause::Reset);
        assert_eq!(of_stream(reset).raw_os_error(), Some(104));
    }

    #[test]
    fn alerts_without_a_cause_of_their_own_have_number_and_name() {
        let text = |number| TlsCause::OtherAlert(number).to_string();
        assert!(text(80).contains("alert 80 (internal_error):"));
        assert!(text(200).contains("alert 200:"));
    }
}
