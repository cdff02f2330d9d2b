//! Checks `--agent-identifiers` before it travels; what it means is core's business.

use adit_core::wire::identifiers::Identifiers;

/// Checks the text as the upstream agent does.
///
/// # Errors
/// A sentence for the flag's error, without the flag's name.
pub(crate) fn check(text: &str) -> Result<(), String> {
    Identifiers::parse_flag(text)
        .map(|_identifiers| ())
        .map_err(|error| {
            // The caller names the flag in upstream's words, which the core's text starts with too.
            let text = error.to_string();
            text.strip_prefix("agent address is invalid: ")
                .unwrap_or(&text)
                .to_owned()
        })
}
