//! What rustls offers for a checked [`TlsPolicy`]: protocol versions and cipher suites in order of preference.
//!
//! Config checks the names. As in Go, the list of suites concerns TLS 1.2 only; TLS 1.3 always stays usable, so no list of
//! valid names can leave a listener with nothing.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite as suite};
use rustls::version::{TLS12, TLS13};
use rustls::{SupportedCipherSuite, SupportedProtocolVersion};

use adit_config::tls_policy::{TlsPolicy, TlsVersion};

/// The suites of TLS 1.3 in our order of preference: AES-GCM runs at three times the speed of ChaCha20 where
/// the processor has AES instructions, and 128 bits is what Go prefers.
const TLS13_SUITES: &[SupportedCipherSuite] = &[
    suite::TLS13_AES_128_GCM_SHA256,
    suite::TLS13_AES_256_GCM_SHA384,
    suite::TLS13_CHACHA20_POLY1305_SHA256,
];

/// The suites of TLS 1.2 in our order of preference: the operator chooses suites, not their order, as in Go.
const TLS12_SUITES: &[SupportedCipherSuite] = &[
    suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
    suite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
    suite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
];

/// FIPS has no ChaCha20.
fn is_allowed(suite: &SupportedCipherSuite) -> bool {
    !cfg!(feature = "fips") || suite.fips()
}

/// aws-lc-rs with the suites of `policy`, preferred first.
pub(super) fn provider(policy: &TlsPolicy) -> Arc<CryptoProvider> {
    let wanted = |suite: &&SupportedCipherSuite| {
        let list = policy.tls12_suites.as_ref();
        let name = suite.suite().as_str().unwrap_or_default();
        list.is_none_or(|list| list.contains(&name))
    };
    let tls12 = TLS12_SUITES.iter().filter(wanted).copied();
    let suites = TLS13_SUITES.iter().copied().chain(tls12);
    let cipher_suites = suites.filter(is_allowed).collect();
    Arc::new(CryptoProvider {
        cipher_suites,
        ..aws_lc_rs::default_provider()
    })
}

/// Whether all cryptography of TLS is that of a module with a FIPS 140-3 certificate: true in a build with the feature `fips`.
#[must_use]
pub fn is_fips() -> bool {
    provider(&TlsPolicy::default()).fips()
}

static BOTH: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];
static ONLY_TLS13: &[&SupportedProtocolVersion] = &[&TLS13];

/// The versions of `policy`. TLS 1.2 is left out when it has no suite, so that a peer learns it at once.
pub(super) fn versions(policy: &TlsPolicy) -> &'static [&'static SupportedProtocolVersion] {
    let without_tls12 = policy.tls12_suites.as_ref().is_some_and(Vec::is_empty);
    match (policy.min_version, without_tls12) {
        (TlsVersion::Tls12, false) => BOTH,
        (TlsVersion::Tls13, _) | (TlsVersion::Tls12, true) => ONLY_TLS13,
    }
}

/// Whether the processor has AES instructions. With them our order of suites wins over the client's. Without them the
/// client's order wins: ChaCha20 is then faster for this end, too.
pub(super) fn aes_in_hardware() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(policy: &TlsPolicy) -> Vec<String> {
        provider(policy)
            .cipher_suites
            .iter()
            .map(|suite| format!("{:?}", suite.suite()))
            .collect()
    }

    #[cfg(feature = "fips")]
    #[test]
    fn a_fips_build_has_no_other_cryptography() {
        assert!(is_fips());
        let names = names(&TlsPolicy::default());
        assert!(
            names.iter().all(|name| !name.contains("CHACHA")),
            "{names:?}"
        );
        assert!(
            names.iter().any(|name| name.starts_with("TLS_")),
            "{names:?}"
        );
    }

    #[cfg(not(feature = "fips"))]
    #[test]
    fn list_restricts_tls12_and_leaves_tls13_alone() {
        for suite in TLS12_SUITES {
            let name = format!("{:?}", suite.suite());
            let parsed = TlsPolicy::parse("", std::slice::from_ref(&name), &mut Vec::new());
            let policy = parsed.unwrap();
            let expected = [
                "TLS13_AES_128_GCM_SHA256",
                "TLS13_AES_256_GCM_SHA384",
                "TLS13_CHACHA20_POLY1305_SHA256",
                &name,
            ];
            assert_eq!(names(&policy), expected);
            assert_eq!(versions(&policy).len(), 2);
        }
    }

    #[test]
    fn list_without_usable_suites_leaves_tls13() {
        let policy = TlsPolicy {
            tls12_suites: Some(Vec::new()),
            ..TlsPolicy::default()
        };
        assert_eq!(versions(&policy), [&TLS13]);
    }

    #[cfg(not(feature = "fips"))]
    #[test]
    fn aes_gcm_comes_before_chacha_in_both_versions() {
        let names = names(&TlsPolicy::default());
        let matches = |name: &String, prefix: &str, kind: &str| {
            name.starts_with(prefix) && name.contains(kind)
        };
        for prefix in ["TLS13_", "TLS_"] {
            let last_aes = names
                .iter()
                .rposition(|n| matches(n, prefix, "AES"))
                .unwrap();
            let first_chacha = names
                .iter()
                .position(|n| matches(n, prefix, "CHACHA"))
                .unwrap();
            assert!(last_aes < first_chacha, "{names:?}");
        }
    }
}
