//! TLS versions and cipher suites by upstream's names, mapped to what rustls supports.
//!
//! rustls supports neither TLS 1.0 / 1.1 nor CBC suites. Their names are accepted with a warning, and the supported part is
//! applied (compat 13, R17).

use crate::error::{ConfigError, bail};

/// Lowest TLS version a listener accepts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum TlsVersion {
    /// TLS 1.2 and 1.3.
    Tls12,
    /// TLS 1.3 only.
    Tls13,
}

/// TLS versions and cipher suites of both TLS listeners of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsPolicy {
    /// Lowest accepted version.
    pub min_version: TlsVersion,
    /// Names of TLS 1.2 suites that rustls supports, which are those of IANA; `None`: all of them. TLS 1.3 suites are not
    /// configurable, as in Go.
    pub tls12_suites: Option<Vec<&'static str>>,
}

/// The meaning of a name in [`SUITES`].
#[derive(Clone, Copy)]
enum Known {
    Tls12,
    /// Always enabled with TLS 1.3, whatever the list contains.
    Tls13,
    /// Accepted by upstream, not implemented by rustls.
    Cbc,
}

const SUITES: &[(&str, Known)] = &[
    ("TLS_AES_128_GCM_SHA256", Known::Tls13),
    ("TLS_AES_256_GCM_SHA384", Known::Tls13),
    ("TLS_CHACHA20_POLY1305_SHA256", Known::Tls13),
    ("TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA", Known::Cbc),
    ("TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA", Known::Cbc),
    ("TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA", Known::Cbc),
    ("TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA", Known::Cbc),
    ("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", Known::Tls12),
    ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", Known::Tls12),
    (
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
        Known::Tls12,
    ),
    ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", Known::Tls12),
    ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", Known::Tls12),
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", Known::Tls12),
];

impl TlsPolicy {
    /// Parses the two flags; an empty text or list means the default.
    ///
    /// # Errors
    /// An unknown version or suite name, in upstream's words.
    pub fn parse(
        min_version: &str,
        suites: &[String],
        warnings: &mut Vec<String>,
    ) -> Result<Self, ConfigError> {
        let min_version = parse_version(min_version, warnings)?;
        let tls12_suites = parse_suites(suites, warnings)?;
        Ok(Self {
            min_version,
            tls12_suites,
        })
    }
}

impl Default for TlsPolicy {
    fn default() -> Self {
        Self {
            min_version: TlsVersion::Tls12,
            tls12_suites: None,
        }
    }
}

fn parse_version(name: &str, warnings: &mut Vec<String>) -> Result<TlsVersion, ConfigError> {
    match name {
        "" | "VersionTLS12" => Ok(TlsVersion::Tls12),
        "VersionTLS13" => Ok(TlsVersion::Tls13),
        "VersionTLS10" | "VersionTLS11" => {
            warnings.push(format!(
                "--tls-min-version={name} is below TLS 1.2, insecure (RFC 8996) and not implemented: using VersionTLS12"
            ));
            Ok(TlsVersion::Tls12)
        }
        _ => Err(ConfigError::new(format!(
            "unsupported TLS version {name:?}, supported values are: VersionTLS10, VersionTLS11, VersionTLS12, VersionTLS13"
        ))),
    }
}

fn parse_suites(
    names: &[String],
    warnings: &mut Vec<String>,
) -> Result<Option<Vec<&'static str>>, ConfigError> {
    if names.is_empty() {
        return Ok(None);
    }
    let mut suites = Vec::new();
    for name in names {
        let Some((name, known)) = SUITES.iter().find(|(known, _)| known == name) else {
            bail!("cipher suite {name} not supported, doesn't exist or considered as insecure");
        };
        match known {
            Known::Tls12 if suites.contains(name) => (),
            Known::Tls12 => suites.push(*name),
            Known::Tls13 => (),
            Known::Cbc => warnings.push(format!(
                "--cipher-suites: {name} is a CBC suite and not implemented: ignored"
            )),
        }
    }
    if suites.is_empty() {
        warnings.push("--cipher-suites leaves no TLS 1.2 suite: peers need TLS 1.3".to_owned());
    }
    Ok(Some(suites))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(version: &str, suites: &[&str]) -> (Result<TlsPolicy, ConfigError>, Vec<String>) {
        let mut warnings = Vec::new();
        let suites: Vec<String> = suites.iter().map(|&s| s.to_owned()).collect();
        (TlsPolicy::parse(version, &suites, &mut warnings), warnings)
    }

    /// Upstream (configuration): TLS versions below 1.2 are accepted with a warning and raised.
    #[test]
    fn versions_below_1_2_are_accepted_with_a_warning_and_raised() {
        for name in ["VersionTLS10", "VersionTLS11"] {
            let (policy, warnings) = parse(name, &[]);
            assert_eq!(policy.unwrap().min_version, TlsVersion::Tls12);
            assert!(warnings[0].contains(name));
        }
        for (name, version) in [
            ("", TlsVersion::Tls12),
            ("VersionTLS12", TlsVersion::Tls12),
            ("VersionTLS13", TlsVersion::Tls13),
        ] {
            let (policy, warnings) = parse(name, &[]);
            assert_eq!(policy.unwrap().min_version, version);
            assert!(warnings.is_empty());
        }
        assert!(
            parse("TLS1.2", &[])
                .0
                .unwrap_err()
                .message()
                .contains("unsupported TLS version \"TLS1.2\"")
        );
    }

    #[test]
    fn cbc_suites_are_accepted_and_dropped_with_a_warning() {
        let (policy, warnings) = parse(
            "",
            &[
                "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
                "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
            ],
        );
        assert_eq!(
            policy.unwrap().tls12_suites,
            Some(vec!["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"])
        );
        assert_eq!(warnings.len(), 1);
    }

    #[test]
    fn cbc_suites_alone_leave_only_tls_1_3() {
        let (policy, warnings) = parse("", &["TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA"]);
        assert_eq!(policy.unwrap().tls12_suites, Some(Vec::new()));
        assert!(warnings[1].contains("need TLS 1.3"));
    }

    #[test]
    fn unknown_and_insecure_suites_are_refused_by_name() {
        for name in ["TLS_RSA_WITH_RC4_128_SHA", "", "tls_aes_128_gcm_sha256"] {
            assert!(
                parse("", &[name])
                    .0
                    .unwrap_err()
                    .message()
                    .contains(&format!("cipher suite {name} not supported"))
            );
        }
    }
}
