//! Types for secrets, which keep secrets out of logs.

use std::fmt;

use zeroize::{Zeroize, Zeroizing};

/// A secret, such as a token, link secret or key: `Debug` and `Display` show a mask, and dropping clears the memory.
#[derive(Clone, PartialEq, Eq)]
pub struct Masked<T: Zeroize>(Zeroizing<T>);

impl<T: Zeroize> Masked<T> {
    /// Hides `secret` from formatting.
    pub fn new(secret: T) -> Self {
        Self(Zeroizing::new(secret))
    }

    /// The secret itself, where it is needed; the name makes such places easy to find.
    pub fn reveal(&self) -> &T {
        &self.0
    }
}

impl<T: Zeroize> From<T> for Masked<T> {
    fn from(secret: T) -> Self {
        Self::new(secret)
    }
}

impl<T: Zeroize> fmt::Debug for Masked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl<T: Zeroize> fmt::Display for Masked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_cleared_when_it_is_dropped() {
        fn clears(_secret: &impl zeroize::ZeroizeOnDrop) {}
        clears(&Masked::new("hunter2".to_owned()).0);
    }

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
