//! Finds the known name that a mistyped name most likely means.

/// Least similarity, of 1, that counts as a typing error: one edit in four characters, or fewer.
const NEAR: f64 = 0.75;

/// The most similar of `known`, ignoring case and separators; of equals the first. `None` if none is similar enough.
pub(crate) fn nearest<'a>(
    typed: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // Truncated, since no flag is this long: bounds the cost of a hostile argument.
    let typed: String = typed
        .chars()
        .take(64)
        .map(|c| {
            if c == '_' {
                '-'
            } else {
                c.to_ascii_lowercase()
            }
        })
        .collect();
    let alike = known
        .into_iter()
        .map(|name| (strsim::normalized_damerau_levenshtein(&typed, name), name))
        .filter(|(alike, _)| *alike >= NEAR);
    // Not `max_by`, which returns the last of equals.
    let best = alike.reduce(|best, next| if next.0 > best.0 { next } else { best });
    best.map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_wins_whatever_the_case_and_separator() {
        let known = ["server-port", "server-cert", "agent-port"];
        assert_eq!(nearest("sevrer-port", known), Some("server-port"));
        assert_eq!(nearest("agent_port", known), Some("agent-port"));
        assert_eq!(nearest("serverCert", known), Some("server-cert"));
    }

    #[test]
    fn unlike_names_get_no_suggestion() {
        let known = ["server-port", "server-cert", "agent-port", "v"];
        for typed in ["x", "zz", "", "port", "enable-something", "server"] {
            assert_eq!(nearest(typed, known), None, "{typed}");
        }
        assert_eq!(nearest("x", []), None);
        assert_eq!(nearest(&"server-port".repeat(10_000), known), None);
    }
}
