//! Tokens signed as the API server signs them (RFC 7519, ES256), with claims that it would not issue.

use std::path::Path;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};

use crate::cluster::{AGENT, AUDIENCE, ISSUER};

pub(crate) struct Signer(EcdsaKeyPair);

impl Signer {
    /// Reads the key from a file.
    pub(crate) fn new(key: &Path) -> Self {
        let der = PrivateKeyDer::from_pem_file(key).expect("a key");
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der.secret_der());
        Self(pair.expect("a P-256 key"))
    }

    pub(crate) fn sign(&self, claims: &Value) -> String {
        let header = URL_SAFE_NO_PAD.encode(json!({"alg": "ES256"}).to_string());
        let payload = URL_SAFE_NO_PAD.encode(claims.to_string());
        let input = format!("{header}.{payload}");
        let signature = self
            .0
            .sign(&SystemRandom::new(), input.as_bytes())
            .expect("a signature");
        format!("{input}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

/// Claims of an agent's token: `uid` of its account, `id` of the token, and `left` seconds of validity.
pub(crate) fn claims(uid: &str, id: usize, left: i64) -> Value {
    #[expect(clippy::disallowed_methods, reason = "tokens end by the time of day")]
    let now = std::time::SystemTime::now();
    let now = now
        .duration_since(std::time::UNIX_EPOCH)
        .expect("a time after 1970")
        .as_secs();
    let now = i64::try_from(now).expect("a time");
    json!({
        "iss": ISSUER,
        "aud": [AUDIENCE],
        "sub": format!("system:serviceaccount:kube-system:{AGENT}"),
        "iat": now - 1000,
        "nbf": now - 1000,
        "exp": now + left,
        "jti": format!("00000000-0000-0000-0000-{id:012}"),
        "kubernetes.io": {"namespace": "kube-system", "serviceaccount": {"name": AGENT, "uid": uid}},
    })
}
