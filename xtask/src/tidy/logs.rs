//! What the product logs is documented for operators: each field of a log line, and each message logged as an error. The
//! troubleshooting page lists only messages that exist in the code.

use std::collections::BTreeMap;

use anyhow::anyhow;
use proc_macro2::{TokenStream, TokenTree};

use crate::tidy::documents::first_column;
use crate::tidy::sources::{is_test, without_tests};
use crate::workspace::Workspace;

const FIELDS: &str = "docs/reference/log-fields.md";
const MESSAGES: &str = "docs/operate/troubleshooting.md";
/// Folder of the product.
const FOLDER: &str = "tunnel-daemon";
/// The source of access events, whose fields have their own table.
const ACCESS: &str = "telemetry/src/access.rs";
/// Beginnings of the tables' heads: fields of access events, fields of all other lines, and messages.
const ACCESS_TABLE: &str = "| field | says |";
const OTHER_TABLE: &str = "| field | is | on lines about |";
const MESSAGE_TABLES: &[&str] = &["| message |", "| text |", "| status, text |"];
/// Parts of messages shorter than this are not searched for: they occur anywhere.
const PART_CHARS_MIN: usize = 5;

/// Macros of `tracing` for events, whose fields end at the message, and for spans, whose fields follow the name.
const EVENTS: &[&str] = &["trace", "debug", "info", "warn", "error", "event"];
const SPANS: &[&str] = &[
    "trace_span",
    "debug_span",
    "info_span",
    "warn_span",
    "error_span",
    "span",
];

/// What the sources log.
#[derive(Default)]
struct Logged {
    /// Names of fields in access events, and in other lines, each with a file that logs it.
    access: BTreeMap<String, String>,
    other: BTreeMap<String, String>,
    /// Messages of `tracing::error!`, each with a file that logs it.
    errors: BTreeMap<String, String>,
    /// All string literals, concatenated.
    literals: String,
}

/// Compares the sources with both documents, in both directions.
///
/// # Errors
/// A file cannot be read or parsed.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut logged = Logged::default();
    for file in workspace.files(FOLDER)? {
        if !file.ends_with(".rs") || is_test(&file) {
            continue;
        }
        let text = workspace.text(&file)?.unwrap_or_default();
        let stream = without_tests(&text).parse::<TokenStream>();
        logged.read(&file, stream.map_err(|error| anyhow!("{file}: {error}"))?);
    }
    let text = workspace.text(FIELDS)?.unwrap_or_default();
    let mut findings = Vec::new();
    for (table, fields) in [(ACCESS_TABLE, &logged.access), (OTHER_TABLE, &logged.other)] {
        let rows = first_column(&text, table);
        let missing = fields.iter().filter(|(field, _)| !rows.contains(field));
        findings.extend(missing.map(|(field, file)| {
            format!("{file}: log field `{field}` has no row below `{table}` in {FIELDS}")
        }));
        let stale = rows.iter().filter(|field| !fields.contains_key(*field));
        findings.extend(stale.map(|field| {
            format!("{FIELDS}: `{field}` is documented below `{table}`, but nothing logs it")
        }));
    }
    let page = workspace.text(MESSAGES)?.unwrap_or_default();
    let messages = MESSAGE_TABLES
        .iter()
        .flat_map(|table| first_column(&page, table));
    // A message may be joined from two literals.
    let is_said = |part: &str| part.len() < PART_CHARS_MIN || logged.literals.contains(part);
    findings.extend(
        messages
            .flat_map(|message| parts(&message))
            .filter_map(|part| {
                let is_said = is_said(&part) || part.split(": ").all(is_said);
                (!is_said).then(|| format!("{MESSAGES}: nothing says `{part}`"))
            }),
    );
    let missing = logged.errors.iter().filter(|(message, _)| {
        let parts = parts(message);
        parts.iter().any(|part| !page.contains(part))
    });
    findings.extend(
        missing.map(|(message, file)| {
            format!("{file}: {MESSAGES} has no row for the error `{message}`")
        }),
    );
    Ok(findings)
}

impl Logged {
    fn read(&mut self, file: &str, stream: TokenStream) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            let group = match token {
                TokenTree::Literal(literal) => {
                    self.literals.push_str(&plain(&literal.to_string()));
                    self.literals.push('\n');
                    continue;
                }
                TokenTree::Group(group) => group.stream(),
                TokenTree::Ident(_) | TokenTree::Punct(_) => continue,
            };
            self.read(file, group.clone());
            let before = at.checked_sub(2).and_then(|from| tokens.get(from..at));
            if let Some([TokenTree::Ident(name), TokenTree::Punct(bang)]) = before
                && bang.as_char() == '!'
            {
                self.read_macro(file, &name.to_string(), group);
            }
        }
    }

    /// Reads the arguments of a macro.
    fn read_macro(&mut self, file: &str, name: &str, args: TokenStream) {
        let is_event = EVENTS.contains(&name);
        if name == "error"
            && let Some(message) = message(args.clone())
        {
            self.errors.insert(message, file.to_owned());
        }
        if is_event || SPANS.contains(&name) {
            let is_access = file.ends_with(ACCESS);
            let table = if is_access {
                &mut self.access
            } else {
                &mut self.other
            };
            let mut names = Vec::new();
            fields(args, is_event, &mut names);
            for name in names {
                // Report each field once, not once per line.
                table.entry(name).or_insert_with(|| file.to_owned());
            }
        }
    }
}

/// The first argument that is only a literal.
fn message(args: TokenStream) -> Option<String> {
    let tokens: Vec<TokenTree> = args.into_iter().collect();
    tokens.split(is_comma).find_map(|arg| match arg {
        [TokenTree::Literal(literal)] => Some(plain(&literal.to_string())),
        _ => None,
    })
}

fn is_comma(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',')
}

/// A string literal as printed: without quotes, with its lines joined.
fn plain(literal: &str) -> String {
    let mut text = String::new();
    let mut lines = literal.trim_matches('"').split("\\\n");
    text.push_str(lines.next().unwrap_or_default());
    lines.for_each(|line| text.push_str(line.trim_start()));
    text.replace("\\\"", "\"")
}

/// The parts of a message between placeholders: words in capitals, flags, numbers, `{...}` and `...`.
fn parts(message: &str) -> Vec<String> {
    let is_placeholder = |word: &&str| {
        let bare = word.trim_matches(|c: char| c.is_ascii_punctuation());
        let is_name = bare.len() > 2 && bare.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        let is_other = bare.chars().all(|c| c.is_ascii_digit());
        let is_open = word.starts_with("--") || word.contains('{') || word.contains("...");
        is_name || is_other || is_open
    };
    let words: Vec<&str> = message.split(' ').collect();
    let parts = words.split(is_placeholder).map(|words| words.join(" "));
    let parts = parts.map(|part| part.trim_end_matches([':', ',', ';']).to_owned());
    parts.filter(|part| !part.is_empty()).collect()
}

/// Names of the fields among a macro's arguments.
fn fields(args: TokenStream, is_event: bool, found: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = args.into_iter().collect();
    for arg in tokens.split(is_comma) {
        match arg {
            // `"name" = value`.
            [TokenTree::Literal(name), TokenTree::Punct(equals), ..] if equals.as_char() == '=' => {
                found.push(name.to_string().trim_matches('"').to_owned());
            }
            // The message, and its arguments.
            [TokenTree::Literal(_), ..] if is_event => break,
            // `{ name = value, other }, "message"`.
            [TokenTree::Group(braced)] => fields(braced.stream(), is_event, found),
            _ => found.extend(name_of(arg)),
        }
    }
}

/// The name in `name = value`, or in the short forms `name`, `%name`, `?name`. `None` for other arguments: `target: "x"`,
/// `Level::INFO`.
fn name_of(arg: &[TokenTree]) -> Option<String> {
    let mut name = String::new();
    for token in arg {
        match token {
            TokenTree::Ident(word) => name.push_str(word.to_string().trim_start_matches("r#")),
            TokenTree::Punct(mark) => match mark.as_char() {
                '%' | '?' if name.is_empty() => (),
                '.' => name.push('.'),
                '=' => break,
                _ => return None,
            },
            _ => return None,
        }
    }
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn every_form_of_a_field_is_found_and_nothing_else() {
        // A source, and behind the last arrow its fields.
        for case in [
            "tracing::warn!(%peer, ?wait) -> peer wait",
            r#"error!(a = 1, b = %c, d = ?e.f(g, h), "i", k = l) -> a b d"#,
            r#"info!(target: T, name: "n", parent: &p, a = b(c), "d") -> a"#,
            r#"debug!("quoted" = 1, dotted.name = 2, r#type = 3,) -> quoted dotted.name type"#,
            r#"trace!({ a = 1, b }, "c") -> a b"#,
            r#"event!(target: "t", tracing::Level::INFO, a = 1, "b") -> a"#,
            r#"span!(Level::INFO, "name", a = 1, %b) -> a b"#,
            "fn f() { g(|| { match h { _ => tracing::info!(a) } }) } -> a",
            "format!(\"{a}\", a = 1); debug_assert!(a); // info!(a)-> ",
        ] {
            let (source, fields) = case.rsplit_once("-> ").unwrap();
            let mut logged = Logged::default();
            logged.read("a.rs", source.parse().unwrap());
            let mut expected: Vec<&str> = fields.split_whitespace().collect();
            expected.sort_unstable();
            let found: Vec<&String> = logged.other.keys().collect();
            assert_eq!(found, expected, "{source}");
        }
    }

    #[test]
    fn undocumented_and_stale_fields_are_found() {
        let access = "tracing::info!(target: T, agent = a, path = b, \"tunnel ended\");";
        let other = "tracing::info!(agent, \"c\"); tracing::debug!(agent, kept, \"d\");";
        let text = "| field | says |\n| --- | --- |\n| `agent` | `path` |\n\n\
                    | field | is | on lines about |\n| --- | --- | --- |\n| `agent`, `gone` | `kept` | `e` |\n";
        let (_folder, workspace) = sample(&[
            ("tunnel-daemon/telemetry/src/access.rs", access),
            ("tunnel-daemon/src/a.rs", other),
            ("tunnel-daemon/src/a/tests.rs", "tracing::info!(of_tests)"),
            (FIELDS, text),
            (MESSAGES, ""),
        ]);
        let findings = check(&workspace).unwrap();
        assert_eq!(findings.len(), 3, "{findings:?}");
    }

    #[test]
    fn messages_are_compared_both_ways() {
        let source = "fn f() { tracing::error!(file, \"the list of {n} names is \\\n  broken\"); g(format!(\"no answer within {} s\", 1)); }";
        let page = "| message | cause |\n| --- | --- |\n| `the list of MANY names is broken`, `no answer within 20 s` | `x y z zz` |\n| `gone now` | |\n\n| other |\n| `unsaid` |\n";
        let fields =
            "| field | is | on lines about |\n| --- | --- | --- |\n| `file` | `kept` | `e` |\n";
        let of = |page| {
            let (_folder, workspace) = sample(&[
                ("tunnel-daemon/src/a.rs", source),
                (FIELDS, fields),
                (MESSAGES, page),
            ]);
            check(&workspace).unwrap()
        };
        assert_eq!(of(page), [format!("{MESSAGES}: nothing says `gone now`")]);
        let no_row = "has no row for the error `the list of {n} names is broken`";
        let finding = format!("tunnel-daemon/src/a.rs: {MESSAGES} {no_row}");
        assert_eq!(of("nothing\n"), [finding]);
    }

    #[test]
    fn placeholders_split_a_message() {
        let all = parts("cannot connect to SERVER through the proxy PROXY: ... after 20 s");
        let expected = ["cannot connect to", "through the proxy", "after", "s"];
        assert_eq!(all, expected);
    }
}
