//! Checks the syntax of `--agent-identifiers`; the core interprets them.

use adit_core::wire::identifiers::Identifiers;

use crate::error::ConfigError;

/// Checks the text as upstream's agent does.
///
/// # Errors
/// The text is refused, in upstream's words.
pub(crate) fn check(text: &str) -> Result<(), ConfigError> {
    const PREFIX: &str = "agent address is invalid: ";
    let parsed = Identifiers::parse_flag(text);
    parsed.map(|_identifiers| ()).map_err(|error| {
        // Some texts of the core begin with it.
        let text = error.to_string();
        ConfigError::new(format!(
            "{PREFIX}{}",
            text.strip_prefix(PREFIX).unwrap_or(&text)
        ))
    })
}
