//! The release of a peer's program, as the peer reports it. Only shown; no decision depends on it.

use std::fmt;

/// Longest accepted release, bytes.
const LEN_MAX: usize = 24;

/// A release such as `0.1.0`; empty if the peer sends none. Only letters, digits, `.`, `-` and `+`.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerVersion([u8; LEN_MAX]);

impl PeerVersion {
    /// The release of this program.
    #[must_use]
    pub fn own() -> Self {
        Self::parse(env!("CARGO_PKG_VERSION"))
    }

    /// Parses a peer's release; empty if the text is longer than 24 bytes or has other characters.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let is_plain =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'+');
        let mut bytes = [0; LEN_MAX];
        if text.bytes().all(is_plain)
            && let Some(kept) = bytes.get_mut(..text.len())
        {
            kept.copy_from_slice(text.as_bytes());
        }
        Self(bytes)
    }

    /// The release, if the peer has sent one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        let end = self.0.iter().position(|byte| *byte == 0);
        let said = &self.0[..end.unwrap_or(LEN_MAX)];
        std::str::from_utf8(said)
            .ok()
            .filter(|said| !said.is_empty())
    }
}

impl fmt::Debug for PeerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_kept_and_anything_else_is_none() {
        let longest = "1".repeat(LEN_MAX);
        for said in ["0.1.0", "1.2.3-rc.1+build", &longest] {
            assert_eq!(PeerVersion::parse(said).as_str(), Some(said));
        }
        let longer = "1".repeat(LEN_MAX + 1);
        for bad in ["", "0.1\"", "0 1", "\u{0}1", "v\u{e9}", "a\nb", &longer] {
            assert_eq!(PeerVersion::parse(bad).as_str(), None, "{bad:?}");
        }
        assert!(PeerVersion::own().as_str().is_some());
    }
}
