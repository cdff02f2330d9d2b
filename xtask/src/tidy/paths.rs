//! The paths a Rust source names, `a::b::c`, with grouped imports spread out. Works on tokens, so comments
//! and strings do not count, while the arguments of macros do.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// Words that stand before a path and are no part of it.
const KEYWORDS: &[&str] = &[
    "as", "break", "const", "dyn", "else", "extern", "for", "if", "impl", "in", "let", "match",
    "mod", "move", "mut", "pub", "ref", "return", "static", "type", "unsafe", "use", "where",
    "while",
];

/// One path as written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NamedPath {
    /// Its parts; a glob ends in `*`.
    pub(super) segments: Vec<String>,
    /// Line of its last part, from 1.
    pub(super) line: usize,
    /// How many inline modules of this file are around it.
    pub(super) depth: usize,
}

/// All paths of a source, single identifiers included.
///
/// # Errors
/// When the text is no sequence of Rust tokens.
pub(super) fn paths(source: &str) -> anyhow::Result<Vec<NamedPath>> {
    let stream: TokenStream = source
        .parse()
        .map_err(|error| anyhow::anyhow!("not Rust tokens: {error}"))?;
    let mut found = Vec::new();
    walk(stream, 0, &mut found);
    Ok(found)
}

fn walk(stream: TokenStream, depth: usize, found: &mut Vec<NamedPath>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token {
            TokenTree::Ident(word) if *word == "mod" => {
                if let (Some(TokenTree::Ident(_)), Some(TokenTree::Group(body))) =
                    (tokens.get(at + 1), tokens.get(at + 2))
                {
                    walk(body.stream(), depth + 1, found);
                    at += 3;
                } else {
                    at += 1;
                }
            }
            TokenTree::Ident(word) if KEYWORDS.iter().any(|keyword| *word == keyword) => at += 1,
            TokenTree::Ident(_) => at = path(&tokens, at, &[], depth, found),
            TokenTree::Group(group) => {
                walk(group.stream(), depth, found);
                at += 1;
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => at += 1,
        }
    }
}

/// Reads one path that starts at `at`, below `prefix`; returns where it ends.
fn path(
    tokens: &[TokenTree],
    mut at: usize,
    prefix: &[String],
    depth: usize,
    found: &mut Vec<NamedPath>,
) -> usize {
    let mut segments = prefix.to_vec();
    let mut line = 0;
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(word)) => {
                line = word.span().start().line;
                // `use a::{self}` names `a` itself.
                if *word != "self" || segments.is_empty() {
                    segments.push(word.to_string().trim_start_matches("r#").to_owned());
                }
            }
            Some(TokenTree::Punct(glob)) if glob.as_char() == '*' && !segments.is_empty() => {
                line = glob.span().start().line;
                segments.push("*".to_owned());
            }
            Some(TokenTree::Group(group))
                if group.delimiter() == Delimiter::Brace && !segments.is_empty() =>
            {
                spread(group, &segments, depth, found);
                return at + 1;
            }
            _ => break,
        }
        at += 1;
        if !is_double_colon(tokens, at) {
            break;
        }
        at += 2;
    }
    if !segments.is_empty() && line > 0 {
        found.push(NamedPath {
            segments,
            line,
            depth,
        });
    }
    at
}

/// Reads the members of `prefix::{a, b::c, self}`.
fn spread(group: &Group, prefix: &[String], depth: usize, found: &mut Vec<NamedPath>) {
    let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
    let is_comma =
        |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
    for member in tokens.split(is_comma) {
        let _end = path(member, 0, prefix, depth, found);
    }
}

fn is_double_colon(tokens: &[TokenTree], at: usize) -> bool {
    let colon =
        |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(mark)) if mark.as_char() == ':');
    colon(at) && colon(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(source: &str) -> Vec<String> {
        paths(source)
            .unwrap()
            .into_iter()
            .map(|path| path.segments.join("::"))
            .collect()
    }

    #[test]
    fn grouped_imports_are_spread_out() {
        let found = named("use crate::{hub::{self, Shard}, net::tls::*, a as b};");
        for path in [
            "crate::hub",
            "crate::hub::Shard",
            "crate::net::tls::*",
            "crate::a",
        ] {
            assert!(found.iter().any(|one| one == path), "{path} in {found:?}");
        }
    }

    #[test]
    fn comments_and_strings_name_nothing() {
        let source = "// crate::hub\n/* crate::hub */\n/// crate::hub\nfn f() -> &'static str { r#\"crate::hub\"# }";
        assert!(
            named(source).iter().all(|path| !path.contains("hub")),
            "{:?}",
            named(source)
        );
    }

    #[test]
    fn macro_arguments_and_types_count() {
        let found = named(
            "fn f(x: &crate::hub::A) { select! { y = crate::net::z() => {} } <crate::app::T as U>::v() }",
        );
        for path in ["crate::hub::A", "crate::net::z", "crate::app::T"] {
            assert!(found.iter().any(|one| one == path), "{path} in {found:?}");
        }
    }

    #[test]
    fn lines_and_inline_modules_are_told() {
        let found = paths("mod tests {\n    use super::super::hub;\n}").unwrap();
        let path = found.iter().find(|path| path.segments.len() == 3).unwrap();
        assert_eq!((path.line, path.depth), (2, 1));
    }

    #[test]
    fn leading_double_colon_is_no_part_of_the_path() {
        assert!(named("use ::tokio::net;").contains(&"tokio::net".to_owned()));
    }
}
