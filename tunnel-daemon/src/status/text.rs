//! Numbers and names for people, without characters that control a terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

/// Columns of a line.
pub(crate) const WIDTH: usize = 80;

/// Prints to standard output. A closed pipe, as with `head`, is not an error.
///
/// # Errors
/// Standard output fails for another reason.
pub(crate) fn show(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        shown => shown,
    }
}

/// Whether to print colours: on a terminal that has them, unless `NO_COLOR` forbids it.
pub(crate) fn has_colours() -> bool {
    may_have_colours() && io::stdout().is_terminal()
}

/// Whether a terminal gets colours: not with `NO_COLOR`, nor if it has none.
pub(crate) fn may_have_colours() -> bool {
    let quiet = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    !quiet && !dumb
}

/// The name in an agent's certificate or token, in short: `edge-1` of `CN=edge-1 names=dns:a`, and of a token its node and account.
pub(crate) fn proved(principal: &str) -> String {
    if let Some(account) = principal.strip_prefix("serviceaccount=") {
        return match (account.split_once(" node="), account.split_once(" pod=")) {
            (Some((account, node)), _) => format!("{node} {account}"),
            (None, Some((account, pod))) => format!("{account} {pod}"),
            (None, None) => account.to_owned(),
        };
    }
    if let Some(names) = principal.strip_prefix("names=") {
        let name = names.split([',', ' ']).next().unwrap_or(names);
        let (_kind, name) = name.split_once(':').unwrap_or(("", name));
        return name.to_owned();
    }
    // In the subject these signs are escaped, so no value looks like another part.
    let subject = principal.split(" names=").next().unwrap_or(principal);
    let subject = subject.split(" sha256=").next().unwrap_or(subject);
    let mut is_escaped = false;
    let mut attributes = subject.split(|character: char| {
        let ends = matches!(character, ',' | '+') && !is_escaped;
        is_escaped = character == '\\' && !is_escaped;
        ends
    });
    let common = attributes.find_map(|attribute| attribute.strip_prefix("CN="));
    common.unwrap_or(subject).to_owned()
}

/// `text` without characters that move the cursor or change the direction of text: letters, digits and printable ASCII remain.
/// At most `width` characters; a shortened text ends in `~`.
pub(crate) fn clean(text: &str, width: usize) -> String {
    let harmless = |c: char| c.is_ascii_graphic() || c == ' ';
    // Other characters may be wider than a column, or have no width.
    let shown = |c: char| if harmless(c) { c } else { '?' };
    let mut characters = text.chars();
    let mut shortened: String = characters.by_ref().take(width).map(shown).collect();
    if characters.next().is_some() && shortened.pop().is_some() {
        shortened.push('~');
    }
    shortened
}

/// Like [`clean`], but cuts the middle: the ends of addresses and ids distinguish them.
pub(crate) fn clean_middle(text: &str, width: usize) -> String {
    let all = clean(text, usize::MAX);
    let count = all.chars().count();
    if count <= width || width < 3 {
        return clean(&all, width);
    }
    let head = (width - 1) / 2;
    let tail = width - 1 - head;
    let mut short: String = all.chars().take(head).collect();
    short.push('~');
    short.extend(all.chars().skip(count - tail));
    short
}

/// `17`, `1.5k`, `23M`: at most five characters below a million of the largest unit. Each unit is 1024 times the previous one.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];
    let power = count.checked_ilog2().unwrap_or(0) / 10;
    let (whole, unit) = (count >> (10 * power), UNITS[power as usize]);
    if power == 0 || whole >= 10 {
        return format!("{whole}{unit}");
    }
    let rest = (count >> (10 * (power - 1))) % 1024;
    format!("{whole}.{}{unit}", rest * 10 / 1024)
}

/// `7s`, `3m12s`, `5h02m`, `12d04h`, `365d`.
pub(crate) fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h{:02}m", minutes % 60),
        (0..100, _, _) => format!("{days}d{:02}h", hours % 24),
        _ => format!("{days}d"),
    }
}

/// `85us`, `1.2ms`, `340ms`, `2.1s`.
pub(crate) fn micros(micros: u64) -> String {
    match micros {
        0..1_000 => format!("{micros}us"),
        1_000..10_000 => format!("{}.{}ms", micros / 1_000, micros % 1_000 / 100),
        10_000..1_000_000 => format!("{}ms", micros / 1_000),
        _ => format!("{}.{}s", micros / 1_000_000, micros % 1_000_000 / 100_000),
    }
}

/// `text` in lines of at most `width` characters, broken at spaces and inside longer words.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => {
                let letters: Vec<char> = word.chars().collect();
                lines.extend(
                    letters
                        .chunks(width)
                        .map(|part| part.iter().collect::<String>()),
                );
            }
        }
    }
    lines
}

/// `text` from column `indent` on, in lines that fit a terminal; `name` is before the first line.
pub(crate) fn labelled(name: &str, indent: usize, text: &str) -> String {
    let (mut out, mut name) = (String::new(), name);
    for part in wrapped(&clean(text, usize::MAX), WIDTH - indent) {
        out.push_str(&format!("{name:<width$} {part}\n", width = indent - 1));
        name = "";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_text_is_cut_and_has_no_control_characters() {
        assert_eq!(clean("a\x1b[2Jb\n\u{202e}c\u{9b}", 40), "a?[2Jb??c?");
        assert_eq!(clean("abcdef", 4), "abc~");
        assert_eq!(clean("abcd", 4), "abcd");
        assert_eq!(clean("\u{4e2d}x", 4), "?x");
        assert_eq!(clean_middle("node-a.example.org:10250", 12), "node-~:10250");
        assert_eq!(clean_middle("short", 12), "short");
    }

    #[test]
    fn what_an_agent_has_proved_is_shown_by_its_name() {
        for (principal, shown) in [
            ("CN=edge-1", "edge-1"),
            ("CN=edge-1 names=dns:a.example,ip:10.0.0.1", "edge-1"),
            ("O=system:nodes,CN=system:node:a", "system:node:a"),
            ("O=a\\,CN\\=b,CN=c", "c"),
            ("CN=a names\\=dns:b", "a names\\=dns:b"),
            ("O=only sha256=00", "O=only"),
            ("names=uri:spiffe://x/y,dns:b", "spiffe://x/y"),
            (
                "serviceaccount=kube-system/agent node=n1",
                "n1 kube-system/agent",
            ),
            (
                "serviceaccount=kube-system/agent pod=7f3c",
                "kube-system/agent 7f3c",
            ),
            ("serviceaccount=kube-system/agent", "kube-system/agent"),
            ("sha256=00", "sha256=00"),
            ("", ""),
        ] {
            assert_eq!(proved(principal), shown, "{principal}");
        }
    }

    #[test]
    fn numbers_are_short_and_have_the_right_unit() {
        for (count, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1.0K"),
            (1536, "1.5K"),
            (10_240, "10K"),
            (1_048_575, "1023K"),
            (1_048_576, "1.0M"),
            (u64::MAX, "15E"),
        ] {
            assert_eq!(bytes(count), text);
        }
        for (seconds, text) in [
            (7, "7s"),
            (192, "3m12s"),
            (18_120, "5h02m"),
            (1_051_200, "12d04h"),
            (31_536_000, "365d"),
        ] {
            assert_eq!(age(Duration::from_secs(seconds)), text);
        }
        for (us, text) in [
            (85, "85us"),
            (1_250, "1.2ms"),
            (340_000, "340ms"),
            (2_100_000, "2.1s"),
        ] {
            assert_eq!(micros(us), text);
        }
    }

    #[test]
    fn lines_break_at_spaces_and_inside_overlong_words() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("a bb  cccccc d", 4), ["a bb", "cccc", "cc d"]);
    }
}
