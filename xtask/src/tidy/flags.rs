//! Every flag of our own command line is documented for operators.

use std::collections::BTreeMap;

use anyhow::anyhow;
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::workspace::Workspace;

const DOCUMENT: &str = "docs/operations.md";
/// Where flags are declared: one file, or a folder of them.
const DECLARED: &[&str] = &[
    "tunnel-daemon/src/config/flags.rs",
    "tunnel-daemon/src/config/flags/",
];

/// Compares the declared flags with the document, both ways. No document yet: nothing to compare.
///
/// # Errors
/// When a file cannot be read or parsed.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    if !workspace.path(DOCUMENT).is_file() {
        return Ok(Vec::new());
    }
    let mut declared = BTreeMap::new();
    for file in workspace.files("tunnel-daemon/src/config")? {
        if DECLARED.iter().any(|place| file.starts_with(place)) && file.ends_with(".rs") {
            let source = workspace.text(&file)?.unwrap_or_default();
            let stream: TokenStream = source.parse().map_err(|error| anyhow!("{file}: {error}"))?;
            let mut flags = Vec::new();
            declared_flags(stream, &mut flags);
            declared.extend(flags.into_iter().map(|flag| (flag, file.clone())));
        }
    }
    if declared.is_empty() {
        return Ok(Vec::new());
    }
    let text = workspace.text(DOCUMENT)?.unwrap_or_default();
    let rows = documented_flags(&text);
    let missing = declared
        .iter()
        .filter(|(flag, _)| !rows.contains(flag))
        .map(|(flag, file)| format!("{file}: `--{flag}` has no row in {DOCUMENT}"));
    let stale = rows
        .iter()
        .filter(|flag| !declared.contains_key(*flag))
        .map(|flag| format!("{DOCUMENT}: `--{flag}` is documented, but no such flag is declared"));
    Ok(missing.chain(stale).collect())
}

/// The flags with a table row of their own: a line that begins "| `--name".
fn documented_flags(text: &str) -> Vec<String> {
    let name = |line: &str| {
        let rest = line.trim_start_matches(['|', ' ']).strip_prefix("`--")?;
        let end = rest
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '-')
            .unwrap_or(rest.len());
        rest.get(..end).map(str::to_owned)
    };
    text.lines()
        .filter(|line| line.starts_with('|'))
        .filter_map(name)
        .collect()
}

/// Long names of `#[arg(long, ...)]` fields.
fn declared_flags(stream: TokenStream, found: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        if let TokenTree::Group(group) = token {
            match long_name(&group.stream()) {
                Some(LongName::Given(name)) => found.push(name),
                Some(LongName::OfField) => {
                    found.extend(field_after(tokens.get(at + 1..).unwrap_or_default()))
                }
                None => declared_flags(group.stream(), found),
            }
        }
    }
}

enum LongName {
    Given(String),
    OfField,
}

/// Reads the content of `#[...]`, if it is an `arg(...)` with `long`.
fn long_name(attribute: &TokenStream) -> Option<LongName> {
    let mut tokens = attribute.clone().into_iter();
    let (Some(TokenTree::Ident(name)), Some(TokenTree::Group(args))) =
        (tokens.next(), tokens.next())
    else {
        return None;
    };
    if name != "arg" || args.delimiter() != Delimiter::Parenthesis {
        return None;
    }
    let args: Vec<TokenTree> = args.stream().into_iter().collect();
    let long = args
        .iter()
        .position(|token| matches!(token, TokenTree::Ident(word) if *word == "long"))?;
    match (args.get(long + 1), args.get(long + 2)) {
        (Some(TokenTree::Punct(equals)), Some(TokenTree::Literal(name)))
            if equals.as_char() == '=' =>
        {
            Some(LongName::Given(
                name.to_string().trim_matches('"').to_owned(),
            ))
        }
        _ => Some(LongName::OfField),
    }
}

/// The field below an attribute, in the spelling of a flag.
fn field_after(tokens: &[TokenTree]) -> Option<String> {
    tokens.iter().find_map(|token| match token {
        TokenTree::Ident(word) if *word != "pub" => {
            Some(word.to_string().trim_start_matches("r#").replace('_', "-"))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const SOURCE: &str = "struct F {\n/// Doc.\n#[arg(long, value_name = \"T\")]\npub(crate) dial_timeout: u8,\n\
                          #[arg(long = \"frontend\", required = true)] frontends: Vec<u8>,\n#[command(flatten)] more: M }";

    #[test]
    fn undocumented_and_stale_flags_are_found() {
        let text = "# Operations\n| `--frontend DIALECT` | none | where |\n| `--gone` | 1 | what |\nprose --other\n";
        let (_folder, workspace) = sample(&[
            ("tunnel-daemon/src/config/flags/a.rs", SOURCE),
            (DOCUMENT, text),
        ]);
        let findings = check(&workspace).unwrap();
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(
            findings
                .iter()
                .any(|finding| finding.contains("`--dial-timeout` has no row")),
            "{findings:?}"
        );
        assert!(
            findings
                .iter()
                .any(|finding| finding.contains("`--gone` is documented")),
            "{findings:?}"
        );
    }

    #[test]
    fn missing_document_is_no_finding() {
        let (_folder, workspace) = sample(&[("tunnel-daemon/src/config/flags.rs", SOURCE)]);
        assert_eq!(check(&workspace).unwrap(), Vec::<String>::new());
    }
}
