//! The usage text, laid out as cobra does, with Adit's help texts.

use std::fmt::Write as _;

use super::pflag::Flag;

/// `Usage:` and one line per visible flag, sorted by name.
pub(super) fn usage(program: &str, flags: &[Flag<'_>]) -> String {
    let mut lines: Vec<(&str, String, String)> = flags
        .iter()
        .filter(|flag| flag.deprecated.is_none())
        .map(line)
        .collect();
    lines.push((
        "help",
        "  -h, --help".to_owned(),
        "print this text".to_owned(),
    ));
    lines.sort_by_key(|(name, ..)| *name);
    let width = lines
        .iter()
        .map(|(_, left, _)| left.len())
        .max()
        .unwrap_or(0)
        + 3;
    let mut text = format!("Usage:\n  {program} [flags]\n\nFlags:\n");
    for (_, left, right) in &lines {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{left:width$}{right}");
    }
    text
}

fn line<'f>(flag: &'f Flag<'_>) -> (&'f str, String, String) {
    let dashes = if flag.name.len() == 1 {
        format!("  -{0}, --{0}", flag.name)
    } else {
        format!("      --{}", flag.name)
    };
    let left = match flag.value_word() {
        Some(word) => format!("{dashes} {word}"),
        None => dashes,
    };
    let right = match flag.shown_default() {
        Some(default) => format!("{} (default {default})", flag.help),
        None => flag.help.to_owned(),
    };
    (flag.name, left, right)
}
