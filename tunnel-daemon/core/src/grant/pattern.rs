//! Patterns with a `*`, and the placeholders `{*}` and `{node}`.

use super::flaw::Flaw;

/// Placeholder in a claim: the text that the `*` of the holder's name matched.
pub(super) const CAPTURED: &str = "{*}";
/// Placeholder in a claim: the node that the token is bound to.
pub(super) const NODE: &str = "{node}";

/// Values of the placeholders in a grant's claims.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Stands {
    pub(super) star: String,
    pub(super) node: Option<String>,
}

/// A text with at most one `*`, as the parts before and after the `*`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Pattern {
    pub(super) start: String,
    pub(super) end: Option<String>,
}

impl Pattern {
    pub(super) fn parse(key: &'static str, text: &str) -> Result<Self, Flaw> {
        if text.is_empty() {
            return Err(Flaw::Empty(key));
        }
        // The star in `{*}` is not a wildcard.
        let plain = text.replace(CAPTURED, "\u{0}");
        let mut parts = plain.split('*').map(|part| part.replace('\u{0}', CAPTURED));
        let (start, end) = (parts.next().unwrap_or_default(), parts.next());
        if parts.next().is_some() {
            return Err(Flaw::Stars(key));
        }
        Ok(Self { start, end })
    }

    pub(super) fn has(&self, braces: &str) -> bool {
        self.start.contains(braces) || self.end.as_ref().is_some_and(|text| text.contains(braces))
    }

    /// The part of `text` that the star matches; empty if the pattern has no star and equals `text`.
    pub(super) fn match_text<'a>(&self, text: &'a str) -> Option<&'a str> {
        let rest = text.strip_prefix(self.start.as_str())?;
        match &self.end {
            None => rest.is_empty().then_some(""),
            Some(end) => rest
                .strip_suffix(end.as_str())
                .filter(|star| !star.is_empty()),
        }
    }

    /// The pattern with `{*}` and `{node}` replaced. A `*` in a replacement is an ordinary character. `None`: `{node}`
    /// has no value.
    pub(super) fn with(&self, stands: &Stands) -> Option<Self> {
        if stands.node.is_none() && self.has(NODE) {
            return None;
        }
        let node = stands.node.as_deref().unwrap_or_default();
        // Split first, because braces in a replacement are ordinary characters.
        let replace = |text: &str| {
            let pieces = text
                .split(NODE)
                .map(|piece| piece.replace(CAPTURED, &stands.star));
            pieces.collect::<Vec<_>>().join(node)
        };
        Some(Self {
            start: replace(&self.start),
            end: self.end.as_deref().map(replace),
        })
    }

    pub(super) fn to_lowercase(&self) -> Self {
        Self {
            start: self.start.to_ascii_lowercase(),
            end: self.end.as_ref().map(|text| text.to_ascii_lowercase()),
        }
    }
}
