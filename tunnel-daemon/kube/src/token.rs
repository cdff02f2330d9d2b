//! A bearer token, and its unverified claims.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::sha256::Sha256;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use zeroize::Zeroizing;

/// Allowed difference between the clocks of the API server and of this host; the API server allows the same.
const CLOCK_SKEW: Duration = Duration::from_secs(60);

/// Wall-clock time, by which tokens end.
#[expect(clippy::disallowed_methods, reason = "an expiry is a time of day")]
pub(crate) fn now() -> SystemTime {
    SystemTime::now()
}

/// Longest token that is parsed: those of service accounts have one to two thousand bytes.
const BYTES_MAX: usize = 16 * 1024;

/// A bearer token. Formatting it shows a mask; dropping clears it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Zeroizing<String>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Claims of a JWT (RFC 7519), as far as they are used. Nothing of it is verified.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Claims {
    /// Expiry; absent in tokens that do not expire.
    pub expires: Option<SystemTime>,
    /// Audiences; absent in tokens of secrets.
    pub audiences: Option<Vec<String>>,
    /// Subject: the user name.
    pub subject: Option<String>,
}

#[derive(Deserialize)]
struct RawClaims {
    exp: Option<f64>,
    aud: Option<OneOrMany>,
    sub: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl Token {
    /// A token as received.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// The token itself, for the request that verifies it.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    /// Distinguishes tokens without keeping them.
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.0.as_bytes())
    }

    /// Reads the claims. `None` when the token is no JWT: three parts, of which the second is JSON, of 16 KiB together at
    /// most.
    #[must_use]
    pub fn claims(&self) -> Option<Claims> {
        if self.0.len() > BYTES_MAX {
            return None;
        }
        let mut parts = self.0.split('.');
        let (header, payload, signature) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() || header.is_empty() || signature.is_empty() {
            return None;
        }
        let payload = Zeroizing::new(URL_SAFE_NO_PAD.decode(payload).ok()?);
        let raw: RawClaims = serde_json::from_slice(&payload).ok()?;
        let expires = raw
            .exp
            .filter(|seconds| seconds.is_finite() && *seconds >= 0.0)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .and_then(|since| UNIX_EPOCH.checked_add(since));
        Some(Claims {
            expires,
            audiences: raw.aud.map(|audiences| match audiences {
                OneOrMany::One(audience) => vec![audience],
                OneOrMany::Many(audiences) => audiences,
            }),
            subject: raw.sub,
        })
    }
}

impl Claims {
    /// Whether the API server would treat the token as expired.
    #[must_use]
    pub fn is_expired(&self, now: SystemTime) -> bool {
        self.expires
            .is_some_and(|expires| expires + CLOCK_SKEW < now)
    }

    /// Time until the token expires; zero when it has. `None`: it does not expire.
    #[must_use]
    pub fn left(&self, now: SystemTime) -> Option<Duration> {
        self.expires
            .map(|expires| expires.duration_since(now).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(payload: &str) -> Token {
        Token::new(format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(payload)))
    }

    #[test]
    fn the_audience_claim_may_be_a_string_or_a_list() {
        let claims = token(r#"{"exp":1900000000,"aud":["a","b"],"sub":"system:serviceaccount:n:s","kubernetes.io":{}}"#)
            .claims()
            .unwrap();
        assert_eq!(claims.audiences, Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(claims.subject.as_deref(), Some("system:serviceaccount:n:s"));
        assert_eq!(
            claims.expires,
            Some(UNIX_EPOCH + Duration::from_secs(1_900_000_000))
        );
        let one = token(r#"{"aud":"a"}"#).claims().unwrap();
        assert_eq!(one.audiences, Some(vec!["a".to_owned()]));
        assert_eq!((one.expires, one.subject), (None, None));
    }

    /// Limit (sizes): Token of an agent | 16 KiB
    #[test]
    fn invalid_jwts_have_no_claims() {
        for text in [
            "",
            "abc",
            "a.b",
            "a.b.c",
            "e30.e30",
            "e30.e30.",
            "e30.e30.s.t",
            ".e30.s",
            "e30.WzFd.s",
        ] {
            assert_eq!(Token::new(text).claims(), None, "{text:?}");
        }
        for payload in [r#"{"exp":"soon"}"#, r#"{"sub":7}"#, "[]", "{"] {
            assert_eq!(token(payload).claims(), None, "{payload}");
        }
        let long = format!(r#"{{"sub":"{}"}}"#, "a".repeat(BYTES_MAX));
        assert_eq!(token(&long).claims(), None);
        // An expiry time out of range is ignored.
        assert_eq!(token(r#"{"exp":1e300}"#).claims().unwrap().expires, None);
    }

    #[test]
    fn token_expiry_allows_for_clock_skew() {
        let claims = Claims {
            expires: Some(UNIX_EPOCH + Duration::from_secs(1000)),
            ..Claims::default()
        };
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert!(!claims.is_expired(at(1060)) && claims.is_expired(at(1061)));
        assert_eq!(claims.left(at(990)), Some(Duration::from_secs(10)));
        assert_eq!(claims.left(at(2000)), Some(Duration::ZERO));
        assert!(!Claims::default().is_expired(at(u32::MAX.into())));
    }

    #[test]
    fn formatting_never_shows_a_token() {
        assert_eq!(format!("{:?}", Token::new("secret")), "***");
    }
}
