//! Every field of a log line is documented for operators.

use std::collections::BTreeMap;

use anyhow::anyhow;
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::tidy::connects::is_test;
use crate::tidy::documents::first_column;
use crate::workspace::Workspace;

const DOCUMENT: &str = "docs/reference/log-fields.md";
/// Where the product is.
const FOLDER: &str = "tunnel-daemon";
/// What writes access events, whose fields have a table of their own.
const ACCESS: &str = "tunnel-daemon/telemetry/src/access.rs";
/// The tables, by how their heads begin: of access events, and of all other lines.
const ACCESS_TABLE: &str = "| field | says |";
const OTHER_TABLE: &str = "| field | is | on lines about |";

const LEVELS: &[&str] = &["trace", "debug", "info", "warn", "error"];

/// What a macro of `tracing` makes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Made {
    /// Its fields come before the message, whose arguments are none.
    Event,
    /// Its fields come after the name.
    Span,
}

impl Made {
    fn by(name: &str) -> Option<Self> {
        let level = name.strip_suffix("_span");
        if name == "event" || LEVELS.contains(&name) {
            Some(Self::Event)
        } else if name == "span" || level.is_some_and(|level| LEVELS.contains(&level)) {
            Some(Self::Span)
        } else {
            None
        }
    }
}

/// Compares the fields in the sources with the document, both ways.
///
/// # Errors
/// When a file cannot be read or parsed.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (mut access, mut other) = (BTreeMap::new(), BTreeMap::new());
    for file in workspace.files(FOLDER)? {
        if !file.ends_with(".rs") || is_test(&file) {
            continue;
        }
        let source = workspace.text(&file)?.unwrap_or_default();
        let stream: TokenStream = source.parse().map_err(|error| anyhow!("{file}: {error}"))?;
        let mut names = Vec::new();
        logged_fields(stream, &mut names);
        let table = if file == ACCESS {
            &mut access
        } else {
            &mut other
        };
        for name in names {
            // Once a field, not once a line.
            table.entry(name).or_insert_with(|| file.clone());
        }
    }
    let text = workspace.text(DOCUMENT)?.unwrap_or_default();
    let mut findings = Vec::new();
    for (table, logged) in [(ACCESS_TABLE, access), (OTHER_TABLE, other)] {
        let rows = first_column(&text, table);
        let missing = logged
            .iter()
            .filter(|(field, _)| !rows.contains(field))
            .map(|(field, file)| {
                format!("{file}: log field `{field}` has no row below `{table}` in {DOCUMENT}")
            });
        let stale = rows
            .iter()
            .filter(|field| !logged.contains_key(*field))
            .map(|field| {
                format!("{DOCUMENT}: `{field}` is documented below `{table}`, but nothing logs it")
            });
        findings.extend(missing.chain(stale));
    }
    Ok(findings)
}

/// Names of the fields that macros of `tracing` are given, but for those in `#[cfg(test)]`.
fn logged_fields(stream: TokenStream, found: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let mut rest = tokens.as_slice();
    while let [token, after @ ..] = rest {
        if is_for_tests(rest) {
            // The item, or what of it is before its first comma: too little is a finding, too much would hide some.
            let end = after.iter().skip(1).position(ends_item);
            rest = end.and_then(|end| after.get(end + 2..)).unwrap_or_default();
            continue;
        }
        if let [
            TokenTree::Ident(name),
            TokenTree::Punct(bang),
            TokenTree::Group(args),
            ..,
        ] = rest
            && bang.as_char() == '!'
            && let Some(made) = Made::by(&name.to_string())
        {
            fields(args.stream(), made, found);
        }
        if let TokenTree::Group(group) = token {
            logged_fields(group.stream(), found);
        }
        rest = after;
    }
}

/// Whether these begin with `#[cfg(test)]`.
fn is_for_tests(tokens: &[TokenTree]) -> bool {
    let [TokenTree::Punct(hash), TokenTree::Group(attribute), ..] = tokens else {
        return false;
    };
    hash.as_char() == '#' && attribute.stream().to_string().replace(' ', "") == "cfg(test)"
}

/// The body of an item, or what ends one that has none.
fn ends_item(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(mark) => matches!(mark.as_char(), ';' | ','),
        TokenTree::Ident(_) | TokenTree::Literal(_) => false,
    }
}

/// Names of the fields among the arguments of one macro.
fn fields(args: TokenStream, made: Made, found: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = args.into_iter().collect();
    let is_comma =
        |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
    for arg in tokens.split(is_comma) {
        match arg {
            // `"name" = value`.
            [TokenTree::Literal(name), TokenTree::Punct(equals), ..] if equals.as_char() == '=' => {
                found.push(name.to_string().trim_matches('"').to_owned());
            }
            [TokenTree::Literal(_), ..] if made == Made::Event => break,
            // `{ name = value, other }, "message"`.
            [TokenTree::Group(braced)] => fields(braced.stream(), made, found),
            _ => found.extend(name_of(arg)),
        }
    }
}

/// The name in `name = value`, or in the short forms `name`, `%name`, `?name`; of anything else, such as `target: "x"` or
/// `Level::INFO`, `None`.
fn name_of(arg: &[TokenTree]) -> Option<String> {
    let arg = match arg {
        [TokenTree::Punct(mark), rest @ ..] if matches!(mark.as_char(), '%' | '?') => rest,
        _ => arg,
    };
    let mut name = String::new();
    for token in arg {
        match token {
            TokenTree::Ident(word) => name.push_str(word.to_string().trim_start_matches("r#")),
            TokenTree::Punct(mark) if mark.as_char() == '.' => name.push('.'),
            TokenTree::Punct(mark) if mark.as_char() == '=' => break,
            _ => return None,
        }
    }
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    fn names(source: &str) -> Vec<String> {
        let mut found = Vec::new();
        logged_fields(source.parse().unwrap(), &mut found);
        found
    }

    #[test]
    fn every_form_of_a_field_is_found() {
        for (source, wanted) in [
            ("tracing::warn!(used, \"a\");", vec!["used"]),
            ("tracing::warn!(%peer, ?wait)", vec!["peer", "wait"]),
            (
                "error!(a = 1, b = %c, d = ?e.f(g, h), \"i\")",
                vec!["a", "b", "d"],
            ),
            (
                "info!(target: T, name: \"n\", parent: &p, a = b(c), \"d\")",
                vec!["a"],
            ),
            (
                "debug!(\"quoted\" = 1, dotted.name = 2, r#type = 3,)",
                vec!["quoted", "dotted.name", "type"],
            ),
            ("trace!({ a = 1, b }, \"c\")", vec!["a", "b"]),
            (
                "event!(target: \"t\", tracing::Level::INFO, a = 1, \"b\")",
                vec!["a"],
            ),
            ("span!(Level::INFO, \"name\", a = 1, %b)", vec!["a", "b"]),
            ("info_span!(\"name\", a)", vec!["a"]),
            (
                "fn f() { g(|| { match h { _ => tracing::info!(a) } }) }",
                vec!["a"],
            ),
        ] {
            assert_eq!(names(source), wanted, "{source}");
        }
    }

    #[test]
    fn messages_other_macros_and_tests_have_no_fields() {
        for source in [
            "tracing::info!(\"message {} {b}\", a, b = c)",
            "format!(\"{a}\", a = 1); debug_assert!(a); tracing::enabled!(target: T, Level::INFO)",
            "#[cfg(test)] mod tests { fn f() { tracing::info!(a) } }",
            "#[cfg(test)]\nmod tests;",
            "// info!(a)\nfn error(a: u8) {}",
        ] {
            assert_eq!(names(source), Vec::<String>::new(), "{source}");
        }
    }

    #[test]
    fn what_follows_tests_is_looked_at() {
        for source in [
            "#[cfg(test)] mod tests; fn f() { info!(a) }",
            "#[cfg(test)] fn f() { info!(b) } fn g() { info!(a) }",
            "match x { #[cfg(test)] Y => z(), Z => { info!(a) } }",
        ] {
            assert_eq!(names(source), ["a"], "{source}");
        }
    }

    #[test]
    fn undocumented_and_stale_fields_are_found() {
        let access = "tracing::info!(target: T, agent = a, path = b, \"tunnel ended\");";
        let other = "tracing::info!(agent, \"c\"); tracing::debug!(agent, kept, \"d\");";
        let text = "| field | says |\n| --- | --- |\n| `agent` | `path` |\n\n\
                    | field | is | on lines about |\n| --- | --- | --- |\n| `agent`, `gone` | `kept` | `e` |\n";
        let (_folder, workspace) = sample(&[
            (ACCESS, access),
            ("tunnel-daemon/src/a.rs", other),
            ("tunnel-daemon/src/b.rs", other),
            ("tunnel-daemon/src/a/tests.rs", "tracing::info!(of_tests)"),
            (DOCUMENT, text),
        ]);
        let findings = check(&workspace).unwrap();
        assert_eq!(findings.len(), 3, "{findings:?}");
        for part in [
            "access.rs: log field `path` has no row below `| field | says |`",
            "a.rs: log field `kept` has no row below `| field | is |",
            "`gone` is documented below `| field | is |",
        ] {
            let found = findings.iter().any(|finding| finding.contains(part));
            assert!(found, "{part}: {findings:?}");
        }
    }
}
