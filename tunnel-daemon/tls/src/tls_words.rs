//! Errors of the TLS library about failed connections, in words for operators: for logs of listeners, links and lanes, and
//! for `adit check --connect`.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

/// For a connection that ended without close_notify: an attacker on the path may have cut it off.
const NO_CLOSE_NOTIFY: &str = "the peer closed the connection without a TLS close_notify";

/// The cause of a failed handshake.
pub(super) fn of_handshake(error: &io::Error) -> String {
    match inner(error) {
        Some(error) => words(error),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            "the peer closed the connection during the handshake".to_owned()
        }
        None => error.to_string(),
    }
}

/// The error of an established connection, of the same kind, with such a text.
pub(super) fn of_stream(error: io::Error) -> io::Error {
    let text = match inner(&error) {
        Some(error) => words(error),
        None if error.kind() == io::ErrorKind::UnexpectedEof => NO_CLOSE_NOTIFY.to_owned(),
        None => return error,
    };
    io::Error::new(error.kind(), text)
}

fn inner(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

fn words(error: &Error) -> String {
    match error {
        Error::NoCertificatesPresented => "the peer shows no certificate".to_owned(),
        Error::InvalidCertificate(error) => {
            format!("the peer's certificate {}", of_certificate(error))
        }
        Error::AlertReceived(alert) => of_alert(*alert),
        Error::InvalidMessage(_) => "the peer does not speak TLS".to_owned(),
        Error::PeerIncompatible(_) => format!("no common TLS version or cipher suite: {error}"),
        Error::NoApplicationProtocol => "no common application protocol (ALPN)".to_owned(),
        other => other.to_string(),
    }
}

/// Text after "the peer's certificate".
fn of_certificate(error: &CertificateError) -> String {
    use CertificateError as E;
    match error {
        E::UnknownIssuer => "is signed by no CA that is trusted here".to_owned(),
        E::Expired | E::ExpiredContext { .. } => "has expired".to_owned(),
        E::NotValidYet | E::NotValidYetContext { .. } => {
            "is not valid yet: check both clocks".to_owned()
        }
        E::Revoked => "is revoked".to_owned(),
        E::NotValidForName => "is for another name".to_owned(),
        E::NotValidForNameContext {
            expected,
            presented,
        } => {
            let expected = expected.to_str();
            let presented = if presented.is_empty() {
                "no name at all".to_owned()
            } else {
                presented.join(", ")
            };
            format!("is not for {expected}, but for {presented}")
        }
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => {
            "is not for this use: check its extended key usage".to_owned()
        }
        E::BadSignature => "has a signature that no CA trusted here has made".to_owned(),
        E::ExpiredRevocationList | E::ExpiredRevocationListContext { .. } => {
            "cannot be checked: the revocation list has expired".to_owned()
        }
        // Errors of the library below, whose texts are the names of its variants.
        E::Other(other) if other.to_string() == "CaUsedAsEndEntity" => {
            "is that of a CA: give it one of its own".to_owned()
        }
        E::Other(other) => format!("cannot be used: {other}"),
        other => format!("cannot be used: {other}"),
    }
}

/// The alert that the peer sent before it closed the connection.
fn of_alert(alert: AlertDescription) -> String {
    use AlertDescription as A;
    let text = match alert {
        A::UnknownCA => "the peer refuses our certificate: it trusts no CA that has signed it",
        A::CertificateRequired | A::NoCertificate => {
            "the peer refuses this connection: it asks for a certificate"
        }
        A::CertificateExpired => "the peer refuses our certificate: it has expired",
        A::CertificateRevoked => "the peer refuses our certificate: it is revoked",
        A::BadCertificate | A::UnsupportedCertificate | A::CertificateUnknown => {
            "the peer refuses our certificate"
        }
        A::AccessDenied => "the peer refuses this connection: access denied",
        A::ProtocolVersion => "the peer takes no TLS version of ours",
        A::HandshakeFailure | A::InsufficientSecurity => {
            "the peer takes no cipher suite or parameter of ours"
        }
        A::NoApplicationProtocol => "the peer takes no application protocol (ALPN) of ours",
        A::UnrecognisedName => "the peer does not know the name it was asked for (SNI)",
        other => {
            let number = u8::from(other);
            let name = alert_name(other).map(|name| format!(" ({name})"));
            let name = name.unwrap_or_default();
            return format!("the peer ended the TLS session with alert {number}{name}");
        }
    };
    text.to_owned()
}

/// The name in RFC 8446, section 6, of an alert without a text of its own.
fn alert_name(alert: AlertDescription) -> Option<&'static str> {
    use AlertDescription as A;
    Some(match alert {
        A::CloseNotify => "close_notify",
        A::UnexpectedMessage => "unexpected_message",
        A::BadRecordMac => "bad_record_mac",
        A::RecordOverflow => "record_overflow",
        A::IllegalParameter => "illegal_parameter",
        A::DecodeError => "decode_error",
        A::DecryptError => "decrypt_error",
        A::InternalError => "internal_error",
        A::InappropriateFallback => "inappropriate_fallback",
        A::UserCanceled => "user_canceled",
        A::MissingExtension => "missing_extension",
        A::UnsupportedExtension => "unsupported_extension",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::OtherError;

    use super::*;

    fn io_error(error: Error) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }

    #[test]
    fn error_causes_contain_no_type_names_and_no_library_links() {
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let alert = Error::AlertReceived(AlertDescription::UnknownCA);
        for (error, text) in [
            (
                unknown,
                "the peer's certificate is signed by no CA that is trusted here",
            ),
            (
                alert,
                "the peer refuses our certificate: it trusts no CA that has signed it",
            ),
            (
                Error::AlertReceived(AlertDescription::InternalError),
                "the peer ended the TLS session with alert 80 (internal_error)",
            ),
            (
                Error::AlertReceived(AlertDescription::Unknown(200)),
                "the peer ended the TLS session with alert 200",
            ),
            (
                Error::NoCertificatesPresented,
                "the peer shows no certificate",
            ),
        ] {
            let error = io_error(error);
            assert_eq!(of_handshake(&error), text);
            let mapped = of_stream(error);
            assert_eq!(
                (mapped.to_string().as_str(), mapped.kind()),
                (text, io::ErrorKind::InvalidData)
            );
        }
        let named = OtherError(Arc::new(io::Error::other("CaUsedAsEndEntity")));
        let of_ca = Error::InvalidCertificate(CertificateError::Other(named));
        assert_eq!(
            of_handshake(&io_error(of_ca)),
            "the peer's certificate is that of a CA: give it one of its own"
        );
        let cut = io::Error::new(io::ErrorKind::UnexpectedEof, "see https://docs.rs/rustls");
        assert_eq!(
            of_handshake(&cut),
            "the peer closed the connection during the handshake"
        );
        assert_eq!(of_stream(cut).to_string(), NO_CLOSE_NOTIFY);
        let reset = io::Error::from_raw_os_error(104);
        assert_eq!(of_stream(reset).raw_os_error(), Some(104));
    }
}
