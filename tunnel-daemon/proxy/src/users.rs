//! Users of proxies and their passwords, from a file of lines `NAME:PASSWORD`.

use std::collections::BTreeMap;
use std::fmt;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{Digest, SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;

/// Octets of a name, and of a password, at most: SOCKS5 has no room for more (RFC 1929).
const OCTETS_MAX: usize = 255;

/// Who may use a proxy. Passwords are kept as SHA-256, and neither they nor names are in the debug text.
#[derive(Clone)]
pub struct Users(BTreeMap<Vec<u8>, Digest>);

/// Why a list of users cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UsersError {
    /// A line is no user. The line itself is not shown: it has a password.
    #[error("line {line}: {flaw}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        flaw: &'static str,
    },
    /// No line is a user.
    #[error("it names no user: write lines NAME:PASSWORD")]
    Empty,
}

impl Users {
    /// Reads lines `NAME:PASSWORD`; empty lines and those that begin with `#` are skipped.
    ///
    /// # Errors
    /// The first line that is wrong, or that there is no user.
    pub fn parse(text: &str) -> Result<Self, UsersError> {
        let mut users = BTreeMap::new();
        for (at, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |flaw| UsersError::Line { line: at + 1, flaw };
            let (name, password) = line
                .split_once(':')
                .ok_or_else(|| wrong("write NAME:PASSWORD"))?;
            if name.is_empty() || password.is_empty() {
                return Err(wrong("name and password must not be empty"));
            }
            if name.len() > OCTETS_MAX || password.len() > OCTETS_MAX {
                return Err(wrong("name and password have at most 255 octets each"));
            }
            if users
                .insert(
                    name.as_bytes().to_vec(),
                    digest(&SHA256, password.as_bytes()),
                )
                .is_some()
            {
                return Err(wrong("the user is named twice"));
            }
        }
        if users.is_empty() {
            return Err(UsersError::Empty);
        }
        Ok(Self(users))
    }

    /// Whether this is a user with this password.
    #[must_use]
    pub fn permit(&self, name: &[u8], password: &[u8]) -> bool {
        let shown = digest(&SHA256, password);
        let known = self.0.get(name);
        known.is_some_and(|known| verify_slices_are_equal(known.as_ref(), shown.as_ref()).is_ok())
    }

    /// The user of a `Proxy-Authorization` header (RFC 7617), if it is one with that password.
    #[must_use]
    pub fn permit_basic(&self, header: Option<&HeaderValue>) -> bool {
        let decoded = header.and_then(|header| {
            let (scheme, token) = header.to_str().ok()?.split_once(' ')?;
            let is_basic = scheme.eq_ignore_ascii_case("basic");
            STANDARD.decode(token.trim()).ok().filter(|_| is_basic)
        });
        let both = decoded.as_deref().and_then(|both| {
            let colon = both.iter().position(|&octet| octet == b':')?;
            Some((both.get(..colon)?, both.get(colon + 1..)?))
        });
        both.is_some_and(|(name, password)| self.permit(name, password))
    }
}

impl PartialEq for Users {
    fn eq(&self, other: &Self) -> bool {
        let pairs = |users: &Self| -> Vec<(Vec<u8>, Vec<u8>)> {
            let each = users.0.iter();
            each.map(|(name, digest)| (name.clone(), digest.as_ref().to_vec()))
                .collect()
        };
        pairs(self) == pairs(other)
    }
}

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Users({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_named_users_with_their_passwords_are_let_in() {
        let users = Users::parse("# of the monitoring\nprom:se:cret\n\nother:x\n").unwrap();
        assert!(users.permit(b"prom", b"se:cret") && users.permit(b"other", b"x"));
        for (name, password) in [
            ("prom", "se"),
            ("prom", ""),
            ("prom", "x"),
            ("", "x"),
            ("who", "x"),
        ] {
            assert!(
                !users.permit(name.as_bytes(), password.as_bytes()),
                "{name} {password}"
            );
        }
        let basic = |text: &str| {
            let header = HeaderValue::try_from(text).unwrap();
            users.permit_basic(Some(&header))
        };
        // prom:se:cret
        assert!(basic("Basic cHJvbTpzZTpjcmV0") && basic("basic  cHJvbTpzZTpjcmV0"));
        for wrong in [
            "Basic",
            "Basic ",
            "Basic cHJvbTpzZQ==",
            "Bearer cHJvbTpzZTpjcmV0",
            "Basic cHJvbQ==",
            "Basic %%",
        ] {
            assert!(!basic(wrong), "{wrong}");
        }
        assert!(!users.permit_basic(None));
        assert_eq!(format!("{users:?}"), "Users(2)");
    }

    #[test]
    fn a_wrong_line_is_named_by_number_and_never_shown() {
        let long = format!("a:{}", "x".repeat(256));
        for (text, line) in [
            ("a:b\nsecret", 2),
            (":b", 1),
            ("a:", 1),
            ("a:b\na:c", 2),
            (&long, 1),
        ] {
            let error = Users::parse(text).unwrap_err();
            assert!(
                matches!(error, UsersError::Line { line: at, .. } if at == line),
                "{text}: {error}"
            );
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        assert_eq!(Users::parse("# nobody\n"), Err(UsersError::Empty));
    }
}
