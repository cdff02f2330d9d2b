//! Checks the syntax of `--agent-identifiers`; the core interprets them.

use adit_core::wire::identifiers::Identifiers;

/// Checks the text as upstream's agent does.
///
/// # Errors
/// A sentence for the flag's error, without the flag's name.
pub(crate) fn check(text: &str) -> Result<(), String> {
    Identifiers::parse_flag(text)
        .map(|_identifiers| ())
        .map_err(|error| {
            // The caller adds upstream's prefix, which the core's text has, too.
            let text = error.to_string();
            text.strip_prefix("agent address is invalid: ")
                .unwrap_or(&text)
                .to_owned()
        })
}
