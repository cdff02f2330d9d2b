//! Parses values as Go's `strconv`, `time` and pflag's string slices do, with Go's error texts.

use std::fmt;
use std::time::Duration;

use adit_core::wire::identifiers::parse_go_bool;

/// A Go `time.Duration`: nanoseconds, possibly negative.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) struct GoDuration(pub(super) i64);

const UNITS: [(&str, i64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

impl GoDuration {
    /// As a [`Duration`]; negative becomes zero.
    pub(super) fn to_std(self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0).unwrap_or(0))
    }

    /// Reads `1h0m0s`, `500ms`, `1.5h`, `-2s`, `0`: numbers with units, fractions allowed.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let invalid = || format!("time: invalid duration {text:?}");
        let (negative, mut rest) = match text.strip_prefix(['-', '+']) {
            Some(rest) => (text.starts_with('-'), rest),
            None => (false, text),
        };
        if rest == "0" {
            return Ok(Self(0));
        }
        if rest.is_empty() {
            return Err(invalid());
        }
        let mut total: i128 = 0;
        while !rest.is_empty() {
            let (whole, after) = split_while(rest, |c| c.is_ascii_digit());
            let (fraction, after) = match after.strip_prefix('.') {
                Some(after) => split_while(after, |c| c.is_ascii_digit()),
                None => ("", after),
            };
            if whole.is_empty() && fraction.is_empty() {
                return Err(invalid());
            }
            let (unit, after) = split_while(after, |c| !c.is_ascii_digit() && c != '.');
            if unit.is_empty() {
                return Err(format!("time: missing unit in duration {text:?}"));
            }
            let Some((_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) else {
                return Err(format!("time: unknown unit {unit:?} in duration {text:?}"));
            };
            total = scaled(whole, fraction, *scale)
                .and_then(|part| total.checked_add(part))
                .ok_or_else(invalid)?;
            rest = after;
        }
        let signed = if negative { -total } else { total };
        i64::try_from(signed)
            .map(Self)
            .map_err(|_too_large| invalid())
    }
}

/// `whole.fraction` of a unit in nanoseconds, truncated towards zero. `None` on overflow.
fn scaled(whole: &str, fraction: &str, unit: i64) -> Option<i128> {
    let digits = |text: &str| match text {
        "" => Some(0),
        digits => digits.parse::<u64>().ok().map(i128::from),
    };
    // Beyond 15 digits even a fraction of an hour is below one nanosecond, so the rest is ignored.
    let fraction = fraction.get(..15).unwrap_or(fraction);
    let places = u32::try_from(fraction.len()).ok()?;
    let unit = i128::from(unit);
    let part = digits(fraction)?.checked_mul(unit)? / 10_i128.checked_pow(places)?;
    digits(whole)?.checked_mul(unit)?.checked_add(part)
}

impl From<Duration> for GoDuration {
    /// For defaults; saturates far above all of them.
    fn from(duration: Duration) -> Self {
        Self(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX))
    }
}

fn split_while(text: &str, keep: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !keep(c)).unwrap_or(text.len()))
}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.unsigned_abs();
        let sign = if self.0 < 0 { "-" } else { "" };
        match nanos {
            0 => f.write_str("0s"),
            1..1_000 => write!(f, "{sign}{nanos}ns"),
            1_000..1_000_000 => write!(f, "{sign}{}\u{b5}s", decimal(nanos, 1_000)),
            1_000_000..1_000_000_000 => write!(f, "{sign}{}ms", decimal(nanos, 1_000_000)),
            _ => {
                let (minutes, rest) = (nanos / 60_000_000_000, nanos % 60_000_000_000);
                let seconds = decimal(rest, 1_000_000_000);
                match (minutes / 60, minutes % 60) {
                    (0, 0) => write!(f, "{sign}{seconds}s"),
                    (0, minutes) => write!(f, "{sign}{minutes}m{seconds}s"),
                    (hours, minutes) => write!(f, "{sign}{hours}h{minutes}m{seconds}s"),
                }
            }
        }
    }
}

fn decimal(value: u64, unit: u64) -> String {
    let (whole, rest) = (value / unit, value % unit);
    if rest == 0 {
        return whole.to_string();
    }
    let places = unit.ilog10() as usize;
    format!(
        "{whole}.{}",
        format!("{rest:0places$}").trim_end_matches('0')
    )
}

/// Go's boolean words.
pub(super) fn parse_bool(text: &str) -> Result<bool, String> {
    parse_go_bool(text)
        .ok_or_else(|| format!("strconv.ParseBool: parsing {text:?}: invalid syntax"))
}

/// `strconv.ParseInt(text, 0, 64)`: sign, `0x`, `0o`, `0b`, a leading zero for octal, underscores.
pub(super) fn parse_int(text: &str) -> Result<i64, String> {
    let (negative, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (text.starts_with('-'), digits),
        None => (false, text),
    };
    let magnitude = parse_magnitude(digits)
        .map_err(|why| format!("strconv.ParseInt: parsing {text:?}: {why}"))?;
    let signed = if negative {
        -i128::from(magnitude)
    } else {
        i128::from(magnitude)
    };
    i64::try_from(signed)
        .map_err(|_too_large| format!("strconv.ParseInt: parsing {text:?}: value out of range"))
}

/// `strconv.ParseUint(text, 0, 64)`.
pub(super) fn parse_uint(text: &str) -> Result<u64, String> {
    parse_magnitude(text).map_err(|why| format!("strconv.ParseUint: parsing {text:?}: {why}"))
}

fn parse_magnitude(text: &str) -> Result<u64, &'static str> {
    const SYNTAX: &str = "invalid syntax";
    let lower = text.to_ascii_lowercase();
    let (radix, digits) = match lower.get(..2) {
        Some("0x") => (16, &lower[2..]),
        Some("0o") => (8, &lower[2..]),
        Some("0b") => (2, &lower[2..]),
        Some(two) if two.starts_with('0') => (8, &lower[1..]),
        _ => (10, lower.as_str()),
    };
    // An underscore must be between digits, or between the prefix and a digit.
    let prefixed = radix != 10;
    if (digits.starts_with('_') && !prefixed) || digits.ends_with('_') || digits.contains("__") {
        return Err(SYNTAX);
    }
    // Go accepts underscores only after a prefix or with base 0; pflag uses base 0.
    let digits: String = digits.chars().filter(|c| *c != '_').collect();
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return Err(SYNTAX);
    }
    u64::from_str_radix(&digits, radix).map_err(|_too_large| "value out of range")
}

/// `strconv.ParseFloat(text, 32)`, without hexadecimal floats.
pub(super) fn parse_float(text: &str) -> Result<f32, String> {
    let error = |why| format!("strconv.ParseFloat: parsing {text:?}: {why}");
    match text.parse::<f32>() {
        Ok(number) if number.is_infinite() && text.contains(|c: char| c.is_ascii_digit()) => {
            Err(error("value out of range"))
        }
        Ok(number) => Ok(number),
        Err(_syntax) => Err(error("invalid syntax")),
    }
}

/// One CSV record, as pflag reads string slices. `[]` and the empty text are empty lists. Upstream reads `[]` as one item,
/// which is of no use outside its test harness.
pub(super) fn parse_list(text: &str) -> Result<Vec<String>, String> {
    if text.is_empty() || text == "[]" {
        return Ok(Vec::new());
    }
    // Columns count bytes from 1, as Go's csv package does.
    let column = |rest: &str| text.len() - rest.len() + 1;
    let unclosed = |column: usize| {
        format!("parse error on line 1, column {column}: extraneous or missing \" in quoted-field")
    };
    let mut items = Vec::new();
    let mut rest = text;
    loop {
        let (item, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted_item(quoted).ok_or_else(|| unclosed(column("")))?,
            None => {
                let (item, after) = split_while(rest, |c| c != ',');
                if let Some(quote) = item.find('"') {
                    let column = column(rest) + quote;
                    return Err(format!(
                        "parse error on line 1, column {column}: bare \" in non-quoted-field"
                    ));
                }
                (item.to_owned(), after)
            }
        };
        items.push(item);
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None if after.is_empty() => return Ok(items),
            // The column of the closing quote.
            None => return Err(unclosed(column(after) - 1)),
        }
    }
}

/// Reads after an opening quote: returns the item, and the text after the closing quote. `None` without a closing quote.
fn quoted_item(text: &str) -> Option<(String, &str)> {
    let mut item = String::new();
    let mut rest = text;
    loop {
        let (before, after) = rest.split_once('"')?;
        item.push_str(before);
        match after.strip_prefix('"') {
            Some(more) => {
                item.push('"');
                rest = more;
            }
            None => return Some((item, after)),
        }
    }
}

/// A klog severity: a name or a number.
pub(super) fn parse_severity(text: &str) -> Result<i64, String> {
    const NAMES: [&str; 4] = ["INFO", "WARNING", "ERROR", "FATAL"];
    match (0_i64..)
        .zip(NAMES)
        .find(|(_, name)| name.eq_ignore_ascii_case(text))
    {
        Some((severity, _)) => Ok(severity),
        None => text
            .parse()
            .map_err(|_syntax| format!("strconv.ParseInt: parsing {text:?}: invalid syntax")),
    }
}

#[cfg(test)]
mod tests;
