//! Secrets as types: what must not reach a log cannot be printed by accident.

use std::fmt;

/// A secret whose `Debug` and `Display` show a mask. Tokens, link secrets, keys.
#[derive(Clone, PartialEq, Eq)]
pub struct Masked<T>(T);

impl<T> Masked<T> {
    /// Hides `secret` from formatting.
    pub const fn new(secret: T) -> Self {
        Self(secret)
    }

    /// The secret itself, for the one place that needs it; the name makes such places easy to find.
    pub const fn reveal(&self) -> &T {
        &self.0
    }
}

impl<T> From<T> for Masked<T> {
    fn from(secret: T) -> Self {
        Self(secret)
    }
}

impl<T> fmt::Debug for Masked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl<T> fmt::Display for Masked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatting_never_shows_the_secret() {
        #[derive(Debug)]
        #[expect(dead_code, reason = "only printed")]
        struct Holder {
            token: Masked<String>,
        }
        let token = Masked::new("hunter2".to_owned());
        assert_eq!(token.reveal(), "hunter2");
        let printed = format!(
            "{token} {token:?} {:?}",
            Holder {
                token: token.clone()
            }
        );
        assert!(!printed.contains("hunter2"), "{printed}");
    }
}
