//! The known name that a mistyped one most likely means.

/// The closest of `known` by edit distance; of equals the first. `None` when nothing known shares
/// anything with it.
pub(super) fn nearest<'a>(
    typed: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // What no flag can be like is cut off, so the cost of a hostile argument stays bounded.
    let typed: Vec<char> = typed
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
    let measured = known.into_iter().map(|name| (distance(&typed, name), name));
    let (edits, name) = measured.min_by_key(|(edits, _)| *edits)?;
    (edits < typed.len()).then_some(name)
}

/// Levenshtein: insertions, deletions and replacements that turn one into the other.
fn distance(from: &[char], to: &str) -> usize {
    let mut row: Vec<usize> = (0..=from.len()).collect();
    for (line, wanted) in to.chars().enumerate() {
        let mut diagonal = line;
        let mut left = line + 1;
        for (have, cell) in from.iter().zip(row.iter_mut().skip(1)) {
            let replaced = diagonal + usize::from(*have != wanted);
            diagonal = *cell;
            left = replaced.min(left + 1).min(*cell + 1);
            *cell = left;
        }
        if let Some(first) = row.first_mut() {
            *first = line + 1;
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_single_edits() {
        for (from, to, edits) in [
            ("", "", 0),
            ("abc", "abc", 0),
            ("abc", "", 3),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
        ] {
            let from: Vec<char> = from.chars().collect();
            assert_eq!(distance(&from, to), edits);
        }
    }

    #[test]
    fn the_nearest_name_wins_whatever_the_case_and_separator() {
        let known = ["server-port", "server-cert", "agent-port"];
        assert_eq!(nearest("sevrer-port", known), Some("server-port"));
        assert_eq!(nearest("agent_port", known), Some("agent-port"));
        assert_eq!(nearest("serverCert", known), Some("server-cert"));
        assert_eq!(nearest("x", []), None);
        assert_eq!(nearest("zz", ["v"]), None);
    }
}
