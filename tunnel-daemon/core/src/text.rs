//! Makes text of a peer or an operator safe to show: short, on one line, printable.

use std::fmt;

/// Longest excerpt, in characters. A DNS name with its port fits into it.
const SHOWN_CHARS_MAX: usize = 260;

/// Longest text of a peer that is kept or passed on, bytes. Bounded because no budget counts these texts while they are queued.
pub const PEER_TEXT_BYTES_MAX: usize = 4096;

/// The first bytes of a text, at most `bytes_max`, cut at a character boundary.
#[must_use]
pub fn beginning(text: &str, bytes_max: usize) -> &str {
    text.get(..text.floor_char_boundary(bytes_max))
        .unwrap_or(text)
}

/// A peer's text, cut to [`PEER_TEXT_BYTES_MAX`]; frees the memory of the rest.
pub(crate) fn shortened(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(PEER_TEXT_BYTES_MAX));
    text.shrink_to_fit();
    text
}

/// Shows at most 260 characters; control characters and line ends are escaped, a cut is marked with `…`.
///
/// Error texts reach clients and logs, so a peer must not be able to make them long or add lines.
#[derive(Clone, Copy, Debug)]
pub struct Excerpt<'a>(pub &'a str);

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        for (shown, c) in self.0.chars().enumerate() {
            if shown == SHOWN_CHARS_MAX {
                return f.write_char('…');
            }
            if c.is_control() {
                write!(f, "{}", c.escape_default())?;
            } else {
                f.write_char(c)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        for (bytes_max, kept) in [(0, ""), (1, "a"), (2, "a"), (3, "aé"), (9, "aéb")] {
            assert_eq!(beginning("aéb", bytes_max), kept);
        }
        let long = "é".repeat(PEER_TEXT_BYTES_MAX);
        assert_eq!(shortened(long).capacity(), PEER_TEXT_BYTES_MAX);
    }

    #[test]
    fn line_ends_are_escaped_and_long_text_is_cut() {
        assert_eq!(Excerpt("a\nb\u{1b}[1m é").to_string(), "a\\nb\\u{1b}[1m é");
        let long = Excerpt(&"x".repeat(5000)).to_string();
        assert_eq!(long.chars().count(), SHOWN_CHARS_MAX + 1);
        assert!(long.ends_with('…'));
    }
}
