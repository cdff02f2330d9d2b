//! Checks the grammar of a Kubernetes label selector for `--lease-label-selector`.
//!
//! Only a check: the API server evaluates the selector.

/// Whether the selector parses; an empty one selects everything.
///
/// # Errors
/// A sentence that names the expected token and its place.
pub(super) fn check(text: &str) -> Result<(), String> {
    let tokens = tokens(text);
    let mut rest = tokens.as_slice();
    if rest.is_empty() {
        return Ok(());
    }
    loop {
        match requirement(rest)? {
            [] => return Ok(()),
            [",", after @ ..] => rest = after,
            [other, ..] => {
                return Err(format!("found '{other}', expected: ',' or 'end of string'"));
            }
        }
    }
}

const SYMBOLS: [char; 7] = ['=', '!', '(', ')', ',', '>', '<'];

/// Words, and operators of one or two characters; white space only separates.
fn tokens(text: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("==") || rest.starts_with("!=") {
            2
        } else if SYMBOLS.contains(&first) {
            1
        } else {
            rest.find(|c: char| c.is_whitespace() || SYMBOLS.contains(&c))
                .unwrap_or(rest.len())
        };
        let (token, after) = rest.split_at(length);
        tokens.push(token);
        rest = after.trim_start();
    }
    tokens
}

/// What follows a part of a selector.
type Rest<'t> = Result<&'t [&'t str], String>;

fn requirement<'t>(tokens: &'t [&'t str]) -> Rest<'t> {
    if let ["!", after @ ..] = tokens {
        return key(after);
    }
    let after = key(tokens)?;
    match after {
        [] | [",", ..] => Ok(after),
        ["=" | "==" | "!=", value @ ..] => match value {
            // A value may be empty: `key=` and `key=,other`.
            [] | [",", ..] => Ok(value),
            [word, after @ ..] if !word.starts_with(SYMBOLS) => check_value(word).map(|()| after),
            [other, ..] => Err(format!("found '{other}', expected: identifier")),
        },
        [operator @ (">" | "<" | "gt" | "lt"), value @ ..] => match value {
            [number, after @ ..] if number.parse::<i64>().is_ok() => Ok(after),
            _ => Err(format!(
                "for '{operator}' operator, the value must be an integer, got {:?}",
                value.first()
            )),
        },
        ["in" | "notin", set @ ..] => value_set(set),
        [other, ..] => Err(format!(
            "found '{other}', expected: in, notin, =, ==, !=, gt, lt"
        )),
    }
}

fn key<'t>(tokens: &'t [&'t str]) -> Rest<'t> {
    match tokens {
        [key, after @ ..] if !key.starts_with(SYMBOLS) => check_key(key).map(|()| after),
        [other, ..] => Err(format!(
            "found '{other}', expected: !, identifier, or 'end of string'"
        )),
        [] => Err("found '', expected: identifier".to_owned()),
    }
}

fn value_set<'t>(tokens: &'t [&'t str]) -> Rest<'t> {
    let ["(", set @ ..] = tokens else {
        return Err("expected: '(' after 'in' or 'notin'".to_owned());
    };
    let mut rest = set;
    loop {
        // A value may be empty.
        if let [value, after @ ..] = rest
            && !value.starts_with(SYMBOLS)
        {
            check_value(value)?;
            rest = after;
        }
        match rest {
            [",", after @ ..] => rest = after,
            [")", after @ ..] => return Ok(after),
            other => {
                let other = other.first().copied().unwrap_or_default();
                return Err(format!("found '{other}', expected: ',', or ')'"));
            }
        }
    }
}

fn check_key(key: &str) -> Result<(), String> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    let prefix_legal = prefix.is_none_or(|prefix| {
        let label = |label: &str| {
            is_word(label, |c| c == '-') && label.chars().all(|c| !c.is_ascii_uppercase())
        };
        prefix.len() <= 253 && prefix.split('.').all(label)
    });
    match prefix_legal && name.len() <= 63 && is_word(name, |c| matches!(c, '-' | '_' | '.')) {
        true => Ok(()),
        false => Err(format!(
            "key: Invalid value: {key:?}: not a qualified label name"
        )),
    }
}

fn check_value(value: &str) -> Result<(), String> {
    match value.len() <= 63 && is_word(value, |c| matches!(c, '-' | '_' | '.')) {
        true => Ok(()),
        false => Err(format!(
            "values: Invalid value: {value:?}: not a valid label value"
        )),
    }
}

/// Whether a word starts and ends alphanumeric, with `inner` characters allowed between.
fn is_word(text: &str, inner: impl Fn(char) -> bool) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    ends(text.chars().next())
        && ends(text.chars().next_back())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || inner(c))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::check;

    #[test]
    fn selectors_of_every_form_parse() {
        for text in [
            "",
            "  ",
            "k8s-app=konnectivity-server",
            "a=b,c=d",
            "a==b, c!=d ,!e,f",
            "a in (x, y),b notin (z)",
            "a in ()",
            "a=",
            "a=,b",
            "a>1,b<2",
            "example.com/name=v1.2_3",
        ] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
    }

    #[test]
    fn malformed_selectors_are_refused() {
        for text in [
            "=", "a=b=c", "a in", "a in x", "a in (x", ",", "a,", "!", "!!a", "a b", "-a=b",
            "a=-b", "a>x", "A B/c", "x_y/n=1",
        ] {
            assert!(check(text).is_err(), "{text}");
        }
        assert!(check(&format!("a={}", "x".repeat(64))).is_err());
    }

    proptest! {
        #[test]
        fn selector_check_never_panics(text in "[a-c=!(),<> /\u{e4}]{0,30}") {
            let _ = check(&text);
        }
    }
}
