//! Text lines of the log: logfmt, one event per line, whatever bytes of a peer its fields contain.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Formats events as `ts=... level=... target=... msg=... FIELD=...`. On a terminal the level has a colour.
pub(super) struct Logfmt;

impl<S, N> FormatEvent<S, N> for Logfmt
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str("ts=")?;
        SystemTime.format_time(&mut writer)?;
        let meta = event.metadata();
        let (name, colour) = level(*meta.level());
        if writer.has_ansi_escapes() {
            write!(writer, " level=\u{1b}[{colour}m{name}\u{1b}[0m")?;
        } else {
            write!(writer, " level={name}")?;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut line = String::new();
        pair(&mut line, "target", meta.target());
        pair(&mut line, "msg", &fields.message);
        writeln!(writer, "{line}{}", fields.others)
    }
}

/// The level's name, and its terminal colour code.
fn level(level: Level) -> (&'static str, u8) {
    match level {
        Level::ERROR => ("error", 31),
        Level::WARN => ("warn", 33),
        Level::INFO => ("info", 32),
        Level::DEBUG => ("debug", 34),
        Level::TRACE => ("trace", 35),
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Fields {
    fn add(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            pair(&mut self.others, field.name(), value);
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.add(field, &value.to_string());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, &format!("{value:?}"));
    }
}

/// Appends ` KEY=VALUE`: characters invalid in a key become `_`, and a value is quoted where needed.
pub(super) fn pair(line: &mut String, key: &str, value: &str) {
    line.push(' ');
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    line.extend(key.chars().map(|c| if plain(c) { c } else { '_' }));
    line.push('=');
    let needs_quotes = |c: char| c == '"' || c == '=' || c.is_whitespace() || c.is_control();
    if !value.is_empty() && !value.contains(needs_quotes) {
        return line.push_str(value);
    }
    line.push('"');
    for c in value.chars() {
        match c {
            '"' => line.push_str("\\\""),
            '\\' => line.push_str("\\\\"),
            '\n' => line.push_str("\\n"),
            '\r' => line.push_str("\\r"),
            '\t' => line.push_str("\\t"),
            // Some readers treat these as line separators, though they are no control characters.
            c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') => {
                let _infallible = write!(line, "\\u{:04x}", u32::from(c));
            }
            c => line.push(c),
        }
    }
    line.push('"');
}

/// A line about the log itself: as [`Logfmt`] writes, without a time.
pub(super) fn own_line(level: &str, message: &str, fields: &[(&str, &str)]) -> String {
    let mut line = format!("level={level} target=adit::log");
    pair(&mut line, "msg", message);
    for (key, value) in fields {
        pair(&mut line, key, value);
    }
    line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::logged;
    use adit_config::plan::LogFormat;

    use crate::log::LogOptions;

    /// Parses a line like go-logfmt: pairs with plain or quoted values.
    fn read(line: &str) -> Vec<(String, String)> {
        let (mut pairs, mut rest) = (Vec::new(), line);
        while !rest.is_empty() {
            let (key, behind) = rest.split_once('=').expect("a key");
            let (value, behind) = if behind.starts_with('"') {
                let mut values = serde_json::Deserializer::from_str(behind).into_iter::<String>();
                let value = values.next().unwrap().expect("quoted as JSON is");
                (value, &behind[values.byte_offset()..])
            } else {
                let end = behind.find(' ').unwrap_or(behind.len());
                (behind[..end].to_owned(), &behind[end..])
            };
            assert!(!key.contains([' ', '"']), "{line}");
            pairs.push((key.to_owned(), value));
            rest = behind.strip_prefix(' ').unwrap_or(behind);
        }
        pairs
    }

    #[test]
    fn event_is_one_line_of_pairs_whatever_its_fields_hold() {
        let options = LogOptions {
            format: LogFormat::Text,
            ..LogOptions::default()
        };
        let hostile = "a \"b\"=c\\\nlevel=error msg=forged\u{7}\u{2028}";
        let text = logged(&options, || {
            tracing::warn!(target: "adit::x", peer = hostile, count = 7, plain = %"a/b:1", "agent refused: {hostile}");
        });
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        let pairs = read(text.trim_end_matches('\n'));
        let expected = [
            ("level", "warn"),
            ("target", "adit::x"),
            ("msg", &*format!("agent refused: {hostile}")),
            ("peer", hostile),
            ("count", "7"),
            ("plain", "a/b:1"),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(pairs[0].0, "ts");
        assert_eq!(pairs[1..], expected);
    }

    #[test]
    fn keys_and_values_are_escaped_when_needed() {
        for (key, value, expected) in [
            ("port", "8132", " port=8132"),
            ("empty", "", " empty=\"\""),
            ("a b=\"c", "x y", " a_b__c=\"x y\""),
            ("path", "C:\\x", " path=C:\\x"),
            ("line", "\u{1b}[0m", " line=\"\\u001b[0m\""),
        ] {
            let mut line = String::new();
            pair(&mut line, key, value);
            assert_eq!(line, expected);
        }
    }
}
