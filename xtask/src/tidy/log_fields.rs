//! Checks that every field of a log line is documented for operators.

use std::collections::BTreeMap;

use anyhow::anyhow;
use proc_macro2::{TokenStream, TokenTree};

use crate::tidy::documents::first_column;
use crate::tidy::sources::{is_test, without_tests};
use crate::workspace::Workspace;

const DOCUMENT: &str = "docs/reference/log-fields.md";
/// Folder of the product.
const FOLDER: &str = "tunnel-daemon";
/// The source of access events, whose fields have their own table.
const ACCESS: &str = "telemetry/src/access.rs";
/// Beginnings of the tables' heads: fields of access events, and of all other lines.
const ACCESS_TABLE: &str = "| field | says |";
const OTHER_TABLE: &str = "| field | is | on lines about |";

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

/// Compares the fields in the sources with the document, in both directions.
///
/// # Errors
/// A file cannot be read or parsed.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (mut access, mut other) = (BTreeMap::new(), BTreeMap::new());
    for file in workspace.files(FOLDER)? {
        if !file.ends_with(".rs") || is_test(&file) {
            continue;
        }
        let text = workspace.text(&file)?.unwrap_or_default();
        let stream = without_tests(&text).parse::<TokenStream>();
        let mut names = Vec::new();
        logged_fields(
            stream.map_err(|error| anyhow!("{file}: {error}"))?,
            &mut names,
        );
        let table = if file.ends_with(ACCESS) {
            &mut access
        } else {
            &mut other
        };
        for name in names {
            // Report each field once, not once per line.
            table.entry(name).or_insert_with(|| file.clone());
        }
    }
    let text = workspace.text(DOCUMENT)?.unwrap_or_default();
    let mut findings = Vec::new();
    for (table, logged) in [(ACCESS_TABLE, access), (OTHER_TABLE, other)] {
        let rows = first_column(&text, table);
        let missing = logged.iter().filter(|(field, _)| !rows.contains(field));
        findings.extend(missing.map(|(field, file)| {
            format!("{file}: log field `{field}` has no row below `{table}` in {DOCUMENT}")
        }));
        let stale = rows.iter().filter(|field| !logged.contains_key(*field));
        findings.extend(stale.map(|field| {
            format!("{DOCUMENT}: `{field}` is documented below `{table}`, but nothing logs it")
        }));
    }
    Ok(findings)
}

/// Names of the fields passed to macros of `tracing`.
fn logged_fields(stream: TokenStream, found: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        let TokenTree::Group(group) = token else {
            continue;
        };
        logged_fields(group.stream(), found);
        let before = at.checked_sub(2).and_then(|from| tokens.get(from..at));
        if let Some([TokenTree::Ident(name), TokenTree::Punct(bang)]) = before
            && bang.as_char() == '!'
        {
            let name = name.to_string();
            let is_event = EVENTS.contains(&name.as_str());
            if is_event || SPANS.contains(&name.as_str()) {
                fields(group.stream(), is_event, found);
            }
        }
    }
}

/// Names of the fields among a macro's arguments.
fn fields(args: TokenStream, is_event: bool, found: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = args.into_iter().collect();
    let is_comma =
        |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
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
        for (source, fields) in [
            ("tracing::warn!(%peer, ?wait)", "peer wait"),
            (
                "error!(a = 1, b = %c, d = ?e.f(g, h), \"i\", k = l)",
                "a b d",
            ),
            (
                "info!(target: T, name: \"n\", parent: &p, a = b(c), \"d\")",
                "a",
            ),
            (
                "debug!(\"quoted\" = 1, dotted.name = 2, r#type = 3,)",
                "quoted dotted.name type",
            ),
            ("trace!({ a = 1, b }, \"c\")", "a b"),
            (
                "event!(target: \"t\", tracing::Level::INFO, a = 1, \"b\")",
                "a",
            ),
            ("span!(Level::INFO, \"name\", a = 1, %b)", "a b"),
            (
                "fn f() { g(|| { match h { _ => tracing::info!(a) } }) }",
                "a",
            ),
            ("format!(\"{a}\", a = 1); debug_assert!(a); // info!(a)", ""),
        ] {
            let mut found = Vec::new();
            logged_fields(source.parse().unwrap(), &mut found);
            assert_eq!(found.join(" "), fields, "{source}");
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
            (DOCUMENT, text),
        ]);
        let findings = check(&workspace).unwrap();
        assert_eq!(findings.len(), 3, "{findings:?}");
    }
}
