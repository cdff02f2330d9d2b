//! The troubleshooting page lists only messages that exist in the code, and every message logged as an error.

use std::collections::BTreeMap;

use anyhow::anyhow;
use proc_macro2::{TokenStream, TokenTree};

use crate::tidy::sources::{is_test, without_tests};
use crate::workspace::Workspace;

const PAGE: &str = "docs/operate/troubleshooting.md";
const FOLDER: &str = "tunnel-daemon";
/// Heads of the tables whose first column lists messages.
const TABLES: &[&str] = &["| message |", "| text |", "| status, text |"];
/// Parts shorter than this are not searched for: they occur anywhere.
const PART_CHARS_MIN: usize = 5;

/// Compares in both directions.
///
/// # Errors
/// A file cannot be read or parsed.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut said = Said::default();
    for file in workspace.files(FOLDER)? {
        if !file.ends_with(".rs") || is_test(&file) {
            continue;
        }
        let text = workspace.text(&file)?.unwrap_or_default();
        let stream = without_tests(&text).parse::<TokenStream>();
        said.read(&file, stream.map_err(|error| anyhow!("{file}: {error}"))?);
    }
    let page = workspace.text(PAGE)?.unwrap_or_default();
    let mut findings = Vec::new();
    for (number, message) in messages(&page) {
        for part in parts(&message) {
            // A message that the code joins from two literals.
            let is_said = |part: &str| part.len() < PART_CHARS_MIN || said.all.contains(part);
            if !is_said(part) && !part.split(": ").all(is_said) {
                findings.push(format!("{PAGE}:{number}: nothing says `{part}`"));
            }
        }
    }
    for (message, file) in &said.errors {
        if parts(message).any(|part| !page.contains(part)) {
            findings.push(format!(
                "{file}: {PAGE} has no row for the error `{message}`"
            ));
        }
    }
    Ok(findings)
}

/// Messages in the sources.
#[derive(Default)]
struct Said {
    /// All string literals, concatenated.
    all: String,
    /// Messages of `tracing::error!`, each with a file that logs it.
    errors: BTreeMap<String, String>,
}

impl Said {
    fn read(&mut self, file: &str, stream: TokenStream) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Literal(literal) => {
                    self.all.push_str(&plain(&literal.to_string()));
                    self.all.push('\n');
                }
                TokenTree::Group(group) => {
                    self.read(file, group.stream());
                    if let Some([TokenTree::Ident(name), TokenTree::Punct(bang)]) =
                        at.checked_sub(2).and_then(|from| tokens.get(from..at))
                        && bang.as_char() == '!'
                        && name == "error"
                        && let Some(message) = message(group.stream())
                    {
                        self.errors.insert(message, file.to_owned());
                    }
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => (),
            }
        }
    }
}

/// The first argument that is only a literal.
fn message(args: TokenStream) -> Option<String> {
    let tokens: Vec<TokenTree> = args.into_iter().collect();
    let is_comma =
        |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
    tokens.split(is_comma).find_map(|arg| match arg {
        [TokenTree::Literal(literal)] => Some(plain(&literal.to_string())),
        _ => None,
    })
}

/// A string literal as printed: without quotes, with its lines joined.
fn plain(literal: &str) -> String {
    let mut text = String::new();
    let mut lines = literal.trim_matches('"').split("\\\n");
    text.push_str(lines.next().unwrap_or_default());
    lines.for_each(|line| text.push_str(line.trim_start()));
    text.replace("\\\"", "\"")
}

/// Texts in backticks in the first column of these tables, with their line numbers.
fn messages(page: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut is_inside = false;
    for (number, line) in page.lines().enumerate() {
        if !line.starts_with('|') {
            is_inside = false;
        } else if TABLES.iter().any(|head| line.starts_with(head)) {
            is_inside = true;
        } else if is_inside {
            let cell = line.split(" | ").next().unwrap_or_default();
            let quoted = cell.split('`').skip(1).step_by(2);
            found.extend(quoted.map(|message| (number + 1, message.to_owned())));
        }
    }
    found
}

/// The parts of a message between placeholders: words in capitals, flags, numbers, `{...}` and `...`.
fn parts(message: &str) -> impl Iterator<Item = &str> {
    let is_fixed = |word: &str| {
        let bare = word.trim_matches(|c: char| c.is_ascii_punctuation());
        let is_name = bare.len() > 2 && bare.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        let is_other = bare.is_empty() || bare.chars().all(|c| c.is_ascii_digit());
        !(is_name
            || is_other
            || word.starts_with("--")
            || word.contains('{')
            || word.contains("..."))
    };
    let mut found: Vec<(usize, usize)> = Vec::new();
    let mut open: Option<(usize, usize)> = None;
    let mut at = 0;
    for word in message.split(' ') {
        let end = at + word.len();
        if is_fixed(word) {
            open = Some((open.map_or(at, |(from, _)| from), end));
        } else {
            found.extend(open.take());
        }
        at = end + 1;
    }
    found.extend(open);
    let trimmed = |part: &'_ str| -> usize { part.trim_end_matches([':', ',', ';']).len() };
    found.into_iter().filter_map(move |(from, to)| {
        let part = message.get(from..to)?;
        part.get(..trimmed(part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn messages_are_compared_both_ways() {
        let source = "fn f() { tracing::error!(file, \"the list of {n} names is \\\n  broken\"); g(format!(\"no answer within {} s\", 1)); }";
        let page = "| message | cause |\n| --- | --- |\n| `the list of MANY names is broken`, `no answer within 20 s` | `x y z zz` |\n| `gone now` | |\n\n| other |\n| `unsaid` |\n";
        let (_folder, workspace) = sample(&[("tunnel-daemon/src/a.rs", source), (PAGE, page)]);
        assert_eq!(
            check(&workspace).unwrap(),
            ["docs/operate/troubleshooting.md:4: nothing says `gone now`"]
        );
        let (_folder, workspace) =
            sample(&[("tunnel-daemon/src/a.rs", source), (PAGE, "nothing\n")]);
        assert_eq!(
            check(&workspace).unwrap(),
            [
                "tunnel-daemon/src/a.rs: docs/operate/troubleshooting.md has no row for the error `the list of {n} names is broken`"
            ]
        );
    }

    #[test]
    fn placeholders_split_a_message() {
        let all: Vec<&str> =
            parts("cannot connect to SERVER through the proxy PROXY: ... after 20 s").collect();
        assert_eq!(
            all,
            ["cannot connect to", "through the proxy", "after", "s"]
        );
    }
}
