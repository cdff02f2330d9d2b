//! Identity of a peer by its certificate, in a form that can be compared, granted and logged.

use std::{fmt, net::IpAddr};

use adit_core::grant::Names;
use adit_kube::sha256::Sha256;
use x509_parser::{
    extensions::GeneralName,
    objects::{oid_registry, oid2abbrev},
    oid_registry::OID_X509_EXT_SUBJECT_ALT_NAME,
    prelude::X509Certificate,
    x509::X509Name,
};

/// Names taken from one certificate. A certificate with more names is valid; the rest is not read.
const NAMES_MAX: usize = 64;

/// The holder of a verified certificate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Principal {
    /// The whole subject in the order of the certificate, `O=system:nodes,CN=system:node:a`, escaped as RFC 4514 section 2.4
    /// asks: no value can read like another attribute.
    pub subject: String,
    /// The first common name of the subject.
    pub common_name: Option<String>,
    /// Subject alternative names, prefixed by their kind and sorted: `dns:`, `ip:`, `uri:`, `email:`.
    pub names: Vec<String>,
    /// SHA-256 of what distinguishes this holder where names alone do not: of all alternative names as encoded in the
    /// certificate (DER) if `names` leaves out some; of the public key (DER) if there is no name at all.
    pub rest_sha256: Option<[u8; 32]>,
    /// SHA-256 of the certificate (DER). Changes with each renewal.
    pub certificate_sha256: [u8; 32],
}

impl Principal {
    /// Reads an end-entity certificate; `None` when it is none. The caller has verified it.
    #[must_use]
    pub fn from_der(der: &[u8]) -> Option<Self> {
        let (_rest, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
        let subject = certificate.subject();
        let text = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| {
            attribute.as_str().ok().map(str::to_owned)
        };
        let names = alternative_names(&certificate);
        Some(Self {
            subject: distinguished_name(subject),
            common_name: subject.iter_common_name().find_map(text),
            rest_sha256: rest_sha256(&certificate, &names),
            names,
            certificate_sha256: Sha256::digest(der),
        })
    }

    /// The holder's names, as grants and client rules compare them.
    #[must_use]
    pub fn names(&self) -> Names<'_> {
        Names {
            common_name: self.common_name.as_deref(),
            alternative: &self.names,
        }
    }

    /// Names the holder, to compare and to log, as `CN=agent-1 names=dns:a.example,ip:10.0.0.1`. Certificates of one holder
    /// have the same text across renewals, unless they have no name and another key. Two holders never have the same text:
    /// `=` is escaped in the subject, space and comma in the names.
    #[must_use]
    pub fn holder(&self) -> String {
        let mut text = self.subject.clone();
        let mut part = |name: &str, value: &str| {
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(name);
            text.push_str(value);
        };
        if !self.names.is_empty() {
            let names: Vec<String> = self.names.iter().map(|name| escaped_name(name)).collect();
            part("names=", &names.join(","));
        }
        if let Some(rest) = &self.rest_sha256 {
            let hex: String = rest.iter().map(|byte| format!("{byte:02x}")).collect();
            part("sha256=", &hex);
        }
        text
    }
}

impl fmt::Display for Principal {
    /// One line for logs: the common name, else the subject, else the alternative names; then the start of the hash.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.common_name {
            Some(name) => write!(f, "CN={name}")?,
            None if !self.subject.is_empty() => f.write_str(&self.subject)?,
            None => f.write_str(&self.names.join(","))?,
        }
        f.write_str(" (sha256 ")?;
        self.certificate_sha256
            .iter()
            .take(4)
            .try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

/// As [`Principal::subject`].
pub(super) fn distinguished_name(name: &X509Name<'_>) -> String {
    let mut text = String::new();
    for relative in name.iter() {
        for (nth, attribute) in relative.iter().enumerate() {
            match (text.is_empty(), nth) {
                (true, _) => (),
                (false, 0) => text.push(','),
                (false, _) => text.push('+'),
            }
            let oid = attribute.attr_type();
            match oid2abbrev(oid, oid_registry()) {
                Ok(short) => text.push_str(short),
                Err(_unnamed) => text.push_str(&oid.to_id_string()),
            }
            text.push('=');
            match attribute.as_str() {
                Ok(value) => escape(value, &mut text),
                // Not a text type: its bytes in hexadecimal, which no escaped text can look like.
                Err(_not_text) => {
                    text.push('#');
                    for byte in attribute.as_slice() {
                        text.push_str(&format!("{byte:02x}"));
                    }
                }
            }
        }
    }
    text
}

fn escape(value: &str, text: &mut String) {
    for (at, character) in value.char_indices() {
        let special = matches!(character, ',' | '+' | '"' | '\\' | '<' | '>' | ';' | '=')
            || (at == 0 && matches!(character, '#' | ' '));
        if character.is_control() {
            escape_bytes(character, text);
            continue;
        }
        if special {
            text.push('\\');
        }
        text.push(character);
    }
}

/// Escapes a character as RFC 4514 does: a backslash and two hexadecimal digits for each byte.
fn escape_bytes(character: char, text: &mut String) {
    let mut bytes = [0; 4];
    for byte in character.encode_utf8(&mut bytes).bytes() {
        text.push_str(&format!("\\{byte:02X}"));
    }
}

/// Escapes an alternative name for a list with commas.
fn escaped_name(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for character in name.chars() {
        if character.is_control() || matches!(character, ' ' | ',' | '\\') {
            escape_bytes(character, &mut text);
        } else {
            text.push(character);
        }
    }
    text
}

fn alternative_names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(extension)) = certificate.subject_alternative_name() else {
        return Vec::new();
    };
    let mut names: Vec<String> = extension
        .value
        .general_names
        .iter()
        .filter_map(alternative_name)
        .take(NAMES_MAX)
        .collect();
    names.sort_unstable();
    names
}

fn rest_sha256(certificate: &X509Certificate<'_>, names: &[String]) -> Option<[u8; 32]> {
    let are_all_read = match certificate.subject_alternative_name() {
        Ok(None) => true,
        Ok(Some(extension)) => extension.value.general_names.len() == names.len(),
        Err(_unreadable) => false,
    };
    if !are_all_read {
        let extensions = certificate.iter_extensions();
        let alternative = extensions.filter(|one| one.oid == OID_X509_EXT_SUBJECT_ALT_NAME);
        let mut hash = Sha256::default();
        alternative.for_each(|one| hash.update(one.value));
        return Some(hash.finish());
    }
    let is_nameless = names.is_empty() && certificate.subject().iter().next().is_none();
    is_nameless.then(|| Sha256::digest(certificate.public_key().raw))
}

fn alternative_name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some(format!("dns:{name}")),
        GeneralName::URI(uri) => Some(format!("uri:{uri}")),
        GeneralName::RFC822Name(address) => Some(format!("email:{address}")),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
            let address = v4
                .or_else(|_not_v4| <[u8; 16]>::try_from(*bytes).map(IpAddr::from))
                .ok()?;
            Some(format!("ip:{address}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selfsigned::{ThrowawayCa, Usage};
    use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
    use rustls_pki_types::{CertificateDer, pem::PemObject};

    fn principal(ca: &ThrowawayCa, common_name: &str, names: &[&str]) -> Principal {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let pair = ca.issue(Usage::Client, common_name, &names).unwrap();
        Principal::from_der(&CertificateDer::from_pem_slice(pair.cert_pem.as_bytes()).unwrap())
            .unwrap()
    }

    #[test]
    fn subject_and_alternative_names_are_read() {
        let ca = ThrowawayCa::new("test").unwrap();
        let principal = principal(
            &ca,
            "agent-7",
            &["b.example", "10.0.0.1", "::1", "a.example"],
        );
        assert_eq!(principal.common_name.as_deref(), Some("agent-7"));
        assert_eq!(principal.subject, "CN=agent-7");
        assert_eq!(
            principal.names,
            ["dns:a.example", "dns:b.example", "ip:10.0.0.1", "ip:::1"]
        );
        assert!(principal.to_string().starts_with("CN=agent-7 (sha256 "));
    }

    #[test]
    fn no_common_name_reads_like_another_attribute() {
        let ca = ThrowawayCa::new("test").unwrap();
        let tricky = principal(&ca, "a, O=b+C=\"d\"", &[]);
        assert_eq!(tricky.subject, "CN=a\\, O\\=b\\+C\\=\\\"d\\\"");
        assert_eq!(principal(&ca, "#0c01", &[]).subject, "CN=\\#0c01");
        assert_eq!(principal(&ca, "a\nb", &[]).subject, "CN=a\\0Ab");
    }

    #[test]
    fn holders_are_readable_and_never_alike() {
        let ca = ThrowawayCa::new("test").unwrap();
        let holder = |common_name, names: &[&str]| principal(&ca, common_name, names).holder();
        assert_eq!(holder("agent-1", &[]), "CN=agent-1");
        assert_eq!(
            holder("agent-1", &["a.example", "10.0.0.1"]),
            "CN=agent-1 names=dns:a.example,ip:10.0.0.1"
        );
        // A common name that looks like a list of names or like a hash is escaped.
        assert_eq!(holder("a names=dns:b", &[]), "CN=a names\\=dns:b");
        assert_eq!(holder("a sha256=00", &[]), "CN=a sha256\\=00");
        let uri = |uri: &str| {
            let mut params = CertificateParams::default();
            params.distinguished_name = DistinguishedName::new();
            params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
            let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            Principal::from_der(certificate.der()).unwrap().holder()
        };
        assert_eq!(uri("x:a,dns:b c"), "names=uri:x:a\\2Cdns:b\\20c");
    }

    #[test]
    fn renewed_certificate_has_the_same_holder_and_another_hash() {
        let ca = ThrowawayCa::new("test").unwrap();
        let (old, new) = (principal(&ca, "a", &["x"]), principal(&ca, "a", &["x"]));
        assert_eq!(old.holder(), new.holder());
        assert_ne!(old.certificate_sha256, new.certificate_sha256);
        assert_ne!(old.holder(), principal(&ca, "a", &["y"]).holder());
        assert_ne!(old.holder(), principal(&ca, "b", &["x"]).holder());
    }

    /// The holder of a certificate without a subject; each call uses a new key.
    fn holder(names: Vec<SanType>) -> String {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = names;
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        Principal::from_der(certificate.der()).unwrap().holder()
    }

    #[test]
    fn a_certificate_without_a_name_has_a_holder_by_its_key() {
        assert_ne!(holder(vec![]), holder(vec![]));
    }

    #[test]
    fn names_of_other_kinds_distinguish_holders() {
        let user = |name: &str| {
            let user_principal_name = vec![1, 3, 6, 1, 4, 1, 311, 20, 2, 3];
            holder(vec![SanType::OtherName((user_principal_name, name.into()))])
        };
        assert_eq!(user("a"), user("a"));
        assert_ne!(user("a"), user("b"));
        assert_ne!(user("a"), holder(vec![]));
    }

    #[test]
    fn names_beyond_the_read_limit_distinguish_holders() {
        let many = |last: &str| {
            let same = (0..NAMES_MAX).map(|number| format!("n{number}.example"));
            let all = same.chain([last.to_owned()]);
            holder(
                all.map(|name| SanType::DnsName(name.try_into().unwrap()))
                    .collect(),
            )
        };
        assert_eq!(many("a.example"), many("a.example"));
        assert_ne!(many("a.example"), many("b.example"));
    }

    #[test]
    fn garbage_is_no_principal() {
        assert_eq!(Principal::from_der(b"hello"), None);
    }
}
